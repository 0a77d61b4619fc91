"""`everwarm serve`."""

from typing import Annotated

import typer

from everwarm import config
from everwarm.cli.console import bytes_bar, err
from everwarm.cli.options import Backend, Threads

DEFAULT = "smollm2"


def serve(
    model: Annotated[
        str, typer.Argument(help="Path or pulled name; the default is pulled if it is missing.")
    ] = DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080,
    backend: Backend = None,
    threads: Threads = None,
) -> None:
    """Serve a model over OpenAI's chat API, one request at a time."""
    import uvicorn

    from everwarm.llm import load
    from everwarm.pull import pull
    from everwarm.server.app import create_app

    if model == DEFAULT:
        with bytes_bar() as bar:
            pull(model, config.home(), progress=bar)
    with load(model, backend=backend, threads=threads) as llm:
        llm.weights.preload()
        err.print(f"serving {llm.config.name} at http://{host}:{port}/v1, Ctrl-C ends", markup=False)
        uvicorn.run(
            create_app(llm, llm.path.stem if model != DEFAULT else model), host=host, port=port, log_level="warning"
        )
