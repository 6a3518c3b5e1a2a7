"""Secure sums between real processes: the simulator's bits, and a site that is killed in the middle of a round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.flower.operate.federation import LocalFederation
from tests.flower import real

pytest.importorskip("flwr")
pytestmark = pytest.mark.system

SITES = 3


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(folder) as started:
        real.start(started, SITES, data_dir, folder / "sites")
        yield started


def settings(algorithm: str, data_dir: Path) -> Config:
    found = real.quick_settings(algorithm, rounds=3, sites=SITES)
    data = found.data.model_copy(update={"dir": str(data_dir)})
    return found.model_copy(update={"data": data, "privacy": found.privacy.model_copy(update={"masks": True})})


@pytest.mark.parametrize("algorithm", ["fedfa", "scaffold", "fedadam"])
def test_real_sites_sum_securely_to_the_simulators_bits(
    algorithm: str, federation: LocalFederation, data_dir: Path, tmp_path: Path
) -> None:
    config, out = settings(algorithm, data_dir), tmp_path / "flower"
    real.finish(real.submit(federation, config, out, data_dir), out)
    here = run(config, tmp_path / "simulator")
    for name in ("model.safetensors", "server.safetensors"):
        real.assert_same_tensors(out / name, here.directory / name)
    again = run(Config.from_file(out / "config.toml"), tmp_path / "again")  # what the federation left
    real.assert_same_tensors(out / "model.safetensors", again.directory / "model.safetensors")
    assert all(record["train_loss"] is None for record in real.metrics(out))
