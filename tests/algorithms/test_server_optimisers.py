"""The server's optimisers against hand-computed rounds and torch's own optimisers.

Linear losses f = g·w with η_local = 1 and one step make the averaged update Δ = −g exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfa.algorithms import FedAvg, FedAvgM
from fedfa.algorithms.registry import build_algorithm, methods
from fedfa.errors import AlgorithmError
from tests.algorithms.quadratics import Quadratics, assert_takes_odd_roles
from tests.algorithms.toy import assert_same_rounds, toy_federation

ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
OPTIMISERS = ("fedavgm", *ADAPTIVE)


def linear(algorithm: str, gradients: Sequence[float], **options: Any) -> Quadratics:
    built, width = build_algorithm(algorithm, {algorithm: options}), len(gradients)
    return Quadratics(built, [np.zeros((width, width))], [[0.0] * width], g=[gradients], lr=1.0)


def change_gradient(federation: Quadratics, gradients: Sequence[float]) -> None:
    loss: Any = federation.algorithm.components[-1]
    loss.g.copy_(torch.tensor([list(gradients)], dtype=torch.float64))


def test_two_rounds_of_fedavgm_by_hand() -> None:
    """Δ = 1, then −0.5; β = 0.9, η = 0.5. v = 1, w = 0.5; v = 0.9 − 0.5 = 0.4, w = 0.7."""
    federation = linear("fedavgm", [-1.0], lr=0.5)
    federation.round()
    assert federation.value == pytest.approx(0.5, rel=1e-14)
    change_gradient(federation, [0.5])
    federation.round()
    assert federation.value == pytest.approx(0.7, rel=1e-14)


def test_two_rounds_of_fedadagrad_by_hand() -> None:
    """τ = 0.1, η = 1, Δ = 0.2, then −0.1.

    v = 0.01 + 0.04 = 0.05, w = 0.2/(√0.05 + 0.1). v = 0.06, w += −0.1/(√0.06 + 0.1).
    """
    federation = linear("fedadagrad", [-0.2], lr=1.0, tau=0.1)
    federation.round()
    first = 0.2 / (math.sqrt(0.05) + 0.1)
    assert federation.value == pytest.approx(first, rel=1e-13)
    change_gradient(federation, [0.1])
    federation.round()
    assert federation.value == pytest.approx(first - 0.1 / (math.sqrt(0.06) + 0.1), rel=1e-13)


def test_two_rounds_of_fedadam_by_hand() -> None:
    """τ = 0.1, β₁ = 0.9, β₂ = 0.99, η = 1, Δ = 0.2, then −0.1; no bias correction.

    m = 0.02, v = 0.0099 + 0.0004 = 0.0103. m = 0.018 − 0.01 = 0.008, v = 0.010197 + 0.0001 = 0.010297.
    """
    federation = linear("fedadam", [-0.2], lr=1.0, tau=0.1)
    federation.round()
    first = 0.02 / (math.sqrt(0.0103) + 0.1)
    assert federation.value == pytest.approx(first, rel=1e-13)
    change_gradient(federation, [0.1])
    federation.round()
    assert federation.value == pytest.approx(first + 0.008 / (math.sqrt(0.010297) + 0.1), rel=1e-13)


def test_two_rounds_of_fedyogi_by_hand() -> None:
    """As FedAdam above. Δ² = 0.04 is above v = 0.01: v = 0.01 + 0.0004 = 0.0104. Then, with Δ = −0.05, Δ² = 0.0025 is
    below: v = 0.0104 − 0.000025 = 0.010375, m = 0.018 − 0.005 = 0.013.
    """
    federation = linear("fedyogi", [-0.2], lr=1.0, tau=0.1)
    federation.round()
    first = 0.02 / (math.sqrt(0.0104) + 0.1)
    assert federation.value == pytest.approx(first, rel=1e-13)
    change_gradient(federation, [0.05])
    federation.round()
    assert federation.value == pytest.approx(first + 0.013 / (math.sqrt(0.010375) + 0.1), rel=1e-13)


def torch_momentum(w: Tensor) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    return torch.optim.SGD([w], lr=0.3, momentum=0.8), lambda t: None


def torch_adagrad(w: Tensor) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    return torch.optim.Adagrad([w], lr=0.3, initial_accumulator_value=0.05**2, eps=0.05), lambda t: None


def torch_adam(w: Tensor) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """Torch's Adam, started at v = τ² and with its bias correction undone.

    Torch steps by lr/(1 − β₁ᵗ) · m/(√v/s + eps) with s = √(1 − β₂ᵗ); lr = η (1 − β₁ᵗ)/s and eps = τ/s make that
    η m/(√v + τ).
    """
    optimiser = torch.optim.Adam([w], betas=(0.7, 0.95))
    optimiser.state[w] = {
        "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.full_like(w, 0.05**2),
    }  # fmt: skip

    def undo_correction(t: int) -> None:
        s = math.sqrt(1 - 0.95**t)
        optimiser.param_groups[0].update(lr=0.3 * (1 - 0.7**t) / s, eps=0.05 / s)

    return optimiser, undo_correction


@pytest.mark.parametrize(
    ("algorithm", "options", "make"),
    [
        ("fedavgm", {"lr": 0.3, "momentum": 0.8}, torch_momentum),
        ("fedadagrad", {"lr": 0.3, "tau": 0.05}, torch_adagrad),
        ("fedadam", {"lr": 0.3, "tau": 0.05, "beta1": 0.7, "beta2": 0.95}, torch_adam),
    ],
)
def test_five_rounds_agree_with_torch(algorithm: str, options: dict[str, float], make: Any) -> None:
    """The server's step is torch's on the gradient −Δ."""
    rng = np.random.default_rng(1)
    federation = linear(algorithm, [0.0, 0.0, 0.0], **options)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimiser, before = make(w)
    for t in range(1, 6):
        gradient = rng.normal(size=3)
        change_gradient(federation, gradient.tolist())
        federation.round()
        w.grad = torch.from_numpy(gradient)
        before(t)
        optimiser.step()
        np.testing.assert_allclose(federation.w, w.detach().numpy(), rtol=1e-10, atol=1e-14)


def test_yogi_forgets_slowly_where_adam_forgets_fast() -> None:
    """After an update of 1, one of 0.01: FedAdam's v loses (1 − β₂) of itself, FedYogi's only (1 − β₂)·10⁻⁴."""
    v = {}
    for algorithm in ("fedadam", "fedyogi"):
        federation = linear(algorithm, [-1.0], tau=1e-6)
        federation.round()
        before = float(federation.state.components[algorithm]["v.point.weight"])
        change_gradient(federation, [-0.01])
        federation.round()
        v[algorithm] = before - float(federation.state.components[algorithm]["v.point.weight"])
    assert v["fedyogi"] == pytest.approx(1e-6, rel=1e-6)
    assert v["fedadam"] == pytest.approx(0.01 * 0.01, rel=0.02)


def test_momentum_zero_and_rate_one_is_fedavg_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedAvgM(momentum=0.0)), toy_federation(FedAvg()))


@pytest.mark.parametrize("algorithm", OPTIMISERS)
def test_one_client_with_one_step_is_plain_sgd_where_nothing_adapts(algorithm: str) -> None:
    """FedAvgM's first step is η Δ. A very large τ swamps Δ²: v stays τ² (FedAdam: β₂ τ²), the step is η Δ/(√v + τ)."""
    scale = 2 * 1e8 if algorithm != "fedadam" else (1 + math.sqrt(0.99)) * 1e8
    options = {"lr": 0.5} if algorithm == "fedavgm" else {"lr": 0.5 * scale, "tau": 1e8, "beta1": 0.0}
    federation = linear(algorithm, [-2.0], **options)
    federation.round()
    assert federation.value == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("algorithm", OPTIMISERS)
