"""Stacked clients: the same bits as one by one, chosen only where a trial shows that."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedfa.algorithms.fedavg import FedAvg
from fedfa.algorithms.fedprox import FedProx
from fedfa.data import DataSet, load
from fedfa.engines.local import LocalEngine
from fedfa.errors import ClientError, ConfigError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientWork
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext
from fedfa.learning.tensors import ComponentTensors
from fedfa.stacking import choice
from fedfa.stacking.choice import Trial
from fedfa.stacking.client_axis import StackedSamples, join, signature, slice_of
from fedfa.stacking.products import rows
from fedfa.stacking.support import not_stackable, reads_trained_model, stackable
from tests.engines.engine_toys import batch_norm_network, equal_results, local_engine, make_experiment, nothing, plan_of
from tests.experiment.run_toys import assert_same_run, equal_tensors, small
from tests.learning.learning_toys import Bench, ToyData, local, toy_data

STACKING = [
    "fedavg", "fedfa", "fedfa+fedlc", "fedfa+fedprox+fedadam", "scaffold", "moon", "fedprox", "feddyn", "fednova",
    "fedlc", "fedproc", "fedproto", "matching", "local", "fedfa+ccvr", "fedntd", "fedrs", "fedacg",
]  # fmt: skip


def asked(expression: str, how: str, **more: Any) -> Config:
    return small(
        expression, engine={"execution": how, "workers": 1}, data={"clients": 7, "partition": "shards:2"}, **more
    )


@pytest.mark.parametrize("algorithm", STACKING)
def test_the_same_run_bit_for_bit(algorithm: str, blobs: DataSet, tmp_path: Path) -> None:
    """Seven clients of two or three sizes, four in a round: some have a partner of equal size, some do not; the
    last batch is smaller. The record and the client state are the same too."""
    for how in ("each", "stacked"):
        run(asked(algorithm, how, rounds=3), tmp_path / how, data=blobs)
    assert_same_run(tmp_path / "each", tmp_path / "stacked")


@pytest.mark.parametrize("variant", ["authors", "paper", "plus"])
def test_the_same_run_for_fedfa_s_variants(variant: str, blobs: DataSet, tmp_path: Path) -> None:
    """``authors`` has momentum in the local steps."""
    for how in ("each", "stacked"):
        config = asked("fedfa", how, rounds=3, algorithm={"name": "fedfa", "variant": variant})
        run(config, tmp_path / how, data=blobs)
    assert_same_run(tmp_path / "each", tmp_path / "stacked")


def tried(config: Config, data: DataSet) -> Trial:
    """A real trial."""
    trained = Experiment.from_config(config, data=data)
    found = choice.try_out(trained.training, local_engine(trained), trained.state, trained.local)
    assert found is not None
    return found


@pytest.mark.parametrize("batch_size", [8, 17])
@pytest.mark.parametrize("algorithm", STACKING)
def test_the_same_bits_where_products_are_made_in_one_call(algorithm: str, batch_size: int, data_dir: Path) -> None:
    """The network of the blobs is so small that its products are made one by one also where clients are stacked; that
    of the digits is not. A library may round a stack of products otherwise than one, which cannot be helped: where
    it does so for FedAvg already, the test shows nothing."""

    def trial(name: str) -> Trial:
        options = {
            "model": {"name": "mlp", "options": {"hidden": [32]}}, "data": {"clients": 100, "partition": "iid"},
            "local": {"epochs": 1, "batch_size": batch_size}, "engine": {"workers": 1},
        }  # fmt: skip
        return tried(small(name, **options), load("digits", data_dir=data_dir, offline=True))

    if not trial("fedavg").equal:
        pytest.skip("this processor's library rounds stacks of products otherwise")
    assert trial(algorithm).difference == 0


def test_a_run_can_continue_with_the_other_execution(blobs: DataSet, tmp_path: Path) -> None:
    run(asked("fedfa", "each", rounds=4), tmp_path / "whole", data=blobs)
    run(asked("fedfa", "stacked", rounds=2), tmp_path / "resumed", data=blobs)
    run(asked("fedfa", "each", rounds=4), tmp_path / "resumed", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_results_are_in_the_order_of_the_cohort_and_do_not_depend_on_the_others_in_it(blobs: DataSet) -> None:
    trained = make_experiment("fedfa", blobs)
    engine, plan = local_engine(trained), plan_of(trained)
    engine.stacked = False
    alone = {client: next(iter(engine.train(plan, [client], nothing))) for client in range(6)}
    engine.stacked = True
    for cohort in ([3, 1, 0, 5], [5, 4, 3, 2, 1, 0], [2], []):
        together = list(engine.train(plan, cohort, nothing))
        assert [result.client for result in together] == cohort
        assert all(equal_results(result, alone[result.client]) for result in together)


def test_clients_with_and_without_state_are_not_mixed(blobs: DataSet) -> None:
    """MOON: a client's second round has a contrast to its previous model, the first has not; they go in two groups."""
    trained = make_experiment("moon", blobs)
    engine, plan = local_engine(trained), plan_of(trained)
    first = {result.client: result.client_state for result in engine.train(plan, [0, 1, 2], nothing)}

    def client_state(client: int) -> ComponentTensors:
        return first.get(client, {})

    results = []
    for engine.stacked in (False, True):
        results.append(list(engine.train(replace(plan, round=1), [0, 4, 1, 5, 2, 3], client_state)))
    assert all(equal_results(a, b) for a, b in zip(*results, strict=True))


