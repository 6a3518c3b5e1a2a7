"""FedExP: the server's step size against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfa.algorithms import FedAvg, FedExP
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.quadratics import Quadratics, assert_takes_clients_without_a_step, assert_takes_odd_roles
from tests.algorithms.toy import toy_federation


def two(components: tuple[tuple[float, ...], ...], epsilon: float = 0.0, **options: object) -> Quadratics:
    """Clients whose single step from 0 with η = 1 is Δ_i = b_i."""
    dim = len(components[0])
    return Quadratics(
        FedExP(epsilon=epsilon, **options), [np.eye(dim)] * len(components), components, lr=1.0,
        sizes=[3] + [1] * (len(components) - 1),
    )  # fmt: skip


def test_orthogonal_updates_are_extrapolated_by_half_their_number() -> None:
    """Four orthogonal unit updates, even weights: mean of squares 1, squared mean ¼, so η_g = 1/(2·¼) = 2."""
    federation = two(((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)), weighting="uniform")
    federation.round()
    np.testing.assert_allclose(federation.w, [0.5] * 4, rtol=1e-12)


def test_weights_and_epsilon_by_hand() -> None:
    """Weights ¾ and ¼, Δ = (2, 0) and (0, 6): mean (1.5, 1.5), Σ p‖Δ‖² = 3 + 9 = 12, ‖Δ̄‖² = 4.5, ε = 0.3: 12/9.6."""
    federation = two(((2, 0), (0, 6)), epsilon=0.3)
    federation.round()
    np.testing.assert_allclose(federation.w, [1.5 * 1.25] * 2, rtol=1e-12)


def test_equal_updates_are_fedavg() -> None:
    """The quotient is ½; the step is never shorter than FedAvg's."""
    federation = two(((2, 1), (2, 1)))
    federation.round()
    np.testing.assert_allclose(federation.w, [2, 1], rtol=1e-14)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.floats(0, 0.1))
def test_the_step_of_a_real_network_is_the_formula(seed: int, epsilon: float) -> None:
    one, plain = (toy_federation(algorithm, seed=seed) for algorithm in (FedExP(epsilon=epsilon), FedAvg()))
    start = plain.state.model
    mean = {name: value - start[name] for name, value in plain.round().model.items()}
    squares = sum(float(value.square().sum()) for value in mean.values())
    shares = [result.contribution["fedavg/model"] for result in plain.results]
    each = [sum(float((value / s.weight).square().sum()) for value in s.tensors.values()) for s in shares]
    weights = [float(s.weight) for s in shares]
    expected = max(1.0, np.average(each, weights=weights) / (2 * (squares + epsilon)))
    after = one.round().model
    for name, value in mean.items():
        np.testing.assert_allclose(after[name] - start[name], expected * value, rtol=1e-6, atol=1e-9)


def test_statistics_are_only_averaged() -> None:
    federation = Quadratics(FedExP(epsilon=0.0, weighting="uniform"), [np.eye(2)] * 2, ((9, 0), (0, 9)), steps=2)
    federation.round()
    assert federation.statistic == pytest.approx(3, rel=1e-14)


def test_any_roles_and_clients_without_a_step_and_one_server_step() -> None:
    assert_takes_odd_roles(FedExP())
    assert_takes_clients_without_a_step(FedExP())
    for other, reason in (("fedadam", "server optimiser"), ("scaffold", "only one component")):
        with pytest.raises(AlgorithmError, match=reason):
            build_algorithm(f"fedexp+{other}")
