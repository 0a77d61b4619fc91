"""An agent on disk: its name, its token history, the text those tokens came from, and the blocks that hold its KV.

A manifest is replaced as a whole; its generation goes up by one each time. Tensors of the file: `tokens` (U32),
`blocks` (U8, one row of 16 bytes per block name) and `text` (U8, zlib-compressed JSON: the runs and, if there are any,
the messages).
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv.chain import KEY_BYTES, U32, Key
from everwarm.kv.last_turn import LastTurn
from everwarm.types import AnswerPlace, Run, Segment

FORMAT = "everwarm-agent"
VERSION = "1"
_MOST_TEXT = 256 << 20
MOST_LEASE_S = 3600.0
MOST_PLACES = 256
"""Answers of a history that are remembered, the latest."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Whose turn it is, where several processes write: nobody else may begin one until it has run out. It is renewed by
    writing it again with another time.
    """

    owner: str
    until: float  # seconds since 1970, by the owner's clock
    duration_s: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is kept of an agent."""

    tenant: str
    name: str
    generation: int
    salt: str  # hex; the root that its blocks hang from
    weights_id: str
    numerics_id: str
    layout: str
    model: str  # for people
    kv_type: str
    tokens: U32  # u32: all of the history
    kv_tokens: int  # of these have blocks
    blocks: tuple[Key, ...]
    runs: tuple[Run, ...]  # the text of the tokens
    messages: tuple[Any, ...] | None = None  # as the caller sent them, with the answer
    positions: tuple[int, ...] = ()  # where it can be gone on from, if that is not everywhere
    ends: tuple[Key, ...] = ()  # names of blocks that it once ended with, beside which a state is kept
    text_digest: str = ""
    anonymous: bool = False
    group: str = ""  # of a branch of a group: the group's name
    pinned: bool = False
    final: bool = False  # a point of a history: it can be continued by others, but never changes
    record: Mapping[str, Any] | None = None  # whatever else is kept with it, as JSON
    answers: tuple[AnswerPlace, ...] = ()  # what of it the model has said
    last: LastTurn | None = None  # what its last request has reused
    created: float = 0.0
    used: float = 0.0
    lease: Lease | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no agent: it was removed, or its first turn has not ended yet."""
        return not len(self.tokens)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Names of all that it owns."""
        return (*self.blocks, *self.ends)

    def as_next(self, **changes: Any) -> "Manifest":
        return replace(self, generation=self.generation + 1, **changes)


