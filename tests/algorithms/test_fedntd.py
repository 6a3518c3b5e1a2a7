"""FedNTD: the divergence with numbers to check with a pencil, and local training written out."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, FedNTD
from fedfa.algorithms.fedntd import not_true_divergence
from tests.algorithms.toy import (
    assert_clients_leave_no_trace,
    assert_same_rounds,
    batches_of,
    descend,
    features_of,
    logits_of,
    toy_federation,
)


def test_the_divergence_by_hand() -> None:
    """Label 1 of three classes: over classes 0 and 2 the teacher has (¾, ¼), the student (½, ½).

    KL = ¾ log(¾/½) + ¼ log(¼/½) = ¾ log 3 − log 2. The logits of class 1 do not matter.
    """
    teacher = torch.tensor([[log(3.0), 50.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[1.0, -7.0, 1.0]], dtype=torch.float64)
    found = not_true_divergence(student, teacher, torch.tensor([1]), tau=1.0)
    assert float(found) == pytest.approx(0.75 * log(3) - log(2), rel=1e-12)


def test_the_temperature_divides_both_logits() -> None:
    """τ = 2 makes (log 9, 0) of the teacher (log 3, 0): the divergence of the test above."""
    teacher = torch.tensor([[log(9.0), 0.0, 5.0]], dtype=torch.float64)
    found = not_true_divergence(torch.zeros(1, 3, dtype=torch.float64), teacher, torch.tensor([2]), tau=2.0)
    assert float(found) == pytest.approx(0.75 * log(3) - log(2), rel=1e-12)


def test_it_never_moves_the_true_logit_and_vanishes_at_the_received_model() -> None:
    torch.manual_seed(0)
    logits, teacher = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 3, 1, 1])
    (gradient,) = torch.autograd.grad(
        not_true_divergence(logits.requires_grad_(), teacher, labels, 1.3).sum(), [logits]
    )
    assert not gradient[torch.arange(6), labels].any()
    assert_close(gradient.sum(1), torch.zeros(6, dtype=torch.float64))  # of a softmax: shifts do not matter
    assert_close(not_true_divergence(teacher, teacher, labels, 1.3), torch.zeros(6, dtype=torch.float64))
    two = not_true_divergence(logits[:, :2], teacher[:, :2], labels.clamp(max=1), 1.0)
    assert not two.any(), "of two classes only one is another"


def test_local_training_written_out() -> None:
    """Two rounds; the teacher of a round is the model that was sent in it."""
    federation = toy_federation(FedNTD(beta=0.7, tau=1.5), lr=0.1, weight_decay=0.0)
    for _ in range(2):
        start = federation.state.model
        for client, data in enumerate(federation.clients):
            teacher = logits_of(start, features_of(start, data.x))

            def loss(h: Tensor, scores: Tensor, y: Tensor, index: Tensor, teacher: Tensor = teacher) -> Tensor:
                own = functional.one_hot(y, scores.shape[1]).bool()
                p, q = (
                    (z / 1.5).masked_fill(own, float("-inf")).softmax(1)[~own].view(len(y), -1)
                    for z in (teacher[index], scores)
                )
                return functional.cross_entropy(scores, y) + 0.7 * (p * (p / q).log()).sum(1).mean()

            expected, _ = descend(start, data, batches_of(federation, client), 0.1, loss)
            update = federation.train(client).contribution["fedavg/model"]
            for name, value in expected.items():
                assert_close(update.tensors[name] / update.weight, value - start[name], rtol=1e-9, atol=1e-11)
        federation.round()


def test_without_beta_it_is_fedavg_and_clients_leave_no_trace() -> None:
    assert_same_rounds(toy_federation(FedNTD(beta=0)), toy_federation(FedAvg()))
    assert_clients_leave_no_trace("fedntd")
