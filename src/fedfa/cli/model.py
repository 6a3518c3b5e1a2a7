"""Commands for the trained model of a run: predictions, and files that other programs read."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from fedfa.cli.common import say

RunDirectoryArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Client = Annotated[
    int | None, typer.Option(min=0, help="Whose model, for methods in which clients keep models of their own.")
]


def predict(
    run: RunDirectoryArgument,
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Pictures, or .npz, .csv or .parquet files.")],
    client: Client = None,
    out: Annotated[Path | None, typer.Option(help="Write a CSV file; default: print it.")] = None,
) -> None:
    """Predict the classes of pictures or of the rows of tables, preprocessed as in training."""
    from fedfa.experiment.export import predictions

    rows = predictions(run, files, client)
    stream = sys.stdout if out is None else out.open("w", newline="", encoding="utf-8")
    try:
        writer = csv.writer(stream)
        writer.writerow(["file", "row", "class", "probability"])
        writer.writerows(rows)
    finally:
        if out is not None:
            stream.close()
            say(f"{len(rows):,} predictions in {escape(str(out))}")


def export(
    run: RunDirectoryArgument,
    format: Annotated[Literal["onnx", "torchscript", "safetensors"], typer.Option(help="What to write.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="Directory; default: RUN/export.")] = None,
    client: Client = None,
) -> None:
    """Write the trained model, with its preprocessing inside, and a model card."""
    from fedfa.experiment.export import export as write

    for path in write(run, out or run / "export", format, client):
        say(escape(str(path)))
