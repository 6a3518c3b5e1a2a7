"""The command ``fedfa dashboard``: runs in a browser, while they train and afterwards."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedfa.cli.common import say


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run directories, or directories that hold some. Default: runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any that is free.")] = 8642,
    browser: Annotated[bool, typer.Option("--open", help="Also open it in the browser.")] = False,
) -> None:
    """Follow runs in a browser: choose some, compare curves, see clients and diagnostics. Only this machine can ask."""
    from fedfa.report.html.dashboard import Dashboard

    server = Dashboard(runs or [Path("runs")], port)
    say(f"{server.address}  (stop with Ctrl-C)")
    if browser:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("stopped.")
    finally:
        server.server_close()
