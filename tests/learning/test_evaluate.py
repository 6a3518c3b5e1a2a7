from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedfa.learning.evaluate import evaluate
from fedfa.models.split import SplitModel

# The network hands its input through as logits: each row below says what is predicted and how surely.
INPUTS = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0], [2.0, 0, 0, 0]])
LABELS = torch.tensor([0, 1, 2, 2, 2])  # right, right, wrong, right, wrong; class 3 is not in the test set


def identity() -> SplitModel:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    return SplitModel.of(nn.Sequential(layer))


def unchanged(inputs: Tensor) -> Tensor:
    return inputs


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 500])
def test_numbers_by_hand(batch_size: int) -> None:
    found = evaluate(identity(), INPUTS, LABELS, unchanged, batch_size=batch_size)
    assert found.accuracy == 3 / 5
    assert found.class_accuracy == [1.0, 1.0, 1 / 3, None]
    assert found.domain_accuracy == {}
    others = math.log(math.exp(2) + 3)  # log of the sum of exponentials of a row
    assert found.loss == pytest.approx((3 * (others - 2) + 2 * others) / 5, rel=1e-6)


def test_accuracy_is_the_mean_over_domains() -> None:
    """One sample in the first domain, four in the second: (1/1 + 2/4) / 2, not 3/5."""
    found = evaluate(
        identity(), INPUTS, LABELS, unchanged, domains=torch.tensor([0, 1, 1, 1, 1]), domain_names=("mnist", "svhn")
    )
    assert found.domain_accuracy == {"mnist": 1.0, "svhn": 0.5}
    assert found.accuracy == 0.75
    assert found.class_accuracy == [1.0, 1.0, 1 / 3, None]


def test_a_single_domain_is_no_domain() -> None:
    found = evaluate(identity(), INPUTS, LABELS, unchanged, domains=torch.zeros(5), domain_names=("only",))
    assert (found.accuracy, found.domain_accuracy) == (3 / 5, {})


def test_a_domain_without_test_samples_does_not_spoil_the_mean() -> None:
    found = evaluate(identity(), INPUTS, LABELS, unchanged, domains=torch.zeros(5), domain_names=("a", "b"))
    assert found.accuracy == 3 / 5


def test_inputs_are_prepared_batch_by_batch() -> None:
    seen: list[int] = []

    def prepare(inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        return inputs.float() / 10

    found = evaluate(identity(), (INPUTS * 10).to(torch.uint8), LABELS, prepare, batch_size=2)
    assert seen == [2, 2, 1]
    assert found == evaluate(identity(), INPUTS, LABELS, unchanged)


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_evaluated_in_eval_mode_and_put_back(training: bool) -> None:
    network = SplitModel.of(nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    network.module.train(training)
    before = {name: value.clone() for name, value in network.state().items()}
    whole = evaluate(network, INPUTS, LABELS, unchanged)
    one_by_one = evaluate(network, INPUTS, LABELS, unchanged, batch_size=1)  # in training mode BatchNorm would refuse
    assert one_by_one.accuracy == whole.accuracy
    assert one_by_one.loss == pytest.approx(whole.loss, rel=1e-6)
    assert network.module.training is training
    assert all(torch.equal(before[name], value) for name, value in network.state().items())
