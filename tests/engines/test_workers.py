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

from fedfa.data import DataSet, Normalisation, Samples
from fedfa.data.partitions import Partition
from fedfa.engines.local import LocalEngine
from fedfa.engines.pool import WINDOW, CannotStartError, obstacle
from fedfa.engines.workers import WorkersEngine, with_workers
from fedfa.errors import ClientError, DataError
from fedfa.learning.part import ClientContext, NoOptions, Part
from fedfa.learning.recipe import Recipe
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import PartTensors
from fedfa.studies.run import run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import ModelMaker
from tests.engines.engine_toys import (
    TROUBLED,
    batch_norm_network,
    equal_results,
    laboratory,
    local_engine,
    needs_fork,
    nothing,
    plan_of,
    trouble,
    workers_engine,
)
from tests.studies.study_toys import STATEFUL, assert_same_run, small

pytestmark = needs_fork


def asked(recipe: str, workers: int) -> Settings:
    """Three rounds; the 60 test samples in nine batches, the last one short."""
    return small(recipe, rounds=3, evaluation={"batch_size": 7}, engine={"workers": workers})


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


@pytest.mark.parametrize(("recipe", "model"), RECIPES)
def test_every_number_of_workers_gives_the_same_run(
    tmp_path: Path, blobs: DataSet, recipe: str, model: ModelMaker | None
) -> None:
    """Weights, server's state, clients' files and metrics; also if the number changes in the middle."""
    for workers in (1, 2, 3):
        run(asked(recipe, workers), tmp_path / str(workers), data=blobs, model=model)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(asked(recipe, 3), tmp_path / "changed", data=blobs, model=model, watch=stop)
    run(asked(recipe, 2), tmp_path / "changed", data=blobs, model=model, resume=True)
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
    lab = laboratory("scaffold", blobs, split=very_different_sizes(blobs))
    clients = [int(client) for client in np.random.default_rng(4).permutation(50)]
    plan = plan_of(lab)

    def kept(client: int) -> PartTensors:  # like what a client has after its first round
        return {} if client % 2 else {"scaffold": {n: torch.full_like(t, client) for n, t in plan.model.items()}}

    plans = [plan, replace(plan, round=1, model={name: 2 * value for name, value in plan.model.items()})]
    expected = [list(local_engine(lab).train(plan, clients, kept)) for plan in plans]
    with workers_engine(lab, 3) as engine:
        found = [list(engine.train(plan, clients, kept)) for plan in plans]
    assert [result.client for result in found[0]] == clients
    for mine, same in zip(found, expected, strict=True):
        assert all(equal_results(a, b) for a, b in zip(mine, same, strict=True))


def test_the_longest_are_begun_first_and_few_results_wait(blobs: DataSet) -> None:
    """What a client kept is asked for when it is begun."""
    split = very_different_sizes(blobs)
    lab = laboratory("fedavg", blobs, split=split)
    begun: list[int] = []
    taken, most = 0, 0

    def kept(client: int) -> PartTensors:
        begun.append(client)
        return {}

    clients = list(range(50))
    with workers_engine(lab, 2) as engine:
        for _ in engine.train(plan_of(lab), clients, kept):
            taken += 1
            most = max(most, len(begun) - taken)
    assert sorted(begun) == clients
    assert most <= WINDOW * 2
    window = sorted(range(WINDOW * 2), key=lambda client: -split.sizes[client])
    assert set(begun[:2]) == set(window[:2])


def test_a_client_that_comes_twice_goes_on_from_its_first_turn(blobs: DataSet) -> None:
    lab = laboratory(STATEFUL, blobs)

    def collect(engine: LocalEngine | WorkersEngine) -> list[float]:
        kept: dict[int, PartTensors] = {}
        for result in engine.train(plan_of(lab), [1, 2, 1], lambda client: kept.get(client, {})):
            kept[result.client] = result.kept
        return [float(kept[client]["habit"]["rounds"]) for client in (1, 2)]

    with workers_engine(lab, 2) as engine:
        assert collect(engine) == collect(local_engine(lab)) == [2, 1]


