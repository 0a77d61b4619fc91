"""How an API writes an answer: typed events of a generation in, server-sent events or one body out.

A wire has the state of one response. It knows no HTTP and no engine: it is a function of the events that it was given.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from everwarm.events import End, Event, Usage
from everwarm.server.errors import ApiError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event."""

    data: Json | str
    name: str | None = None


ServerEvents = list[ServerEvent]


class Wire(Protocol):
    """One response. Calls come in this order: `begin`, `add` for each event, `end`; or, for a response that is not
    streamed, `add` for each event, then `whole`. An `error` ends a stream at any point. Where the client wants to know
    how far its prompt is, `progress` comes after `begin`.
    """

    wants_progress: bool

    def waiting(self) -> ServerEvent | None:
        """Nothing has happened for a while: what keeps the connection open, None for a comment."""

    def begin(self, usage: Usage) -> ServerEvents:
        """Before the first token, when it is known how much of the prompt was reused."""

    def progress(self, report: Json) -> ServerEvents:
        """So many tokens of the prompt are computed."""

    def add(self, event: Event | End) -> ServerEvents:
        """The next event of one of the choices."""

    def end(self, usage: Usage, receipt: Json | None) -> ServerEvents:
        """Every choice has ended."""

    def error(self, error: ApiError) -> ServerEvents: ...

    def whole(self, usage: Usage, receipt: Json | None) -> Json | list[Json]:
        """The body of a response that is not streamed."""
