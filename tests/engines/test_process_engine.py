"""The same bits for every number of workers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfa.data import DataSet, Normalisation, Partition, Samples
from fedfa.engines.local import LocalEngine
from fedfa.engines.process_engine import ProcessEngine, with_workers
from fedfa.engines.process_pool import WINDOW, WorkerStartError, obstacle
from fedfa.errors import ClientError, DataError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import ClientContext
from fedfa.learning.tensors import ComponentTensors
from tests.engines.engine_toys import (
    TROUBLED,
    UNWELL,
    batch_norm_network,
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

pytestmark = needs_fork


def asked(algorithm: str, workers: int) -> Config:
    """Three rounds; the 60 test samples in nine batches, the last one short."""
    return small(algorithm, rounds=3, evaluation={"batch_size": 7}, engine={"workers": workers})


class StoppedError(Exception):
    pass


RECIPES: list[Any] = [
    pytest.param("fedavg", None, id="fedavg"),
    pytest.param("fedfa", None, id="fedfa"),
    pytest.param("scaffold", None, id="scaffold"),
    pytest.param("moon", None, id="moon"),
    pytest.param("fedbn", batch_norm_network, id="fedbn"),
    pytest.param("fedproto", None, id="fedproto"),
    pytest.param("fedavg+ccvr", None, id="ccvr"),
    pytest.param(STATEFUL, batch_norm_network, id="stateful"),
]


@pytest.mark.parametrize(("algorithm", "model"), RECIPES)
def test_every_number_of_workers_gives_the_same_run(
    tmp_path: Path, blobs: DataSet, algorithm: str, model: ModelSource | None
) -> None:
    """Weights, server's state, clients' files and metrics; also if the number changes in the middle."""
    for workers in (1, 2, 3):
        run(asked(algorithm, workers), tmp_path / str(workers), data=blobs, model=model)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(asked(algorithm, 3), tmp_path / "changed", data=blobs, model=model, watch=stop)
    run(asked(algorithm, 2), tmp_path / "changed", data=blobs, model=model, resume=True)
    for other in ("2", "3", "changed"):
        assert_same_run(tmp_path / "1", tmp_path / other)
    assert multiprocessing.active_children() == []


# -- training ---------------------------------------------------------------------------------------------------------
def very_different_sizes(blobs: DataSet) -> Partition:
    """50 clients with 0 to 40 samples, in no order."""
    draw = np.random.default_rng(3)
    sizes = np.r_[0, 1, 40, draw.integers(1, 6, 47)]
    draw.shuffle(sizes)
    order = np.concatenate([draw.permutation(240)[:size] for size in sizes])
    return Partition(order.astype(np.int64), np.r_[0, np.cumsum(sizes)].astype(np.int64))


def test_fifty_clients_of_very_different_sizes(blobs: DataSet) -> None:
    experiment = make_experiment("scaffold", blobs, split=very_different_sizes(blobs))
    clients = [int(client) for client in np.random.default_rng(4).permutation(50)]
    plan = plan_of(experiment)

    def client_state(client: int) -> ComponentTensors:  # like what a client has after its first round
        return {} if client % 2 else {"scaffold": {n: torch.full_like(t, client) for n, t in plan.model.items()}}

    plans = [plan, replace(plan, round=1, model={name: 2 * value for name, value in plan.model.items()})]
    expected = [list(local_engine(experiment).train(plan, clients, client_state)) for plan in plans]
    with process_engine(experiment, 3) as engine:
        found = [list(engine.train(plan, clients, client_state)) for plan in plans]
    assert [result.client for result in found[0]] == clients
    for mine, same in zip(found, expected, strict=True):
        assert all(equal_results(a, b) for a, b in zip(mine, same, strict=True))


def test_the_longest_jobs_start_first_and_few_results_wait(blobs: DataSet) -> None:
    """Client state is read when the client starts."""
    split = very_different_sizes(blobs)
    experiment = make_experiment("fedavg", blobs, split=split)
    begun: list[int] = []
    taken, most = 0, 0

    def client_state(client: int) -> ComponentTensors:
        begun.append(client)
        return {}

    clients = list(range(50))
    with process_engine(experiment, 2) as engine:
        for _ in engine.train(plan_of(experiment), clients, client_state):
            taken += 1
            most = max(most, len(begun) - taken)
    assert sorted(begun) == clients
    assert most <= WINDOW * 2
    window = sorted(range(WINDOW * 2), key=lambda client: -split.sizes[client])
    assert set(begun[:2]) == set(window[:2])


def test_a_client_that_trains_twice_continues_from_its_first_result(blobs: DataSet) -> None:
    experiment = make_experiment(STATEFUL, blobs)

    def collect(engine: LocalEngine | ProcessEngine) -> list[float]:
        client_state: dict[int, ComponentTensors] = {}
        for result in engine.train(plan_of(experiment), [1, 2, 1], lambda client: client_state.get(client, {})):
            client_state[result.client] = result.client_state
        return [float(client_state[client]["habit"]["rounds"]) for client in (1, 2)]

    with process_engine(experiment, 2) as engine:
        assert collect(engine) == collect(local_engine(experiment)) == [2, 1]


def test_the_processor_time_is_that_of_the_worker(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(tmp_path, monkeypatch, "0-0-burn")
    experiment = make_experiment(TROUBLED, blobs)
    with process_engine(experiment, 2) as engine:
        before = time.process_time()
        (result,) = engine.train(plan_of(experiment), [0], nothing)
        assert result.cpu_seconds >= 0.2 > time.process_time() - before


def test_output_of_a_worker_is_printed(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trouble(tmp_path, monkeypatch, "0-3-print")
    experiment = make_experiment(TROUBLED, blobs)
    with process_engine(experiment, 2) as engine:
        list(engine.train(plan_of(experiment), [0, 3], nothing))
    assert capfd.readouterr().out == "a word from client 3\n"


class Vandal(Component):
    """Changes its broadcast, which no component should, and sends it back."""

    name = "vandal"

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        ctx.broadcast["vandal"]["x"].add_(1)
        return {"x": WeightedSum.of(ctx.broadcast["vandal"], 1)}


def test_a_worker_cannot_change_the_broadcast_of_others(blobs: DataSet) -> None:
    experiment = make_experiment("fedavg", blobs)
    experiment.algorithm = Algorithm([*experiment.algorithm.components, Vandal()])
    plan = replace(plan_of(experiment), broadcast={"vandal": {"x": torch.zeros(3)}})
    with process_engine(experiment, 2) as engine:
        found = list(engine.train(plan, [0, 1], nothing))
    assert [result.contribution["vandal/x"].tensors["x"].tolist() for result in found] == [[1, 1, 1]] * 2


# -- own things -------------------------------------------------------------------------------------------------------
def test_networks_and_data_defined_in_a_function(tmp_path: Path) -> None:
    """Nothing of them can be found by name in another process."""
    width = 5

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(width, 6), nn.Linear(6, 2)
            self.shape: Callable[[Tensor], Tensor] = lambda x: x.tanh() * width

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(self.shape(self.body(x)))
            return output

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(80, width, generator=draw)
    samples = Samples(inputs, (inputs.sum(1) > 0).long())
    data = DataSet("mine", samples, samples, ("a", "b"), (), Normalisation(), "mine", {})
    for workers in (1, 2):
        run(asked("fedfa", workers), tmp_path / str(workers), model=Mine, data=data)
    assert_same_run(tmp_path / "1", tmp_path / "2")


# -- evaluation -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [1, 7, 20, 59, 60, 500])
def test_evaluations_with_workers_are_the_same(blobs: DataSet, batch: int) -> None:
    experiment = make_experiment("fedavg", blobs, evaluation={"batch_size": batch})
    model = experiment.state.model
    with process_engine(experiment, 3) as engine:
        assert engine.evaluate(model, {}) == local_engine(experiment).evaluate(model, {})


def test_evaluations_of_a_clients_own_domains_are_the_same(blobs: DataSet) -> None:
    """Domain 0 is the first half; with another way to predict too."""
    train, test = (
        replace(samples, domains=(torch.arange(len(samples)) >= len(samples) // 2).long())
        for samples in (blobs.train, blobs.test)
    )
    data = replace(blobs, train=train, test=test, domains=("first", "second"))
    split = Partition(np.arange(240), np.array([0, 120, 240]))
    experiment = make_experiment("fedproto", data, split=split, evaluation={"batch_size": 4}, cohort={"clients": 2})
    plan = plan_of(experiment)
    prototypes = {
        component: {n: torch.randn_like(t) for n, t in own.items()} for component, own in plan.broadcast.items()
    }
    with process_engine(experiment, 3) as engine:
        for client in (None, 0, 1):
            found = engine.evaluate(plan.model, prototypes, client)
            assert found == local_engine(experiment).evaluate(plan.model, prototypes, client)
        assert set(found.domain_accuracy) == {"second"}


def test_evaluation_in_the_middle_of_a_round(blobs: DataSet) -> None:
    experiment = make_experiment("fedavg", blobs, evaluation={"batch_size": 7})
    plan = plan_of(experiment)
    expected = list(local_engine(experiment).train(plan, [0, 1, 2, 3, 4], nothing))
    alone = local_engine(experiment).evaluate(plan.model, {})
    with process_engine(experiment, 2) as engine:
        for result, same in zip(engine.train(plan, [0, 1, 2, 3, 4], nothing), expected, strict=True):
            assert engine.evaluate(plan.model, {}) == alone
            assert equal_results(result, same)


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_error_of_a_client_keeps_its_type_and_place_in_the_order(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Two clients fail; whichever is faster, the first one's error counts, after the results before it."""
    trouble(tmp_path, monkeypatch, "0-3-raise", "0-5-raise")
    experiment = make_experiment(TROUBLED, blobs)
    engine = with_workers(local_engine(experiment), workers)
    before: list[int] = []
    with pytest.raises(ClientError) as caught:
        before.extend(result.client for result in engine.train(plan_of(experiment), [0, 1, 2, 3, 4, 5], nothing))
    error = caught.value
    assert before == [0, 1, 2]
    assert str(error) == f"client 3, round 1, local training (epoch 1, batch 2): {UNWELL}"
    assert (error.client, error.round, error.problem) == (3, 1, UNWELL)
    if workers > 1:
        assert 'raise ValueError(f"client' in error.__notes__[0], "where it happened is lost"
    # No worker hangs, and the next round works.
    after = list(engine.train(plan_of(experiment, 1), [0, 1, 2, 3, 4, 5], nothing))
    assert [result.client for result in after] == [0, 1, 2, 3, 4, 5]
    engine.close()


