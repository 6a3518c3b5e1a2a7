"""Differential privacy in rounds: bounded contributions of every method, noise by the numbers, budgets that hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfa import Experiment, LocalTraining
from fedfa.algorithms.registry import methods
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError, FedfaError, RunError
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.flower.config import RunConfig
from fedfa.learning.aggregate import Aggregate, Contribution
from fedfa.learning.cohort import choose_cohort
from fedfa.protection.noise import from_system
from fedfa.protection.privacy import Privacy
from tests.protection.small import experiment, one_round

REFUSED = {"ccvr", "matching", "centralised", "local", "fedproto", "fednova", "fednh", "fedrep", "ditto"}
"""Methods that refuse differential privacy."""


def private(data: DataSet, algorithm: str = "fedavg", *, rounds: int = 3, **privacy: Any) -> Experiment:
    given = {"noise": 1.0} | privacy if "epsilon" not in privacy else privacy
    return experiment(data, {"privacy": given}, algorithm, partition="shards:2", rounds=rounds)


def joint_norm(contribution: Contribution, scales: dict[str, float] | None = None) -> float:
    """√Σ ‖v / s‖² over all groups but the adaptive clip's vote."""
    squared = 0.0
    for group, entry in contribution.items():
        if group != "privacy/below":
            scale = (scales or {}).get(group.partition("/")[0], 1.0)
            squared += sum(float((value.double() / scale).square().sum()) for value in entry.tensors.values())
    return math.sqrt(squared)


# -- sensitivity --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [name for name in methods() if name != "fedbn"])
def test_every_method_sends_at_most_the_clip_or_refuses_with_a_reason(method: str, blobs: DataSet) -> None:
    """Neighbouring federations: with a client and without it, the sums differ by at most the clip, in every round."""
    if method in REFUSED:
        with pytest.raises(AlgorithmError, match=r"differential privacy.*; |differential privacy.*: \w+"):
            private(blobs, method)
        return
    made = private(blobs, method, clip=0.3)
    engine = made.local_engine()
    for _ in range(2):
        state, statistics = made.training.apply(
            made.state, list(range(8)), made.local, engine.train, made.client_states, keep_results=True
        )
        whole = Aggregate()
        for result in statistics.results:
            whole.add(result.contribution)
        for left_out in range(8):
            without = Aggregate()
            for result in statistics.results:
                if result.client != left_out:
                    without.add(result.contribution)
            difference = sum(
                float((value - without[group].tensors[name]).square().sum())
                for group in whole.groups
                for name, value in whole[group].tensors.items()
            )
            assert difference**0.5 <= 0.3
            assert all(bool((e.weight == 1).all()) for e in statistics.results[left_out].contribution.values())
        made._state = state


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    seed=st.integers(0, 2**31), clip=st.sampled_from([1e-3, 0.5, 7.0]), size=st.sampled_from([1e-6, 1.0, 1e6]),
    scale=st.sampled_from([0.1, 1.0, 20.0]), sizes=st.sampled_from([1, 50, 10**6]),
)  # fmt: skip
def test_whatever_a_client_contributes_is_clipped_jointly(
    seed: int, clip: float, size: float, scale: float, sizes: int, blobs: DataSet
) -> None:
    from fedfa.learning.aggregate import WeightedSum

    rng = np.random.default_rng(seed)
    made = private(blobs, "fedfa", clip=clip, scales={"anchors": scale})
    component = made.algorithm.components[-1]
    assert isinstance(component, Privacy)
    anchors = made.state.components["anchors"]["anchors"]

    class Context:
        broadcast = made.algorithm.broadcast(made.state.components)
        label_counts = torch.tensor([3, 0, 1, 0])

    def drawn(*shape: int) -> Tensor:
        return torch.from_numpy(size * rng.standard_normal(shape)).float()

    sent = component.protect(
        Context(),  # type: ignore[arg-type]
        {
            "fedavg/model": WeightedSum.of({"w": drawn(5, 3)}, sizes),
            "anchors/anchors": WeightedSum.of({"anchors": anchors + drawn(*anchors.shape)}, sizes),
            "other/rows": WeightedSum.of({"x": drawn(4, 2)}, torch.tensor([[1.0], [0.0], [5.0], [2.0]])),
        },
    )
    assert joint_norm(sent, {"anchors": scale}) <= clip
    assert torch.equal(sent["anchors/anchors"].tensors["anchors"][[1, 3]], torch.zeros(2, anchors.shape[1]))
    assert not sent["other/rows"].tensors["x"][1].any()


