"""Progress of runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from fedfa.experiment.sweep import Cell


_MAX_BARS = 12
"""With more runs than this, the bars of finished ones disappear."""


class RoundsProgress:
    """One bar per run, with the accuracy as it stands; above them one for all runs, where there are several."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._of_cells: dict[Path, Callable[[dict[str, Any]], None]] = {}
        self._all: TaskID | None = None
        self._runs = 0
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[result]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> RoundsProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def during(self, work: Callable[[], object]) -> None:
        """Do work that can be resumed; whatever stops it, say so under the bars."""
        try:
            work()
        except BaseException:
            self.stop()
            self._console.print("stopped. The same command goes on from here.")
            raise

    def count(self, finished: int, runs: int) -> None:
        """Show how many of all runs are finished."""
        if runs < 2:
            return
        self._runs = runs
        text = f"{finished} of {runs} runs"
        if self._all is None:
            self._all = self._progress.add_task(text, total=runs, result="")
        self._progress.update(self._all, completed=finished, description=text)
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def watch(self, cell: Cell, record: dict[str, Any]) -> None:
        """Show a round of a cell, in a bar that begins with its first one."""
        if cell.directory not in self._of_cells:
            self._of_cells[cell.directory] = self.add(cell.name, cell.config.rounds)
        self._of_cells[cell.directory](record)

    def add(self, title: str, rounds: int) -> Callable[[dict[str, Any]], None]:
        """A new bar; returns what to call with each round's record."""
        task = self._progress.add_task(title, total=rounds, result="accuracy   –   ")
        tenth = max(1, rounds // 10)

        def show(record: dict[str, Any]) -> None:
            accuracy = "  –   " if record["accuracy"] is None else f"{record['accuracy']:6.2%}"
            ended = record["round"] >= rounds and self._runs > _MAX_BARS
            self._progress.update(
                task, completed=min(record["round"], rounds), result=f"accuracy {accuracy}", visible=not ended
            )
            if self._console.is_terminal:
                return
            if record.get("final_pass"):
                self._console.print(f"{title:<10} after the final pass  accuracy {accuracy}")
            elif record["round"] % tenth == 0 or record["round"] == rounds:
                self._console.print(f"{title:<10} round {record['round']:>4}/{rounds}  accuracy {accuracy}")

        return show