def test_an_unknown_client_is_an_error(blobs: DataSet) -> None:
    experiment = make_experiment("fedavg", blobs)
    with process_engine(experiment, 2) as engine, pytest.raises(DataError, match="there is no client 99"):
        list(engine.train(plan_of(experiment), [0, 99], nothing))


def test_unreadable_client_state_is_an_error(blobs: DataSet) -> None:
    """An error on the main process's side leaves the engine usable."""
    experiment = make_experiment("fedavg", blobs)

    def unreadable(client: int) -> ComponentTensors:
        raise DataError("damaged")

    with process_engine(experiment, 2) as engine:
        with pytest.raises(DataError, match="damaged"):
            list(engine.train(plan_of(experiment), [0, 1], unreadable))
        assert len(list(engine.train(plan_of(experiment), [0, 1], nothing))) == 2


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4, 5], [0]], ids=["in-progress", "all-jobs-done"])
def test_a_round_can_be_abandoned(blobs: DataSet, clients: list[int]) -> None:
    """Whether a round is over is decided by the iteration over it, not by how fast the workers were."""
    experiment = make_experiment("fedavg", blobs)
    plan = plan_of(experiment)
    with process_engine(experiment, 2) as engine:
        results = engine.train(plan, clients, nothing)
        first = next(iter(results))
        with pytest.raises(RuntimeError, match="still at a round"):
            next(iter(engine.train(plan, clients, nothing)))
        del results
        again = list(engine.train(plan, [0, 1, 2, 3, 4, 5], nothing))
    assert equal_results(first, again[0])


