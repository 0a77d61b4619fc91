"""All settings. Each is one field: its name, its type, its default and what people are told about it.

Flags, EVERWARM_* variables, config.toml, `everwarm.load(...)`, `everwarm doctor` and docs/config.md follow from these
fields. To add a setting, add a field; the function on its right says how a value is read (`everwarm.setting_kinds`).
"""

from dataclasses import dataclass

from everwarm.setting_kinds import (
    OffFlag,
    byte_count,
    choice,
    number,
    seconds,
    size,
    some_of,
    switch,
    text,
    texts,
    whole_number,
)
from everwarm.sizes import Share, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is loaded."""

    backend: str = choice("auto", "native", "reference", help="which kernels compute")
    isa: str = choice("auto", "avx512", "avx2", "portable", help="instruction set of the native kernels")
    pack: bool = switch(
        default=True,
        help="keep packed weights on disk, so that the next start maps them",
        off_flag=OffFlag("--no-pack", "Keep packed weights in memory only, write no pack."),
    )
    verify: str = choice(
        "background", "eager", help="when the pack's checksums are read: after the start, or before it"
    )
    threads: int | None = whole_number(
        1, 1024, default=None, help="threads to compute with (default: the cores this process may use)"
    )
    weight_budget: Size | None = size(
        default=None,
        help="bytes that weights may take in memory, such as 8GiB or 75% of the model; the rest is streamed from disk "
        "(default: all of it if that is at most 80% of the memory that is available, else what fits into 80%)",
    )
    weight_policy: str = choice(
        "value", "lru", "pinned-prefix",
        help="what is kept if not everything fits (most time saved per byte, latest used, first come)",
    )  # fmt: skip
    prefetch_ahead: int | None = whole_number(
        0,
        64,
        default=None,
        help="layers that are read ahead of the computation if not everything fits; more takes more memory (default: "
        "1, which hides the disk behind the computation where it can be hidden; 0 for weights that are not read but "
        "built from the model file, which takes time away from the computation)",
    )
    prefetch: bool = switch(default=True, help="read layers ahead in the background")
    access_window: int = whole_number(
        1,
        86400,
        default=60,
        help="seconds over which uses of weights are counted: shorter follows a change sooner, longer is steadier",
    )
    kv_budget: Size = size(
        default=Share(0.25),
        help="bytes that keys and values may take in memory, such as 8GiB or 25% of what is available",
    )
    context: int | None = whole_number(
        2, 2**31 - 1, default=None, help="tokens of prompt and answer, if fewer than the model's"
    )
    kv_type: str = choice("f16", "q8", "q4", help="how native kernels store keys and values (f16: 16 bits an element)")
    warm: bool = switch(default=True, help="keep agents on disk, so that they survive a restart")
    warm_quota: Size = size(
        default=Share(0.2),
        help="bytes that agents of all models may take on disk, such as 50GiB or 20% of what is free there without "
        "them; with --warm-url, bytes of the cache on disk in front of the object storage",
    )
    warm_url: str = text(
        default="",
        help="object storage in which agents are kept, such as s3://BUCKET/PREFIX, so that several machines share them "
        "(default: a directory on this machine)",
    )
    warm_age: int = whole_number(1, 36500, default=30, help="days after which an agent that was not used is forgotten")
    durability: str = choice(
        "turn", "async",
        help="when a turn counts as ended: when it is safe on disk, or at once, while it is being written",
    )  # fmt: skip
    chat_template: str = text(default="", help="chat template (Jinja) that is used instead of the model's own")
    chat_template_file: str = text(
        default="", help="file with a chat template (Jinja) that is used instead of the model's own"
    )
    prefill_ahead: bool = switch(
        default=True,
        help="while nobody asks for anything, compute a history as the next request will show it, where the chat "
        "template writes earlier turns anew",
    )
    speculate: bool = switch(
        default=True,
        help="draft the next tokens from what was said before and verify them in one step, where that is faster; "
        "answers are the same, bit for bit",
    )
    draft_memory: int = byte_count(
        default=40 << 20,
        help="memory for what agents have said, to draft from: 36 MB for a million tokens",
    )
    restore: str = choice("auto", "always", help="read KV from disk where that is faster than computing it, or always")
    tool_parser: str = choice(
        "auto", "none", "hermes", "qwen3-coder", "seed", "minimax", "glm", "llama3", "mistral", "mistral-json",
        "harmony", "deepseek-r1", "deepseek-v3.1", "deepseek-v3.2", "kimi", "granite", "apriel", "apertus", "command-r",
        "gigachat", "gemma", "function-gemma", "tool-code", "lfm2",
        help="how the model writes tool calls; auto takes it from the file's chat template, none reads no calls",
    )  # fmt: skip
    lenient_tools: bool = switch(
        default=True,
        help="an answer that is nothing but a JSON object naming an offered tool is a call, also without the marks",
    )
    prompt_rules: tuple[str, ...] = some_of(
        "claude-billing-header", "dates-last", "environment-last",
        default=("claude-billing-header",),
        help="rules for text that changes from prompt to prompt and so keeps the rest from being reused: drop Claude "
        "Code's billing line, or move lines with dates, or with the working directory and git's status, from the "
        "system text to the user's first message; several are separated by commas, none switches all of them off",
    )  # fmt: skip

    @property
    def warm_age_s(self) -> float:
        return 86400.0 * self.warm_age


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(Settings):
    """How a model is loaded and served. Keys are not here: they are secrets, which `everwarm doctor` must not show."""

    host: str = text(
        default="127.0.0.1",
        help="address to listen on; other machines reach it only if it is not a loopback one",
    )
    alias: tuple[str, ...] = texts(
        help="name under which the model is served, instead of its file's; may be given several times: all are listed, "
        "answers tell the first",
    )
    port: int = whole_number(0, 65535, default=8080, help="port to listen on; 0 takes a free one")
    cors: tuple[str, ...] = texts(
        help="origin whose pages may ask from a browser, such as http://localhost:3000, or '*' for any; may be given "
        "several times. All others are refused",
    )
    allowed_host: tuple[str, ...] = texts(
        help="name under which clients reach this server (a Docker service, a proxy's name); may be given several "
        "times. Without keys only these, localhost and IP addresses are served",
    )
    max_connections: int = whole_number(
        1, 60_000, default=8192, help="connections at once; fewer if the system allows fewer file descriptors"
    )
    max_connections_per_address: int | None = whole_number(
        1, 60_000, default=None, help="connections at once from one address (default: half of all)"
    )
    proxy: tuple[str, ...] = texts(
        help="address or network of a reverse proxy, such as 10.0.0.0/8: its connections are not limited per address. "
        "May be given several times",
    )
    max_queue: int = whole_number(
        1, 4096, default=256, help="requests that may run or wait; more are told to come again"
    )
    max_body: int = byte_count(default=16 << 20, help="largest body of a request")
    request_timeout: float = seconds(0.1, default=3600.0, help="seconds that a request may take")
    grace: float = seconds(0.0, default=20.0, help="seconds that running requests have to end after SIGTERM or Ctrl-C")
    temp: float | None = number(0, 100, help="temperature of requests that name none; 0 is greedy")
    top_k: int | None = whole_number(
        0, 2**31 - 1, default=None, help="of how many most likely tokens requests that don't say so choose; 0 is all"
    )
    top_p: float | None = number(
        0, 1, above=True, help="probability of the tokens that requests which don't say so choose from"
    )
    min_p: float | None = number(
        0, 1, help="least probability, relative to the most likely token's, for requests that name none"
    )
    repeat_penalty: float | None = number(
        0, 100, above=True, help="penalty on tokens that were there before, for requests that name none; 1 is none"
    )
    presence_penalty: float | None = number(
        -2, 2, help="penalty on tokens that the answer has, for requests that name none"
    )
    frequency_penalty: float | None = number(
        -2, 2, help="penalty on each occurrence of a token in the answer, for requests that name none"
    )
    seed: int | None = whole_number(
        0, 2**64 - 1, default=None, help="seed of requests that name none (default: a fresh one for each)"
    )
    n_predict: int | None = whole_number(
        1, 2**31 - 1, default=None, help="tokens of an answer at most, for requests that name no limit"
    )
    page: str = choice(
        "on", "read-only", "off",
        help="the page at / for browsers; read-only: it shows everything and offers nothing that changes anything",
    )  # fmt: skip
    log_format: str = choice("text", "json", help="one line per request, in this format")