def test_a_client_that_is_listed_twice_keeps_its_order(blobs: DataSet) -> None:
    trained = make_experiment("scaffold", blobs)
    engine, plan = local_engine(trained), plan_of(trained)
    engine.stacked = True
    assert [result.client for result in engine.train(plan, [0, 1, 0], nothing)] == [0, 1, 0]


def test_a_client_that_diverges_is_named(blobs: DataSet) -> None:
    trained = make_experiment("fedavg", blobs)
    engine, plan = local_engine(trained), plan_of(trained)
    engine.stacked = True
    broken = replace(plan, local=plan.local.model_copy(update={"lr": 1e30}))
    with pytest.raises(ClientError, match=r"client 0, round 1.*not finite"):
        list(engine.train(broken, [0, 1], nothing))


class Spoilt:
    """A client's samples, one label of which is no class."""

    def __init__(self, samples: ToyData) -> None:
        self.inputs, self.labels, self.size = samples.inputs, samples.labels.clone(), samples.size
        self.label_counts = samples.label_counts
        self.labels[0] = 99

    def batch(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[positions], self.labels[positions]


def test_the_client_whose_steps_fail_is_named_and_no_other() -> None:
    bench = Bench()
    work = [ClientWork(0, toy_data(), {}), ClientWork(1, Spoilt(toy_data()), {}), ClientWork(2, toy_data(), {})]
    with pytest.raises(ClientError, match=r"^client 1, round 1, local training"):
        bench.trainer.train_together(bench.plan(), work)


@stackable
class DrawsPerBatch(Component):
    """Declared stackable by mistake: it draws from a stream that belongs to one client."""

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        ctx.rng.random()


def test_an_error_that_only_stacking_causes_names_the_remedy() -> None:
    """A stacked hook gets no client's stream: it would be the first one's for all."""
    bench = Bench([DrawsPerBatch()])
    work = [ClientWork(client, toy_data(), {}) for client in (4, 7)]
    with pytest.raises(ClientError, match=r"^client 4, .*ctx\.rng belongs to one client.*stacked with 7; .*\"each"):
        bench.trainer.train_together(bench.plan(), work)


class OtherLoss(FedProx):
    """Replaces a hook of a stackable component."""

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        pass


class OtherStart(FedProx):
    def begin(self, ctx: ClientContext) -> None:
        super().begin(ctx)


@stackable
class OtherLossDeclared(OtherLoss):
    pass


@stackable
class ReadsOutputs(Component):
    @property
    def outputs(self) -> tuple[str, ...]:
        return ("0",)

    def gradient(self, ctx: ClientContext, batch: Batch) -> None: ...


@pytest.mark.parametrize(
    ("component", "stacks"),
    [(FedProx, True), (OtherStart, False), (OtherLoss, False), (OtherLossDeclared, True), (ReadsOutputs, False)],
)
def test_a_subclass_is_stackable_only_if_declared_so(component: type[Component], stacks: bool) -> None:
    assert not_stackable(Algorithm([FedAvg(), component()])) == ([] if stacks else [component.name])


@stackable
class KeepsGradients(Component):
    """Keeps the tensors that it finds after an epoch, without copying them."""

    name = "keeps"

    def begin(self, ctx: ClientContext) -> None:
        ctx.scratch[self.name] = {}

    def after_epoch(self, ctx: ClientContext) -> None:
        gradient = ctx.parameters[ctx.model.head_tensors[0]].grad
        assert gradient is not None
        ctx.scratch[self.name][f"epoch {ctx.epoch}"] = gradient

    def contribute(self, ctx: ClientContext) -> dict[str, WeightedSum]:
        return {"gradients": WeightedSum.of(ctx.scratch[self.name], 1)}


class SendsWeights(FedAvg):
    """Its `contribute` reads the network, unlike that of FedAvg."""

    def contribute(self, ctx: ClientContext) -> dict[str, WeightedSum]:
        return {"model": WeightedSum.of(ctx.model.state(), 1)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("components", [[FedAvg()], [FedAvg(), KeepsGradients()], [SendsWeights()]])
def test_own_components_see_what_they_see_alone(components: list[Component], momentum: float) -> None:
    """Nothing that a component may keep is overwritten by a later step, and what it reads belongs to its client."""
    bench = Bench(components)
    plan = bench.plan(how=local(epochs=3, momentum=momentum))
    work = [ClientWork(client, toy_data(), {}) for client in (4, 7, 9)]
    together = bench.trainer.train_together(plan, work)
    alone = [bench.trainer.train(plan, each.client, each.data, {}) for each in work]
    assert all(equal_results(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize(("component", "reads"), [(FedAvg, False), (SendsWeights, True)])
def test_a_subclass_may_read_the_trained_network(component: type[FedAvg], reads: bool) -> None:
    assert reads_trained_model(Algorithm([component()])) == reads


def test_few_stacked_networks_are_cached() -> None:
    bench = Bench()
    for clients in (*range(2, 14), 5):
        bench.trainer.train_together(bench.plan(), [ClientWork(k, toy_data(), {}) for k in range(clients)])
    assert list(bench.trainer._cached) == [7, 8, 9, 10, 11, 12, 13, 5]


# -- choosing ---------------------------------------------------------------------------------------------------------
def chosen(config: Config, data: DataSet, **more: Any) -> bool:
    engine = Experiment.from_config(config, data=data, **more).engine()
    assert isinstance(engine, LocalEngine)
    return engine.stacked


def trial(monkeypatch: pytest.MonkeyPatch, *, equal: bool = True, gain: float = 9.0) -> None:
    monkeypatch.setattr(choice, "try_out", lambda *_: Trial(equal, 0.0 if equal else 1e-7, gain))


def many(**more: Any) -> Config:
    """Clients of one size."""
    return small(
        **{"engine": {"workers": 1}, "data": {"clients": 6, "partition": "iid"}, "cohort": {"clients": 6}, **more}
    )


def test_auto_stacks_where_that_is_faster_and_gives_the_same_bits(
    blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial(monkeypatch)
    assert chosen(many(), blobs)
    assert not chosen(many(engine={"execution": "each", "workers": 1}), blobs)
    trial(monkeypatch, equal=False)
    assert not chosen(many(), blobs)
    trial(monkeypatch, gain=1.1)
    assert not chosen(many(), blobs)


def test_auto_does_not_try_what_cannot_gain(blobs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Trial:
        raise AssertionError("a trial takes time")

    monkeypatch.setattr(choice, "try_out", refuse)
    assert not chosen(many(cohort={"clients": 2}), blobs), "two clients"
    assert not chosen(many(local={"precision": "bfloat16"}), blobs), "another precision"
    assert not chosen(many(), blobs, model=batch_norm_network), "no stacked form"
    assert not chosen(many(model={"name": "mlp", "options": {"hidden": [4000, 400]}}), blobs), "a large network"
    assert not chosen(many(algorithm={"name": "centralised"}), blobs), "one client"
    assert not chosen(many(data={"clients": 6, "partition": "dirichlet:0.5"}), blobs), "all of different sizes"
    tanh = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    assert not chosen(many(), blobs, model=tanh), "rounds by position"
    assert not chosen(many(), blobs, model=Squashed), "rounds by position, in the network's own forward"


class Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.sigmoid(self.body(x)))
        return result


def test_a_real_trial_finds_equal_bits(blobs: DataSet) -> None:
    scaffold = Experiment.from_config(many(algorithm={"name": "scaffold"}), data=blobs)
    engine, state = local_engine(scaffold), scaffold.state
    before = {name: value.clone() for name, value in state.model.items()}
    found = choice.try_out(scaffold.training, engine, state, scaffold.local)
    assert found is not None
    assert found.equal
    assert found.difference == 0
    assert equal_tensors(before, state.model)
    assert equal_tensors(before, engine.model.state()), "the network is as it was"


def test_a_real_trial_finds_a_difference(blobs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StackedSamples.__init__

    def other(self: StackedSamples, each: Any) -> None:
        made(self, each)
        self._inputs *= 1.0001

    monkeypatch.setattr(StackedSamples, "__init__", other)
    found = tried(many(algorithm={"name": "fedavg"}), blobs)
    assert not found.equal
    assert 0 < found.difference < 0.01


def test_stacked_execution_that_is_not_possible_is_refused_with_the_reason(blobs: DataSet) -> None:
    def stacked(**more: Any) -> Config:
        return many(engine={"execution": "stacked", "workers": 1}, **more)

    with pytest.raises(ConfigError, match=r'engine.execution = "stacked": no stacked form of BatchNorm1d \(1\); use'):
        chosen(stacked(), blobs, model=batch_norm_network)
    with pytest.raises(ConfigError, match="component feddecorr serves one client at a time"):
        chosen(stacked(algorithm={"name": "feddecorr"}), blobs)
    with pytest.raises(ConfigError, match="it computes in float32, not in bfloat16"):
        chosen(stacked(local={"precision": "bfloat16"}), blobs)


def test_stacked_execution_warns_where_bits_differ(
    blobs: DataSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial(monkeypatch, equal=False)
    with caplog.at_level(logging.WARNING):
        assert chosen(many(engine={"execution": "stacked", "workers": 1}), blobs)
    assert "differs from training one by one in the last digits (by up to 1.0e-07)" in caplog.text


def test_workers_without_effect_are_warned_about(blobs: DataSet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(many(engine={"execution": "stacked", "workers": 1}), blobs)
        assert not caplog.text
        assert chosen(many(engine={"execution": "stacked", "workers": 2}), blobs)
    assert "engine.workers = 2 has no effect on stacked clients" in caplog.text


# -- helpers ----------------------------------------------------------------------------------------------------------
TREES = st.recursive(
    st.sampled_from(["tensor", None, 3, "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def planted(tree: Any, client: int) -> Any:
    if tree == "tensor":
        return torch.full((2,), float(client))
    if isinstance(tree, dict):
        return {key: planted(item, client) for key, item in tree.items()}
    if isinstance(tree, list):
        return [planted(item, client) for item in tree]
    return tree


@settings(deadline=None, max_examples=50)
@given(tree=TREES, clients=st.integers(1, 4))
def test_joined_values_can_be_split(tree: Any, clients: int) -> None:
    each = [planted(tree, client) for client in range(clients)]
    assert len({signature(value) for value in each}) == 1
    joined = join(each)
    for client, value in enumerate(each):
        assert repr(slice_of(joined, client)) == repr(value)


def test_different_things_have_different_signatures() -> None:
    kinds = [
        None,
        1,
        1.0,
        True,
        2,
        "1",
        [1],
        (1,),
        {"a": 1},
        torch.zeros(2),
        torch.zeros(3),
        torch.zeros(2).long(),
        [],
        object(),
    ]
    assert len({signature(kind) for kind in kinds}) == len(kinds)


def test_rows_and_samples_by_hand() -> None:
    values = torch.arange(12).view(2, 3, 2)
    assert rows(values, torch.tensor([[2, 0], [1, 1]])).tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]
    assert rows(values[0], torch.tensor([1])).tolist() == [[2, 3]]
    each = [toy_data(4, seed=1), toy_data(4, seed=2)]
    inputs, labels = StackedSamples(each).in_order(torch.tensor([[3, 0, 1, 2], [1, 2, 3, 0]]))
    assert torch.equal(inputs[1], each[1].inputs[[1, 2, 3, 0]])
    assert torch.equal(labels[0], each[0].labels[[3, 0, 1, 2]])


# -- bfloat16 ---------------------------------------------------------------------------------------------------------
def test_bfloat16_is_another_result_near_by_with_weights_in_full(blobs: DataSet) -> None:
    trained = make_experiment("fedfa", blobs)
    engine, plan = local_engine(trained), plan_of(trained)
    engine.stacked = False
    (full,) = engine.train(plan, [0], nothing)
    (short,) = engine.train(replace(plan, local=plan.local.model_copy(update={"precision": "bfloat16"})), [0], nothing)
    for group, entry in full.contribution.items():
        for name, value in entry.tensors.items():
            other = short.contribution[group].tensors[name]
            assert other.dtype == value.dtype
            assert not torch.equal(other, value)
            assert float((other - value).abs().max()) < 0.1 * float(value.abs().max())


def test_bfloat16_reaches_workers_and_inner_layers(blobs: DataSet, tmp_path: Path) -> None:
    layered = {"name": "fedfa", "anchors": {"layers": ["fc1"]}}
    for workers in (1, 2):
        config = small(local={"precision": "bfloat16"}, engine={"workers": workers}, algorithm=layered, rounds=2)
        run(config, tmp_path / str(workers), data=blobs)
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_networks_of_one_layer_type_only_are_swapped() -> None:
    """A subclass may compute something else; it is not taken for its parent."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    from fedfa.models.split import SplitModel
    from fedfa.stacking.stacked_model import NotStackableError, StackedModel

    with pytest.raises(NotStackableError, match="no stacked form of Doubled"):
        StackedModel(SplitModel.of(nn.Sequential(Doubled(3, 3), nn.Linear(3, 2))), 2)
