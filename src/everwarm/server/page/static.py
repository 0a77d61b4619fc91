"""The files of the page: small, read once, compressed once, served without a key. They hold nothing of any user.

In: a path and the headers of a request. Out: status, headers and body. It knows no framework, so that the page can also
be served while the model is being loaded.
"""

import functools
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "files"

PREFIX = "/page/"
"""Where the files are that the page refers to."""

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""No code, style or picture but the page's own, no request to anybody else, and no text can become markup."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file, plain and compressed."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent."""

    status: int
    headers: dict[str, str]
    body: bytes


def is_page(path: str, accept: str) -> bool:
    """Whether one of the page's files is asked for, which needs no key."""
    return wants_page(accept) if path == "/" else path.startswith(PREFIX)


def wants_page(accept: str) -> bool:
    """A browser that opens the address says that it reads HTML; programs that look who is there do not."""
    return "text/html" in accept.lower()


def answer(path: str, headers: Mapping[str, str]) -> Answer | None:
    """The file of a path; None if there is none. `headers` have lower-case names."""
    name = "index.html" if path == "/" else path.removeprefix(PREFIX)
    file = _files().get(name)
    if file is None:
        return None
    said = HEADERS | {"content-type": file.kind, "etag": file.tag}
    if headers.get("if-none-match") == file.tag:
        return Answer(304, said, b"")
    if "gzip" in headers.get("accept-encoding", ""):
        return Answer(200, said | {"content-encoding": "gzip"}, file.packed)
    return Answer(200, said, file.plain)


def weight() -> int:
    """Bytes that a browser fetches to show the page."""
    return sum(len(file.packed) for name, file in _files().items() if name != "licences.txt")


@functools.cache
def _files() -> dict[str, File]:
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if kind := KINDS.get(path.suffix):
            data = path.read_bytes()
            tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
            found[path.name] = File(kind, data, gzip.compress(data, 9, mtime=0), tag)
    return found
