from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedfa.cli.app import app, default_name
from fedfa.data import DataSet
from fedfa.engines.local import LocalEngine
from fedfa.engines.process_engine import ProcessEngine
from fedfa.engines.worker_count import WORTH_IT, _quota, available_cores, choose_workers
from fedfa.errors import ConfigError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import same_run
from tests.engines.engine_toys import needs_fork
from tests.experiment.run_toys import small

CPU = torch.device("cpu")
LONG = 100 * WORTH_IT


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.engines.worker_count.available_cores", lambda: 4)
    monkeypatch.setattr("fedfa.engines.worker_count.start_method", lambda: "fork")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("asked", "clients", "seconds", "workers"),
    [
        pytest.param("auto", 10, LONG, 4, id="one per core"),
        pytest.param("auto", 3, LONG, 3, id="no more than clients"),
        pytest.param("auto", 10, WORTH_IT / 2, 1, id="not for moments"),
        pytest.param(7, 3, 0.0, 7, id="as asked"),
        pytest.param(1, 10, LONG, 1, id="one"),
    ],
)
def test_the_number_of_workers(asked: int, clients: int, seconds: float, workers: int) -> None:
    assert choose_workers(asked, clients, seconds, CPU) == workers


@pytest.mark.usefixtures("four_cores")
def test_auto_is_one_with_a_gpu_or_without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_workers("auto", 10, LONG, torch.device("cuda")) == 1
    monkeypatch.setattr("fedfa.engines.worker_count.start_method", lambda: "spawn")
    assert choose_workers("auto", 10, LONG, CPU) == 1


def test_the_number_of_cores_may_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr("fedfa.engines.worker_count._quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert available_cores() == 16
    monkeypatch.setattr("fedfa.engines.worker_count._quota", lambda: 6)
    assert available_cores() == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert available_cores() == 2


@pytest.mark.parametrize(
    ("inside", "here", "above", "cores"),
    [
        ("0::/\n", None, "250000 100000\n", 2),
        ("0::/box\n", "max 100000\n", None, None),
        ("0::/box\n", "50000 100000\n", "400000 100000\n", 1),
        ("0::/../outside\n", None, None, None),
        ("12:cpu:/old\n", None, None, None),
    ],
)
def test_the_quota_of_a_container(
    tmp_path: Path, inside: str, here: str | None, above: str | None, cores: int | None
) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "own").write_text(inside)
    for place, text in ((tmp_path / "box", here), (tmp_path, above)):
        if text is not None:
            (place / "cpu.max").write_text(text)
    assert _quota(tmp_path, tmp_path / "own") == cores
    assert _quota(tmp_path, tmp_path / "not there") is None


# -- the setting ------------------------------------------------------------------------------------------------------
def engine_of(config: Config, data: DataSet) -> type:
    engine = Experiment.from_config(config, data=data).engine()
    engine.close()
    return type(engine)


@needs_fork
def test_the_config_sets_the_number_of_workers(blobs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.engines.worker_count.available_cores", lambda: 2)
    assert engine_of(small(), blobs) is LocalEngine, "a toy must not start processes"
    assert engine_of(small(engine={"workers": 1}, rounds=100_000), blobs) is LocalEngine
    assert engine_of(small(engine={"workers": 2}), blobs) is ProcessEngine
    assert engine_of(small(rounds=100_000, engine={"execution": "each"}), blobs) is ProcessEngine
    assert engine_of(small("centralised", rounds=100_000), blobs) is LocalEngine, "it has one client"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "many", "2"])
def test_wrong_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r'engine\.workers = .*: must be a positive integer or "auto"'):
        Config.resolve({"engine": {"workers": wrong}})


def test_the_number_of_workers_is_auto_by_default() -> None:
    assert Config().engine.workers == "auto"
    assert Config.resolve(Config.resolve({"engine": {"workers": 3}}).to_dict()).engine.workers == 3


def test_the_command_line_sets_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it names no run: the result is the same."""
    monkeypatch.setattr("sys.argv", ["fedfa", "run", "--preset", "digits-c2", "--workers", "few", "--out", "x"])
    with pytest.raises(ConfigError, match=r"engine\.workers = 'few'"):
        app(standalone_mode=False)
    config = Config.preset("digits-c2")
    assert default_name("digits-c2", config, ["engine.workers=2"]) == default_name("digits-c2", config, None)
    assert same_run(config, Config.preset("digits-c2", {"engine": {"workers": 2}}))
