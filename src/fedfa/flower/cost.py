"""What a round costs over Flower, by stage, from the record of a run; beside it the simulator's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedfa.errors import RunError
from fedfa.studies.folder import RunFolder

STAGES = {
    "site train": "local training",
    "site start": "starting a process for the message: interpreter, torch, Flower",
    "site prepare": "opening data, building the network, reading the state",
    "site keep": "writing the state",
    "form": "finding out what clients must send",
    "send": "writing and handing over the messages",
    "check": "reading and checking the replies",
}
"""Stages of a round by their name in the record, and what they are. Those of sites are the slowest site's."""
WAITING = "polling, starting tasks and transport inside Flower"
SERVER = "adding up and the server's step"


def cost_of_rounds(flower: Path, simulator: Path | None = None) -> list[tuple[str, float]]:
    """The median over rounds of the seconds spent on each stage; the last rows are the whole, and the simulator's.

    Args:
        flower: Folder of a run over Flower.
        simulator: Folder of the same run in the simulator.

    Raises:
        RunError: The first is not a run over Flower, or one has no rounds.
    """
    records = [record for record in _rounds(flower) if "federation" in record]
    if not records:
        raise RunError(f"{flower} is not the record of a run over Flower")
    spent = [record["federation"]["seconds"] for record in records]
    whole = [record["train_seconds"] for record in records]
    rows = [(words, median(one.get(stage, 0.0) for one in spent)) for stage, words in STAGES.items()]
    rest = [max(0.0, one["round"] - sum(one.get(stage, 0.0) for stage in STAGES)) for one in spent]
    rows.append((WAITING, median(rest)))
    rows.append((SERVER, median(total - one["round"] for total, one in zip(whole, spent, strict=True))))
    rows.append(("a round over Flower", median(whole)))
    if simulator is not None:
        rows.append(("a round in the simulator", median(record["train_seconds"] for record in _rounds(simulator))))
    return rows


def _rounds(folder: Path) -> Sequence[dict[str, Any]]:
    rounds = [record for record in RunFolder(folder).metrics() if "survey" not in record]
    if not rounds:
        raise RunError(f"{folder} has no record of a round")
    return rounds