def test_an_engine_can_be_closed_twice(blobs: DataSet) -> None:
    experiment = make_experiment("fedavg", blobs)
    engine = ProcessEngine(local_engine(experiment), 2)
    engine.close()
    engine.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="closed"):
        list(engine.train(plan_of(experiment), [0], nothing))


# -- starting ---------------------------------------------------------------------------------------------------------
def train_with_busy_threads(blobs: DataSet) -> None:
    torch.set_num_threads(2)
    big = torch.randn(600, 600)
    (big @ big).relu().sum()
    nn.functional.conv2d(torch.randn(8, 8, 40, 40), torch.randn(16, 8, 3, 3))
    torch.set_num_threads(1)
    experiment = make_experiment("fedavg", blobs)
    with process_engine(experiment, 2) as engine:
        assert len(list(engine.train(plan_of(experiment), [0, 1, 2], nothing))) == 3


def test_workers_after_torch_has_used_several_threads(blobs: DataSet) -> None:
    process = multiprocessing.get_context("fork").Process(target=train_with_busy_threads, args=(blobs,))
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0, "the workers hang" if code is None else "the workers failed"


@pytest.mark.slow
def test_new_interpreters_give_the_same_result(blobs: DataSet) -> None:
    """As on systems that cannot fork."""
    experiment = make_experiment("scaffold", blobs, model=batch_norm_network, evaluation={"batch_size": 7})
    plan, clients = plan_of(experiment), [0, 1, 2, 3, 4, 5]
    expected = list(local_engine(experiment).train(plan, clients, nothing))
    with process_engine(experiment, 2, method="spawn") as engine:
        found = list(engine.train(plan, clients, nothing))
        assert engine.evaluate(plan.model, plan.broadcast) == local_engine(experiment).evaluate(
            plan.model, plan.broadcast
        )
    assert all(equal_results(a, b) for a, b in zip(expected, found, strict=True))


