"""FedDecorr: the energy of correlations in closed form, and its gradient in local training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, FedDecorr
from fedfa.algorithms.feddecorr import correlation_energy
from tests.algorithms.toy import assert_same_rounds, batches_of, descend, toy_federation


def test_the_energy_by_hand() -> None:
    """Three features of four samples: a = (1, 1, −1, −1), 2a + 5 and b = (1, −1, 1, −1).

    a and 2a + 5 have correlation 1, b is uncorrelated with both: K has ones on the diagonal and at two other places.
    """
    a, b = torch.tensor([1.0, 1, -1, -1]), torch.tensor([1.0, -1, 1, -1])
    features = torch.stack([a, 2 * a + 5, b], 1).double()
    assert float(correlation_energy(features)) == pytest.approx(5 / 9, rel=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 1000))
def test_the_energy_is_that_of_numpys_correlations(size: int, dim: int, seed: int) -> None:
    """For more and for fewer samples than features; scales and shifts of a feature do not matter."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(size, dim)) * rng.uniform(100, 500, dim) + rng.normal(size=dim)
    K = np.corrcoef(features.T).reshape(dim, dim)
    found = float(correlation_energy(torch.from_numpy(features)))
    assert found == pytest.approx((K**2).sum() / dim**2, rel=1e-4)


def test_a_constant_feature_counts_as_zero_and_has_a_finite_gradient() -> None:
    """A dead ReLU: of two features only one is left, K has a single one."""
    features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]], dtype=torch.float64, requires_grad=True)
    energy = correlation_energy(features)
    (gradient,) = torch.autograd.grad(energy, [features])
    assert energy.item() == pytest.approx(1 / 4, rel=1e-7)
    assert gradient.isfinite().all()


def test_local_training_written_out_with_a_batch_of_one() -> None:
    """The third client's last batch holds a single sample, which has no correlations."""
    federation = toy_federation(FedDecorr(beta=0.5), lr=0.1, weight_decay=0.0)
    start = federation.state.model

    def loss(h: Tensor, scores: Tensor, y: Tensor, index: Tensor) -> Tensor:
        entropy = functional.cross_entropy(scores, y)
        if len(y) == 1:
            return entropy
        z = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-8).sqrt()
        return entropy + 0.5 * (z.T @ z / len(y)).square().mean()

    for client, data in enumerate(federation.clients):
        expected, _ = descend(start, data, batches_of(federation, client), 0.1, loss)
        update = federation.train(client).contribution["fedavg/model"]
        for name, value in expected.items():
            assert_close(update.tensors[name] / update.weight, value - start[name], rtol=1e-8, atol=1e-10)


def test_without_beta_it_is_fedavg_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedDecorr(beta=0)), toy_federation(FedAvg()))
