"""Rounds as they are iterated over, with a progress bar in a terminal or a notebook."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

from fedfa.experiment.record import RoundRecord


class Rounds(Iterator[RoundRecord]):
    """The records of rounds, each trained when it is asked for. Warns where none was: nothing has been trained then.

    Args:
        records: Trains a round with each step.
        ahead: Number of rounds that are to come.
    """

    def __init__(self, records: Iterator[RoundRecord], ahead: int) -> None:
        self._records, self._ahead, self._begun = records, ahead, False

    def __next__(self) -> RoundRecord:
        self._begun = True
        return next(self._records)

    def __repr__(self) -> str:
        return f"<{self._ahead} rounds, trained as they are iterated over: for record in experiment.rounds(…)>"

    def __del__(self) -> None:
        if not self._begun and self._ahead > 0:
            warnings.warn(
                f"rounds({self._ahead}) trained nothing, because nobody iterated over it; write "
                f"`for record in experiment.rounds({self._ahead}): …` or `list(experiment.rounds({self._ahead}))`",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip


def show_progress(records: Iterator[RoundRecord], total: int, title: str, asked: bool | None) -> Iterator[RoundRecord]:
    """The records, with a progress bar beside them if that is asked for or somebody watches."""
    return _with_bar(records, total, title) if (_is_interactive() if asked is None else asked) else records


def _is_interactive() -> bool:
    """Whether the output is a terminal or a notebook; not while tests or scripts write to files."""
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None  # else rich warns instead of drawing
    return notebook or (hasattr(sys, "ps1") and sys.stderr.isatty())


def _with_bar(records: Iterator[RoundRecord], total: int, title: str) -> Iterator[RoundRecord]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task(title, total=total, accuracy="")
        for record in records:
            accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}"
            bar.update(task, advance=0 if record.final_pass else 1, accuracy=accuracy)
            yield record
