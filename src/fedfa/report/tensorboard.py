"""Runs for TensorBoard: event files made from run folders, as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfa.errors import FedfaError
from fedfa.report.html.reading import Run
from fedfa.report.names import run_names
from fedfa.report.scalars import scalars

_MARK = ".fedfa"
"""Ends the names of event files that were written here, so that a second export replaces them and no others."""


def export_tensorboard(runs: Sequence[Run], folder: Path) -> int:
    """Write a folder of event files for each run; returns how many values were written.

    Raises:
        FedfaError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FedfaError("TensorBoard is not installed: pip install 'fedfa[tensorboard]'") from None
    written = 0
    for name, run in run_names(runs).items():
        place = folder / name
        for old in place.glob(f"events.out.tfevents.*{_MARK}"):
            old.unlink()
        writer: Any = SummaryWriter(str(place), filename_suffix=_MARK)
        try:
            for scalar in scalars(run):
                writer.add_scalar(scalar.name, scalar.value, scalar.round)
                written += 1
        finally:
            writer.close()
    return written
