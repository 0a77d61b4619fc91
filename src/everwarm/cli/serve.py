"""`everwarm serve`."""

import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Iterable
from typing import Annotated

import typer

from everwarm.cli.console import err
from everwarm.cli.options import LoadSettings, loads_model
from everwarm.config import Share, parse_size
from everwarm.errors import ConfigError
from everwarm.server import descriptors
from everwarm.server.connections import ConnectionLimits, IPNetwork
from everwarm.server.origin import parse_origins

DEFAULT = "smollm2"


@loads_model
def serve(
    model: Annotated[
        str, typer.Argument(help="Path or pulled name; the default is pulled if it is missing.")
    ] = DEFAULT,
    host: Annotated[
        str,
        typer.Option(
            envvar="EVERWARM_HOST",
            help="Address to listen on; other machines reach it only if it is not a loopback one.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="EVERWARM_PORT", help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
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
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Without any key, listen on an address that others can reach, or serve any web page."
        ),
    ] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EVERWARM_CORS",
            help="Origin whose pages may ask from a browser, such as http://localhost:3000, or '*' for any; may be "
            "given several times. All others are refused.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EVERWARM_ALLOWED_HOST",
            help="Name under which clients reach this server (a Docker service, a proxy's name); may be given several "
            "times. Without keys only these, localhost and IP addresses are served.",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        typer.Option(
            envvar="EVERWARM_MAX_CONNECTIONS",
            help="Connections at once; fewer if the system allows fewer file descriptors.",
            min=1,
            max=60_000,
        ),
    ] = 8192,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            envvar="EVERWARM_MAX_CONNECTIONS_PER_ADDRESS",
            help="Connections at once from one address. Half of all by default.",
            show_default=False,
            min=1,
            max=60_000,
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EVERWARM_PROXY",
            help="Address or network of a reverse proxy, such as 10.0.0.0/8: its connections are not limited per "
            "address. May be given several times.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(envvar="EVERWARM_CONTEXT", help="Tokens of prompt and answer, if fewer than the model's.", min=2),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            envvar="EVERWARM_MAX_QUEUE",
            help="Requests that may run or wait; more are told to come again.",
            min=1,
            max=4096,
        ),
    ] = 256,
    max_body: Annotated[str, typer.Option(envvar="EVERWARM_MAX_BODY", help="Largest body of a request.")] = "16MiB",
    request_timeout: Annotated[
        float, typer.Option(envvar="EVERWARM_REQUEST_TIMEOUT", help="Seconds that a request may take.", min=0.1)
    ] = 3600.0,
    grace: Annotated[
        float,
        typer.Option(
            envvar="EVERWARM_GRACE", help="Seconds that running requests have to end after SIGTERM or Ctrl-C.", min=0.0
        ),
    ] = 20.0,
    log_format: Annotated[
        str, typer.Option(envvar="EVERWARM_LOG_FORMAT", help="One line per request: text, json.")
    ] = "text",
    *,
    settings: LoadSettings,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs. /health answers at once and says when the model is ready."""
    from everwarm.server import process

    keys = parse_keys([*(api_key or ()), *_variable_keys("EVERWARM_API_KEYS")])
    operators = parse_operator_keys([*(operator_key or ()), *_variable_keys("EVERWARM_OPERATOR_KEYS")], keys)
    _hide_keys([*(api_key or ()), *(operator_key or ())])
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {log_format!r}: expected text or json")
    body = _bytes("--max-body", max_body)
    if not keys and not insecure and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and without a key anyone there could use the model and read "
            "what agents remember: give --api-key (or EVERWARM_API_KEYS), or --insecure if that is meant"
        )
    if not keys and not insecure and "*" in (cors or ()):
        raise ConfigError(
            "--cors '*' without a key lets every web page use the model and read what agents remember: name the "
            "origins, give --api-key (or EVERWARM_API_KEYS), or --insecure if that is meant"
        )
    own_name = [] if keys or not host or _is_address(host) else [host]  # what it listens on is a name that was meant
    origins = parse_origins(cors or (), [*(allowed_host or ()), *own_name], has_keys=bool(keys))
    connections = connection_limits(max_connections, max_connections_per_address, proxy or (), max_queue)
    listener = _listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    err.print(f"listening at {address}; {address}/health says when {model} is ready, Ctrl-C ends", markup=False)

    def load(progress: process.Progress) -> process.Served:
        progress.say("loading the code")
        from everwarm.server import log
        from everwarm.server.keys import Keys
        from everwarm.server.loading import load_model
        from everwarm.server.serving import Limits

        log.configure(log_format)
        limits = Limits(most_queued=max_queue, most_body_bytes=body, timeout_s=request_timeout, context=context)
        return load_model(model, progress, settings, limits, Keys(keys, operators), origins, pull=model == DEFAULT)

    def ready(seconds: float) -> None:
        err.print(f"ready after {seconds:.1f} s: {address}/v1", markup=False)

    with listener:
        process.run(listener, load, grace, ready, connections)


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


def _bytes(flag: str, text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: can't understand {text!r}: {error}") from None
    if isinstance(size, Share) or size < 1:
        raise ConfigError(f"{flag}: expected a number of bytes such as 16MiB, found {text!r}")
    return size


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
