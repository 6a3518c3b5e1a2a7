"""Deaths of processes by real signals at fixed moments."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedfa.cli import main
from fedfa.data import DataSet
from fedfa.errors import ClientError
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from tests.engines.engine_toys import (
    TROUBLED,
    equal_results,
    local_engine,
    make_experiment,
    needs_fork,
    nothing,
    plan_of,
    process_engine,
    trouble,
)
from tests.experiment.run_toys import STATEFUL, assert_same_run, small
from tests.processes import is_running

pytestmark = needs_fork


def asked(workers: int) -> Config:
    """Three rounds with every client."""
    return small(f"{TROUBLED}+{STATEFUL}", rounds=3, cohort={"clients": 6}, engine={"workers": workers})


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, f"{what} does not happen"
        time.sleep(0.01)


def in_shared_memory() -> set[str]:
    found = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in found if not name.startswith("sem.loky")}  # of scikit-learn, in tests beside this one


# -- workers ----------------------------------------------------------------------------------------------------------
def test_killed_workers_do_not_change_the_result(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one round, one of the next; the one that comes last in the cohort and others."""
    run(asked(1), tmp_path / "whole", data=blobs)
    trouble(tmp_path / "notes", monkeypatch, "0-3-SIGKILL", "0-1-SIGKILL", "1-5-SIGSEGV", "2-0-exit")
    run(asked(2), tmp_path / "killed", data=blobs)
    assert list((tmp_path / "notes").iterdir()) == [], "nobody was killed"
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SIGKILL", r"was killed \(SIGKILL\).*memory runs out; use fewer workers"),
        ("SIGSEGV", r"crashed \(SIGSEGV\).*--workers 1"),
        ("exit", "ended by itself with exit code 3"),
    ],
)
def test_the_second_death_of_a_client_is_its_error(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    trouble(tmp_path, monkeypatch, f"1-4-{what}", f"1-4-{what}")
    experiment = make_experiment(TROUBLED, blobs)
    plan, clients = plan_of(experiment, 1), [0, 1, 4, 2]
    with process_engine(experiment, 2) as engine:
        done: list[int] = []
        with pytest.raises(ClientError, match=f"client 4, round 2, in a worker process: ended two processes.*{words}"):
            done.extend(result.client for result in engine.train(plan, clients, nothing))
        assert done == [0, 1]
        expected = list(local_engine(experiment).train(plan, clients, nothing))
        found = list(engine.train(plan, clients, nothing))
        assert all(equal_results(a, b) for a, b in zip(expected, found, strict=True))


def test_a_worker_that_is_killed_between_rounds_is_replaced(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That does not count as a client's death."""
    trouble(tmp_path, monkeypatch, "1-0-SIGKILL", "1-1-SIGKILL", "1-2-SIGKILL")
    experiment = make_experiment(TROUBLED, blobs, evaluation={"batch_size": 7})
    plan, clients = plan_of(experiment), [0, 1, 2]
    evaluation = local_engine(experiment).evaluate(plan.model, {})
    with process_engine(experiment, 2) as engine:
        first = list(engine.train(plan, clients, nothing))
        kill_all(engine.pids)
        assert engine.evaluate(plan.model, {}) == evaluation
        kill_all(engine.pids)
        again = list(engine.train(replace(plan, round=1), clients, nothing))
        assert list(tmp_path.iterdir()) == []
        last = list(engine.train(plan, clients, nothing))
    assert [result.client for result in again] == clients
    assert all(equal_results(a, b) for a, b in zip(first, last, strict=True))


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, pids)), "the end of the workers")


# -- the main process -------------------------------------------------------------------------------------------------
def command(arguments: list[str], log: Path) -> None:
    """The command line, as the leader of a group of processes of its own."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["fedfa", *arguments]
    main()


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        pytest.param(signal.SIGKILL, False, -9, id="SIGKILL"),
        pytest.param(signal.SIGINT, True, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, False, 143, id="SIGTERM"),
    ],
)
def test_no_process_outlives_the_main_process(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, to_all: bool, code: int
) -> None:
    """Three workers: two are in the middle of a client that would take two minutes, one has nothing to do."""
    notes, log, out = tmp_path / "notes", tmp_path / "log", tmp_path / "run"
    trouble(notes, monkeypatch, *(f"1-{client}-sleep" for client in range(20)))
    shared = in_shared_memory()
    arguments = [
        "run", "--preset", "digits-c2", "--algorithm", TROUBLED, "--rounds", "3", "--set", "cohort.clients=2",
        "--data-dir", str(data_dir), "--workers", "3", "--out", str(out), "--set", "data.offline=true",
    ]  # fmt: skip
    process = multiprocessing.get_context("fork").Process(target=command, args=(arguments, log))
    process.start()
    assert process.pid is not None
    try:
        wait_for(lambda: len(list(notes.glob("asleep-*"))) == 2 or not process.is_alive(), "the second round")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        workers = [int(pid) for pid in children.split()]
        assert {int(path.name.split("-")[1]) for path in notes.glob("asleep-*")} < set(workers)
        assert len(workers) == 3, log.read_text()
        if to_all:
            for worker in workers:
                os.kill(worker, number)
            time.sleep(0.3)
            assert all(map(is_running, workers)), "that is for the main process to decide"
        (os.killpg if to_all else os.kill)(process.pid, number)
        process.join(30)
        assert process.exitcode == code, log.read_text()
        wait_for(lambda: not any(map(is_running, workers)), "the end of the workers")
    finally:
        process.kill()
    assert in_shared_memory() <= shared
    said = log.read_text()
    assert "Traceback" not in said
    assert "resource_tracker" not in said
    assert ("Continue with: fedfa run --resume" in said) == (number != signal.SIGKILL)
    # The run is resumed with another number of workers.
    monkeypatch.delenv("FEDFA_TROUBLE")
    process = multiprocessing.get_context("fork").Process(
        target=command, args=(["run", "--resume", "--workers", "2", "--out", str(out)], log)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0, log.read_text()
    assert re.search("after 3 rounds", log.read_text())
