"""The facade: `everwarm.load(...)` gives a model that can tokenise, compute, generate and score.

In: text, messages or token ids. Out: events with tokens and complete characters. Everything else (files, kernels,
caches) is behind it.
"""

import _thread
import atexit
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from everwarm import config, kernels
from everwarm.engine.admission import Admission
from everwarm.engine.budget import Budget
from everwarm.engine.drafts.drafts import Drafts
from everwarm.engine.engine import Engine
from everwarm.engine.prefill import check_prompt, prefill, too_long
from everwarm.engine.processors import Constraint
from everwarm.engine.sampling import Sampling, file_sampling
from everwarm.engine.score import Score, score
from everwarm.errors import EverwarmError, ModelError, RequestError, StoreError, TemplateError
from everwarm.events import End, Event
from everwarm.generation import Ahead, Drafter, Generation, Message, Point, Request, Runtime
from everwarm.generation.completion import Completion, WeightUse, completed
from everwarm.generation.generation import LONG_TEXT
from everwarm.generation.reasoning_gate import ReasoningGate
from everwarm.kernels.backend import reach
from everwarm.kv.agent import check_name
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.ids import ModelIds
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import SequenceKV
from everwarm.kv.layout import kv_layout
from everwarm.kv.store import AgentStore
from everwarm.kv.warm.blockstore import BlockStore, most_bytes
from everwarm.model.facts import read_model
from everwarm.model.spec import ModelConfig
from everwarm.model.transformer import Transformer
from everwarm.pull import resolve
from everwarm.setting_kinds import Given
from everwarm.settings import Settings
from everwarm.sizes import in_bytes
from everwarm.text import prompt_rules
from everwarm.text.chat import ChatTemplate
from everwarm.text.chat_format import ChatFormat
from everwarm.text.model_chat import model_chat, own_template
from everwarm.text.next_turn import common_beginning, next_conversations
from everwarm.text.output_parser import OutputParser, PlainText
from everwarm.text.reasoning import Thinking, begins_inside
from everwarm.text.tokenizer import Tokenizer
from everwarm.text.tool_calls.choice import ToolChoice
from everwarm.types import Segment
from everwarm.waiting import Line
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.memory import Buffers, available_bytes
from everwarm.weights.pack.file import Pack
from everwarm.weights.pack.identity import pack_was_touched, remember_pack, weights_id
from everwarm.weights.pack.source import FileSource, PackSource, Source, packed_source

if TYPE_CHECKING:
    from everwarm.structured.grammar import Grammar
    from everwarm.structured.grammars import Grammars

__all__ = ["LLM", "Completion", "End", "Event", "Generation", "Message", "Point", "WeightUse", "load"]

_log = logging.getLogger(__name__)

SCORE_WINDOW = 2048
DEFAULT_MAX_TOKENS = 256
LONGEST_NAME = 4096
"""Characters of a control token's name, at most: so much of a prompt that is still being written may become one."""
MOST_RUNNING = 64
"""Sequences that are computed at once; more wait."""


@config.with_setting_names
def load(path_or_name: str | Path, *, progress: Callable[[int, int], None] | None = None, **settings: Given) -> "LLM":
    """Open a model: a path, or a name that was pulled.

    `settings` are the fields of `everwarm.settings.Settings`, as their types or as text: `threads=4`,
    `kv_budget="8GiB"`, `pack="off"`. What is None comes from the EVERWARM_* variables, from config.toml, or from a
    default. `progress` is told (bytes done, bytes in all) while a pack is being built.
    """
    chosen = config.load_settings(settings)
    return LLM(resolve(str(path_or_name), config.home()), chosen, progress)


