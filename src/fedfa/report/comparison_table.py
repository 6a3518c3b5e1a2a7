"""Finished runs side by side: accuracies, time and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedfa.errors import RunError
from fedfa.experiment.recorded_runs import RecordedRun, read_run
from fedfa.report.marks import marked, marks_of

HEADER = ("run", "seed", "final %", "best %", "last 10 %", "±", "s", "CPU s", "MB up", "MB down")
"""``run``: name of the run directory without the seed, with marks (:mod:`fedfa.report.marks`); ``last 10`` and ``±``:
mean and standard deviation of the last ten evaluations, in brackets their number where there are fewer; ``s``: wall
time of the training, without evaluations; ``CPU s``: processor time of the clients."""


def comparison_rows(directories: Sequence[Path]) -> list[tuple[str, ...]]:
    """One row per finished run, in the given order.

    Raises:
        RunError: A run is damaged.
    """
    rows = []
    for directory in directories:
        try:
            run = read_run(directory)
            if run.summary_error:
                raise RunError(run.summary_error)
            if run.finished:
                rows.append(comparison_row(run))
        except RunError as error:
            raise RunError(f"{directory} is damaged ({error}); remove it and run it again") from None
    return rows


def comparison_row(run: RecordedRun) -> tuple[str, ...]:
    """The cells of a finished run as text.

    Raises:
        RunError: The summary or the metrics lack a value.
    """
    found = run.results
    try:
        return (
            marked(run.stem, [marks_of(run.metrics)]),
            str(run.seed),
            *(f"{100 * found[key]:.2f}" for key in ("final_accuracy", "best_accuracy")),
            f"{100 * found['last10_accuracy']:.2f}" + (f" [{fewer}]" if (fewer := _fewer_than_ten(run)) else ""),
            f"{100 * found['swing']:.2f}",
            f"{found['seconds']:.0f}",
            f"{found['cpu_seconds']:.0f}" if "cpu_seconds" in found else "–",
            *(f"{found[key] / 1e6:.1f}" for key in ("bytes_up", "bytes_down")),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(repr(error)) from None


def _fewer_than_ten(run: RecordedRun) -> int:
    """The number of evaluations where there are fewer than ten; else 0."""
    return len(run.evaluated) if len(run.evaluated) < 10 else 0
