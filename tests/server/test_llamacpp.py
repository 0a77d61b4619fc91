"""llama.cpp's own API: completion, tokenize, apply-template, props."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import LETTERS, TOOLS_TEMPLATE, Running, running

from everwarm.server.serving import Limits
from tiny import Tiny

GREEDY = {"temperature": 0, "n_predict": 6}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("llamacpp")
    Tiny(context=512, template=TOOLS_TEMPLATE).write(home / "tiny.gguf")
    limits = Limits(most_prompts=4)
    with running(home / "tiny.gguf", home, limits=limits, sampling={"temperature": 0.5, "seed": 7}) as server:
        yield server


def post(server: Running, path: str, status: int = 200, **body: Any) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def complete(server: Running, prompt: Any, **more: Any) -> Any:
    return post(server, "/completion", prompt=prompt, **{**GREEDY, "logit_bias": LETTERS, **more})


def chunks(server: Running, prompt: Any, **more: Any) -> list[Any]:
    body = {"prompt": prompt, "stream": True, "logit_bias": LETTERS} | GREEDY | more
    with httpx.stream("POST", server.url + "/completion", json=body, timeout=60) as reply:
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]


def test_a_completion_says_what_llama_cpp_says(server: Running) -> None:
    found = complete(server, "Once", return_tokens=True)
    assert found["content"] == server.llm.detokenize(found["tokens"])
    same = server.llm.generate("Once", max_tokens=6, logit_bias={int(k): v for k, v in LETTERS.items()}, cache=False)
    assert found["tokens"] == same.tokens
    assert (found["stop"], found["stop_type"], found["stopping_word"], found["truncated"]) == (True, "limit", "", False)
    assert (found["tokens_evaluated"], found["tokens_predicted"], found["prompt"]) == (4, 6, "Once")
    assert found["timings"]["predicted_n"] == 6
    assert found["everwarm"]["prompt_tokens"] == 4
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (6, 0, 7)
    assert complete(server, "Once")["tokens"] == []


def test_a_stream_has_a_chunk_for_each_token_and_no_done(server: Running) -> None:
    found = chunks(server, "Once", timings_per_token=True, return_progress=True)
    progress = [chunk for chunk in found if "prompt_progress" in chunk]
    tokens = found[len(progress) : -1]
    assert progress[-1]["prompt_progress"]["processed"] == 4
    assert "".join(chunk["content"] for chunk in tokens) == complete(server, "Once")["content"]
    assert [len(chunk["tokens"]) for chunk in tokens] == [1] * 6
    assert [chunk["timings"]["predicted_n"] for chunk in tokens] == [1, 2, 3, 4, 5, 6]
    assert not any(chunk["stop"] for chunk in found[:-1])
    assert (found[-1]["stop"], found[-1]["content"], found[-1]["stop_type"]) == (True, "", "limit")


def test_why_it_ended(server: Running) -> None:
    letters = complete(server, "Once")["content"]
    found = complete(server, "Once", stop=[letters[2:4]])
    at = letters.index(letters[2:4])
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (letters[:at], "word", letters[2:4])
    found = complete(server, "Once", logit_bias={"258": 100}, return_tokens=True)
    assert (found["content"], found["stop_type"], found["tokens"]) == ("", "eos", [])
    found = complete(server, "Once", n_predict=-1)
    assert (found["truncated"], found["tokens_predicted"]) == (True, 512 - 4)


def test_prompts_are_texts_ids_or_both(server: Running) -> None:
    ids = server.llm.tokenize("Once")
    text = complete(server, "Once")["content"]
    for prompt in (ids, {"prompt_string": "Once"}, ["Once"], [ids], [*ids[:2], "ce"]):
        assert complete(server, prompt)["content"] == text, prompt
    several = complete(server, ["Once", ids, {"prompt_string": "Twice"}])
    assert [one["content"] for one in several] == [text, text, complete(server, "Twice")["content"]]
    assert [one["index"] for one in several] == [0, 1, 2]
    assert [one["everwarm"]["prompt_tokens"] for one in several] == [4, 4, 5]
    ends = [chunk["index"] for chunk in chunks(server, ["Once", "Twice"]) if chunk["stop"]]
    assert ends == [0, 1]


def test_control_tokens_in_a_prompt_count(server: Running) -> None:
    found = complete(server, "<|im_start|>user\nHi<|im_end|>\n")
    assert found["tokens_evaluated"] == 1 + len("user\nHi") + 1 + 1


def test_probabilities(server: Running) -> None:
    asked = {"n_probs": 3, "logit_bias": None, "ignore_eos": True}
    found = complete(server, "Once", **asked)["completion_probabilities"]
    assert len(found) == 6
    for token in found:
        assert set(token) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["id"] == token["id"]  # greedy
    streamed = [chunk["completion_probabilities"] for chunk in chunks(server, "Once", **asked) if not chunk["stop"]]
    assert [one for part in streamed for one in part] == found


def test_biases_name_tokens_by_id_or_text(server: Running) -> None:
    plain = complete(server, "Once")["content"]
    first = plain[0]
    pairs = [[int(token), bias] for token, bias in LETTERS.items()]
    for forbidden in ([first, False], [ord(first), -100], [first, -100.0]):
        found = complete(server, "Once", logit_bias=[*pairs, forbidden])
        assert first not in found["content"]
    assert complete(server, "Once", logit_bias=pairs)["content"] == plain
    assert complete(server, "Once", logit_bias=[*pairs, ["9" * 5000, -1]])["content"] == plain  # a text, not an id
    for wrong in ("a", [["a"]], [["a", "b"]], [["a", True]], [[1.5, 1]], [[i, 1] for i in range(2000)]):
        assert "logit_bias" in post(server, "/completion", 400, prompt="Once", logit_bias=wrong)["error"]["message"]


def test_only_the_fields_that_were_asked_for(server: Running) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/nothing", "everwarm/tier/more"]
    found = complete(server, "Once", response_fields=fields)
    assert set(found) == {"content", "generation_settings/n_predict"}


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": None}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ""}, {"prompt": [1.5]}, {"prompt": [10**9]},
        {"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}}, {"prompt": {"prompt_string": 5}},
        {"prompt": ["a"] * 5}, {"prompt": [True, 1]}, {"prompt": "a", "n_probs": 99}, {"prompt": "a", "n_predict": -7},
        {"prompt": "a", "grammar": "root ::= ("}, {"prompt": "a " * 600},
        {"prompt": "a", "logit_bias": [[10**30, 1]]}, {"prompt": "a", "logit_bias": [[-5, 1]]}, {"prompt": [2**70]},
        {"prompt": "a", "response_fields": "content"},
        {"prompt": "a", "logit_bias": [[97, 10**400]]}, {"prompt": "a", "logit_bias": {"97": -(10**400)}},
        {"prompt": [[[1]]]}, {"prompt": [[1, None]]}, {"prompt": "a", "logit_bias": [["a", 1e300]]},
    ],
)  # fmt: skip
def test_what_can_not_be_answered_is_a_400(server: Running, body: Any) -> None:
    assert post(server, "/completion", 400, **body)["error"]["type"] == "invalid_request_error"
    assert httpx.get(server.url + "/health").status_code == 200


def test_tokenize_with_pieces(server: Running) -> None:
    text = "zq é"
    found = post(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    wanted: list[tuple[int, Any]] = [(259, "zq"), (32, " "), (0xC3, [0xC3]), (0xA9, [0xA9])]
    assert found == [{"id": id_, "piece": piece} for id_, piece in wanted]
    assert post(server, "/v1/tokenize", text=text, with_pieces=True) == {"tokens": found, "count": 4}
    assert post(server, "/tokenize", content=text)["tokens"] == [one["id"] for one in found]
    assert post(server, "/detokenize", tokens=[one["id"] for one in found]) == {"content": text}


def test_tokenize_reads_names_of_control_tokens_unless_told_not_to(server: Running) -> None:
    name = "<|im_end|>"
    assert post(server, "/tokenize", content=name)["tokens"] == [258]
    assert len(post(server, "/tokenize", content=name, parse_special=False)["tokens"]) == len(name)
    assert post(server, "/tokenize", content=["a", 258, "b"])["tokens"] == [97, 258, 98]
    assert post(server, "/detokenize", tokens=[258])["content"] == name
    assert post(server, "/tokenize", status=400, content={"a": 1})["error"]["message"]


def test_add_special_puts_bos_before_the_text(tmp_path: Any) -> None:
    Tiny(context=128).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path) as server:
        tokenizer = server.llm.tokenizer
        bos = [] if not tokenizer.add_bos else [tokenizer.bos_id]
        assert post(server, "/tokenize", content="a", add_special=True)["tokens"] == [*bos, 97]
        tokenizer.add_bos = True
        assert post(server, "/tokenize", content="a", add_special=True)["tokens"] == [tokenizer.bos_id, 97]
        assert post(server, "/v1/tokenize", text="a", add_special=True)["tokens"] == [tokenizer.bos_id, 97]
        assert post(server, "/tokenize", content="a")["tokens"] == [97]


def test_the_prompt_that_chat_would_make(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    begun = "<|im_start|>user\nHi<|im_end|>\n"
    assert post(server, "/apply-template", messages=messages)["prompt"] == begun + "<|im_start|>assistant\n"
    assert post(server, "/apply-template", messages=messages, add_generation_prompt=False)["prompt"] == begun
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert "look_up" in post(server, "/apply-template", messages=messages, tools=tools)["prompt"]
    more = [*messages, {"role": "assistant", "content": "Well"}]
    assert post(server, "/apply-template", messages=more)["prompt"].endswith("assistant\nWell")
    counted = post(server, "/v1/chat/completions/input_tokens", messages=messages)["input_tokens"]
    assert counted == post(server, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    assert post(server, "/chat/completions/input_tokens", messages=messages)["input_tokens"] == counted


def test_a_prompt_without_the_beginning_of_an_answer_is_made_in_the_same_way(server: Running) -> None:
    function = {"name": "look", "arguments": '{"a": "\\ud800"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    whole = {"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}]}
    for more in ({}, {"tool_choice": "none"}, {"chat_template_kwargs": {"self": 1}}):
        prompt = post(server, "/apply-template", **whole, **more)["prompt"]
        begun = post(server, "/apply-template", **whole, **more, add_generation_prompt=False)["prompt"]
        assert prompt == begun + "<|im_start|>assistant\n"
        assert ("look: " in prompt) == ("tool_choice" not in more)
    for name in ("messages", "tools", "watch"):
        refused = post(server, "/apply-template", 400, **whole, add_generation_prompt=False,
                       chat_template_kwargs={name: 1})  # fmt: skip
        assert name in refused["error"]["message"]


def test_a_message_is_continued_or_an_answer_begun(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    options = {"max_tokens": 4, "temperature": 0}
    continued = post(server, "/v1/chat/completions", messages=messages, continue_final_message=True, **options)
    assert continued["choices"] == post(server, "/v1/chat/completions", messages=messages, **options)["choices"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for body in ({"messages": messages, **both}, {"messages": messages[:1], "continue_final_message": True}):
        refused = post(server, "/v1/chat/completions", 400, **body)
        assert "continue_final_message" in refused["error"]["message"]


def test_props_say_what_is_served_and_how_it_is_sampled(server: Running) -> None:
    found = httpx.get(server.url + "/props").json()
    parameters = found["default_generation_settings"]["params"]
    assert (parameters["temperature"], parameters["seed"], parameters["top_p"]) == (0.5, 7, 1.0)
    assert parameters["repeat_penalty"] == 1.0
    assert found["default_generation_settings"]["n_ctx"] == 512
    assert (found["model_alias"], found["model_path"]) == ("tiny", "tiny.gguf")
    assert found["chat_template"] == TOOLS_TEMPLATE
    assert found["eos_token"] == server.llm.tokenizer.token_text(server.llm.tokenizer.eos_id)


def test_a_wrong_key_is_an_authentication_error(tmp_path: Any) -> None:
    Tiny(context=128).write(tmp_path / "tiny.gguf")
    with running(tmp_path / "tiny.gguf", tmp_path, keys={"right": "default"}) as server:
        refused = post(server, "/completion", 401, prompt="Hi")["error"]
        assert (refused["type"], refused["code"]) == ("authentication_error", "invalid_api_key")
        assert httpx.get(server.url + "/props").status_code == 401
