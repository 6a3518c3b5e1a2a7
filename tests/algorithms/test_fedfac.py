"""FedFAC: the anchor loss on the sphere by hand, and the methods that it is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import Averaging, FedACG, TiedAnchors
from fedfa.algorithms.fedetf import FrameHead
from fedfa.algorithms.registry import expression_of
from fedfa.errors import AlgorithmError
from fedfa.models.split import SplitModel
from tests.algorithms.toy import assert_same_bits, assert_same_rounds, batch_of, client_context, toy_federation


def pull(features: torch.Tensor, anchors: torch.Tensor, labels: list[int], mu: float) -> torch.Tensor:
    batch = batch_of(features, labels)
    batch.logits = features @ anchors.T
    ctx = client_context(torch.zeros(len(anchors), 2, dtype=torch.float64), [1] * len(anchors))
    return TiedAnchors(mu=mu).loss(ctx, batch, torch.tensor(1.0, dtype=torch.float64))


def test_the_anchor_loss_by_hand() -> None:
    """Anchors ±e₁ (a simplex of two). Features (3, 4) at cosine 0.6 of class 0, (0, 2) at 0 of class 1:

    1 + μ · mean(2 − 1.2, 2 − 0) = 1 + 0.5 · 1.4, which is the mean squared distance of the unit features.
    """
    anchors = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    features = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    loss = pull(features, anchors, [0, 1], 0.5)
    assert float(loss) == pytest.approx(1.7, rel=1e-14)
    distances = (functional.normalize(features, dim=-1) - anchors).square().sum(-1)
    assert float(loss) == pytest.approx(1 + 0.5 * float(distances.mean()), rel=1e-14)


def test_the_anchor_loss_turns_features_and_leaves_their_length_and_the_temperature() -> None:
    """Its gradient with respect to β is zero, that of the features −2μ (a − (a·u) u) / ‖h‖: at right angles to u."""
    model = TiedAnchors(beta=5.0).adapt(SplitModel.of(nn.Linear(4, 3).double()), np.random.default_rng(0))
    head = model.module.get_submodule("0")
    assert isinstance(head, FrameHead)
    features, logits = model(torch.from_numpy(np.random.default_rng(1).normal(size=(1, 4))))
    batch = batch_of(features, [2])
    batch.logits = logits
    ctx = client_context(torch.zeros(3, 4, dtype=torch.float64), [1, 1, 1])
    loss = TiedAnchors(mu=0.3).loss(ctx, batch, torch.zeros((), dtype=torch.float64))
    gradient, of_beta = torch.autograd.grad(loss, [features, head.beta])
    a, u = head.frame.weight[2].detach(), functional.normalize(features.detach(), dim=-1)
    assert_close(gradient, -0.6 * (a - (u @ a) * u) / 5)
    assert float(of_beta) == pytest.approx(0, abs=1e-12)


def test_without_the_pull_it_is_its_parts_bit_for_bit() -> None:
    """But for the random stream from which the anchors are drawn, which is that of the component."""
    tied = toy_federation({"name": "fedfac", "tied": {"mu": 0.0}})
    parts = toy_federation("fedetf+fedacg+averaging")
    parts.state.model.update({name: value.clone() for name, value in tied.state.model.items()})
    assert_same_rounds(tied, parts)


def test_the_anchors_are_the_classifier_and_stay() -> None:
    federation = toy_federation("fedfac")
    before = federation.state.model["classifier.frame.weight"].clone()
    plain = toy_federation({"name": "fedfac", "tied": {"mu": 0.0}})
    for _ in range(2):
        federation.round()
        plain.round()
    assert_same_bits({"a": before}, {"a": federation.state.model["classifier.frame.weight"]})
    assert not torch.equal(federation.state.model["hidden.weight"], plain.state.model["hidden.weight"])


def test_the_object_has_the_name_of_the_method() -> None:
    assert expression_of(TiedAnchors() + FedACG() + Averaging())[0] == "fedfac"
    assert expression_of(FedACG() + Averaging())[0] == "fedacg+averaging"


@pytest.mark.parametrize("other", ["fedetf", "fedlc", "ccvr", "fedfa", "scaffold", "fedavgm"])
def test_what_would_train_the_anchors_or_has_another_server_step_is_refused(other: str) -> None:
    with pytest.raises(AlgorithmError):
        toy_federation(f"fedfac+{other}")
