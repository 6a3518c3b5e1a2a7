"""What can be said of a Ray cluster without one: how it is reached, and which nodes are refused."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.data import DataSet
from fedfa.engines import ray_cluster
from fedfa.engines.ray_cluster import ClusterError, Connection, differences, versions
from fedfa.engines.ray_engine import RayEngine
from fedfa.errors import SettingsError
from fedfa.studies.run import FREE_ON_RESUME
from fedfa.studies.settings import Settings
from tests.engines.engine_toys import laboratory, local_engine


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'fedfa\[ray\]'"):
        Connection("auto")


def test_the_statistics_of_ray_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    ray_cluster.import_ray()
    from ray._common.usage.usage_lib import usage_stats_enabled

    assert not usage_stats_enabled()


@pytest.fixture
def port() -> Iterator[int]:
    """A port where somebody listens who never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 1)
    before = time.monotonic()
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port} within 1 seconds; see that"):
        Connection(f"127.0.0.1:{port}")
    assert time.monotonic() - before < 10


def test_an_address_where_nobody_listens(port: int) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        closed = other.getsockname()[1]
    with pytest.raises(ClusterError, match=f"127.0.0.1:{closed} .*refused"):
        Connection(f"127.0.0.1:{closed}")


@pytest.mark.parametrize("address", ["somewhere", "here:", "here:there", "here:99999", ":6379x"])
def test_what_is_not_an_address(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(ClusterError, match="write HOST:PORT, auto or local"):
        Connection(address)


def test_ray_clients_are_told_where_to_run() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(ClusterError, match="start the run on a node of the cluster"):
        Connection("ray://head:10001")


def test_graphics_cards_are_refused(blobs: DataSet) -> None:
    local = local_engine(laboratory("fedavg", blobs))
    local.device = torch.device("cuda")
    with pytest.raises(ClusterError, match='not on cuda: set device = "cpu"'):
        RayEngine(local, None, 2)


# -- versions ---------------------------------------------------------------------------------------------------------
def test_a_node_like_this_machine_is_welcome() -> None:
    here = versions()
    assert {"python", "torch", "numpy", "fedfa", "fedfa's source"} <= set(here)
    assert differences("n", versions(), here) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "1.0"}, "node n has torch 1.0 (here: "),
        ({"fedfa": None, "fedfa's source": None}, "node n has no fedfa (here: "),
        ({"fedfa's source": "0123"}, "node n has fedfa's source 0123 (here: "),
        ({"numpy": None}, "node n has no numpy (here: "),
    ],
)
def test_a_node_with_other_versions_is_named(change: dict[str, str | None], words: str) -> None:
    found = differences("n", {**versions(), **change}, versions())
    assert found is not None
    assert found.startswith(words)
    assert found.count("(here") == 1


# -- settings ---------------------------------------------------------------------------------------------------------
def test_the_engine_does_not_count_when_a_run_goes_on() -> None:
    assert {"engine.kind", "engine.address", "engine.workers"} <= FREE_ON_RESUME


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"engine\.kind"):
        Settings.resolve({"engine": {"kind": "spark"}})


def test_an_address_without_ray_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        app, ["run", "--preset", "digits-c2", "--address", "auto", "--out", str(tmp_path / "run")]
    )
    assert answer.exit_code == 2
    assert "add --engine ray" in answer.output
    assert not (tmp_path / "run").exists()


# -- what all actors of a node read -----------------------------------------------------------------------------------
class Careless(torch.nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(x.mul_(2))
        return output


def test_no_network_writes_to_the_test_set(blobs: DataSet) -> None:
    """These data are not normalised, so nothing makes a copy of them on the way."""
    before = blobs.test.inputs.clone()
    lab = laboratory("fedavg", blobs, model=Careless)
    engine, model = local_engine(lab), lab.initial_state().model
    assert engine.evaluate(model, {}) == engine.evaluate(model, {})
    assert torch.equal(blobs.test.inputs, before)