class TextDigest:
    """A name for the beginning of a rendered text that ends with a run: histories that spell the same have the same.
    Neighbouring texts must have been merged.
    """

    def __init__(self, runs: Iterable[Run | Segment] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        for run in runs:
            self.add(run)

    def add(self, run: Run | Segment) -> str:
        """The name of the text with one more run."""
        text = run.text.encode("utf-8", "surrogatepass")
        self._hash.update(b"%d:%d:" % (run.special, len(text)) + text)
        return self.name

    @property
    def name(self) -> str:
        return self._hash.hexdigest()


def text_digests(runs: Sequence[Run | Segment]) -> list[str]:
    """The names of all beginnings, the shortest first."""
    digest = TextDigest()
    return [digest.add(run) for run in runs]


def answer_places(
    kept: Sequence[AnswerPlace], kept_runs: int, prompt: Sequence[Run | Segment]
) -> tuple[AnswerPlace, ...]:
    """Where the answers of a history are: those of an earlier one whose first runs were kept, and the new one, which
    follows the prompt.
    """
    run = len(prompt) if not prompt or prompt[-1].special else len(prompt) - 1
    lead = len(prompt[run].text) if run < len(prompt) else 0
    new = AnswerPlace(TextDigest(prompt[:run]).name, run, lead)
    return (*(place for place in kept if place.run < min(kept_runs, run)), new)[-MOST_PLACES:]


def merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbouring texts as one: what was said in pieces (a prompt's end and the answer) is one text later."""
    out: list[Run] = []
    for run in runs:
        if out and not run.special and not out[-1].special:
            out[-1] = Run(out[-1].text + run.text, False, out[-1].tokens + run.tokens)
        else:
            out.append(run)
    return tuple(out)


def emptied(manifest: Manifest) -> Manifest:
    """What is left of an agent that was removed, where many processes write: a number that nobody can commit over."""
    return replace(
        manifest,
        generation=manifest.generation + 1,
        tokens=np.empty(0, np.uint32),
        kv_tokens=0,
        blocks=(),
        runs=(),
        messages=None,
        positions=(),
        ends=(),
        text_digest="",
        pinned=False,
        final=False,
        record=None,
        answers=(),
        last=None,
        lease=None,
    )


def file_name(tenant: str, name: str) -> str:
    """Names are user input: they never become part of a path."""
    said = tenant.encode("utf-8", "surrogatepass") + b"\0" + name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(said, digest_size=16).hexdigest() + ".safetensors"


@dataclass(frozen=True, slots=True)
class Text:
    """What a history says, and what is kept with it."""

    runs: tuple[Run, ...] = ()
    messages: tuple[Any, ...] | None = None
    record: Mapping[str, Any] | None = None
    last: LastTurn | None = None


def pack_text(
    runs: Sequence[Run],
    messages: Sequence[Any] | None,
    record: Mapping[str, Any] | None = None,
    last: LastTurn | None = None,
) -> container.Array:
    """The text of a history as a tensor."""
    body: dict[str, Any] = {"runs": [[run.text, int(run.special), run.tokens] for run in runs], "messages": messages}
    if record is not None:
        body["record"] = record
    if last is not None:
        body["turn"] = last.as_json()
    return np.frombuffer(zlib.compress(json.dumps(body).encode(), 1), np.uint8)


def unpack_text(text: container.Array, most_bytes: int = _MOST_TEXT) -> Text:
    """What `pack_text` packed. Raises StoreError."""
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(text.tobytes(), most_bytes)
        if inflate.unconsumed_tail:
            raise StoreError(f"a text of more than {most_bytes:,} bytes")
        body = json.loads(plain)
        runs = tuple(Run(str(text), bool(special), int(count)) for text, special, count in body["runs"])
        messages = None if body["messages"] is None else tuple(body["messages"])
        record = body.get("record")
        return Text(runs, messages, record if isinstance(record, dict) else None, LastTurn.from_json(body.get("turn")))
    except (KeyError, ValueError, TypeError, OverflowError, zlib.error, RecursionError) as error:
        raise StoreError(f"the text can't be read: {error!r}") from None


def encode(manifest: Manifest) -> list[container.Part]:
    text = pack_text(manifest.runs, manifest.messages, manifest.record, manifest.last)
    blocks = np.frombuffer(b"".join(manifest.blocks), np.uint8).reshape(-1, KEY_BYTES)
    tokens = np.asarray(manifest.tokens, "<u4")
    said = {
        "format": FORMAT,
        "version": VERSION,
        "tenant": json.dumps(manifest.tenant),
        "name": json.dumps(manifest.name),
        "generation": str(manifest.generation),
        "salt": manifest.salt,
        "weights_id": manifest.weights_id,
        "numerics_id": manifest.numerics_id,
        "layout": manifest.layout,
        "model": manifest.model,
        "kv_type": manifest.kv_type,
        "kv_tokens": str(manifest.kv_tokens),
        "text_digest": manifest.text_digest,
        "anonymous": str(int(manifest.anonymous)),
        "group": json.dumps(manifest.group),
        "pinned": str(int(manifest.pinned)),
        "final": str(int(manifest.final)),
        "answers": json.dumps([[place.digest, place.run, place.lead] for place in manifest.answers]),
        "created": repr(manifest.created),
        "used": repr(manifest.used),
    }
    if manifest.positions:
        said["positions"] = json.dumps(manifest.positions)
    if manifest.ends:
        said["ends"] = json.dumps([key.hex() for key in manifest.ends])
    if manifest.lease is not None:
        said["lease"] = json.dumps([manifest.lease.owner, manifest.lease.until, manifest.lease.duration_s])
    return container.encode(
        said,
        [
            (container.Tensor("tokens", "U32", tokens.shape), tokens),
            (container.Tensor("blocks", "U8", blocks.shape), blocks),
            (container.Tensor("text", "U8", text.shape), text),
        ],
    )


def decode(file: bytes, with_text: bool = True) -> Manifest:
    """Raises StoreError unless it is whole and of a version that can be read. Without text, runs are empty."""
    said, tensors = container.decode(file)
    container.check_version(said, FORMAT, VERSION)
    try:
        text = unpack_text(tensors["text"]) if with_text else Text()
        blocks = tensors["blocks"].reshape(-1, KEY_BYTES)
        manifest = Manifest(
            tenant=str(json.loads(said["tenant"])),
            name=str(json.loads(said["name"])),
            generation=int(said["generation"]),
            salt=bytes.fromhex(said["salt"]).hex(),
            weights_id=said["weights_id"],
            numerics_id=said["numerics_id"],
            layout=said["layout"],
            model=said["model"],
            kv_type=said["kv_type"],
            tokens=tensors["tokens"].reshape(-1),
            kv_tokens=int(said["kv_tokens"]),
            blocks=tuple(Key(row.tobytes()) for row in blocks),
            runs=text.runs,
            messages=text.messages,
            positions=_positions(said.get("positions", "[]"), int(said["kv_tokens"])),
            ends=tuple(Key(bytes.fromhex(key)) for key in json.loads(said.get("ends", "[]"))),
            text_digest=said["text_digest"],
            anonymous=said["anonymous"] == "1",
            group=str(json.loads(said["group"])),
            pinned=said["pinned"] == "1",
            final=said.get("final") == "1",
            record=text.record,
            answers=_places(said.get("answers", "[]")),
            last=text.last,
            created=float(said["created"]),
            used=float(said["used"]),
            lease=_lease(said.get("lease")),
        )
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise StoreError(f"a field can't be read: {error!r}") from None
    if not 0 <= manifest.kv_tokens <= len(manifest.tokens):
        manifest = replace(manifest, kv_tokens=0, blocks=())  # its KV can't be used; what was said can
    if min((run.tokens for run in manifest.runs), default=0) < 0:
        raise StoreError("invalid text: a part of it has fewer than 0 tokens")
    if with_text and sum(run.tokens for run in manifest.runs) != len(manifest.tokens):
        raise StoreError("the text does not belong to the tokens")
    return manifest


def _lease(text: str | None) -> Lease | None:
    if text is None:
        return None
    owner, until, duration_s = json.loads(text)
    lease = Lease(str(owner), float(until), float(duration_s))
    if not math.isfinite(lease.until) or not 0 <= lease.duration_s <= MOST_LEASE_S:  # nobody waits for ever
        raise ValueError(f"a lease of {lease.duration_s} s until {lease.until}")
    return lease


def _positions(text: str, kv_tokens: int) -> tuple[int, ...]:
    """Where a history can be gone on from. What can't be right is left out: then more is computed again."""
    found = {int(position) for position in json.loads(text)}
    return tuple(sorted(position for position in found if 0 < position <= kv_tokens))


def _places(text: str) -> tuple[AnswerPlace, ...]:
    """Where answers begin. What can't be right is left out: then an answer is computed again if it is spelt anew."""
    found = json.loads(text)
    places = [AnswerPlace(str(digest), int(run), int(lead)) for digest, run, lead in found]
    return tuple(place for place in places if place.run >= 0 and place.lead >= 0)
