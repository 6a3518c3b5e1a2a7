"""Runs that must not change by a bit: recorded digests, for the processor and the torch they were recorded with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.golden import digest, environment, runs
from fedfa.cli.app import app

RECORDED = json.loads((Path(__file__).parents[1] / "results" / "golden" / "current.json").read_text(encoding="utf-8"))
CHOSEN = ["fedavg", "fedfa", "fedfa@plus", "fedfa@paper", "fedfa@authors", "scaffold", "moon", "fedavg+ccvr"]
same_environment = all(RECORDED[key] == value for key, value in environment().items())


@pytest.mark.skipif(not same_environment, reason="bits depend on the processor and on torch")
@pytest.mark.parametrize("method", CHOSEN)
def test_a_golden_run_has_the_recorded_bits(method: str, tmp_path: Path) -> None:
    name = f"{method}/1-worker"
    result = CliRunner().invoke(app, [*runs()[name], "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert digest(tmp_path / "run") == RECORDED["runs"][name]


@pytest.mark.parametrize("method", CHOSEN)
def test_workers_stacking_and_ray_give_the_bits_of_one_worker(method: str) -> None:
    recorded = {name: value for name, value in RECORDED["runs"].items() if name.startswith(f"{method}/")}
    simulated = {value for name, value in recorded.items() if name.partition("/")[2] not in ("cnn", "flower")}
    assert len(simulated) == 1, recorded