def test_statistics_take_the_mean_as_it_is(algorithm: str) -> None:
    """One step adds client + 1 to the statistic: 1 for client 0; a server's optimiser would change that."""
    federation = linear(algorithm, [-1.0])
    for expected in (1.0, 2.0):
        federation.round()
        assert federation.statistic == pytest.approx(expected, rel=1e-14)
    assert not any("statistic" in name for name in federation.state.components[algorithm])


@pytest.mark.parametrize("algorithm", OPTIMISERS)
def test_it_acts_after_whatever_made_the_update(algorithm: str) -> None:
    """Beside FedFA, SCAFFOLD and FedNova; moments stay on the server, in double precision."""
    for base in ("fedfa", "scaffold", "fednova"):
        federation = toy_federation(f"{base}+{algorithm}")
        federation.round()
        federation.round()
        assert algorithm not in federation.plan().broadcast
        assert all(value.dtype == torch.float64 for value in federation.state.components[algorithm].values())
        assert all(torch.isfinite(value).all() for value in federation.state.to_tensors().values())
    assert_takes_odd_roles(build_algorithm(algorithm))


def test_there_is_one_server_optimiser() -> None:
    with pytest.raises(AlgorithmError, match="server optimiser"):
        build_algorithm("fedavgm+fedadam")


def test_defaults_are_the_papers() -> None:
    options = {name: methods()[name].components[0]().model_dump() for name in OPTIMISERS}
    assert options["fedavgm"] == {"lr": 1.0, "momentum": 0.9}
    assert options["fedadam"] == options["fedyogi"] == {"lr": 0.01, "beta1": 0.9, "tau": 1e-3, "beta2": 0.99}
    assert options["fedadagrad"] == {"lr": 0.01, "beta1": 0.0, "tau": 1e-3}


@pytest.mark.parametrize("algorithm", [*OPTIMISERS, "fedprox"])
def test_without_a_shared_model_there_is_nothing_to_act_on(algorithm: str) -> None:
    with pytest.raises(AlgorithmError):
        toy_federation(f"local+{algorithm}")
