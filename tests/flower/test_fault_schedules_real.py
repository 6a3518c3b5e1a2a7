"""Faults from a seed, done to real processes: the run completes by itself, with the simulator's bits.

``FEDFA_SCHEDULES=200 pytest -m slow tests/flower/test_fault_schedules_real.py`` runs 200 seeds; failures name theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedfa.experiment.run import run
from fedfa.flower import app_folder
from fedfa.flower.operate.local_deployment import LocalDeployment, as_run_config
from fedfa.flower.operate.process_supervisor import descendants
from tests.flower import real
from tests.flower.faults import CALLS, Fault, schedule
from tests.flower.test_survival_real import lock_database

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SITES = 2
KINDS = ("lock", "site killed", "site executor killed", "site frozen", "SuperLink killed", "SuperLink executor killed")
SPAN = 30.0
"""Seconds after the first round over which the faults are spread."""


def processes_of(words: str) -> list[psutil.Process]:
    """Our descendants whose command line has these words."""
    found = []
    for process in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            if words in " ".join(process.cmdline()):
                found.append(process)
    return found


def do(fault: Fault, folder: Path) -> None:
    """Do a fault to the federation in this directory; a process that is just being started again is spared."""
    if fault.kind == "lock":
        lock_database(folder, 2.0 * fault.length)
        return
    site = f"configs/site{fault.site}.toml"
    children = processes_of("watched superlink --child" if "SuperLink" in fault.kind else site)
    children = [one for one in children if "--child" in " ".join(one.cmdline())]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            executors = [one for one in child.children() if "flower-superexec" in " ".join(one.cmdline())]
            for victim in executors if "executor" in fault.kind else [child]:
                if fault.kind == "site frozen":
                    victim.send_signal(signal.SIGSTOP)
                    time.sleep(2.0 * fault.length)
                    victim.send_signal(signal.SIGCONT)
                else:
                    victim.kill()


@pytest.mark.parametrize("seed", range(int(os.environ.get("FEDFA_SCHEDULES", "5"))))
def test_a_federation_survives_the_faults_of_a_seed(
    seed: int, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    settings, out = real.quick_settings("scaffold", 4, SITES, epochs=20), tmp_path / "run"
    faults = schedule(seed, KINDS, SITES, most=3)
    timers: list[threading.Timer] = []
    started = time.monotonic()

    def begin(record: dict[str, Any]) -> None:
        if record["round"] == 1 and not timers:
            for fault in faults:
                timers.append(threading.Timer(SPAN * fault.when / CALLS, do, [fault, out / "flower"]))
                timers[-1].start()

    deployment = LocalDeployment(
        app_folder(), out, SITES, run_config=as_run_config(settings), node_config={"data-dir": str(data_dir)},
        federation={"wait_seconds": 300.0, "round_seconds": 240.0, "quorum": 1.0, "attempts": 5}, on_round=begin,
    )  # fmt: skip
    try:
        deployment.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {faults}: {error}") from error
    finally:
        for timer in timers:
            timer.cancel()
    here = run(settings, tmp_path / "simulator")
    real.assert_same_tensors(out / "model.safetensors", here.directory / "model.safetensors")
    assert [record["accuracy"] for record in real.metrics(out)] == [record["accuracy"] for record in here.metrics]
    print(f"seed {seed}: {[fault.kind for fault in faults]}, {time.monotonic() - started:.0f} s")  # noqa: T201
