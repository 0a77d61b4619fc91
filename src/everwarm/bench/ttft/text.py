"""Prompts for measuring: made-up English, the same in every run, a different one for each agent."""

import random

from everwarm.llm import LLM

_WORDS = """a about after again all also always an and another any as at back be because been before began between boat
book both bridge but by called came can city clear close cold come could country day did different do door down each
early earth end even every eyes far father few field find fire first five food for forest found four from garden gave
get glass go good great ground had half hand hard has have he head hear help her here high him his home horse hour house
how hundred if in into is it just keep kind knew know land large last late learn leave left letter light like line
little live long look made make man many map may mean measure men might mile money more morning mother mountain move
much music must my name near never new next night no north not note now number of off often old on once one only open or
order other our out over own page paper part people picture place plain plant point read red right river road rock room
round run said same saw say school sea second see seven ship short should side small so some song soon south stand star
start still stone stop story street strong such sun sure table take talk tell ten than that the their them then there
these they thing think this those three through time to together told too took town travel tree true turn two under
until up us very voice wait walk wall want war warm was watch water way we week well went were west what wheel when
where which while white who why will wind winter with without wood word work world would write year yes you young"""


def text(sentences: int, number: int) -> str:
    """So many sentences, of which each number gives others."""
    draw, words = random.Random(f"everwarm {number}"), _WORDS.split()  # noqa: S311
    made = []
    for _ in range(sentences):
        said = [draw.choice(words) for _ in range(draw.randrange(5, 16))]
        made.append(" ".join(said).capitalize() + draw.choice([".", ".", ".", "?", ", they said."]))
    return " ".join(made)


def tokens(llm: LLM, count: int, number: int) -> list[int]:
    """`count` tokens of the text of this number. No two numbers begin alike: nothing of one prompt is known of another.
    There is no BOS, for the same reason.
    """
    ids = llm.tokenize(text(count // 4 + 8, number))
    while len(ids) < count:
        ids += llm.tokenize(" " + text(count // 4 + 8, number))
    return [number % llm.config.vocab_size, *ids][:count]
