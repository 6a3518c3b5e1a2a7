"""Runs that must not change by a bit: recorded digests, for the processor and the torch they were recorded with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.golden import compute, environment, runs

RECORDED = json.loads((Path(__file__).parents[1] / "results" / "golden" / "current.json").read_text(encoding="utf-8"))
CHOSEN = ["fedavg", "fedfa", "fedfa@plus", "fedfa@paper", "fedfa@authors", "scaffold", "moon", "fedavg+ccvr"]
same_environment = all(RECORDED[key] == value for key, value in environment().items())


@pytest.mark.skipif(not same_environment, reason="bits depend on the processor and on torch")
@pytest.mark.parametrize("method", CHOSEN)
def test_a_golden_run_has_the_recorded_bits(method: str) -> None:
    name = f"{method}/1-worker"
    assert compute(name, runs()[name]) == RECORDED["runs"][name]


@pytest.mark.parametrize("method", CHOSEN)
def test_workers_stacking_and_ray_give_the_bits_of_one_worker(method: str) -> None:
    recorded = {name: value for name, value in RECORDED["runs"].items() if name.startswith(f"{method}/")}
    simulated = {value for name, value in recorded.items() if name.partition("/")[2] not in ("cnn", "flower")}
    assert len(simulated) == 1, recorded
