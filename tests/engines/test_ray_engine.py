"""The Ray engine on a real cluster on this machine: a head without cores, and two nodes of one core each."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.data import DataSet
from fedfa.engines import ray_pool
from fedfa.engines.ray_cluster import ClusterError, Connection, versions
from fedfa.engines.ray_engine import RayEngine
from fedfa.errors import ClientError, DataError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.learning.tensors import ComponentTensors
from tests.engines.engine_toys import (
    TROUBLED,
    UNWELL,
    batch_norm_network,
    equal_results,
    local_engine,
    make_experiment,
    nothing,
    plan_of,
)
from tests.experiment.run_toys import STATEFUL, assert_same_run, small
from tests.fleet.test_clock import DRAWN, POLICIES
from tests.processes import is_running

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedfa[ray]'")
pytestmark = pytest.mark.system

STORE = 80 * 2**20
EVERYBODY = [0, 1, 2, 3, 4, 5]


class TestCluster:
    """Nodes that come and go."""

    __test__ = False

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.ray: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        self.address: str = self.ray.address

    def add(self) -> None:
        self.nodes.append(self.ray.add_node(num_cpus=1, object_store_memory=STORE, wait=True))

    def kill_node_of(self, pid: int) -> None:
        """Kill the node that runs a process, with all its processes."""
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        node = next(node for node in self.nodes if parent in raylets(node))
        self.nodes.remove(node)
        self.ray.remove_node(node, allow_graceful=False)
        assert not is_running(parent)


def raylets(node: Any) -> list[int]:
    return [entry.process.pid for entry in node.all_processes["raylet"]]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the failure requests; see troubled_method."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def cluster(notes: Path) -> Iterator[TestCluster]:
    before = {name: os.environ.get(name) for name in ("FEDFA_TROUBLE", "RAY_USAGE_STATS_ENABLED")}
    os.environ.update(FEDFA_TROUBLE=str(notes), RAY_USAGE_STATS_ENABLED="0")  # the nodes inherit it
    made = TestCluster()
    try:
        made.add()
        made.add()
        yield made
    finally:
        ray.shutdown()
        made.ray.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def connected(cluster: TestCluster) -> Iterator[TestCluster]:
    """The connection is made once: engines use one that is there, and leave it."""
    connection = Connection(cluster.address)
    yield cluster
    connection.close()


@pytest.fixture(scope="module")
def long_lived(connected: TestCluster, blobs: DataSet) -> Iterator[tuple[RayEngine, Any]]:
    """Actors take seconds to start: one engine serves the tests at the end of this file. It has all cores till then."""
    experiment = make_experiment(TROUBLED, blobs, evaluation={"batch_size": 7})
    engine = RayEngine(local_engine(experiment), connected.address, 4)
    try:
        yield engine, experiment
    finally:
        engine.close()


@pytest.fixture
def troubled(long_lived: tuple[RayEngine, Any], notes: Path) -> Iterator[tuple[RayEngine, Any]]:
    wait_for(lambda: two_nodes(long_lived[0]), "both nodes at work")
    yield long_lived
    remove(notes)


def two_nodes(engine: RayEngine) -> bool:
    """Whether both nodes have an actor that is ready; refreshes them as a round does."""
    engine._actors._refresh()
    for worker in engine._actors._with_results(0.2):
        engine._actors._advance(worker)
    return len(set(engine.nodes)) == 2


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, f"{what} does not happen"
        time.sleep(0.02)


def put(notes: Path, *what: str) -> None:
    for number, note in enumerate(what):
        (notes / f"{note}-{number}").touch()


def asked(algorithm: str, cluster: TestCluster | None, **more: Any) -> Config:
    """Three rounds; the 60 test samples in nine batches, the last one short."""
    engine = {"workers": 1} if cluster is None else {"kind": "ray", "address": cluster.address}
    return small(algorithm, rounds=3, evaluation={"batch_size": 7}, engine=engine, **more)


def same_on_the_cluster(
    algorithm: str, folder: Path, cluster: TestCluster, data: DataSet, model: ModelSource | None = None, **more: Any
) -> None:
    for name, where in (("here", None), ("there", cluster)):
        run(asked(algorithm, where, **more), folder / name, data=data, model=model)
    assert_same_run(folder / "here", folder / "there")


# -- the same bits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "scaffold", "moon"])
def test_a_cluster_gives_the_same_run(tmp_path: Path, blobs: DataSet, connected: TestCluster, algorithm: str) -> None:
    """Weights, server's state, clients' files and metrics after three rounds."""
    same_on_the_cluster(algorithm, tmp_path, connected, blobs)


@pytest.mark.parametrize("policy", ["partial", "fedbuff"])
def test_a_cluster_gives_the_same_run_on_a_clock(
    tmp_path: Path, blobs: DataSet, connected: TestCluster, policy: str
) -> None:
    """Virtual times and orders do not come from the cluster: partial work, contributions that outlive their round, a
    channel with error feedback, and a selection with memory."""
    more: dict[str, Any] = {"fleet": {**DRAWN, **POLICIES[policy]}, "channel": {"up": "topk", "share": 0.2}}
    same_on_the_cluster(STATEFUL, tmp_path, connected, blobs, **more, cohort={"clients": 3, "selection": "oort"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        pytest.param("fedbn", batch_norm_network, id="fedbn"),
        pytest.param("fedproto", None, id="fedproto"),
        pytest.param("fedavg+ccvr", None, id="ccvr"),
        pytest.param("centralised", None, id="centralised"),
        pytest.param(STATEFUL, batch_norm_network, id="stateful"),
    ],
)
def test_a_cluster_gives_the_same_run_for_other_methods(
    tmp_path: Path, blobs: DataSet, connected: TestCluster, algorithm: str, model: ModelSource | None
) -> None:
    same_on_the_cluster(algorithm, tmp_path, connected, blobs, model)


@pytest.mark.slow
def test_a_cluster_gives_the_same_run_for_the_papers_network(
    tmp_path: Path, connected: TestCluster, data_dir: Path
) -> None:
    """Images, convolutions in channels-last memory, several actors reading one copy of the data."""
    layer = {"rounds": 2, "cohort": {"clients": 4}, "device": "cpu", "data": {"dir": str(data_dir), "offline": True}}
    for name, engine in (("here", {"workers": 1}), ("there", {"kind": "ray", "address": connected.address})):
        config = Config.preset("digits-c2", layer, {"algorithm": {"name": "fedfa"}, "engine": engine})
        run(config, tmp_path / name)
    assert_same_run(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_a_run_is_resumed_with_another_engine(tmp_path: Path, blobs: DataSet, connected: TestCluster) -> None:
    run(asked("scaffold", None), tmp_path / "whole", data=blobs)

    class StoppedError(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(asked("scaffold", None), tmp_path / "moved", data=blobs, watch=stop)
    run(asked("scaffold", connected), tmp_path / "moved", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "moved")


@pytest.mark.slow
def test_custom_code_is_sent_to_the_nodes(tmp_path: Path, blobs: DataSet, connected: TestCluster) -> None:
    """A network defined in a function and a method in a file, with options: the nodes cannot import them."""
    method = tmp_path / "pull.py"
    method.write_text(
        "from pydantic import Field\nfrom fedfa import Component\n\n\n"
        "def squared(x):\n    return x.square().sum()\n\n\n"
        "class Pull(Component):\n    strength: float = Field(0.3, ge=0)\n\n"
        "    def loss(self, ctx, batch, loss):\n"
        "        pairs = ctx.model.module.named_parameters()\n"
        "        return loss + self.strength * sum(squared(w - ctx.start[n]) for n, w in pairs)\n"
    )
    width = 7

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, width), nn.Linear(width, 4)
            self.shape: Callable[[Tensor], Tensor] = lambda x: x.tanh() * width

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(self.shape(self.body(x)))
            return output

    same_on_the_cluster(f"fedfa+{method}", tmp_path, connected, blobs, Mine)


# -- what cannot be ----------------------------------------------------------------------------------------------------
def test_a_node_with_other_versions_is_refused(
    connected: TestCluster, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "versions", lambda: {**versions(), "torch": "1.0"})
    words = rf"node \S+ has torch {re.escape(str(versions()['torch']))} \(here: 1.0\).*same versions on all nodes"
    with pytest.raises(ClusterError, match=words):
        RayEngine(local_engine(make_experiment("fedavg", blobs)), connected.address, 2)


def test_a_network_that_cannot_be_sent_is_an_error(connected: TestCluster, blobs: DataSet) -> None:
    experiment = make_experiment("fedavg", blobs)
    local = local_engine(experiment)
    local._arguments[1].module.lock = threading.Lock()  # type: ignore[assignment]  # what cannot travel
    with pytest.raises(ClusterError, match="cannot be sent to a cluster: TypeError"):
        RayEngine(local, connected.address, 2)


def test_another_address_than_the_current_one_is_an_error(connected: TestCluster) -> None:
    with pytest.raises(ClusterError, match="is connected to the Ray cluster"):
        Connection("192.0.2.1:6379")


# -- one engine, many questions ---------------------------------------------------------------------------------------
def test_rounds_evaluations_and_failures_of_one_engine(
    troubled: tuple[RayEngine, Any], notes: Path, blobs: DataSet
) -> None:
    """In sequence: a failure must not affect what follows."""
    engine, experiment = troubled
    plan, local = plan_of(experiment), local_engine(experiment)
    expected = list(local.train(plan, EVERYBODY, nothing))

    # Results in the order of the cohort, evaluations split over both nodes.
    assert_equal(engine.train(plan, EVERYBODY, nothing), expected)
    assert engine.evaluate(plan.model, {}) == local.evaluate(plan.model, {})

    # Client state is sent with the job; a second broadcast replaces the first.
    other = replace(plan, model={name: 2 * value for name, value in plan.model.items()})
    assert_equal(engine.train(other, EVERYBODY, client_state), list(local.train(other, EVERYBODY, client_state)))

    # An error keeps its type and place in the order, with its traceback.
    put(notes, "0-3-raise", "0-5-raise")
    before: list[int] = []
    with pytest.raises(ClientError) as caught:
        before.extend(result.client for result in engine.train(plan, EVERYBODY, nothing))
    error = caught.value
    assert before == [0, 1, 2]
    assert (error.client, error.round, error.problem) == (3, 1, UNWELL)
    assert error.stage == "local training (epoch 1, batch 2)"
    assert 'raise ValueError(f"client' in error.__notes__[0], "where it happened is lost"
    with pytest.raises(DataError, match="there is no client 99"):
        list(engine.train(plan, [0, 99], nothing))
    remove(notes)

    # Actors that die are replaced, and their clients repeated.
    put(notes, "0-2-SIGKILL", "0-4-exit")
    assert_equal(engine.train(plan, EVERYBODY, nothing), expected)
    assert list(notes.iterdir()) == [], "nobody died"

    # The second death of the same client is its error; the engine stays usable.
    put(notes, "0-2-SIGKILL", "0-2-SIGKILL")
    with pytest.raises(
        ClientError, match=r"client 2, round 1, on the Ray cluster: ended two processes.*died: its memory"
    ):
        list(engine.train(plan, EVERYBODY, nothing))
    assert_equal(engine.train(plan, EVERYBODY, nothing), expected)


def client_state(client: int) -> ComponentTensors:
    return {"some": {"x": torch.full((3,), float(client))}} if client % 2 else {}


def assert_equal(found: Iterator[Any], expected: list[Any]) -> None:
    assert all(equal_results(a, b) for a, b in zip(found, expected, strict=True))


def remove(notes: Path) -> None:
    for note in notes.iterdir():
        note.unlink()


# -- nodes ------------------------------------------------------------------------------------------------------------
def test_a_round_survives_the_loss_of_a_node_and_uses_a_new_one(
    troubled: tuple[RayEngine, Any], connected: TestCluster, notes: Path
) -> None:
    """The node that goes is the one that is in the middle of client 3, which would take two minutes there."""
    engine, experiment = troubled
    plan = plan_of(experiment)
    expected = list(local_engine(experiment).train(plan, EVERYBODY, nothing))
    put(notes, "0-3-sleep")
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: any(notes.glob("asleep-*")), "client 3")
        (note,) = notes.glob("asleep-*")
        killed.append(int(note.name.split("-")[1]))
        connected.kill_node_of(killed[0])

    killer = threading.Thread(target=kill)
    killer.start()
    before, began = set(engine.nodes), time.monotonic()
    assert_equal(engine.train(plan, EVERYBODY, nothing), expected)
    killer.join(60)
    assert killed, "no node was killed"
    assert not is_running(killed[0])
    assert time.monotonic() - began < 100, "it waited for the lost client"
    assert len(set(engine.nodes)) == 1
    connected.add()
    wait_for(lambda: two_nodes(engine), "the new node at work")
    assert set(engine.nodes) != before
    assert_equal(engine.train(plan, EVERYBODY, nothing), expected)


def test_data_are_stored_once_per_node(troubled: tuple[RayEngine, Any]) -> None:
    """The actor's samples lie in the object store's memory, which all processes of the node map."""
    engine, _ = troubled

    def where(node_actor: Any) -> dict[str, str]:
        federation = node_actor.actor._local.federation
        tensors = {"train": federation.dataset.train.inputs, "test": federation.dataset.test.inputs}
        tensors |= {"labels": federation.dataset.train.labels, "split": federation._order}
        weight = next(node_actor.actor._local.model.module.parameters())
        files = {}
        for name, tensor in {**tensors, "weight": weight}.items():
            for line in open("/proc/self/maps"):  # noqa: SIM115  # ends with its process
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                if first <= tensor.data_ptr() < last:
                    files[name] = line.split(maxsplit=5)[5].strip() if len(line.split()) > 5 else ""
        return files

    found = ray.get(engine._actors._workers[0].actor.__ray_call__.remote(where), timeout=60)
    assert set(found) == {"train", "test", "labels", "split", "weight"}
    assert all("plasma" in found[name] for name in ("train", "test", "labels", "split")), found
    assert "plasma" not in found["weight"], "what is trained must be the actor's own"
