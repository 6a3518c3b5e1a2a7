"""FedLC: the shift of the logits with numbers to check with a pencil, and what it does to clients that lack classes."""

from __future__ import annotations

from math import exp, inf, log
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms.fedlc import FedLC, label_margins, label_shift
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from tests.algorithms.toy import (
    CLASSES,
    HELD,
    assert_clients_leave_no_trace,
    assert_same_rounds,
    batch_of,
    client_context,
    toy_federation,
    toy_samples,
)

Form = Literal["margin", "log"]


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def calibrated(logits: Tensor, counts: list[int], **options: Any) -> Tensor:
    """The logits that enter the cross-entropy."""
    component = FedLC(**options)
    ctx = client_context(torch.zeros(len(counts), 2, dtype=torch.float64), counts)
    component.begin(ctx)
    return component.logits(ctx, batch_of(torch.zeros(len(logits), 2), [0] * len(logits)), logits)


# -- the shift ------------------------------------------------------------------------------------------------------
def test_the_margin_is_tau_times_the_inverse_fourth_root_of_the_count() -> None:
    """16^(1/4) = 2, 1^(1/4) = 1, 81^(1/4) = 3; τ = 3 gives margins 3/2, 3, 1, which are subtracted."""
    counts = numbers(16, 1, 81)
    assert_close(label_margins(counts, 3.0), numbers(1.5, 3, 1))
    assert_close(label_shift(counts, "margin", 3.0), numbers(-1.5, -3, -1))


def test_the_log_form_adds_tau_times_the_log_frequency() -> None:
    """6 and 2 of 8 samples: τ·log(3/4) and τ·log(1/4)."""
    assert_close(label_shift(numbers(6, 2), "log", 2.0), numbers(2 * log(0.75), 2 * log(0.25)))


@pytest.mark.parametrize("form", ["margin", "log"])
def test_an_absent_class_is_masked(form: Form) -> None:
    shift = label_shift(torch.tensor([4, 0, 4]), form)
    assert shift[1] == -inf
    assert shift[[0, 2]].isfinite().all()


def test_a_floor_stands_in_for_the_counts_below_it() -> None:
    """Floor 1/16: its margin is 2. In the log form, counts (6, 2, 0) with floor 1 become (6, 2, 1) of 9."""
    assert_close(label_shift(numbers(16, 0), "margin", 1.0, "floor", 1 / 16), numbers(-0.5, -2))
    assert_close(label_shift(numbers(6, 2, 0), "log", 1.0, "floor"), (numbers(6, 2, 1) / 9).log())
    below = label_shift(numbers(9, 1, 0), "margin", 1.0, "floor", 2.0)
    assert below[1] == below[2]  # one sample is not worth less than none


@pytest.mark.parametrize("form", ["margin", "log"])
def test_tau_zero_shifts_nothing_and_masks_nothing(form: Form) -> None:
    assert torch.equal(label_shift(torch.tensor([3, 0]), form, tau=0.0), torch.zeros(2))
    assert torch.equal(label_margins(torch.tensor([3, 0]), tau=0.0), torch.zeros(2))


@pytest.mark.parametrize("form", ["margin", "log"])
def test_clients_side_by_side_get_what_each_gets_alone(form: Form) -> None:
    """Counts of a client that holds nothing come out masked, not as NaN."""
    counts = torch.tensor([[5, 0, 2], [1, 1, 1], [0, 0, 0]])
    together = label_shift(counts, form)
    assert torch.equal(together, torch.stack([label_shift(one, form) for one in counts]))
    assert not together.isnan().any()


# -- the loss -------------------------------------------------------------------------------------------------------
def test_the_calibrated_loss_and_its_gradient_by_hand() -> None:
    """Logits (0, 0, 5), counts (16, 1, 0), label 1, τ = 1: margins ½ and 1, the third class is out.

    ℓ = −log(e^(−1) / (e^(−½) + e^(−1))) = log(1 + e^(½)). Softmax over the first two: p₁ = 1/(1 + e^(½)), p₀ = 1 − p₁;
    the gradient with respect to the logits is (p₀, p₁ − 1, 0).
    """
    logits = numbers([0, 0, 5]).requires_grad_()
    loss = functional.cross_entropy(calibrated(logits, [16, 1, 0]), torch.tensor([1]))
    loss.backward()
    p1 = 1 / (1 + exp(0.5))
    assert_close(loss.detach(), numbers(log(1 + exp(0.5))).squeeze())
    assert_close(logits.grad, numbers([1 - p1, p1 - 1, 0]))


