"""Commands for fleets of devices. Heavy imports happen inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedfa.cli.common import console, plain_table, say

app = typer.Typer(no_args_is_help=True)


@app.callback()
def fleet() -> None:
    """Devices, links and availability of the clients."""


@app.command()
def show(
    devices: Annotated[str, typer.Argument(help="equal, lognormal, phones, or a .csv or .json file.")] = "phones",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 100,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="E.g. fleet.availability=daily; repeat it."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also plot it, to a file that ends in .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show a fleet: how fast its devices and links are, when they are available; on request a picture."""
    import numpy as np

    from fedfa.experiment.config import Config
    from fedfa.experiment.layers import assign
    from fedfa.fleet.devices import build_fleet
    from fedfa.report.fleet_picture import availability_curve, fleet_picture

    config = Config.resolve({"fleet": {"devices": devices}}, assign({}, assignments or [])).fleet
    built = build_fleet(config, clients)
    rows = []
    for name, values in (
        ("computing [samples/s]", built.speed), ("download [kB/s]", built.down / 1e3), ("upload [kB/s]", built.up / 1e3)
    ):  # fmt: skip
        points = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
        rows.append((name, *(f"{point:,.1f}" for point in points)))
    console.print(plain_table((f"{clients:,} devices", "slowest", "10 %", "median", "90 %", "fastest"), rows))
    if built.availability is not None:
        hours = np.arange(0.0, 24.0, 3.0)
        shares = availability_curve(built, hours)
        console.print()
        console.print(
            plain_table(
                ("at", *(f"{int(hour):02d}:00" for hour in hours)), [("available", *(f"{s:.0%}" for s in shares))]
            )
        )
    if picture is not None:
        path = fleet_picture(built, picture, title=f"{config.devices}, {clients:,} devices, seed {config.seed}")
        say(f"picture: {escape(str(path))}")