def test_the_processor_time_is_that_of_the_worker(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(tmp_path, monkeypatch, "0-0-burn")
    lab = laboratory(TROUBLED, blobs)
    with workers_engine(lab, 2) as engine:
        before = time.process_time()
        (result,) = engine.train(plan_of(lab), [0], nothing)
        assert result.cpu_seconds >= 0.2 > time.process_time() - before


def test_what_a_method_prints_in_a_worker_arrives(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trouble(tmp_path, monkeypatch, "0-3-print")
    lab = laboratory(TROUBLED, blobs)
    with workers_engine(lab, 2) as engine:
        list(engine.train(plan_of(lab), [0, 3], nothing))
    assert capfd.readouterr().out == "a word from client 3\n"


class Vandal(Part[NoOptions]):
    """Changes what it received, which no part should, and sends it back."""

    name = "vandal"

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        ctx.received["vandal"]["x"].add_(1)
        return {"x": WeightedSum.of(ctx.received["vandal"], 1)}


def test_what_all_workers_read_cannot_be_changed_for_others(blobs: DataSet) -> None:
    lab = laboratory("fedavg", blobs)
    lab = replace(lab, recipe=Recipe([*lab.recipe.parts, Vandal()]))
    plan = replace(plan_of(lab), received={"vandal": {"x": torch.zeros(3)}})
    with workers_engine(lab, 2) as engine:
        found = list(engine.train(plan, [0, 1], nothing))
    assert [result.sums["vandal/x"].tensors["x"].tolist() for result in found] == [[1, 1, 1]] * 2


# -- own things -------------------------------------------------------------------------------------------------------
def test_networks_and_data_made_on_the_spot(tmp_path: Path) -> None:
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
def test_evaluations_are_the_same(blobs: DataSet, batch: int) -> None:
    lab = laboratory("fedavg", blobs, evaluation={"batch_size": batch})
    model = lab.initial_state().model
    with workers_engine(lab, 3) as engine:
        assert engine.evaluate(model, {}) == local_engine(lab).evaluate(model, {})


def test_evaluations_of_a_clients_own_domains_are_the_same(blobs: DataSet) -> None:
    """Domain 0 is the first half; with another way to predict too."""
    train, test = (
        replace(samples, domains=(torch.arange(len(samples)) >= len(samples) // 2).long())
        for samples in (blobs.train, blobs.test)
    )
    data = replace(blobs, train=train, test=test, domains=("first", "second"))
    split = Partition(np.arange(240), np.array([0, 120, 240]))
    lab = laboratory("fedproto", data, split=split, evaluation={"batch_size": 4}, cohort={"clients": 2})
    plan = plan_of(lab)
    prototypes = {part: {n: torch.randn_like(t) for n, t in own.items()} for part, own in plan.received.items()}
    with workers_engine(lab, 3) as engine:
        for client in (None, 0, 1):
            found = engine.evaluate(plan.model, prototypes, client)
            assert found == local_engine(lab).evaluate(plan.model, prototypes, client)
        assert set(found.domain_accuracy) == {"second"}


def test_evaluation_in_the_middle_of_a_round(blobs: DataSet) -> None:
    lab = laboratory("fedavg", blobs, evaluation={"batch_size": 7})
    plan = plan_of(lab)
    expected = list(local_engine(lab).train(plan, [0, 1, 2, 3, 4], nothing))
    alone = local_engine(lab).evaluate(plan.model, {})
    with workers_engine(lab, 2) as engine:
        for result, same in zip(engine.train(plan, [0, 1, 2, 3, 4], nothing), expected, strict=True):
            assert engine.evaluate(plan.model, {}) == alone
            assert equal_results(result, same)


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_error_of_a_client_comes_as_itself_and_in_its_turn(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Two clients fail; whichever is faster, the first one's error counts, after the results before it."""
    trouble(tmp_path, monkeypatch, "0-3-raise", "0-5-raise")
    lab = laboratory(TROUBLED, blobs)
    engine = with_workers(local_engine(lab), workers)
    before: list[int] = []
    with pytest.raises(ClientError) as caught:
        before.extend(result.client for result in engine.train(plan_of(lab), [0, 1, 2, 3, 4, 5], nothing))
    error = caught.value
    assert before == [0, 1, 2]
    assert str(error) == (
        "client 3, round 1, local training (epoch 1, batch 2): ValueError: client 3 does not feel well"
    )
    assert (error.client, error.round, error.problem) == (3, 1, "ValueError: client 3 does not feel well")
    if workers > 1:
        assert 'raise ValueError(f"client' in error.__notes__[0], "where it happened is lost"
    # Nobody is left hanging, and the next round works.
    after = list(engine.train(plan_of(lab, 1), [0, 1, 2, 3, 4, 5], nothing))
    assert [result.client for result in after] == [0, 1, 2, 3, 4, 5]
    engine.close()


def test_a_client_that_does_not_exist(blobs: DataSet) -> None:
    lab = laboratory("fedavg", blobs)
    with workers_engine(lab, 2) as engine, pytest.raises(DataError, match="there is no client 99"):
        list(engine.train(plan_of(lab), [0, 99], nothing))


def test_what_was_kept_cannot_be_read(blobs: DataSet) -> None:
    """An error on the main process's side leaves the engine usable."""
    lab = laboratory("fedavg", blobs)

    def unreadable(client: int) -> PartTensors:
        raise DataError("damaged")

    with workers_engine(lab, 2) as engine:
        with pytest.raises(DataError, match="damaged"):
            list(engine.train(plan_of(lab), [0, 1], unreadable))
        assert len(list(engine.train(plan_of(lab), [0, 1], nothing))) == 2


def test_a_round_that_nobody_wants_to_the_end(blobs: DataSet) -> None:
    lab = laboratory("fedavg", blobs)
    plan = plan_of(lab)
    with workers_engine(lab, 2) as engine:
        results = engine.train(plan, [0, 1, 2, 3, 4, 5], nothing)
        first = next(iter(results))
        with pytest.raises(RuntimeError, match="still at a round"):
            next(iter(engine.train(plan, [0, 1, 2, 3, 4, 5], nothing)))
        del results
        again = list(engine.train(plan, [0, 1, 2, 3, 4, 5], nothing))
    assert equal_results(first, again[0])


def test_closing_twice(blobs: DataSet) -> None:
    lab = laboratory("fedavg", blobs)
    engine = WorkersEngine(local_engine(lab), 2)
    engine.close()
    engine.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="closed"):
        list(engine.train(plan_of(lab), [0], nothing))


# -- starting ---------------------------------------------------------------------------------------------------------
def train_with_busy_threads(blobs: DataSet) -> None:
    torch.set_num_threads(2)
    big = torch.randn(600, 600)
    (big @ big).relu().sum()
    nn.functional.conv2d(torch.randn(8, 8, 40, 40), torch.randn(16, 8, 3, 3))
    torch.set_num_threads(1)
    lab = laboratory("fedavg", blobs)
    with workers_engine(lab, 2) as engine:
        assert len(list(engine.train(plan_of(lab), [0, 1, 2], nothing))) == 3


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
    lab = laboratory("scaffold", blobs, model=batch_norm_network, evaluation={"batch_size": 7})
    plan, clients = plan_of(lab), [0, 1, 2, 3, 4, 5]
    expected = list(local_engine(lab).train(plan, clients, nothing))
    with workers_engine(lab, 2, method="spawn") as engine:
        found = list(engine.train(plan, clients, nothing))
        assert engine.evaluate(plan.model, plan.received) == local_engine(lab).evaluate(plan.model, plan.received)
    assert all(equal_results(a, b) for a, b in zip(expected, found, strict=True))


def test_what_cannot_be_sent_to_a_new_interpreter_is_trained_here(
    blobs: DataSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(nn.Linear):
        pass

    lab = laboratory("fedavg", blobs, model=lambda: Mine(6, 4))
    local = local_engine(lab)
    monkeypatch.setattr("fedfa.engines.workers.start_method", lambda: "spawn")
    assert with_workers(local, 2) is local
    assert "training in one process instead of 2: AttributeError: Can't pickle local object" in caplog.text


def fall_back(blobs: DataSet, path: str) -> None:
    lab = laboratory("fedavg", blobs)
    local = local_engine(lab)
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


def test_a_process_that_cannot_train_says_why(blobs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no backward pass in a forked process")

    monkeypatch.setattr("fedfa.engines.worker._try_out", refuse)
    with pytest.raises(CannotStartError, match="RuntimeError: no backward pass in a forked process"):
        WorkersEngine(local_engine(laboratory("fedavg", blobs)), 2)
    assert multiprocessing.active_children() == []


def test_what_a_client_does_to_what_it_received_reaches_nobody(tmp_path: Path, blobs: DataSet) -> None:
    """A method that writes into what it received gives the same result for every number of workers."""
    method = tmp_path / "careless.py"
    method.write_text(
        "import torch\nfrom fedfa import Part\n\n\nclass Careless(Part):\n    name = 'careless'\n\n"
        "    def init(self, task, rng):\n        return {'t': torch.zeros(1)}\n\n"
        "    def loss(self, ctx, batch, loss):\n        ctx.received['careless']['t'] += 1\n"
        "        return loss * (1 + 0.01 * ctx.received['careless']['t'][0])\n"
    )
    for workers in (1, 2):
        settings = small(f"fedavg+{method}", engine={"workers": workers})
        run(settings, tmp_path / str(workers), data=blobs)
    assert_same_run(tmp_path / "1", tmp_path / "2")
