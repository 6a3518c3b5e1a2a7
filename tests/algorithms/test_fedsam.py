"""FedSAM against a SAM step written out, alone and with other components; and the recomputing of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import Anchors, Calibration, FedAvg, FedFA, FedProx, FedSAM
from fedfa.errors import ClientError
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext
from fedfa.learning.tensors import Tensors, clone
from tests.algorithms.federation_harness import Federation, Samples
from tests.algorithms.quadratics import Quadratics
from tests.algorithms.toy import (
    Normalised,
    assert_same_rounds,
    batches_of,
    features_of,
    logits_of,
    toy_federation,
)

LR, RHO = 0.1, 0.3


WholeLoss = Callable[[Tensors, Tensor, Tensor], Tensor]
"""From weights, inputs and labels to the local loss with all its terms."""


def written_out(start: Tensors, data: Samples, batches: list[list[Tensor]], loss: WholeLoss) -> Tensors:
    """Local training by SAM as its paper writes it, by autograd."""
    weights = clone(start)

    def gradient(at: Tensors, index: Tensor) -> Tensors:
        leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
        found = torch.autograd.grad(loss(leaves, data.x[index], data.y[index]), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    for index in (index for epoch in batches for index in epoch):
        slope = gradient(weights, index)
        length = torch.cat([value.flatten() for value in slope.values()]).norm()
        worst = {name: value + RHO * slope[name] / length for name, value in weights.items()}
        at_worst = gradient(worst, index)
        weights = {name: value - LR * at_worst[name] for name, value in weights.items()}
    return weights


def entropy(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits_of(weights, features_of(weights, x)), y)


def fedsam(algorithm: Algorithm | Component) -> Federation:
    return toy_federation(algorithm, lr=LR, weight_decay=0.0)


def assert_local_training_is(federation: Federation, loss: WholeLoss) -> None:
    for client, data in enumerate(federation.clients):
        start = federation.state.model
        expected = written_out(start, data, batches_of(federation, client), loss)
        update = federation.train(client).contribution["fedavg/model"]
        for name, value in expected.items():
            assert_close(update.tensors[name] / update.weight, value - start[name], rtol=1e-9, atol=1e-11)


def test_fedsam_alone_is_sam_on_the_cross_entropy() -> None:
    assert_local_training_is(fedsam(FedSAM(rho=RHO)), entropy)


@pytest.mark.parametrize("per", ["sample", "class"])
def test_fedsam_with_fedfa_recomputes_the_anchor_loss_too(per: Literal["sample", "class"]) -> None:
    """FedFA without its calibration, whose steps on the classifier are no part of the local loss."""
    fedfa = FedFA(anchors=Anchors(mu=0.7, per=per), calibration=Calibration(when="never"))
    federation = fedsam(fedfa + FedSAM(rho=RHO))
    anchors = federation.state.components["anchors"]["anchors"]

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        distances = (features_of(weights, x) - anchors[y]).square().sum(-1)
        if per == "sample":
            aligned = distances.mean()
        else:
            aligned = torch.stack([distances[y == c].mean() for c in y.unique()]).sum() / len(anchors)
        return entropy(weights, x, y) + 0.7 * aligned

    assert_local_training_is(federation, loss)


def test_fedsam_after_fedprox_recomputes_the_proximal_term_too() -> None:
    """FedProx adds the gradient of its term in the hook ``gradient``, not in the loss."""
    federation = fedsam(FedProx(mu=0.7) + FedSAM(rho=RHO))
    start = federation.state.model

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        apart = torch.stack([(value - start[name]).square().sum() for name, value in weights.items()]).sum()
        return entropy(weights, x, y) + 0.7 / 2 * apart

    assert_local_training_is(federation, loss)


def test_one_step_on_a_quadratic_by_hand() -> None:
    """f = ½·4·(w − 1)² from w = 0: g = −4, so the worst point within ρ = 0.25 is −0.25, where the gradient is −5."""
    federation = Quadratics(FedSAM(rho=0.25), [4], [1])
    federation.round()
    assert federation.value == pytest.approx(0.5, rel=1e-12)


def test_at_a_minimum_nothing_moves() -> None:
    """The gradient is zero and has no direction."""
    federation = Quadratics(FedSAM(rho=0.25), [4], [1], start=[1.0])
    federation.round()
    assert federation.value == 1.0


def test_without_a_radius_it_is_fedavg_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedSAM(rho=0)), toy_federation(FedAvg()))


def test_two_components_may_recompute() -> None:
    """The second one repeats the first, once per recomputation, without endless recursion."""
    calls: list[str] = []

    class Counting(Component):
        label: str

        def gradient(self, ctx: ClientContext, batch: Batch) -> None:
            calls.append(self.label)
            ctx.recompute_gradients(batch)

    class Second(Counting):
        name = "second"

    federation = fedsam(Counting(label="first") + Second(label="second"))
    plain = fedsam(FedAvg())
    assert_same_rounds(federation, plain, rounds=1)
    steps = sum(result.steps for result in federation.results)
    assert calls == ["first", "second", "first"] * steps


def test_a_recomputed_loss_is_the_loss_at_the_moved_weights() -> None:
    """Nothing moved: the same loss and the same gradients to the last bit, with BatchNorm in training mode."""
    seen: list[tuple[float, float]] = []

    class Again(Component):
        def gradient(self, ctx: ClientContext, batch: Batch) -> None:
            before = [p.grad.clone() for p in ctx.parameters.values() if p.grad is not None]
            seen.append((float(ctx.recompute_gradients(batch)), functional.cross_entropy(batch.logits, batch.y).item()))
            after = [p.grad for p in ctx.parameters.values() if p.grad is not None]
            assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))

    toy_federation(Again(), network=Normalised, batch_size=8).round()
    assert len(seen) > 10
    assert all(again == pytest.approx(first, rel=1e-12) for again, first in seen)


def test_gradients_cannot_be_recomputed_outside_the_hook_gradient() -> None:
    class Early(Component):
        def begin(self, ctx: ClientContext) -> None:
            zero = torch.zeros(1)
            ctx.recompute_gradients(Batch(zero, zero, zero, zero, zero))

    with pytest.raises(ClientError, match=r"recompute_gradients works in the hook `gradient` only.*test_fedsam\.py"):
        fedsam(Early()).round()