class LLM:
    """A loaded model. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path, settings: Settings, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self._closing = threading.Event()
        self._own_template = own_template(settings.chat_template, settings.chat_template_file)
        self._file = GGUFFile(path)
        try:
            self.config: ModelConfig = read_model(self._file, settings.context)
            if settings.context is not None and settings.context < self.config.context:
                self.config = replace(self.config, context=settings.context)
            self.tokenizer = Tokenizer.from_metadata(self._file.metadata)
            if self.tokenizer.vocab_size != self.config.vocab_size:
                raise ModelError(
                    f"{path}: vocabulary mismatch: the tokenizer has {self.tokenizer.vocab_size:,} tokens, "
                    f"the embedding table {self.config.vocab_size:,} rows"
                )
            choice = kernels.choose(settings.backend, settings.isa)
            self.backend = kernels.make(choice, settings.threads, config.cores(), settings.kv_type)
            # Before anything is packed: it says whether these kernels can run this model at all.
            blocks = self.backend.block_memory(self.config.kv_shape, self.config.state_shape)
        except BaseException:
            self._file.close()
            raise
        self._source: Source = (
            packed_source(self._file, self.backend, config.home(), progress)
            if settings.pack and self.backend.packs
            else FileSource(self._file, self.backend)
        )
        try:
            self.weights = _weight_cache(self._source, settings)
        except BaseException:
            self._file.close()
            raise
        self._check: threading.Thread | None = None
        if isinstance(self._source, PackSource):
            first = settings.verify == "eager" or pack_was_touched(self._source.pack)
            self._check = threading.Thread(target=self._verify_pack, args=(self._source.pack,), daemon=True)
            self._check.start()
            if first:
                self._check.join()
        tensor_types = {info.type.name for info in self._file.tensors.values()}
        self.model = Transformer(self.config, self.weights, self.backend, tensor_types)
        self._index = Index(blocks, reach=reach(self.config.kv_shape))
        self.settings = settings
        self._agents: AgentStore | None = None
        self._engine: Engine | None = None
        self.admission = Admission(Budget(self._index, MOST_RUNNING))
        self._ahead = Ahead() if settings.prefill_ahead else None
        self.drafts = Drafts(settings.draft_memory, self.backend.exact) if settings.speculate else None
        self._opening = threading.Lock()
        self._chat: ChatFormat | TemplateError | None = None
        self._long_texts: Line[None] = Line()
        self._grammars: Grammars | None = None
        self.control_ids = frozenset(self.tokenizer.special_tokens.values())

    def close(self) -> None:
        self._closing.set()
        if self._ahead is not None:
            self._ahead.close()
        if self._engine is not None:
            self._engine.close()
        if self._agents is not None:
            _close(self._agents, None)
        if self._grammars is not None:
            self._grammars.close()
        if self._check is not None:
            self._check.join()
        self.weights.close()
        if isinstance(self._source, PackSource):
            self._source.pack.close()
        self._file.close()

    def _verify_pack(self, pack: Pack) -> None:
        """Compare the pack with its checksums. What was altered is built from the file, now and at the next start."""
        from_file = FileSource(self._file, self.backend)
        buffers = Buffers()
        # What is mapped may as well be read through the mapping; else the check must not fill the memory.
        read = None if self.weights.mapped else lambda name: pack.read(name, buffers)
        sound, seen = True, pack.fingerprint()
        try:
            for name in pack.altered(self._closing.is_set, read):
                _log.error("%s: tensor %s was altered; built again from %s", pack.path, name, self.path)
                sound = False
                pack.path.unlink(missing_ok=True)
                self.weights.rebuild_from(name, from_file)
        except EverwarmError as error:  # whoever needs that tensor gets the same error
            _log.error("the pack can't be compared or mended: %s", error)
            sound = False
        if sound and not self._closing.is_set():
            remember_pack(pack, seen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def file_sampling(self) -> Mapping[str, Any]:
        """Fields of `Sampling` that the model file recommends. Only the server follows it, where a request says
        nothing else.
        """
        return file_sampling(self._file.metadata)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text. With `special`, names of control tokens in it become those tokens. No BOS is added."""
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. Control tokens are left out unless `special`."""
        return self.tokenizer.decode(ids, special=special)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each of the tokens: (n, vocab). Nothing is added to them: no BOS, no template."""
        ids = _token_ids(token_ids)
        self._check_ids(ids)
        with closing(self.new_kv()) as kv:
            return np.concatenate(list(prefill(self.model, kv, ids, logits_from=0)))

    @property
    def agents(self) -> AgentStore:
        """The agent store; opened at its first use, because looking through its directory takes time."""
        with self._opening:
            if self._closing.is_set():
                raise RequestError("the model is closed: load it again")
            if self._agents is None:
                self._agents = self._open_agents()
                self._agents.before_removal = partial(_forget, self._ahead, self.drafts, self._new_engine())
                atexit.register(self._agents.close)  # at the latest when the process ends
                # Not on this thread: the garbage collector may run on the writer's own, or on one that holds a lock.
                forgotten = weakref.finalize(self, _thread.start_new_thread, _close, (self._agents, self._ahead))
                forgotten.atexit = False
            return self._agents

    def _open_agents(self) -> AgentStore:
        settings = self.settings
        kv_type = self.backend.kv_type
        model = self.model
        layout = kv_layout(
            model.kv_shape, model.state_shape, kv_type, self._index.block_tokens, self._index.layer_bytes
        )
        directory = DirectoryStore(config.home() / "agents")
        quota = in_bytes(settings.warm_quota, lambda: most_bytes(directory))
        store: BlockStore = directory
        if settings.warm and settings.warm_url:
            from everwarm.kv.remote.opening import open_warm

            store = open_warm(settings.warm_url, config.home(), cache_quota=quota)
            quota = store.free_bytes()
        self._index.resize(in_bytes(settings.kv_budget, available_bytes))
        agents = AgentStore(
            self._index,
            ModelIds(
                weights_id(self._file, config.home()),
                self.model.numerics_id,
                layout,
                self.config.name,
                kv_type,
            ),
            store if settings.warm else None,
            quota=quota,
            most_age_s=settings.warm_age_s,
            durability=settings.durability,
            restore=settings.restore,
            exact=self.backend.exact,
            vocab_size=self.config.vocab_size,
            message_ends=self.tokenizer.eog_ids,
            owns_store=True,
        )
        if store.many_writers and agents.read_only:  # it was well just now
            agents.close()
            raise StoreError(f"{settings.warm_url}: {agents.read_only}")
        return agents

    def conversation(self, agent: str, tenant: str = "") -> list[Message]:
        """The messages that an agent has heard and said, if its turns came as messages; none if it is unknown."""
        with self.agents.open_turn(agent, 0, tenant) as turn:
            return list(turn.history.messages or ())

    @property
    def engine(self) -> Engine:
        """What computes all requests, in one loop."""
        with self._opening:
            if self._closing.is_set():
                raise RequestError("the model is closed: load it again")
            return self._new_engine()

    def _new_engine(self) -> Engine:
        """It costs nothing before something is submitted."""
        if self._engine is None:
            self._engine = Engine(self.model)
        return self._engine

    @property
    def grammars(self) -> "Grammars":
        """Compiled grammars, which make constraints. Made at its first use: few answers have to follow a grammar."""
        from everwarm.structured.grammars import Grammars

        with self._opening:
            if self._closing.is_set():
                raise RequestError("the model is closed: load it again")
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer)
            return self._grammars

    def answer_grammar(
        self, asked: "Grammar | None", tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None
    ) -> "Grammar | None":
        """What an answer must follow: what is `asked` for, and how tools are called. None: any answer will do. Raises
        RequestError.
        """
        if not tools:
            return asked
        from everwarm.generation.answer_grammar import answer_grammar

        return answer_grammar(asked, self.chat, tools, choice, self.tokenizer.special_tokens)

    def _constraint(
        self, tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None, **given: object
    ) -> Callable[[], Constraint] | None:
        asked = None
        if any(value is not None for value in given.values()):
            from everwarm.structured.asked import asked_grammar

            asked = asked_grammar(**given)
        grammar = self.answer_grammar(asked, tools, choice)
        return None if grammar is None else self.grammars.constraint(grammar)

    @property
    def waiting(self) -> int:
        """Requests that wait for room in the KV budget."""
        return self.admission.waiting

    def runtime(self, *, store: bool = True) -> Runtime:
        """What generations need. Without the `store` nothing is looked up, nothing is kept."""
        return Runtime(
            tokenizer=self.tokenizer,
            control_ids=self.control_ids,
            long_texts=self._long_texts,
            store=self.agents if store else None,
            index=self._index,
            admission=self.admission,
            engine=self.engine,
            model=self.model,
            rows=self.backend.rows,
            weights=self.weights,
            drafts=self.drafts,
            exact=self.backend.exact,
        )

    def warm_up(self) -> None:
        """Compute a little and keep nothing of it: the first request finds threads running and memory in place."""
        self.tokenizer.least_tokens([])
        count = min(64, self.config.context - 2)
        self.generate(tokens=[0] * count, max_tokens=2, ignore_eos=True, cache=False)

    def new_kv(self) -> SequenceKV:
        """An empty KV cache of the model's own, which no agent owns."""
        return self._index.sequence(self.config.context)

    def segments(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        special: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        thinking: Thinking | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        context: int | None = None,
    ) -> tuple[list[Segment], bool]:
        """What is to be tokenised, and whether BOS goes before it. Raises ContextError as soon as it is certain that
        its tokens don't fit into `context`. Without `add_generation_prompt` messages don't end with the beginning of an
        answer.
        """
        if messages is not None:
            shown = None if tool_choice is not None and tool_choice.mode == "none" else tools
            segments, add_bos = self._chat_prompt().segments(
                messages, shown, thinking, template_variables, context, add_generation_prompt
            )
        else:
            segments, add_bos = self._raw_segments(prompt, special)
        if context is not None and sum(len(segment.text) for segment in segments) >= LONG_TEXT:
            _check_length(self.tokenizer, segments, context)
        return segments, add_bos

    def _chat_prompt(self) -> "_ChatPrompt":
        return _ChatPrompt(self.chat, self.tokenizer, tuple(self.settings.prompt_rules))

    def _raw_segments(self, prompt: str | None, special: bool) -> tuple[list[Segment], bool]:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt: expected a text, found {type(prompt).__name__}")
        if not prompt:
            raise RequestError("the prompt is empty: give at least one character")
        return list(self.tokenizer.split(prompt)) if special else [Segment(prompt)], self.tokenizer.add_bos

    def encode_prompt(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> list[int]:
        """Token ids to start from: of a raw text (BOS as the file says), of chat messages, or the ids themselves."""
        if sum(source is not None for source in (prompt, messages, tokens)) != 1:
            raise RequestError("give exactly one of prompt, messages and tokens")
        if tokens is not None:
            ids = _token_ids(tokens)
        else:
            segments, add_bos = self.segments(prompt, messages=messages, special=special)
            ids = self.tokenizer.encode(segments, add_bos=add_bos)
        check_prompt(self.model, ids)
        return ids

    def stream(self, prompt: str | None = None, **kwargs: Any) -> Iterator[Event | End]:
        """Generate: an event per token, then, when the turn is safe, its end. Takes what `start` takes."""
        return self.start(prompt, **kwargs).events()

    def start(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tokens: Sequence[int] | None = None,
        special: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        thinking: Thinking | None = None,
        template_variables: Mapping[str, Any] | None = None,
        agent: str | None = None,
        tenant: str = "",
        group: str = "",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        cache: bool = True,
        keep: bool = True,
        context: int | None = None,
        priority: int = 0,
        schema: object = None,
        regex: str | None = None,
        grammar: str | None = None,
        constraint: Callable[[], Constraint] | None = None,
        after_reasoning: bool = False,
        drafter: Drafter | None = None,
        parser: Callable[[], OutputParser] | None = None,
        point: Point | None = None,
        choice: int = 0,
        **sampling: Any,
    ) -> Generation:
        """A generation that can be cancelled; it begins when its events are asked for. `context` is a limit on prompt
        and answer below the model's own. Without `keep` the answer is not kept. Without `cache` everything is computed
        and nothing is kept. The answer is JSON that is valid under `schema`, or matches `regex`, or follows `grammar`
        (GBNF or Lark): at most one of them. `constraint` is for any other rule: it makes what says which tokens may
        follow, with the state of one answer; it runs on the engine's thread. With `after_reasoning` it begins behind
        the reasoning of a model that reasons. What `drafter` proposes is verified in one step: the answer is the same,
        it comes sooner if the draft is right. `parser` makes what tells text, reasoning
        and tool calls apart; by default the chat template decides for messages, and all is text for prompts.
        `template_variables` are for the chat template. With `point` the answer becomes a point of a history under the
        agent's name. Its events have the number `choice`. `sampling` takes the fields of
        `everwarm.engine.sampling.Sampling`. A second turn of the same agent waits for the first.
        """
        checked = self.check_options(max_tokens=max_tokens, stop=stop, **sampling)
        follows = schema is not None or regex is not None or grammar is not None
        if follows and constraint is not None:
            raise RequestError("give either a constraint or one of schema, regex and grammar")
        if constraint is None and (follows or (tools and messages is not None)):
            offered = None if messages is None else tools
            constraint = self._constraint(offered, tool_choice, schema=schema, regex=regex, grammar=grammar)
            after_reasoning = after_reasoning or constraint is not None
        if sum(source is not None for source in (prompt, messages, tokens)) != 1:
            raise RequestError("give exactly one of prompt, messages and tokens")
        if agent is not None:
            check_name(agent, "agent")
        limit = min(context or self.config.context, self.config.context)
        content: list[int] | tuple[list[Segment], bool]
        reader = next_prompt = None
        if tokens is not None:
            content = ids = _token_ids(tokens)
            check_prompt(self.model, ids)
        else:
            content = self.segments(
                prompt, messages=messages, special=special, tools=tools, tool_choice=tool_choice, thinking=thinking,
                template_variables=template_variables, context=limit,
            )  # fmt: skip
            if parser is None and messages is not None:
                offered = None if tool_choice is not None and tool_choice.mode == "none" else tools
                parser, reader = self.chat.parser(offered, content[0]), partial(_reader, self.chat, offered)
                next_prompt = partial(self._chat_prompt().of_next_turn, messages, offered, thinking, template_variables)
            budget = None if thinking is None else thinking.budget
            if messages is not None and (after_reasoning or budget is not None):
                constraint = self._gate(content[0], budget, constraint)
        request = Request(
            content,
            checked,
            max_tokens,
            stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            end_ids=frozenset() if ignore_eos else self.tokenizer.eog_ids,
            context=limit,
            agent=agent,
            tenant=tenant,
            group=group,
            messages=None if messages is None else tuple(messages),
            rules=() if messages is None else prompt_rules.apply(messages, self.settings.prompt_rules).rules,
            keep=keep,
            priority=priority,
            constraint=constraint,
            drafter=drafter,
            parser=parser or PlainText,
            reader=reader,
            next_prompt=next_prompt,
            most_calls=None if tool_choice is None or tool_choice.parallel else 1,
            point=point,
            choice=choice,
        )
        return Generation(self.runtime(store=cache), request, self._ahead)

    def _gate(
        self, prompt: Sequence[Segment], budget: int | None, constraint: Callable[[], Constraint] | None
    ) -> Callable[[], Constraint] | None:
        """Makes a constraint that bounds the reasoning of an answer, if it has a budget; another constraint begins
        behind the reasoning.
        """
        form = self.chat.reasoning
        if form is None:
            return constraint
        inside, tokenizer = begins_inside(form, prompt), self.tokenizer
        return lambda: ReasoningGate(
            tokenizer, form, inside=inside, budget=budget, answer=constraint() if constraint else None
        )

    def check_options(
        self, *, max_tokens: int = 1, stop: str | Sequence[str] | None = None, **sampling: Any
    ) -> Sampling:
        """Raise RequestError if `stream` would refuse these options."""
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise RequestError(f"max_tokens {max_tokens!r}: must be a whole number of at least 1")
        if not all(isinstance(text, str) for text in ([stop] if isinstance(stop, str) else stop or ())):
            raise RequestError("stop: expected a text or a list of texts")
        unknown = set(sampling) - set(Sampling.__dataclass_fields__)
        if unknown:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise RequestError(f"unknown option(s) {', '.join(sorted(unknown))}; known are {known}")
        return Sampling(**sampling)

    def generate(
        self, prompt: str | None = None, *, on_event: Callable[[Event], None] | None = None, **kwargs: Any
    ) -> Completion:
        """Generate to the end. Takes what `stream` takes."""
        return completed(lambda: self.stream(prompt, **kwargs), self.weights, self.backend, on_event)

    def score(self, text: str, window: int | None = None, progress: Callable[[int, int], None] | None = None) -> Score:
        """Perplexity of a text, in windows of `window` tokens."""
        ids = self.tokenizer.encode(text, add_bos=self.tokenizer.add_bos)
        return score(
            self.model, self._index, ids, min(SCORE_WINDOW, self.config.context) if window is None else window, progress
        )

    @property
    def chat(self) -> ChatFormat:
        """How the file's chat template has conversations written, and answers read. The template is compiled at first
        use. A refusal is remembered: it may have taken seconds.
        """
        if self._chat is None:
            settings = self.settings
            try:
                self._chat = model_chat(
                    self._file.metadata, self.tokenizer, self._own_template,
                    tool_parser=settings.tool_parser, lenient=settings.lenient_tools,
                )  # fmt: skip
            except TemplateError as error:
                self._chat = error
        if isinstance(self._chat, TemplateError):
            raise TemplateError(str(self._chat))
        return self._chat

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template."""
        return self.chat.template

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("no tokens: give at least one")
        if len(ids) > self.config.context:
            raise RequestError(f"{len(ids):,} tokens, the model's context is {self.config.context:,}")
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token {token} is not in the vocabulary of {self.config.vocab_size:,}")


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """Renders conversations. Requests hold it after their end, so it must not hold the model: that could not be
    forgotten.
    """

    chat: ChatFormat
    tokenizer: Tokenizer
    rules: tuple[str, ...]

    def segments(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: Thinking | None,
        variables: Mapping[str, Any] | None,
        context: int | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[list[Segment], bool]:
        watch = None
        if context is not None:
            watch = partial(_check_length, self.tokenizer, context=context, unsettled=LONGEST_NAME)
        messages = prompt_rules.apply(messages, self.rules).messages
        segments = self.chat.render(
            messages, tools=tools, thinking=thinking, variables=variables,
            add_generation_prompt=add_generation_prompt, watch=watch,
        )  # fmt: skip
        opens_with_bos = (
            bool(segments)
            and segments[0].special
            and self.tokenizer.special_tokens[segments[0].text] == self.tokenizer.bos_id
        )
        return segments, self.tokenizer.add_bos and not opens_with_bos

    def of_next_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: Thinking | None,
        variables: Mapping[str, Any] | None,
        answer: Message,
    ) -> tuple[list[Segment], bool] | None:
        """How the prompt of the next turn begins, whatever is said then; None if that can't be told."""
        try:
            made = [
                self.segments(conversation, tools, thinking, variables)
                for conversation in next_conversations(messages, answer)
            ]
        except EverwarmError:
            return None
        return (common_beginning([segments for segments, _ in made]), made[0][1]) if made else None


def _check_length(tokenizer: Tokenizer, segments: Sequence[Segment], context: int, unsettled: int = 0) -> None:
    """Raise ContextError if they don't fit, whatever becomes of the last `unsettled` characters."""
    least = tokenizer.least_tokens(segments) - unsettled
    if least >= context:
        raise too_long(f"at least {least:,}", context)


def _reader(
    chat: ChatFormat, tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[Segment], strict: bool
) -> OutputParser:
    return chat.parser(tools, prompt, strict=strict)()


def _forget(ahead: Ahead | None, drafts: Drafts | None, engine: Engine, tenant: str, agent: str) -> None:
    """An agent is to be removed."""
    if ahead is not None:
        ahead.forget(engine, tenant, agent)
    if drafts is not None:
        drafts.forget(tenant)


def _close(agents: AgentStore, ahead: Ahead | None) -> None:
    if ahead is not None:
        ahead.close()
    atexit.unregister(agents.close)
    agents.close()


def _weight_cache(source: Source, settings: Settings) -> WeightCache:
    return WeightCache(
        source,
        settings.weight_budget,
        settings.weight_policy,
        ahead=settings.prefetch_ahead,
        background=settings.prefetch,
        window_s=float(settings.access_window),
    )


def _token_ids(tokens: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise RequestError("tokens: expected a list of whole numbers") from None
