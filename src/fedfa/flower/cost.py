"""Cost of a round over Flower by stage, from a run's record, next to the simulator's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedfa.errors import RunError
from fedfa.experiment.run_directory import RunDirectory

STAGES = {
    "site train": "local training",
    "site start": "process start per message: interpreter, torch, Flower",
    "site prepare": "opening data, building the network, reading state",
    "site keep": "writing state",
    "form": "deriving the expected form of the updates",
    "send": "writing and sending messages",
    "check": "reading and checking replies",
}
"""Descriptions of the stages in the record. Stages of sites are those of the slowest site."""
WAITING = "polling, task start and transport inside Flower"
SERVER = "aggregation and server step"


def cost_of_rounds(flower: Path, simulator: Path | None = None) -> list[tuple[str, float]]:
    """Median seconds per round spent on each stage; the last rows are the total and the simulator's total.

    Raises:
        RunError: The first directory does not hold a run over Flower, or one holds no rounds.
    """
    records = [record for record in _rounds(flower) if "federation" in record]
    if not records:
        raise RunError(f"{flower} does not hold a run over Flower")
    stages = [record["federation"]["seconds"] for record in records]
    totals = [record["train_seconds"] for record in records]
    rows = [(label, median(one.get(stage, 0.0) for one in stages)) for stage, label in STAGES.items()]
    rest = [max(0.0, one["round"] - sum(one.get(stage, 0.0) for stage in STAGES)) for one in stages]
    rows.append((WAITING, median(rest)))
    rows.append((SERVER, median(total - one["round"] for total, one in zip(totals, stages, strict=True))))
    rows.append(("a round over Flower", median(totals)))
    if simulator is not None:
        rows.append(("a round in the simulator", median(record["train_seconds"] for record in _rounds(simulator))))
    return rows


def _rounds(directory: Path) -> Sequence[dict[str, Any]]:
    rounds = [record for record in RunDirectory(directory).metrics() if "final_pass" not in record]
    if not rounds:
        raise RunError(f"{directory} has no record of a round")
    return rounds