def test_an_unclipped_contribution_is_the_change_itself_and_an_absent_class_is_exactly_zero(blobs: DataSet) -> None:
    plain = experiment(blobs, {}, "fedfa", partition="shards:2")
    made = private(blobs, "fedfa", clip=1e6)
    _, bare = one_round(plain)
    _, statistics = one_round(made)
    received = made.state.components["anchors"]["anchors"].double()
    for open_, protected in zip(bare.results, statistics.results, strict=True):
        entry, sent = (
            open_.contribution["anchors/anchors"],
            protected.contribution["anchors/anchors"].tensors["anchors"],
        )
        assert torch.allclose(sent.double(), entry.tensors["anchors"].double() / entry.weight - received, atol=1e-5)
        absent = made.federation[open_.client].label_counts == 0
        assert absent.any()
        assert not sent[absent].any()
        model, change = open_.contribution["fedavg/model"], protected.contribution["fedavg/model"]
        for name, value in change.tensors.items():
            assert torch.allclose(value, model.tensors[name] / model.weight, atol=1e-6)


# -- noise --------------------------------------------------------------------------------------------------------
def noise_of(made: Experiment) -> dict[str, Tensor]:
    """What one round added to the sums, in units of the sum."""
    state, statistics = one_round(made)
    clients = 8
    found = {}
    for name, before in made.state.model.items():
        moved = (state.model[name].double() - before.double()) * clients
        found[name] = moved - sum(r.contribution["fedavg/model"].tensors[name].double() for r in statistics.results)
    anchors = state.components["anchors"]["anchors"].double() - made.state.components["anchors"]["anchors"].double()
    sent = sum(r.contribution["anchors/anchors"].tensors["anchors"].double() for r in statistics.results)
    found["anchors"] = anchors * clients - sent
    return found


def test_the_noise_has_the_stated_deviation_in_every_group(blobs: DataSet) -> None:
    made = experiment(
        blobs,
        {"privacy": {"noise": 4.0, "clip": 0.5, "scales": {"anchors": 10.0}}, "model": {"options": {"hidden": [400]}}},
        "fedfa", rounds=2,
    )  # fmt: skip
    found = noise_of(made)
    anchors = found.pop("anchors").flatten()
    model = torch.cat([value.flatten() for value in found.values()])
    for values, expected in ((model, 4.0 * 0.5), (anchors, 4.0 * 0.5 * 10)):
        n = len(values)
        assert n > 1000
        # Five standard errors of a normal sample's mean and deviation.
        assert abs(float(values.mean())) < 5 * expected / n**0.5
        assert float(values.std()) == pytest.approx(expected, rel=5 / (2 * n) ** 0.5)
        inside = float((values.abs() < expected).double().mean())
        assert inside == pytest.approx(0.6827, abs=5 * (0.6827 * 0.3173 / n) ** 0.5)


