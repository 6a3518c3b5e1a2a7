"""Short names for runs that tell them apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedfa.report.html.reading import Run


def run_names(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by their folder below the one they have in common."""
    folders = [run.folder.resolve() for run in runs]
    if len(folders) < 2:
        return {run.folder.resolve().name: run for run in runs}
    common = Path(os.path.commonpath(folders))
    return {folder.relative_to(common).as_posix(): run for folder, run in zip(folders, runs, strict=True)}
