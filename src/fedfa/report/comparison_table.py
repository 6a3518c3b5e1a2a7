"""A table of finished runs side by side: final, best, mean of the last ten, time, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfa.errors import RunError
from fedfa.studies.folder import RunFolder

HEADER = ("run", "seed", "final %", "best %", "last 10 %", "±", "s", "CPU s", "MB up", "MB down")
"""``run``: the run folder's name without its seed, which names method and variant; ``last 10``: mean of the last ten
evaluations, and their standard deviation; ``s``: as the clock has it, evaluations apart, whatever else the machine was
doing; ``CPU s``: processor time of the clients' training."""


def comparison_rows(folders: Sequence[Path]) -> list[tuple[str, ...]]:
    """One row per finished run, in the given order; the cells as text.

    Raises:
        RunError: A run's record is damaged.
    """
    rows = []
    for folder in folders:
        record = RunFolder(folder)
        summary = record.summary()
        if summary is not None:
            try:
                rows.append(_row(folder.name, summary, record.metrics()))
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise RunError(f"{folder} is damaged ({error!r}); remove it and run it again") from None
    return rows


def _row(name: str, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    rounds = [record["accuracy"] for record in metrics if record["accuracy"] is not None and "survey" not in record]
    last = rounds[-10:]
    mean = sum(last) / len(last)
    swing = (sum((value - mean) ** 2 for value in last) / len(last)) ** 0.5
    return (
        name.removesuffix(f"-s{summary['seeds']['training']}"),
        str(summary["seeds"]["training"]),
        *(f"{100 * summary[f'{what}_accuracy']:.2f}" for what in ("final", "best", "last10")),
        f"{100 * swing:.2f}",
        f"{summary['seconds']:.0f}",
        f"{summary['cpu_seconds']:.0f}" if "cpu_seconds" in summary else "–",
        *(f"{summary[f'bytes_{way}'] / 1e6:.1f}" for way in ("up", "down")),
    )