def test_noise_of_the_system_is_normal_and_never_the_same() -> None:
    first, second = from_system((200, 100)), from_system((200, 100))
    assert not torch.equal(first, second)
    for values in (first.flatten(), second.flatten(), (first * second).flatten()):
        assert abs(float(values.mean())) < 5 / len(values) ** 0.5
        assert float(values.std()) == pytest.approx(1, abs=0.05)
    assert float((first.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.02)
    assert from_system(()).shape == ()


def test_a_real_federation_does_not_draw_noise_from_the_seed(blobs: DataSet) -> None:
    class Real(Experiment):
        simulation = False

    def once(kind: type[Experiment]) -> Tensor:
        settings = {"privacy": {"noise": 1.0}, "engine": {"execution": "each"}}
        data = blobs.split("iid", clients=4)
        made = kind("fedavg", data=data, model="mlp", cohort=4, workers=1, planned_rounds=1, settings=settings)
        return next(iter(one_round(made)[0].model.values()))

    assert torch.equal(once(Experiment), once(Experiment))
    assert not torch.equal(once(Real), once(Real))


def test_workers_change_no_bit(blobs: DataSet) -> None:
    ends = []
    for workers in (1, 2):
        made = experiment(blobs, {"privacy": {"epsilon": 50.0, "quantile": 0.5}}, "fedfa", workers=workers, rounds=1)
        assert len(list(made.rounds(progress=False))) == 1
        ends.append(made.state.to_tensors())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


# -- the adaptive clip ----------------------------------------------------------------------------------------------
def test_the_adaptive_clip_follows_its_update_rule(blobs: DataSet) -> None:
    made = private(blobs, noise=1e-4, clip=0.01, quantile=0.5, clip_lr=0.3)
    state, statistics = one_round(made)
    votes = [float(result.contribution["privacy/below"].tensors["below"]) for result in statistics.results]
    assert votes == [-0.5] * 8  # every update is longer than 0.01
    component = made.algorithm.components[-1]
    assert isinstance(component, Privacy)
    # All above: the clip grows by exp(0.3 · 0.5), up to the noise of the count (a twentieth of 8 clients).
    assert component.count_noise == pytest.approx(0.4)
    grown = float(np.log(float(state.components["privacy"]["clip"]) / 0.01))
    assert grown == pytest.approx(0.15, abs=0.3 * 5 * 0.4 / 8)
    # z'^−2 + (2σ_b)^−2 = z^−2: the count is paid for.
    assert component.change_noise**-2 + (2 * component.count_noise) ** -2 == pytest.approx(component.noise**-2)
    for noise, cohort in ((1.0, 8), (3.0, 1000), (20.0, 10)):
        paid = Privacy(noise=noise, cohort=cohort, quantile=0.5)
        assert paid.change_noise**-2 + (2 * paid.count_noise) ** -2 == pytest.approx(noise**-2)
        assert paid.change_noise > noise


# -- budgets and records --------------------------------------------------------------------------------------------
def test_every_record_carries_epsilon_and_no_loss_of_clients(blobs: DataSet) -> None:
    made = private(blobs, epsilon=8.0, rounds=3)
    records = list(made.rounds(progress=False))
    spent = [record["epsilon"] for record in records]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[2] <= 8.0
    assert spent[2] == pytest.approx(8.0, rel=0.01)
    assert all(record.train_loss is None and record["delta"] == 1e-5 for record in records)


def test_a_run_stops_at_the_budget_and_cannot_go_past_it(tmp_path: Path, data_dir: Path) -> None:
    def config(rounds: int) -> Config:
        layer = {
            "rounds": rounds, "data": {"dir": str(data_dir), "offline": True}, "local": {"epochs": 1},
            "cohort": {"rate": 1.0}, "privacy": {"epsilon": 4.0, "noise": 2.5}, "evaluation": {"every": 10},
            "engine": {"workers": 1, "execution": "each"},
        }  # fmt: skip
        return Config.preset("digits-c2", layer)

    result = run(config(10), tmp_path / "run")
    done = len(result.metrics)
    assert 1 <= done < 10
    assert result.metrics[-1]["epsilon"] <= 4.0
    assert result.summary["epsilon"] == result.metrics[-1]["epsilon"]
    assert result.metrics[-1]["accuracy"] is not None  # though the run was to be evaluated in round 10 only
    assert result.summary["planned_rounds"] == 10
    assert len(run(config(10), tmp_path / "run", resume=True).metrics) == done
    with pytest.raises(RunError, match="cannot be extended"):
        run(config(20), tmp_path / "run", resume=True)
    other = config(10).model_copy(update={"privacy": config(10).privacy.model_copy(update={"epsilon": 40.0})})
    with pytest.raises(RunError, match=r"privacy\.epsilon was 4\.0, now 40\.0"):
        run(other, tmp_path / "run", resume=True)


def test_a_longer_training_than_calibrated_for_is_refused(blobs: DataSet) -> None:
    made = private(blobs, epsilon=8.0, rounds=2)
    with pytest.raises(ConfigError, match="schedule over 2 rounds"):
        made.rounds(3, progress=False)
    with pytest.raises(ConfigError, match="planned_rounds"):
        experiment(blobs, {"privacy": {"epsilon": 8.0}})


def test_what_is_not_accounted_is_refused(blobs: DataSet) -> None:
    def refused(settings: dict[str, Any], algorithm: str = "fedavg", **more: Any) -> str:
        with pytest.raises(FedfaError) as caught:
            experiment(blobs, {"privacy": {"noise": 1.0}, **settings}, algorithm, **more)
        return str(caught.value)

    assert "diagnostics look into single clients" in refused({"diagnostics": {"every": 1}})
    assert "cannot be combined with [fleet]" in refused({"fleet": {"devices": "equal"}})
    assert "cannot be combined with [channel]" in refused({"channel": {"up": "int8"}})
    assert "compares single contributions" in refused({"aggregation": {"rule": "median"}})
    assert "final pass" in refused({"algorithm": {"final": {"steps": 5}}}, "fedfa") or "not accounted" in refused(
        {"algorithm": {"final": {"steps": 5}}}, "fedfa"
    )
    assert "samples of clients" in refused({"data": {"validation": "clients:0.1"}})
    assert "evaluations of single clients" in refused({"evaluation": {"clients": "all"}})
    assert 'set it to "poisson" or "uniform"' in refused({"cohort": {"selection": "size"}})
    assert "the algorithm has the components" in refused({"privacy": {"noise": 1.0, "scales": {"anchor": 2.0}}})
    with pytest.raises(ConfigError, match="evaluations on the sites' data"):
        RunConfig({"preset": "digits-c2", "federation.evaluation": "sites", "settings": "privacy.epsilon=4"}).config(3)


def test_client_statistics_are_refused(blobs: DataSet) -> None:
    class Normalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    for buffers, reason in (("average", "GroupNorm"), ("local", "single clients' own models")):
        with pytest.raises(AlgorithmError, match=reason):
            Experiment("fedavg", data=blobs.split("iid", clients=4), model=Normalised, cohort=4, planned_rounds=1,
                       settings={"privacy": {"noise": 1.0}, "model": {"buffers": buffers}})  # fmt: skip


# -- Poisson cohorts ------------------------------------------------------------------------------------------------
def test_poisson_cohorts_are_independent_draws_and_never_empty() -> None:
    sizes = np.ones(50, dtype=np.int64)
    cohorts = [choose_cohort(sizes, 10, "poisson", 1, round) for round in range(400)]
    lengths = np.array([len(cohort) for cohort in cohorts])
    assert lengths.mean() == pytest.approx(10, abs=5 * (50 * 0.2 * 0.8 / 400) ** 0.5)
    assert lengths.var() == pytest.approx(50 * 0.2 * 0.8, rel=0.4)
    counts = np.bincount(np.concatenate(cohorts), minlength=50) / 400
    assert float(abs(counts - 0.2).max()) < 5 * (0.2 * 0.8 / 400) ** 0.5
    assert all(len(set(cohort)) == len(cohort) for cohort in cohorts)
    assert min(len(choose_cohort(np.ones(3, dtype=np.int64), 1, "poisson", 1, r)) for r in range(50)) >= 1
    assert cohorts[7] == choose_cohort(sizes, 10, "poisson", 1, 7)


def test_the_sampling_rate_is_that_among_clients_with_samples(blobs: DataSet) -> None:
    """Empty clients are never drawn, so those with samples are drawn more often, which costs more."""
    from fedfa.data import Federation
    from fedfa.data.partitions.assignment import Partition

    split = blobs.split("iid", clients=20, seed=1)
    empty = np.concatenate([split.partition.offsets, np.full(20, split.partition.offsets[-1])])
    doubled = Federation(blobs, Partition(split.partition.order, empty.astype(split.partition.offsets.dtype)))
    settings = {"privacy": {"noise": 3.0}}
    found = [
        Experiment("fedavg", data=data, model="mlp", cohort=5, planned_rounds=4, settings=settings).budget
        for data in (split, doubled)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].mechanism == found[0].mechanism


def test_the_denominator_is_the_planned_cohort_not_who_came(blobs: DataSet) -> None:
    """With almost no noise and no clip, half of the planned clients move the model by half of their mean."""
    settings = {"privacy": {"noise": 1e-9, "clip": 1e3}, "algorithm": {"fedavg": {"weighting": "uniform"}}}
    made = experiment(blobs, settings, rounds=1, local=LocalTraining(epochs=1, batch_size=16, lr=0.1))
    engine = made.local_engine()
    half, statistics = made.training.apply(
        made.state, [0, 1, 2, 3], made.local, engine.train, made.client_states, keep_results=True
    )
    for name, before in made.state.model.items():
        total = sum(r.contribution["fedavg/model"].tensors[name].double() for r in statistics.results)
        assert torch.allclose(half.model[name].double(), before.double() + total / 8, atol=1e-6)
