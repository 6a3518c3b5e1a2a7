"""What a federation of real processes survives by itself: a locked database, a killed SuperLink, frozen sites."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.experiment.run import run
from fedfa.flower import app_folder
from fedfa.flower.operate.federation import LocalFederation
from fedfa.flower.operate.local_deployment import LocalDeployment, as_run_config
from fedfa.flower.operate.process_supervisor import descendants
from fedfa.flower.operate.watched import RESTARTED
from tests.flower import real
from tests.flower.test_faults_real import command_of
from tests.flower.test_up_processes import until
from tests.processes import is_running

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow  # minutes each

SITES = 2


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[LocalFederation]:
    with LocalFederation(tmp_path_factory.mktemp("federation")) as started:
        real.start(started, SITES, data_dir, tmp_path_factory.mktemp("states"))
        yield started


def lock_database(folder: Path, seconds: float) -> None:
    """Hold the SuperLink's database, as a slow disk or a backup would."""
    with sqlite3.connect(folder / "superlink.db", timeout=60, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        database.execute("ROLLBACK")


def wait_for_result(out: Path) -> None:
    deadline = time.monotonic() + real.LIMIT
    while not (out / "summary.json").exists():
        assert time.monotonic() < deadline, f"no result; rounds: {len(real.metrics(out))}"
        time.sleep(0.5)


def test_a_run_survives_a_locked_database(federation: LocalFederation, data_dir: Path, tmp_path: Path) -> None:
    """Nine seconds used to park every site for good."""
    seconds = 9
    out, settings = tmp_path / "run", real.quick_settings("scaffold", 4, SITES)
    started = real.submit(federation, settings, out, data_dir, round_seconds=400.0, wait_seconds=300.0)
    real.until(lambda: len(real.metrics(out)) >= 1, "round 1", started)
    lock_database(federation.folder, seconds)
    released = time.monotonic()
    wait_for_result(out)  # the stream of the log may end at the lock
    print(f"a lock of {seconds} s: complete {time.monotonic() - released:.0f} s later")  # noqa: T201  (pytest shows it)
    assert [record["round"] for record in real.metrics(out)] == [1, 2, 3, 4]
    assert not any(RESTARTED in process.output() for process in federation.processes.running.values())


def test_a_site_that_gives_up_is_started_again(federation: LocalFederation, data_dir: Path, tmp_path: Path) -> None:
    """Its executor dies, as Flower's does at an HTTP 500: without it the site would take messages and never answer."""
    site = federation.processes.running["site0"]
    (executor,) = [process for process in site.pids() if "flower-superexec" in command_of(process)]
    before = site.output().count("SuperNode ID:")
    os.kill(executor, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while site.output().count("SuperNode ID:") == before:
        assert time.monotonic() < deadline, site.output()[-2000:]
        time.sleep(0.5)
    out = tmp_path / "run"
    started = real.submit(federation, real.quick_settings("fedavg", 1, SITES), out, data_dir)
    real.finish(started, out)
    assert sorted(real.metrics(out)[0]["cohort"]) == [0, 1]


@pytest.mark.parametrize("trouble", ["killed", "locked for 70 s"])
def test_a_local_deployment_completes_although_its_superlink_fails_in_mid_round(
    trouble: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 70 seconds the SuperLink has answered with errors, and everything has started again."""
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    settings, out = real.quick_settings("scaffold", 4, SITES, epochs=40), tmp_path / "run"
    killed: list[float] = []

    def kill_superlink(record: dict[str, object]) -> None:
        if record["round"] == 1 and not killed:
            killed.append(time.monotonic())
            act = threading.Timer(1.0, kill_process, ["watched superlink --child"])
            (act if trouble == "killed" else threading.Timer(1.0, lock_database, [out / "flower", 70])).start()

    steps: list[str] = []
    deployment = LocalDeployment(
        app_folder(), out, SITES, run_config=as_run_config(settings), node_config={"data-dir": str(data_dir)},
        federation={"wait_seconds": 300.0, "round_seconds": 400.0}, on_step=steps.append, on_round=kill_superlink,
    )  # fmt: skip
    deployment.run()
    assert killed
    print(f"the SuperLink {trouble}: complete {time.monotonic() - killed[0]:.0f} s later; {steps}")  # noqa: T201
    here = run(settings, tmp_path / "simulator")
    assert [record["accuracy"] for record in real.metrics(out)] == [record["accuracy"] for record in here.metrics]
    real.assert_same_tensors(out / "model.safetensors", here.directory / "model.safetensors")


def test_nothing_outlives_a_supernode_whose_wrapper_is_killed(tmp_path: Path) -> None:
    from fedfa.flower.environment import without_telemetry
    from fedfa.flower.operate.watched import watched_command

    with tempfile.TemporaryDirectory(prefix="fedfa-", ignore_cleanup_errors=True) as short:
        command = [*watched_command("supernode"), "--insecure", "--superlink", "127.0.0.1:9", "--port", "0"]
        wrapper = subprocess.Popen(
            [sys.executable, "-m", "fedfa.flower.operate.fork_server", short, *command],
            env={**without_telemetry(), "FLWR_HOME": str(tmp_path)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert until(lambda: len(descendants(wrapper.pid)) >= 2, 120)
        children = [process.pid for process in descendants(wrapper.pid)]
        wrapper.kill()
        wrapper.wait(60)
        assert until(lambda: not any(is_running(child) for child in children), 60)


def kill_process(words: str) -> None:
    """Kill our own descendant whose command line has these words."""
    found = [one.pid for one in descendants(os.getpid()) if words in command_of(one.pid)]
    assert found
    for process in found:
        os.kill(process, signal.SIGKILL)
