"""Who is connected: how many in all and from each address, and who has to leave when there is no place for another.

A connection that only sits there costs its sender nothing, so it must not keep others out. When there is no place, the
one that has been silent for longest makes room: first those that never sent a request, then those between two
requests, then those that don't send the body they announced, then those that don't read their answer. A connection
whose request is being answered is never closed for another.

Used from the event loop only.
"""

import ipaddress
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class Silence(IntEnum):
    """What a connection is waited for, in the order in which they leave."""

    NO_REQUEST = 0
    NO_NEXT_REQUEST = 1
    NO_BODY = 2
    NOT_READING = 3


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections, and how long one may be silent."""

    in_all: int = 8192
    per_address: int = 4096
    proxies: tuple[IPNetwork, ...] = ()  # addresses that speak for many: only the limit in all counts
    head_s: float = 30.0  # from the first moment, or the first byte of a next request, to the end of its head
    idle_s: float = 30.0  # between two requests
    stalled_s: float = 60.0  # not reading the answer
    closing_s: float = 5.0  # reading what was sent before the connection was closed
    sweep_s: float = 1.0  # how often these times are looked at


class Place:
    """One connection's place, from before its first byte until it is closed."""

    __slots__ = ("_places", "address", "close", "silence", "taken")

    def __init__(self, places: "Places", address: str) -> None:
        self._places = places
        self.address = address
        self.taken = True
        self.silence: Silence | None = None
        self.close: Callable[[], None] = lambda: None  # how to have its owner leave

    @property
    def limits(self) -> ConnectionLimits:
        return self._places.limits

    def silent(self, silence: Silence | None) -> None:
        """It is waited for from now on; None: it is not."""
        self._places.note(self, silence)

    def leave(self) -> None:
        """It is closed. May be said twice."""
        self._places.leave(self)


class _Crowd:
    """Connections of one address, or all of them; the silent ones in the order in which they fell silent."""

    __slots__ = ("count", "silent")

    def __init__(self) -> None:
        self.count = 0
        self.silent: tuple[dict[Place, None], ...] = tuple({} for _ in Silence)

    def longest_silent(self) -> Place | None:
        return next((place for places in self.silent for place in places), None)


class Places:
    """All connections, counted."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.pushed_out = self.refused = 0
        self._all = _Crowd()
        self._by_address: dict[str, _Crowd] = {}

    def __len__(self) -> int:
        return self._all.count

    def take(self, peer: str) -> Place | None:
        """A place for a connection from this address, if need be that of a silent one. None: there is none."""
        address = _counted_as(peer)
        crowd = self._by_address.get(address) or _Crowd()
        most = self.limits.in_all if _is_in(peer, self.limits.proxies) else self.limits.per_address
        for some, limit in ((crowd, most), (self._all, self.limits.in_all)):
            if some.count >= limit:
                silent = some.longest_silent()
                if silent is None:
                    self.refused += 1
                    return None
                self.leave(silent)
                silent.close()
                self.pushed_out += 1
        place = Place(self, address)
        for some in (self._by_address.setdefault(address, crowd), self._all):
            some.count += 1
        return place

    def note(self, place: Place, silence: Silence | None) -> None:
        """Called by a place. Whoever falls silent again goes to the end."""
        if not place.taken:
            return
        for some in (self._by_address[place.address], self._all):
            if place.silence is not None:
                del some.silent[place.silence][place]
            if silence is not None:
                some.silent[silence][place] = None
        place.silence = silence

    def leave(self, place: Place) -> None:
        """Called by a place."""
        if not place.taken:
            return
        self.note(place, None)
        place.taken = False
        for some in (self._by_address[place.address], self._all):
            some.count -= 1
        if not self._by_address[place.address].count:
            del self._by_address[place.address]


def _counted_as(peer: str) -> str:
    """An IPv6 network is given to one owner as 64 bits: all of it counts as one address."""
    address = _address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address.packed, 64), strict=False))
    return peer if address is None else str(address)


def _is_in(peer: str, networks: Collection[IPNetwork]) -> bool:
    address = _address(peer)
    return address is not None and any(address in network for network in networks)


def _address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:  # a socket without addresses
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
