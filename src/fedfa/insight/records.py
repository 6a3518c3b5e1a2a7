"""What was seen, in a run folder: ``insight.jsonl`` and the probe's features under ``insight/``.

Written before the checkpoint that counts the round, and cut back to the checkpoint when a run is taken up again, as
the metrics are: after any interruption the files are those of a run that was never stopped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedfa.errors import RunError
from fedfa.insight.observer import Observation
from fedfa.learning.tensors import Tensors
from fedfa.studies.files import append_line, load_tensors, read_lines, save_tensors, write_lines

_FEATURES = re.compile(r"round(\d+)\.safetensors")
_SHOWN = re.compile(r"round(\d+)(?:\.tsne)?\.safetensors")


class InsightRecords:
    """Reads and writes what was seen in one run."""

    def __init__(self, folder: Path) -> None:
        self.lines = folder / "insight.jsonl"
        self.folder = folder / "insight"

    def add(self, seen: Observation) -> None:
        """Record a round."""
        if seen.features is not None:
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.file(seen.record["round"]), seen.features)
        append_line(self.lines, seen.record)

    def cut(self, rounds: int) -> None:
        """Forget the rounds after this one."""
        if self.lines.exists():
            write_lines(self.lines, [record for record in self.read() if record["round"] <= rounds])
        for round in self.shown_rounds():
            if round > rounds:
                self.file(round).unlink(missing_ok=True)
                self.embedding(round).unlink(missing_ok=True)

    def copy(self, other: InsightRecords) -> None:
        """Take over what was seen in another run."""
        if other.lines.exists():
            write_lines(self.lines, other.read())
        for round in other.rounds():
            self.folder.mkdir(exist_ok=True)
            save_tensors(self.file(round), other.features(round))

    def read(self) -> list[dict[str, Any]]:
        """The records in order."""
        return read_lines(self.lines)

    def rounds(self) -> list[int]:
        """Rounds whose features are stored."""
        return self._rounds(_FEATURES)

    def shown_rounds(self) -> list[int]:
        """Rounds whose features can be shown in the plane: stored, or embedded before and kept without them."""
        return self._rounds(_SHOWN)

    def _rounds(self, names: re.Pattern[str]) -> list[int]:
        found = [names.fullmatch(file.name) for file in self.folder.glob("round*.safetensors")]
        return sorted({int(name[1]) for name in found if name})

    def features(self, round: int) -> Tensors:
        """The features of a round, with labels, clients and the rest; see ``docs/insight.md``."""
        if round not in self.rounds():
            stored = ", ".join(map(str, self.rounds())) or "none"
            raise RunError(
                f"{self.folder.parent} holds no probe features of round {round} (stored: {stored}); ask for them with "
                f"--set insight.features=[{round}] when the run is started"
            )
        return load_tensors(self.file(round))

    def file(self, round: int) -> Path:
        """Where a round's features are."""
        return self.folder / f"round{round:05d}.safetensors"

    def embedding(self, round: int) -> Path:
        """Where their embedding in the plane is, once somebody asked for it."""
        return self.folder / f"round{round:05d}.tsne.safetensors"


def insight_records(run_folder: Path | str) -> list[dict[str, Any]]:
    """What was seen in a run, a record a round; empty if nobody looked."""
    return InsightRecords(Path(run_folder)).read()


def feature_rounds(run_folder: Path | str) -> list[int]:
    """Rounds of a run whose probe features are stored."""
    return InsightRecords(Path(run_folder)).rounds()


def shown_rounds(run_folder: Path | str) -> list[int]:
    """Rounds of a run that :func:`~fedfa.insight.embedding.shared_embedding` can show."""
    return InsightRecords(Path(run_folder)).shown_rounds()


def probe_features(run_folder: Path | str, round: int) -> Tensors:
    """The probe features of one round of a run.

    Raises:
        RunError: They were not stored.
    """
    return InsightRecords(Path(run_folder)).features(round)
