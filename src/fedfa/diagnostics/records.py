"""Diagnostics in a run directory: ``diagnostics.jsonl``, and the features of the probe under ``diagnostics/``.

A round is written before its checkpoint, and resuming truncates the files to the checkpoint, as it does the metrics.
After any interruption they equal those of an uninterrupted run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedfa.diagnostics.observer import Observation
from fedfa.errors import RunError
from fedfa.experiment.files import append_line, load_tensors, read_lines, save_tensors, write_lines
from fedfa.learning.tensors import Tensors

_FEATURES = re.compile(r"round(\d+)\.safetensors")
_SHOWN = re.compile(r"round(\d+)(?:\.tsne)?\.safetensors")


class DiagnosticsRecords:
    """Reads and writes the diagnostics of one run."""

    def __init__(self, run_directory: Path) -> None:
        # Releases before 0.2 used another name; their runs stay readable and resumable.
        old = any((run_directory / name).exists() for name in ("insight.jsonl", "insight"))
        name = "insight" if old else "diagnostics"
        self.lines = run_directory / f"{name}.jsonl"
        self.folder = run_directory / name

    def add(self, observation: Observation) -> None:
        """Record a round."""
        if observation.features is not None:
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.file(observation.record["round"]), observation.features)
        append_line(self.lines, observation.record)

    def cut(self, rounds: int) -> None:
        """Remove the rounds after this one."""
        if self.lines.exists():
            write_lines(self.lines, [record for record in self.read() if record["round"] <= rounds])
        for round in self.shown_rounds():
            if round > rounds:
                self.file(round).unlink(missing_ok=True)
                self.embedding(round).unlink(missing_ok=True)

    def copy(self, other: DiagnosticsRecords) -> None:
        """Copy the diagnostics of another run."""
        if other.lines.exists():
            write_lines(self.lines, other.read())
        for round in other.rounds():
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.file(round), other.features(round))

    def read(self) -> list[dict[str, Any]]:
        """Return the records in order."""
        return read_lines(self.lines)

    def rounds(self) -> list[int]:
        """Return the rounds whose features are stored."""
        return self._rounds(_FEATURES)

    def shown_rounds(self) -> list[int]:
        """Return the rounds whose features or embedding are stored."""
        return self._rounds(_SHOWN)

    def _rounds(self, names: re.Pattern[str]) -> list[int]:
        found = [names.fullmatch(file.name) for file in self.folder.glob("round*.safetensors")]
        return sorted({int(name[1]) for name in found if name})

    def features(self, round: int) -> Tensors:
        """Return the features of a round with labels, clients and the rest; see ``docs/diagnostics.md``."""
        if round not in self.rounds():
            stored = ", ".join(map(str, self.rounds())) or "none"
            raise RunError(
                f"{self.folder.parent} has no probe features of round {round} (stored: {stored}); start the run with "
                f"--set diagnostics.features=[{round}]"
            )
        return load_tensors(self.file(round))

    def file(self, round: int) -> Path:
        """Return the file of a round's features."""
        return self.folder / f"round{round:05d}.safetensors"

    def embedding(self, round: int) -> Path:
        """Return the file of a round's embedding, which exists once it was computed."""
        return self.folder / f"round{round:05d}.tsne.safetensors"


def diagnostics_records(run_directory: Path | str) -> list[dict[str, Any]]:
    """Return the diagnostics of a run, one record per measured round."""
    return DiagnosticsRecords(Path(run_directory)).read()
