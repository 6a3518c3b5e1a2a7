"""Addresses and version checks of Ray clusters, without a cluster."""

from __future__ import annotations

import socket
import subprocess
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
from fedfa.errors import ConfigError
from fedfa.experiment.config import Config, affects_result
from tests.engines.engine_toys import local_engine, make_experiment


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
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_address_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 1)
    before = time.monotonic()
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port} within 1 seconds; check that"):
        Connection(f"127.0.0.1:{port}")
    assert time.monotonic() - before < 10


def test_a_closed_port_is_an_error(port: int) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        closed = other.getsockname()[1]
    with pytest.raises(ClusterError, match=f"127.0.0.1:{closed} .*refused"):
        Connection(f"127.0.0.1:{closed}")


@pytest.mark.parametrize("address", ["somewhere", "here:", "here:there", "here:99999", ":6379x"])
def test_an_invalid_address_is_an_error(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(ClusterError, match="write HOST:PORT, auto or local"):
        Connection(address)


def test_an_address_of_rays_client_server_is_an_error() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(ClusterError, match="start the run on a node of the cluster"):
        Connection("ray://head:10001")


def test_a_gpu_is_an_error(blobs: DataSet) -> None:
    local = local_engine(make_experiment("fedavg", blobs))
    local.device = torch.device("cuda")
    with pytest.raises(ClusterError, match='not on cuda: set device = "cpu"'):
        RayEngine(local, None, 2)


# -- versions ---------------------------------------------------------------------------------------------------------
def test_a_node_with_the_same_versions_has_no_differences() -> None:
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
    assert not any(map(affects_result, ("engine.kind", "engine.address", "engine.workers")))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        Config.resolve({"engine": {"kind": "spark"}})


def test_an_address_without_ray_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        app, ["run", "--preset", "digits-c2", "--address", "auto", "--out", str(tmp_path / "run")]
    )
    assert answer.exit_code == 2
    assert "add --engine ray" in answer.output
    assert not (tmp_path / "run").exists()


# -- data shared by all actors of a node ------------------------------------------------------------------------------
class Careless(torch.nn.Module):
    """A network that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(x.mul_(2))
        return output


def test_no_network_writes_to_the_test_set(blobs: DataSet) -> None:
    """These data are not normalised, so nothing makes a copy of them on the way."""
    before = blobs.test.inputs.clone()
    experiment = make_experiment("fedavg", blobs, model=Careless)
    engine, model = local_engine(experiment), experiment.state.model
    assert engine.evaluate(model, {}) == engine.evaluate(model, {})
    assert torch.equal(blobs.test.inputs, before)


LISTENING = """
import psutil
from fedfa.engines.ray_cluster import Connection

connection = Connection("local")
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    for one in process.net_connections(kind="inet"):
        if one.status == psutil.CONN_LISTEN:
            print("listens", one.laddr.ip)
connection.close()
"""


@pytest.mark.slow
def test_a_cluster_for_this_process_alone_listens_on_the_loopback_interface_only() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=300, check=True)
    addresses = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")}
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
