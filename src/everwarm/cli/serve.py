"""`everwarm serve`."""

import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import typer

from everwarm.cli.console import err
from everwarm.cli.options import takes_settings
from everwarm.errors import ConfigError
from everwarm.server import descriptors
from everwarm.server.connections import ConnectionLimits, IPNetwork
from everwarm.server.origin import parse_origins
from everwarm.settings import ServeSettings

DEFAULT = "smollm2"


@takes_settings(ServeSettings)
def serve(
    model: Annotated[
        str, typer.Argument(help="Path or pulled name; the default is pulled if it is missing.")
    ] = DEFAULT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY or TENANT:KEY that a client must send; may be given several times. EVERWARM_API_KEYS holds "
            "several, separated by commas, and does not show in the list of processes."
        ),
    ] = None,
    operator_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that opens /metrics with the figures of all tenants, and nothing else; may be given several "
            "times. EVERWARM_OPERATOR_KEYS holds several, separated by commas."
        ),
    ] = None,
    read_key: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY or TENANT:KEY that may look at everything of a tenant and change nothing; may be given several "
            "times. EVERWARM_READ_KEYS holds several, separated by commas."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Without any key, listen on an address that others can reach, or serve any web page."
        ),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser when the model is ready, if there is a screen.")
    ] = False,
    *,
    settings: ServeSettings,
    sources: Mapping[str, str],
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs. /health answers at once and says when the model is ready."""
    from everwarm.server import process

    keys = parse_keys([*(api_key or ()), *_variable_keys("EVERWARM_API_KEYS")])
    operators = parse_operator_keys([*(operator_key or ()), *_variable_keys("EVERWARM_OPERATOR_KEYS")], keys)
    readers = parse_reader_keys([*(read_key or ()), *_variable_keys("EVERWARM_READ_KEYS")], keys, operators)
    _hide_keys([*(api_key or ()), *(operator_key or ()), *(read_key or ())])
    has_keys = bool(keys or readers)
    host, cors = settings.host, settings.cors
    if not has_keys and not insecure and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and without a key anyone there could use the model and read "
            "what agents remember: give --api-key (or EVERWARM_API_KEYS), or --insecure if that is meant"
        )
    if not has_keys and not insecure and "*" in cors:
        raise ConfigError(
            "--cors '*' without a key lets every web page use the model and read what agents remember: name the "
            "origins, give --api-key (or EVERWARM_API_KEYS), or --insecure if that is meant"
        )
    own_name = (
        [] if has_keys or not host or _is_address(host) else [host]
    )  # what it listens on is a name that was meant
    origins = parse_origins(cors, [*settings.allowed_host, *own_name], has_keys=has_keys)
    connections = connection_limits(
        settings.max_connections, settings.max_connections_per_address, settings.proxy, settings.max_queue
    )
    listener = _listen(host, settings.port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    err.print(f"listening at {address}; {address}/health says when {model} is ready, Ctrl-C ends", markup=False)

    def load(progress: process.Progress) -> process.Served:
        progress.say("loading the code")
        from everwarm.server import log
        from everwarm.server.keys import Keys
        from everwarm.server.loading import load_model
        from everwarm.server.page.routes import PageOptions
        from everwarm.server.sampling import sampling_of
        from everwarm.server.serving import Limits

        log.configure(settings.log_format)
        limits = Limits(
            most_queued=settings.max_queue,
            most_body_bytes=settings.max_body,
            timeout_s=settings.request_timeout,
            context=settings.context,
            answer_tokens=settings.n_predict,
        )
        everyone = Keys(keys, operators, readers)
        page = PageOptions(settings.page, settings, dict(sources))
        return load_model(
            model, progress, settings, limits, everyone, origins, pull=model == DEFAULT, alias=settings.alias,
            sampling=sampling_of(settings), page=page,
        )  # fmt: skip

    def ready(seconds: float) -> None:
        page = "" if settings.page == "off" else f"; the page is {address}/"
        err.print(f"ready after {seconds:.1f} s: {address}/v1{page}", markup=False)
        if open_page and settings.page != "off":
            open_browser(f"{address}/")

    with listener:
        process.run(listener, load, settings.grace, ready, connections, page=settings.page != "off")


def parse_keys(given: Iterable[str]) -> dict[str, str]:
    """Tenants by key. What stands before a colon names the tenant; several keys may name the same."""
    from everwarm.kv.warm.tenants import DEFAULT_TENANT

    keys: dict[str, str] = {}
    for number, text in enumerate(given, start=1):
        tenant, _, key = text.partition(":") if ":" in text else (DEFAULT_TENANT, "", text)
        if not key or not tenant or not text.isascii() or not text.isprintable() or text != text.strip():
            raise ConfigError(f"API key {number}: expected KEY or TENANT:KEY, of printable ASCII characters")
        if keys.setdefault(key, tenant) != tenant:
            raise ConfigError(f"API key {number}: the same key is given to tenants {keys[key]!r} and {tenant!r}")
    return keys


def parse_operator_keys(given: Iterable[str], tenants: Collection[str]) -> frozenset[str]:
    """Keys of operators; none of them may be a tenant's, too."""
    keys = list(given)
    for number, key in enumerate(keys, start=1):
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ConfigError(f"operator key {number}: expected printable ASCII characters")
        if key in tenants:
            raise ConfigError(f"operator key {number}: the same key is given to a tenant; take another")
    return frozenset(keys)


def parse_reader_keys(given: Iterable[str], tenants: Collection[str], operators: Collection[str]) -> dict[str, str]:
    """Keys that may only look, with their tenants; none of them may open more elsewhere."""
    keys = parse_keys(given)
    for number, key in enumerate(keys, start=1):
        if key in tenants or key in operators:
            raise ConfigError(f"read key {number}: the same key opens more as another key; take another")
    return keys


def open_browser(url: str) -> bool:
    """Show a page to the person in front of this machine. False if there is no screen or no browser; never an error."""
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.open(url)
    except (OSError, webbrowser.Error):
        return False


def connection_limits(in_all: int, per_address: int | None, proxies: Iterable[str], requests: int) -> ConnectionLimits:
    """How many connections there may be, once the limit of descriptors has been raised."""
    possible = descriptors.for_connections(descriptors.raise_limit(), requests)
    if possible < in_all:
        err.print(f"at most {possible:,} connections: the system allows no more file descriptors (ulimit -n)")
    in_all = min(in_all, possible)
    return ConnectionLimits(
        in_all, per_address or max(1, in_all // 2), tuple(parse_network(proxy) for proxy in proxies)
    )


def parse_network(text: str) -> IPNetwork:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ConfigError(f"--proxy {text!r}: expected an address or a network, such as 10.0.0.0/8") from None


def _variable_keys(variable: str) -> list[str]:
    said = os.environ.get(variable, "")
    return [key.strip() for key in said.split(",") if key.strip()]


def _hide_keys(keys: list[str]) -> None:
    """The lock of the agent store names this command to others: without its keys."""
    sys.argv = ["..." if any(key in argument for key in keys) else argument for argument in sys.argv]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host or None, None)}
        return bool(host) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another --host or --port") from None
