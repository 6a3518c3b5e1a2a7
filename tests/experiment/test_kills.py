"""Runs that are killed for real, at moments drawn at random, and taken up again until they are done.

Each run is a process of its own, as a user starts it. Whatever moment the kill hits (loading of libraries, the data, a
client's training, the writing of a checkpoint or of a client's file), the finished run must equal one never stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import torch

from fedfa.cli import main
from fedfa.experiment.files import load_tensors
from fedfa.experiment.run_directory import RunDirectory
from tests.experiment.run_toys import STATEFUL, assert_same_run

pytestmark = pytest.mark.system

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork and signals")

CONFIG = """
rounds = {rounds}
device = "cpu"
[data]
name = "digits"
clients = 10
partition = "shards:2"
offline = true
[model]
name = "mlp"
options = {{ hidden = [16] }}
[cohort]
clients = 3
[local]
epochs = 1
batch_size = 16
lr = 0.1
[checkpoint]
every = {every}
"""


class Job(Protocol):
    """A process that can be waited for and killed."""

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it is still running after that time."""

    def kill(self) -> None:
        """Kill it the hard way and wait until it is gone."""


class Fresh:
    """``python -m fedfa …`` in a new interpreter, exactly as a user starts it."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedfa", *arguments], stdout=file, stderr=file, env=environment()
            )

    def wait(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Forked:
    """The same command in a process forked from this one: without the seconds that loading torch takes."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=_command, args=(arguments, log))
        self.process.start()

    def wait(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module", autouse=True)
def _loaded_before_forking() -> None:
    """The first optimiser of a process makes torch load hundreds of modules; let forked ones find them loaded."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _command(arguments: list[str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["fedfa", *arguments]
    main()


class Killed:
    """One run that is killed again and again.

    Args:
        folder: The run folder.
        arguments: What is run, without ``--out`` and ``--resume``.
        kind: How its processes are started.
        draw: Where the moments of the kills come from.
    """

    def __init__(self, directory: Path, arguments: list[str], kind: type[Fresh | Forked], draw: random.Random) -> None:
        self.directory, self.kind, self.draw = directory, kind, draw
        self.arguments = ["run", *arguments, "--out", str(directory), "--resume"]
        self.log = directory.with_suffix(".log")

    def start(self) -> Job:
        return self.kind(self.arguments, self.log)

    def finish(self) -> None:
        assert self.start().wait(600) == 0, self.log.read_text()

    def rounds(self) -> int:
        return len(RunDirectory(self.directory).metrics())

    def kill(self, moment: str) -> str:
        """Start the run and kill it; returns what the kill hit (``finished`` if the run was faster).

        Args:
            moment: ``start-up``: before training; ``training``: within the next rounds; ``writing``: while a file is
                being written, some rounds later.
        """
        file, saved = self.metrics_file(), self.saved_rounds()

        def training() -> bool:  # a resumed run first cuts its metrics back, into a new file
            return self.metrics_file() != file and self.rounds() > saved

        job = self.start()
        try:
            if moment == "start-up":
                code = job.wait(self.draw.uniform(0, 4.0 if self.kind is Fresh else 0.15))
            else:
                code = self.until(job, training)
                code = job.wait(self.draw.uniform(0, 0.3)) if code is None else code
                if moment == "writing" and code is None:
                    code = self.until(job, self.is_writing)
        finally:
            job.kill()
        assert code in (None, 0), self.log.read_text()
        if code == 0:
            return "finished"
        if self.is_writing():
            return "writing"
        return "training" if training() else "start-up"

    def metrics_file(self) -> int | None:
        """Which file the metrics are, so that a new one can be told from the old."""
        path = self.directory / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def saved_rounds(self) -> int:
        """Rounds that a resumed run goes on from."""
        path = self.directory / "checkpoint.safetensors"
        return int(load_tensors(path)["round"]) if path.exists() else 0

    def is_writing(self) -> bool:
        """Whether a file lies half-written beside its place."""
        try:
            return any(
                entry.name.endswith(".tmp")
                for place in (".", "clients")
                for entry in os.scandir(self.directory / place)
            )
        except FileNotFoundError:  # not begun
            return False

    @staticmethod
    def until(job: Job, happened: Callable[[], bool]) -> int | None:
        """Wait for something; its exit code if the process ended before."""
        deadline = time.monotonic() + 120
        while not happened():
            if (code := job.wait(0.0005)) is not None:
                return code
            assert time.monotonic() < deadline, "the run does not get on"
        return None


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "300"}


def asked(tmp_path: Path, data_dir: Path, algorithm: str, rounds: int, every: int = 1) -> list[str]:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(rounds=rounds, every=every))
    return [str(config), "--algorithm", algorithm, "--data-dir", str(data_dir)]


def kill_until_done(
    tmp_path: Path, arguments: list[str], kind: type[Fresh | Forked], plan: list[str], draw: random.Random
) -> Counter[str]:
    """Kill a run at each of the planned moments, let it finish, compare it with one never stopped; what was hit."""
    Killed(tmp_path / "whole", arguments, Forked, draw).finish()
    stopped = Killed(tmp_path / "stopped", arguments, kind, draw)
    hits: Counter[str] = Counter()
    for moment in plan:
        hit = stopped.kill(moment)
        if hit == "finished":
            break
        hits[hit] += 1
    stopped.finish()
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    return hits


@pytest.mark.parametrize("algorithm", [STATEFUL, "fedfa"], ids=["stateful", "fedfa"])
def test_kills(tmp_path: Path, data_dir: Path, algorithm: str) -> None:
    plan = ["start-up", "training", "writing", "writing", "training", "start-up"]
    hits = kill_until_done(tmp_path, asked(tmp_path, data_dir, algorithm, rounds=15), Forked, plan, random.Random(7))
    assert hits["training"] + hits["writing"] >= 2, f"too few kills fell into the run: {hits}"


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path, data_dir: Path) -> None:
    """Over six runs: three methods, two intervals of checkpoints, two of the runs in fresh interpreters."""
    draw = random.Random(2026)
    together: Counter[str] = Counter()
    for number in range(6):
        algorithm, every = ("fedavg", "fedfa", STATEFUL)[number % 3], (1, 3)[number // 3]
        kind = Fresh if number in (1, 5) else Forked
        plan = ["start-up"] * 2 + ["training"] * 4 + ["writing"] * 4
        draw.shuffle(plan)
        (directory := tmp_path / str(number)).mkdir()
        hits = kill_until_done(directory, asked(directory, data_dir, algorithm, 60, every), kind, plan, draw)
        print(f"{Path(algorithm).stem}, every {every}, {kind.__name__}: {dict(hits)}", flush=True)  # noqa: T201  # progress of a long test
        together += hits
    print(f"{together.total()} kills, each resumed: {dict(together)}")  # noqa: T201  # its result
    assert together.total() >= 50
    assert together["start-up"] >= 3
    assert min(together["training"], together["writing"]) >= 10


@pytest.mark.parametrize(
    ("sign", "code", "kind"),
    [
        pytest.param(signal.SIGTERM, 143, Forked, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, Fresh, id="SIGINT"),  # Ctrl-C
        pytest.param(signal.SIGTERM, 143, Fresh, id="SIGTERM, fresh", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_the_run_and_prints_how_to_continue(
    tmp_path: Path, data_dir: Path, sign: signal.Signals, code: int, kind: type[Fresh | Forked]
) -> None:
    arguments = asked(tmp_path, data_dir, "fedfa", rounds=15)
    Killed(tmp_path / "whole", arguments, Forked, random.Random()).finish()
    run = Killed(tmp_path / "stopped", arguments, kind, random.Random())
    job = kind(run.arguments, run.log)
    run.until(job, lambda: run.rounds() >= 2)
    assert job.process.pid is not None
    os.kill(job.process.pid, sign)
    assert job.wait(60) == code, run.log.read_text()
    output = run.log.read_text()
    assert f"Continue with: fedfa run --resume --out {tmp_path / 'stopped'}" in output
    assert "Traceback" not in output
    assert 2 <= run.rounds() < 15

    # The command of the message continues, from the run directory alone.
    again = Forked(["run", "--resume", "--out", str(tmp_path / "stopped")], run.log)
    assert again.wait(300) == 0, run.log.read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
