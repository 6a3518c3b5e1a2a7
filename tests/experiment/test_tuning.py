"""Tuning: proposals, halving on resumable runs, the same winner after a kill, and a test set that nobody touched."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.cli.tune import winner_command
from fedfa.errors import ConfigError, RunError
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.sweep import Cell
from fedfa.experiment.tuning import Parameter, TrialResult, Tuner, TuningPlan, parse_parameter, score
from tests.experiment.run_toys import small

QUICK: dict[str, Any] = {
    "rounds": 3, "device": "cpu", "data": {"name": "digits", "clients": 10, "validation": "clients:0.2"},
    "model": {"name": "logistic"}, "cohort": {"clients": 2}, "local": {"epochs": 1},
    "algorithm": {"name": "fedavg"},
}  # fmt: skip
RATE = parse_parameter("local.lr=log:0.0001..0.5")


def plan(out: Path, **more: Any) -> TuningPlan:
    values: dict[str, Any] = {"layers": (QUICK,), "parameters": (RATE,), "trials": 4, "seeds": (1,), "out": out}
    return TuningPlan(**{**values, **more})


def test_parameters_are_read_and_what_is_none_is_refused() -> None:
    assert parse_parameter("a.b=0..1") == Parameter("a.b", 0, 1)
    assert parse_parameter("a.b=-0.5..1").low == -0.5
    assert parse_parameter("model.name=mlp,cnn").choices == ("mlp", "cnn")
    for text in ("lr", "lr=", "lr=0.1", "lr=1..0", "lr=log:0..1", "lr=a..b", "lr=log:1,2", "lr=1,1", "lr=1..inf"):
        with pytest.raises(ConfigError, match="--param"):
            parse_parameter(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"parameters": ()}, "nothing to tune"),
        ({"parameters": (RATE, RATE)}, "given twice"),
        ({"parameters": (Parameter("seed", 1, 3),)}, "leave it out"),
        ({"parameters": (Parameter("local.lrr", 0.1, 1.0),)}, "did you mean 'lr'"),
        ({"parameters": (Parameter("local.lr", -1.0, 1.0),)}, "local.lr = -1.0"),
        ({"layers": ({**QUICK, "data": {"name": "digits"}},)}, "set data.validation"),
        ({"layers": (QUICK, {"evaluation": {"patience": 2}})}, "leave evaluation.patience out"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **more)


def test_rungs_and_scores() -> None:
    layers = ({**QUICK, "rounds": 200},)
    assert TuningPlan(layers, (RATE,), 9, (1,), Path("x")).rungs == [22, 66, 200]
    assert TuningPlan(({**QUICK, "rounds": 2},), (RATE,), 9, (1,), Path("x")).rungs == [2]
    config = small("fedavg", data={"validation": "server:0.2"})
    on = {"evaluated": {"model": "global", "on": "validation"}}
    records = [{"round": r, "accuracy": a, "loss": 1 - a, **on} for r, a in ((1, 0.5), (2, 0.7), (3, 0.6), (4, 0.9))]
    assert score(config, records, 3) == 0.7
    assert score(small("fedavg", data={"validation": "server:0.2"}, evaluation={"choose": "last"}), records, 3) == 0.6
    by_loss = small("fedavg", data={"validation": "server:0.2"}, evaluation={"monitor": "loss"})
    assert score(by_loss, records, 3) == pytest.approx(-0.3)
    assert score(config, [], 3) is None
    own = [
        {"round": r, "accuracy": a, "evaluated": {"model": "clients", "on": "validation"}}
        for r, a in ((1, 0.9), (2, 0.5))
    ]
    assert score(config, own, 2) == 0.5


@pytest.mark.slow
def test_tuning_halves_resumes_and_finds_the_same_winner_after_a_kill(tmp_path: Path) -> None:
    """Four trials of three rounds: all train one round, two go on to the end (rungs 1 and 3) from their checkpoints."""
    whole = Tuner(plan(tmp_path / "whole"), jobs=2)
    winner = whole.run()
    results = [whole.results[number] for number in range(4)]
    assert sorted(one.rounds for one in results) == [1, 1, 3, 3]
    first = {number: _records(tmp_path / "whole", number)[0]["accuracy"] for number in range(4)}
    promoted = {one.number for one in results if one.rounds == 3}
    assert promoted == set(sorted(first, key=lambda number: (-first[number], number))[:2])
    for number in range(4):
        records = _records(tmp_path / "whole", number)
        assert [one["round"] for one in records] == list(range(1, results[number].rounds + 1)), "no round twice"
        assert all(one["evaluated"]["on"] == "validation" for one in records)
        assert RunDirectory(_directory(tmp_path / "whole", number)).summary() is None, "nobody was tested"
    assert winner.mean == max(one.mean for one in results if one.rounds == 3)

    class KilledError(Exception):
        pass

    for allowed in (1, 4):  # killed in the first rung, then in the second; each time after some records
        seen = 0

        def watch(cell: Cell, record: dict[str, Any], allowed: int = allowed) -> None:
            nonlocal seen
            seen += 1
            if seen > allowed:
                raise KilledError

        with pytest.raises(KilledError):
            Tuner(plan(tmp_path / "pieces"), jobs=1, watch=watch).run()
    again = Tuner(plan(tmp_path / "pieces"), jobs=1)
    assert again.run() == winner
    assert again.results == whole.results
    trained = []
    third = Tuner(plan(tmp_path / "pieces"), watch=lambda cell, record: trained.append(cell.name))
    assert third.run() == winner
    assert trained == [], "what is finished is not run again"
    with pytest.raises(RunError, match="holds a tuning with other trials"):
        Tuner(plan(tmp_path / "pieces", trials=5)).run()


def _directory(out: Path, number: int) -> Path:
    return out / "trials" / f"{number + 1:04d}-s1"


def _records(out: Path, number: int) -> list[dict[str, Any]]:
    return RunDirectory(_directory(out, number)).metrics()


def test_the_command_that_repeats_the_winner(tmp_path: Path) -> None:
    winner = TrialResult(0, {"local.lr": 0.03125, "model.name": "mlp"}, 3, (0.5, 0.7))
    command = winner_command(plan(tmp_path, seeds=(1, 2)), winner, ["--preset", "digits-c2", "--algorithm", "fedfa"])
    assert command == (
        "fedfa compare --preset digits-c2 --algorithm fedfa --set local.lr=0.03125 --set model.name=mlp --set "
        f"data.validation=clients:0.2 --seed 3 --seed 4 --seed 5 --out {tmp_path}/winner"
    )
    assert winner.mean == pytest.approx(0.6)
    assert winner.deviation == pytest.approx(math.sqrt(0.02))


@pytest.mark.system
def test_the_command_line(tmp_path: Path, data_dir: Path) -> None:
    """A diverging trial is reported and the others go on; the table and the study are there."""
    arguments = [
        "tune", "--preset", "digits-c2", "--algorithm", "fedavg", "--rounds", "1", "--trials", "2", "--seeds", "1",
        "--param", "local.lr=0.01,1e30", "--data-dir", str(data_dir), "--out", str(tmp_path / "out"),
        "--set", "model.name=logistic", "--set", "local.epochs=1",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    trials = json.loads((tmp_path / "out" / "trials.json").read_text())["trials"]
    drawn = {one["values"]["local.lr"] for one in trials}
    if 0.01 in drawn:
        assert done.exit_code == 0, done.output
        assert "fedfa compare --preset digits-c2 --algorithm fedavg" in done.output.replace("\n", " ")
        assert "--set local.lr=0.01" in (tmp_path / "out" / "tuning.md").read_text()
    assert (tmp_path / "out" / "study.log").exists()
    if 1e30 in drawn:
        assert any("failed" in one for one in trials)


@pytest.mark.system
def test_killed_with_signal_9_and_started_again_it_finds_the_same_winner(tmp_path: Path, data_dir: Path) -> None:
    """The command itself, killed twice while trials train, against one that was left alone."""
    arguments = [
        "tune", "--preset", "digits-c2", "--algorithm", "fedavg", "--rounds", "6", "--trials", "4", "--seeds", "1",
        "--param", "local.lr=log:0.001..0.5", "--param", "local.epochs=1..2", "--data-dir", str(data_dir),
        "--jobs", "1", "--set", "model.name=logistic",
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "whole")])
    assert done.exit_code == 0, done.output
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fedfa", *arguments, "--out", str(out)]
    for enough in (2, 7):  # rounds recorded when it dies: in the first rung, then after it
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 120
            while recorded_rounds(out) < enough and process.poll() is None:
                assert time.monotonic() < end, "no round was recorded"
                time.sleep(0.005)
        finally:
            process.kill()
        assert process.wait() == -9, "it was over before it could be killed"
        assert not (out / "trials.json").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    whole, resumed = (json.loads((tmp_path / name / "trials.json").read_text()) for name in ("whole", "killed"))
    assert resumed == whole
    for directory in (out / "trials").iterdir():
        rounds = [one["round"] for one in RunDirectory(directory).metrics()]
        assert rounds == list(range(1, len(rounds) + 1)), "no round is missing, none is recorded twice"


def recorded_rounds(out: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in out.glob("trials/*/metrics.jsonl"))
