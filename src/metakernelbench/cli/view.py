"""`mkb view`: the report of an experiment, served from its store while it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.cli.studies import StoreOption
from metakernelbench.errors import UserError

app = typer.Typer(add_completion=False)

_PORT = 8321


@app.command()
def view(
    experiment: Annotated[str, typer.Argument(help="The experiment's TOML file, or its name in --store.")],
    store: StoreOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = _PORT,
) -> None:
    """Serve the report on this machine, at full detail; running attempts update by themselves. Ctrl-C ends it."""
    from metakernelbench.cli.report import opened
    from metakernelbench.report.live import LiveStudy
    from metakernelbench.report.serving import Server

    source, name = opened(experiment, store)
    with source:
        with output.stderr.status("reading the store"):
            live = LiveStudy(source, name)
        try:
            server = Server(live, port)
        except OSError as error:
            hint = "choose another one with --port, or --port 0 for any that is free"
            raise UserError(f"cannot listen on port {port}: {error.strerror}", hint=hint) from error
        with server:
            output.stdout.print(server.url, markup=False)
            output.stderr.print("open it in a browser of this machine; Ctrl-C ends it")
            server.serve_forever()
