"""Clients that were told an address without `/v1`: their paths are served all the same."""

from starlette.types import Scope

VERSION = "/v1"
WITHOUT = ("/chat/completions", "/completions", "/responses", "/messages", "/models", "/embeddings")
"""Paths below `/v1` that clients also ask for without it."""


def with_version(scope: Scope) -> Scope:
    """A request with `/v1` before such a path."""
    path: str = scope["path"]
    if not any(path == known or path.startswith(known + "/") for known in WITHOUT):
        return scope
    changed = {**scope, "path": VERSION + path}
    if raw := scope.get("raw_path"):
        changed["raw_path"] = VERSION.encode() + raw
    return changed
