"""Noise in shares: exact discrete Gaussians, sums that are noisy enough whoever is lost, ranges, budgets, refusals."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedfa import Experiment
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ClientError, ConfigError, FedfaError
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.protection.accounting import Mechanism, budget
from fedfa.protection.noise import Bits, discrete_gaussian, simulated_bits, system_bits
from fedfa.protection.secure.encoding import FixedPoint, Layout
from fedfa.protection.secure.protocol import SecureSumError
from fedfa.protection.settings import PrivacyConfig
from fedfa.protection.shares import UNIT, NoiseShares
from tests.protection.small import experiment, one_round
from tests.protection.test_privacy import joint_norm
from tests.protection.test_secure_sum import Session, added


def shared(data: DataSet, algorithm: str = "fedfa", *, rounds: int = 2, clients: int = 8, **privacy: Any) -> Experiment:
    given = {"noise": 2.0, "clip": 0.5, "masks": True, "noise_by": "clients"} | privacy
    return experiment(data, {"privacy": given}, algorithm, partition="shards:2", rounds=rounds, clients=clients)


# -- the distribution ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["stream", "system"])
@pytest.mark.parametrize("deviation", [0.4, 1.0, 2.5, 6.0])
def test_the_sampler_has_the_probabilities_of_the_discrete_gaussian(deviation: float, source: str) -> None:
    bits: Bits = system_bits if source == "system" else simulated_bits(np.random.default_rng(5))
    drawn = discrete_gaussian(deviation, 60_000, bits)
    assert drawn.dtype == np.int64
    reach = math.ceil(12 * deviation) + 2
    support = np.arange(-reach, reach + 1)
    mass = np.exp(-(support**2) / (2 * deviation**2))
    expected = mass / mass.sum() * len(drawn)
    common = expected >= 10  # cells that a test of chi squared can use; the rest together
    observed = np.array([(drawn == value).sum() for value in support[common]])
    rest = [[len(drawn) - observed.sum()], [len(drawn) - expected[common].sum()]]
    statistic = ((observed - expected[common]) ** 2 / expected[common]).sum() + (rest[0][0] - rest[1][0]) ** 2 / max(
        rest[1][0], 1.0
    )
    assert stats.chi2.sf(statistic, common.sum()) > 1e-6


@pytest.mark.parametrize("deviation", [1e4, 3e9])
def test_wide_noise_is_whole_and_has_mean_variance_and_shape(deviation: float) -> None:
    drawn = discrete_gaussian(deviation, 100_000, simulated_bits(np.random.default_rng(2))) / deviation
    n = len(drawn)
    assert abs(drawn.mean()) < 5 / n**0.5
    assert drawn.var() == pytest.approx(1, abs=5 * (2 / n) ** 0.5)
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    parity = (discrete_gaussian(deviation, 10_000, system_bits) % 2).mean()  # every last bit is used
    assert parity == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("deviation", [0.0, -1.0, 2.0**41, math.nan])
def test_deviations_out_of_range_are_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        discrete_gaussian(deviation, 3, system_bits)


def test_no_number_is_no_draw() -> None:
    assert discrete_gaussian(3.0, 0, system_bits).shape == (0,)


# -- shares in a round --------------------------------------------------------------------------------------------
def noise_on_sums(made: Experiment, without: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """What the sum over clients holds beside their contributions, on the model and on the anchors, in units."""
    _, noisy = one_round(made)
    plain = made.algorithm.components[:-1]  # the same clients, without their shares of noise
    assert isinstance(made.algorithm.components[-1], NoiseShares)
    from fedfa.learning.algorithm import Algorithm
    from fedfa.learning.client import ClientTrainer

    trainer = ClientTrainer(made.task.model, Algorithm(plain, "plain"), made.roles)
    plan = made.training.plan(made.state, made.local)
    total, bare = Aggregate(), Aggregate()
    for result in noisy.results:
        if result.client in without:
            continue
        total.add(result.contribution)
        data = made.clients.client(result.client)
        bare.add(trainer.train(plan, result.client, data, {}).contribution)
    found = []
    for group in ("fedavg/model", "anchors/anchors"):
        parts = [(total[group].tensors[n] - bare[group].tensors[n]).flatten() for n in total[group].tensors]
        found.append(torch.cat(parts).numpy() / UNIT)
    return found[0], found[1]


@pytest.mark.parametrize("lost", [(), (0,), (1, 4, 5, 7)])
def test_noise_is_whole_and_never_below_what_is_accounted_whoever_is_lost(
    lost: tuple[int, ...], blobs: DataSet
) -> None:
    """With t of n relied on, the variance of a sum over m ≥ t clients is m/t times the accounted one."""
    made = experiment(
        blobs,
        {
            "privacy": {"noise": 2.0, "clip": 0.5, "masks": True, "noise_by": "clients", "scales": {"anchors": 3.0}},
            "model": {"options": {"hidden": [300]}},
        },
        "fedfa", rounds=2,
    )  # fmt: skip
    assert made.algorithm.components[-1].relied_on == 4  # type: ignore[attr-defined]  # half of eight
    staying = 8 - len(lost)
    for values, scale in zip(noise_on_sums(made, lost), (1.0, 3.0), strict=True):
        assert np.array_equal(values, np.round(values))
        needed, n = 2.0 * 0.5 * scale / UNIT, len(values)
        assert n > 1000
        assert values.std() >= needed * (1 - 5 / (2 * n) ** 0.5)
        assert values.std() == pytest.approx(needed * (staying / 4) ** 0.5, rel=5 / (2 * n) ** 0.5)
        assert abs(values.mean()) < 5 * values.std() / n**0.5


def test_a_sum_of_fewer_clients_than_are_relied_on_is_refused(blobs: DataSet) -> None:
    made = shared(blobs)
    engine = made.local_engine()
    with pytest.raises(AlgorithmError, match="3 clients are in the sum, but the noise of 4 is needed"):
        made.training.apply(made.state, [0, 1, 2], made.local, engine.train, made.client_states)


def test_clients_do_not_unmask_a_sum_of_too_few_shares() -> None:
    vectors = {client: np.arange(4, dtype=np.uint64) for client in range(7)}
    with pytest.raises(SecureSumError, match="the noise of 7 clients is needed, 6 are in the sum"):
        Session(vectors, lost={0: 3}, least=7).run()
    assert Session(vectors, lost={0: 3}, least=6).run().tolist() == [0, 6, 12, 18]  # the protocol itself allows it


def test_the_server_adds_nothing_and_divides_by_the_planned_cohort(blobs: DataSet) -> None:
    made = shared(blobs)
    state, statistics = one_round(made)
    for name, before in made.state.model.items():
        total = sum(r.contribution["fedavg/model"].tensors[name].double() for r in statistics.results)
        expected = (before.double() + total / 8).float()
        assert torch.equal(state.model[name], expected)


def test_noise_is_reproducible_in_simulations_only_and_differs_by_client_and_round(blobs: DataSet) -> None:
    class Real(Experiment):
        simulation = False

    def sent(kind: type[Experiment]) -> list[torch.Tensor]:
        made = kind(
            "fedavg", data=blobs.split("iid", clients=4), model="mlp", cohort=4, workers=1, planned_rounds=2,
            settings={"privacy": {"noise": 1.0, "masks": True, "noise_by": "clients"}, "engine": {"execution": "each"}},
        )  # fmt: skip
        first, statistics = one_round(made)
        made._state = first
        _, again = one_round(made)
        results = [*statistics.results, *again.results]
        return [next(iter(result.contribution["fedavg/model"].tensors.values())) for result in results]

    once, twice, real, other = sent(Experiment), sent(Experiment), sent(Real), sent(Real)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(real, other, strict=True))
    flat = [value.flatten().tolist() for value in once]
    assert len({tuple(values) for values in flat}) == len(flat)


def test_workers_change_no_bit(blobs: DataSet) -> None:
    ends = []
    for workers in (1, 2):
        settings = {"privacy": {"epsilon": 50.0, "masks": True, "noise_by": "clients", "quantile": 0.5}}
        made = experiment(blobs, settings, "fedfa", workers=workers, rounds=1)
        (record,) = made.rounds(progress=False)
        assert record["epsilon"] == pytest.approx(50.0, rel=2e-3)
        ends.append(made.state.to_tensors())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_noisy_shares_through_the_masks_have_the_simulators_bits(blobs: DataSet) -> None:
    made = shared(blobs, quantile=0.5)
    _, statistics = one_round(made)
    layout = Layout.of(statistics.results[0].contribution)
    inputs = {result.client: layout.to_vector(result.contribution) for result in statistics.results}
    decoded = layout.to_contribution(Session(inputs, lost={2: 3}).run())
    plain = Aggregate()
    for result in statistics.results:
        if result.client != 2:
            plain.add(result.contribution, result.client)
    states = [made.training.server_step(made.state, one).to_tensors() for one in (plain, plain.with_sums(decoded))]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


# -- sensitivity and ranges ---------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-7, 1e-3, 1.0, 50.0]), clients=st.integers(1, 1000))
def test_rounding_towards_zero_never_lengthens_a_contribution(seed: int, size: float, clients: int) -> None:
    values = torch.from_numpy(size * np.random.default_rng(seed).standard_normal(200)).float()
    entry = {"a/b": WeightedSum({"x": values}, torch.tensor(1.0))}
    rounded = FixedPoint(clients=clients, towards_zero=True).protect(None, entry)["a/b"].tensors["x"]  # type: ignore[arg-type]
    assert bool((rounded.abs() <= values.double().abs()).all())
    assert bool((rounded - values.double()).abs().max() < UNIT)
    assert joint_norm({"a/b": WeightedSum({"x": rounded}, torch.tensor(1.0))}) <= joint_norm(entry)


@pytest.mark.parametrize(
    ("privacy", "problem"),
    [
        ({"clip": 1e-7}, r"too close to the unit .* raise privacy\.clip"),
        ({"clip": 1e7}, r"does not fit into the range ±6\.71089e\+07 .* lower privacy\.clip"),
        ({"clip": 1.0, "noise": 1e8}, r"does not fit into the range"),
    ],
)
def test_noise_that_the_range_cannot_hold_is_refused_before_it_is_drawn(
    privacy: dict[str, Any], problem: str, blobs: DataSet
) -> None:
    with pytest.raises(ClientError, match=problem):
        one_round(shared(blobs, "fedavg", **privacy))


def test_the_largest_allowed_noise_of_all_clients_does_not_overflow() -> None:
    """Every client at 40 deviations at once: the sum of the integers is still that of the numbers."""
    encoding = FixedPoint(clients=50)
    most = {"a/b": WeightedSum({"x": torch.tensor([encoding.largest], dtype=torch.float64)}, torch.tensor(1.0))}
    layout = Layout.of(most)
    total = layout.to_contribution(added([layout.to_vector(most)] * 50))
    assert float(total["a/b"].tensors["x"]) == 50 * encoding.largest
    assert 50 * encoding.largest / UNIT <= 2**53


# -- accounting ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("noise", "rounds", "delta"), [(4.0, 30, 1e-5), (1.0, 1, 1e-6), (20.0, 200, 1e-5)])
def test_epsilon_is_that_of_dp_accounting_for_every_round_with_the_client(
    noise: float, rounds: int, delta: float
) -> None:
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.GaussianDpEvent(noise), rounds)
    found = Mechanism(noise, "seen", 100, 10, delta, tuple(range(1, rounds + 1))).epsilon(rounds)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    # By hand, from α k / 2z² and the conversion of Canonne, Kamath and Steinke (2020), at the best whole order.
    by_hand = min(
        alpha * rounds / (2 * noise**2) + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)
        for alpha in np.linspace(1.01, 300, 30_000)
    )
    assert by_hand <= found * (1 + 1e-9)
    assert found == pytest.approx(by_hand, rel=0.03)


def test_a_client_is_charged_for_the_rounds_it_takes_part_in(blobs: DataSet) -> None:
    settings = {"privacy": {"noise": 2.0, "masks": True, "noise_by": "clients"}}
    made = experiment(blobs, settings, clients=8, cohort=4, rounds=6)
    taken = np.zeros(8, int)
    most = []
    for round in range(6):
        taken[made.cohort(round)] += 1
        most.append(int(taken.max()))
    assert made.budget is not None
    assert made.budget.mechanism.counts == tuple(most)
    assert most[-1] < 6
    spent = [made.budget.mechanism.epsilon(rounds) for rounds in range(8)]
    alone = Mechanism(2.0, "seen", 8, 4, made.budget.mechanism.delta, (1, 2, 3, 4, 5, 6, 7, 8))
    assert spent[1:7] == [alone.epsilon(count) for count in most]
    assert spent[7] == alone.epsilon(most[-1] + 1)  # not planned: it may be anybody's


def test_the_server_gains_nothing_from_drawing_clients_at_random() -> None:
    """The guarantee against a server that knows the cohorts is weaker than that against others."""
    seen = budget(
        PrivacyConfig(noise=2.0, masks=True, noise_by="clients"),
        poisson=False, clients=1000, cohort=50, rounds=20, counts=tuple(range(1, 21)),
    )  # fmt: skip
    unseen = Mechanism(2.0, "poisson", 1000, 50, seen.mechanism.delta)
    assert seen.mechanism.epsilon(20) > unseen.epsilon(20)


# -- refusals -----------------------------------------------------------------------------------------------------
def test_what_cannot_be_combined_is_refused_with_the_reason(blobs: DataSet) -> None:
    def refused(settings: dict[str, Any], privacy: dict[str, Any] | None = None) -> str:
        given = {"noise": 1.0, "masks": True, "noise_by": "clients"} | (privacy or {})
        with pytest.raises(FedfaError) as caught:
            experiment(blobs, {"privacy": given, **settings}, rounds=2)
        return str(caught.value)

    assert "a single share of noise protects nobody" in refused({}, {"masks": False})
    assert "knows who takes part" in refused({"cohort": {"selection": "poisson"}})
    assert "compares single contributions" in refused({"aggregation": {"rule": "median"}})
    assert "local.drop_last" in refused({"local": {"drop_last": True}})
    with pytest.raises(ConfigError, match=r"privacy\.noise_by"):
        experiment(blobs, {"privacy": {"noise": 1.0, "noise_by": "sites"}}, rounds=2)
