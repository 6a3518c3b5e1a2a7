"""Faults from a seed, done to real processes: every run ends, with the simulator's weights for what arrived.

``FEDFA_SCHEDULES=200 pytest -m slow tests/flower/test_fault_schedules_real.py`` runs 200 seeds; failures name theirs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fault_schedules import RULES, SITES, Laboratory, config
from fedfa.flower import app_folder
from fedfa.flower.operate.local_deployment import LocalDeployment, as_run_config
from tests.flower import real

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[Laboratory]:
    with Laboratory(tmp_path_factory.mktemp("laboratory")) as started:
        started.start(str(data_dir))
        yield started


def test_a_round_ends_at_its_deadline_although_an_upload_is_frozen(
    laboratory: Laboratory, data_dir: Path, tmp_path: Path
) -> None:
    """A site announces its reply and never sends it; a round of 20 s used to last 195 s."""
    frozen, out = laboratory.proxies[SITES - 1], tmp_path / "run"
    settings = config(str(data_dir))
    deployment = LocalDeployment(
        app_folder(), out, SITES, run_config=as_run_config(settings),
        federation={**RULES, "round_seconds": 20.0, "quorum": 0.6},
    )  # fmt: skip
    over = threading.Event()

    def freeze() -> None:
        while not (out / "config.toml").exists() and not over.is_set():  # once all sites have announced themselves
            time.sleep(0.02)
        frozen.on["upload stalled"] = 1

    started = time.monotonic()
    thread = threading.Thread(target=freeze, daemon=True)
    thread.start()
    try:
        deployment.execute(laboratory.federation)
    finally:
        over.set()
        thread.join()
        frozen.on.clear()
    records = real.metrics(out)
    rounds = [record["federation"]["seconds"]["round"] for record in records]
    assert frozen.hurt
    assert 20 <= rounds[0] < 60
    print(f"complete after {time.monotonic() - started:.0f} s; rounds of {rounds} s")  # noqa: T201  (pytest shows it)
    assert [sorted(record["cohort"]) for record in records] == [[0, 1]] * len(records)
    assert laboratory._compare(out, [[0, 1]] * len(records), str(data_dir)) is None


@pytest.mark.parametrize("seed", range(int(os.environ.get("FEDFA_SCHEDULES", "3"))))
def test_a_federation_survives_the_faults_of_a_seed(seed: int, laboratory: Laboratory, data_dir: Path) -> None:
    line = laboratory.survive(seed, str(data_dir))
    print(line)  # noqa: T201  (pytest shows it)
    assert line["outcome"] == "the simulator's weights", f"seed {seed}: {line}"
