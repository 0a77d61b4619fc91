"""Which web pages may ask: rules over the headers Host, Origin and Sec-Fetch-*, which come before anything else.

A browser runs pages of strangers. Such a page can reach a server on this machine in two ways:

- Cross-site request: it sends a request to http://127.0.0.1:8080. The browser adds `Origin` and `Sec-Fetch-Site`, which
  no page can change. A foreign origin is refused unless `--cors` allows it.
- DNS rebinding: it is served from a name of its owner, evil.example, and then has that name point to 127.0.0.1. For the
  browser the page and this server are now one origin, but `Host` still says evil.example. So, without keys, only
  `localhost`, IP addresses (rebinding needs a name) and the names of `--allowed-host` are served.

With keys any Host is served unless `--allowed-host` names some: a page that does not know a key learns nothing.
X-Forwarded-Host is not read: any client can send it.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from everwarm.errors import ConfigError

ANY = "*"

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(\d{1,5}))?")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_PORTS = {"http": ":80", "https": ":443"}
_OWN_SITE = ("", "none", "same-origin")
"""What Sec-Fetch-Site says of a request that no other site has caused; nothing, if it is no browser that asks."""


class RequestHeaders:
    """The headers of one request, as ASGI gives them. One that came twice counts as empty."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> str:
        values = self._values.get(name, [])
        return values[0].lower() if len(values) == 1 else ""


@dataclass(frozen=True, slots=True)
class Origins:
    """What `--cors` and `--allowed-host` say. Everything in it is lower case, without default ports."""

    cors: frozenset[str] = frozenset()  # origins whose pages may ask; `*`: any
    hosts: frozenset[str] = frozenset()  # names of this server
    any_host: bool = False  # Host is not checked

    def why_not(self, method: str, headers: RequestHeaders) -> str | None:
        """Why a request is refused, because a stranger's page may have sent it; None if it is not."""
        host = headers["host"]
        if not self.any_host and not self._is_our_name(host):
            return (
                f"Host {host[:100]!r}: this server answers only to localhost, IP addresses and the names given with "
                "--allowed-host; start it with --allowed-host NAME if that is a name of this machine"
            )
        if not _is_navigation(method, headers) and self._is_foreign(host, headers):
            origin = headers["origin"][:100]
            return (
                f"Origin {origin or 'of another site'}: pages of other origins may not use this server; start it with "
                f"--cors {origin if '://' in origin else 'ORIGIN'} to allow one"
            )
        return None

    def _is_our_name(self, host: str) -> bool:
        name = re.sub(r":\d*\Z", "", host).removesuffix(".")
        return name == "localhost" or name in self.hosts or _is_address(name)

    def _is_foreign(self, host: str, headers: RequestHeaders) -> bool:
        if ANY in self.cors:
            return False
        own_site = headers["sec-fetch-site"] in _OWN_SITE
        if "origin" not in headers:
            return not own_site
        origin = headers["origin"]
        if origin in self.cors:
            return False
        # The scheme is not compared: behind a proxy that speaks TLS the page says https, this server http.
        scheme, _, authority = origin.partition("://")
        return not own_site or not authority or authority != host.removesuffix(_PORTS.get(scheme, ""))


def parse_origins(cors: Iterable[str], hosts: Iterable[str], *, has_keys: bool) -> Origins:
    """What was given on the command line, checked. Raises ConfigError."""
    names = frozenset(parse_name(name) for name in hosts)
    return Origins(frozenset(parse_origin(origin) for origin in cors), names, any_host=has_keys and not names)


def parse_origin(text: str) -> str:
    """An origin as browsers write it: `https://a.example`, without a path, a default port or capital letters."""
    if text == ANY:
        return ANY
    if text.strip().lower() == "null":
        raise ConfigError(
            "--cors null: any page can have this origin (a sandboxed frame has it); name the origin, or give '*'"
        )
    match = _ORIGIN.fullmatch(text.strip().lower().removesuffix("/"))
    if match is None or int(match[3] or 0) > 65535:
        raise ConfigError(f"--cors {text!r}: expected an origin such as https://app.example or http://localhost:3000")
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and f":{port}" != _PORTS.get(scheme) else "")


def parse_name(text: str) -> str:
    """A name of this server, without a port."""
    name = text.strip().lower().removesuffix(".")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--allowed-host {text!r}: expected a name such as llm.example, without a port")
    return name


def _is_navigation(method: str, headers: RequestHeaders) -> bool:
    """A person follows a link. The page with the link does not see what comes back."""
    return method == "GET" and (headers["sec-fetch-mode"], headers["sec-fetch-dest"]) == ("navigate", "document")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
