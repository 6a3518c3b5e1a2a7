"""FedFA's anchor loss, whose gradient is in closed form, against autograd of the formula written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedfa.algorithms.anchor_kernels import anchor_loss

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From features ``[B, d]``, anchors ``[C, d]`` and labels ``[B]`` of one client to its loss."""


def per_sample(features: Tensor, anchors: Tensor, y: Tensor) -> Tensor:
    """Eq. 3: the mean over samples of ‖h − a_y‖²."""
    return (features - anchors[y]).square().sum(-1).mean()


def per_class(features: Tensor, anchors: Tensor, y: Tensor) -> Tensor:
    """The mean within each class of ‖h − a_y‖², summed over the classes in the batch and divided by all C."""
    distances = (features - anchors[y]).square().sum(-1)
    return torch.stack([distances[y == c].mean() for c in y.unique()]).sum() / len(anchors)


reductions = pytest.mark.parametrize("formula", [per_sample, per_class])
shapes = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 7), st.integers(0, 10_000))
"""Samples, classes, features, seed."""


def random_batch(
    samples: int, classes: int, width: int, seed: int, clients: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Features, anchors and labels; with a client axis where a number of clients is given."""
    draw = torch.Generator().manual_seed(seed)
    axis = () if clients is None else (clients,)
    features = torch.randn(*axis, samples, width, generator=draw, dtype=dtype).requires_grad_()
    anchors = torch.randn(classes, width, generator=draw, dtype=dtype)
    return features, anchors, torch.randint(classes, (*axis, samples), generator=draw)


def counts_of(formula: Formula, y: Tensor, like: Tensor) -> Tensor | None:
    """The counts that choose the reduction: the samples of each sample's own class, ``[…, B, 1]``."""
    return (y.unsqueeze(-1) == y.unsqueeze(-2)).sum(-1, keepdim=True).to(like.dtype) if formula is per_class else None


def closed(formula: Formula, features: Tensor, anchors: Tensor, y: Tensor) -> Tensor:
    return anchor_loss(features, anchors, y, counts_of(formula, y, features))


@reductions
@given(shapes)
def test_value_and_gradient_are_those_of_the_formula(formula: Formula, shape: tuple[int, int, int, int]) -> None:
    features, anchors, y = random_batch(*shape)
    found, expected = closed(formula, features, anchors, y), formula(features, anchors, y)
    assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(3.5 * loss, features)[0] for loss in (found, expected)]
    assert_close(*gradients, rtol=1e-12, atol=1e-14)


@reductions
@pytest.mark.parametrize("clients", [None, 3], ids=["one client", "client axis"])
def test_the_gradient_is_the_slope(formula: Formula, clients: int | None) -> None:
    """By difference quotients, for any gradient that comes from behind the loss."""
    features, anchors, y = random_batch(6, 4, 3, seed=1, clients=clients)

    def loss(features: Tensor) -> Tensor:
        return closed(formula, features, anchors, y)

    assert torch.autograd.gradcheck(loss, (features,))


@reductions
@given(shapes, st.integers(1, 4))
def test_with_a_client_axis_each_client_has_its_own_loss_and_gradient(
    formula: Formula, shape: tuple[int, int, int, int], clients: int
) -> None:
    features, anchors, y = random_batch(*shape, clients=clients)
    weights = torch.arange(1.0, clients + 1, dtype=torch.float64)
    both = closed(formula, features, anchors, y)
    expected = torch.stack([formula(h, anchors, labels) for h, labels in zip(features, y, strict=True)])
    assert both.shape == (clients,)
    assert_close(both, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, features, grad_outputs=weights)[0] for loss in (both, expected)]
    assert_close(*gradients, rtol=1e-12, atol=1e-14)


@reductions
@pytest.mark.parametrize(("samples", "classes", "width"), [(1, 2, 3), (7, 5, 6), (64, 10, 192), (33, 62, 100)])
def test_stacked_and_single_clients_have_the_same_bits(
    formula: Formula, samples: int, classes: int, width: int
) -> None:
    """In single precision: a client's loss and gradient do not depend on the clients it is computed with."""
    features, anchors, y = random_batch(samples, classes, width, seed=2, clients=4, dtype=torch.float32)
    stacked = closed(formula, features, anchors, y)
    (gradient,) = torch.autograd.grad(stacked.sum(), features)
    for client in range(4):
        alone = features[client].detach().clone().requires_grad_()
        loss = closed(formula, alone, anchors, y[client])
        assert torch.equal(loss, stacked[client])
        assert torch.equal(torch.autograd.grad(loss, alone)[0], gradient[client])


@reductions
def test_anchors_are_constants(formula: Formula) -> None:
    features, anchors, y = random_batch(6, 4, 3, seed=3)
    anchors.requires_grad_()
    closed(formula, features, anchors, y).backward()
    assert features.grad is not None
    assert anchors.grad is None


@reductions
def test_features_at_their_anchors_have_no_loss_and_no_gradient(formula: Formula) -> None:
    _, anchors, y = random_batch(6, 4, 3, seed=4)
    features = anchors[y].clone().requires_grad_()
    loss = closed(formula, features, anchors, y)
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert features.grad is not None
    assert not features.grad.any()