def test_a_network_that_cannot_be_pickled_is_trained_in_the_main_process(
    blobs: DataSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(nn.Linear):
        pass

    experiment = make_experiment("fedavg", blobs, model=lambda: Mine(6, 4))
    local = local_engine(experiment)
    monkeypatch.setattr("fedfa.engines.process_engine.start_method", lambda: "spawn")
    assert with_workers(local, 2) is local
    assert "training in one process instead of 2: AttributeError: Can't pickle local object" in caplog.text


def fall_back(blobs: DataSet, path: str) -> None:
    experiment = make_experiment("fedavg", blobs)
    local = local_engine(experiment)
    with open(path, "w") as file:
        file.write(f"{with_workers(local, 2) is local} {obstacle(torch.device('cpu'))}")


def test_the_worker_of_another_pool_starts_no_workers(tmp_path: Path, blobs: DataSet) -> None:
    answer = tmp_path / "answer"
    process = multiprocessing.get_context("fork").Process(target=fall_back, args=(blobs, str(answer)), daemon=True)
    process.start()
    process.join(60)
    assert answer.read_text().startswith("True this process is itself a worker of another pool")


def test_no_workers_for_one_device() -> None:
    assert "one cuda device" in (obstacle(torch.device("cuda")) or "")


def test_a_process_that_cannot_train_reports_why(blobs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no backward pass in a forked process")

    monkeypatch.setattr("fedfa.engines.worker_process._try_backward", refuse)
    with pytest.raises(WorkerStartError, match="RuntimeError: no backward pass in a forked process"):
        ProcessEngine(local_engine(make_experiment("fedavg", blobs)), 2)
    assert multiprocessing.active_children() == []


def test_a_client_that_writes_to_its_broadcast_does_not_change_others(tmp_path: Path, blobs: DataSet) -> None:
    """The result is the same for every number of workers."""
    method = tmp_path / "careless.py"
    method.write_text(
        "import torch\nfrom fedfa import Component, Traits\n\n\nclass Careless(Component):\n"
        "    traits = Traits(broadcasts=True)\n\n"
        "    def init(self, task, rng):\n        return {'t': torch.zeros(1)}\n\n"
        "    def loss(self, ctx, batch, loss):\n        ctx.broadcast['careless']['t'] += 1\n"
        "        return loss * (1 + 0.01 * ctx.broadcast['careless']['t'][0])\n"
    )
    for workers in (1, 2):
        config = small(f"fedavg+{method}", engine={"workers": workers})
        run(config, tmp_path / str(workers), data=blobs)
    assert_same_run(tmp_path / "1", tmp_path / "2")