@pytest.mark.parametrize("form", ["margin", "log"])
def test_the_rarer_class_pulls_harder(form: Form) -> None:
    """At equal logits |∂ℓ/∂f_y| = 1 − p_y, and calibration makes p_y smaller the rarer y is."""
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    functional.cross_entropy(calibrated(logits, [90, 10], form=form), torch.tensor([0, 1]), reduction="sum").backward()
    assert logits.grad is not None
    frequent, rare = logits.grad[0, 0].abs(), logits.grad[1, 1].abs()
    assert rare > 0.5 > frequent


@pytest.mark.parametrize("form", ["margin", "log"])
def test_equal_counts_shift_the_present_classes_alike(form: Form) -> None:
    """The softmax over the classes that are present does not see a constant."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 3)))
    all_present = calibrated(logits, [7, 7, 7], form=form)
    assert_close(all_present.softmax(-1), logits.softmax(-1))
    two_present = calibrated(logits, [7, 0, 7], form=form)
    assert_close(two_present[:, [0, 2]].softmax(-1), logits[:, [0, 2]].softmax(-1))


def test_the_logits_are_left_alone_at_tau_zero() -> None:
    assert Algorithm([FedLC(tau=0.0)]).hooks("logits") == []
    assert len(Algorithm([FedLC(tau=0.1)]).hooks("logits")) == 1


# -- whole rounds ---------------------------------------------------------------------------------------------------
def test_tau_zero_is_fedavg_to_the_last_bit() -> None:
    assert_same_rounds(toy_federation({"name": "fedlc", "fedlc": {"tau": 0.0}}), toy_federation("fedavg"))


def test_tau_one_is_not_fedavg() -> None:
    results = [toy_federation(name).train(0).contribution["fedavg/model"].tensors for name in ("fedlc", "fedavg")]
    assert not torch.equal(results[0]["hidden.weight"], results[1]["hidden.weight"])


@pytest.mark.parametrize("client", [0, 1, 2])
def test_a_client_does_not_touch_the_classifier_of_classes_it_lacks(client: int) -> None:
    """Without weight decay: masked logits have no gradient. With FedAvg these rows are pushed down."""
    lacking = [c for c in range(CLASSES) if c not in HELD[client]]
    for algorithm, still in (("fedlc", True), ("fedavg", False)):
        result = toy_federation(algorithm, weight_decay=0.0).train(client)
        change = result.contribution["fedavg/model"].tensors["classifier.weight"][lacking]
        assert bool((change == 0).all()) is still


def test_a_client_with_a_single_class_does_not_move() -> None:
    """Its softmax has one entry: loss 0 and gradient 0, not NaN."""
    x, _ = toy_samples(1)[0]
    federation = toy_federation("fedlc", [(x, np.full(len(x), 2))], weight_decay=0.0)
    result = federation.train(0)
    assert result.loss == 0.0
    assert all(bool((value == 0).all()) for value in result.contribution["fedavg/model"].tensors.values())


def test_a_floor_lets_a_client_with_a_single_class_learn() -> None:
    x, _ = toy_samples(1)[0]
    federation = toy_federation(
        {"name": "fedlc", "fedlc": {"absent": "floor"}}, [(x, np.full(len(x), 2))], weight_decay=0.0
    )
    result = federation.train(0)
    assert result.loss is not None
    assert result.loss > 0


def test_a_client_without_a_step_returns_no_change() -> None:
    federation = toy_federation("fedlc", batch_size=64, drop_last=True)
    assert all(bool((v == 0).all()) for v in federation.train(0).contribution["fedavg/model"].tensors.values())


def test_predictions_use_the_plain_logits() -> None:
    assert FedLC.predict is Component.predict


def test_bad_options_and_double_calibration_are_refused() -> None:
    with pytest.raises(ConfigError, match="tau"):
        toy_federation({"name": "fedlc", "fedlc": {"tau": -1.0}})
    with pytest.raises(AlgorithmError, match="logit calibration"):
        toy_federation("fedlc+fedetf")


def test_clients_leave_no_trace() -> None:
    assert_clients_leave_no_trace("fedlc")
