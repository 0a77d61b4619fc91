"""`everwarm serve`."""

import socket
from typing import Annotated

import typer

from everwarm import config
from everwarm.cli.console import bytes_bar, err
from everwarm.cli.loading import loaded
from everwarm.cli.options import LoadSettings, loads_model
from everwarm.errors import ConfigError

DEFAULT = "smollm2"


@loads_model
def serve(
    model: Annotated[
        str, typer.Argument(help="Path or pulled name; the default is pulled if it is missing.")
    ] = DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080,
    *,
    settings: LoadSettings,
) -> None:
    """Serve a model over OpenAI's chat API, one request at a time."""
    import uvicorn

    from everwarm.pull import pull
    from everwarm.server.app import create_app

    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another --host or --port") from None
    if model == DEFAULT:
        with bytes_bar() as bar:
            pull(model, config.home(), progress=bar)
    with loaded(model, settings) as llm:
        llm.weights.preload()
        with listener:
            address = f"http://{host}:{listener.getsockname()[1]}/v1"
            err.print(f"serving {llm.config.name} at {address}, Ctrl-C ends", markup=False)
            app = create_app(llm, llm.path.stem if model != DEFAULT else model)
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
