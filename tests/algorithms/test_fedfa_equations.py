"""FedFA's equations with numbers small enough to check with a pencil, and each option's effect in isolation.

Two classes, features of two dimensions. Unless a test says otherwise the anchors are a₀ = (1, 0) and a₁ = (0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from fedfa.algorithms import Anchors, Calibration, FedFA
from fedfa.algorithms.anchor_kernels import AnchorBatch
from fedfa.algorithms.initial_anchors import initial_anchors
from fedfa.errors import AlgorithmError, FedfaError
from fedfa.learning.aggregate import Aggregate
from fedfa.learning.context import ClientContext, ServerStep
from tests.algorithms import transcription as plain
from tests.algorithms.federation_harness import Federation
from tests.algorithms.toy import (
    CLASSES,
    EPOCHS,
    FEATURES,
    SIZES,
    anchors_of,
    as_array,
    batch_of,
    client_context,
    toy_federation,
    toy_samples,
)

UNIT = torch.eye(2, dtype=torch.float64)


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- eq. 3 and 4: the anchor loss -----------------------------------------------------------------------------------
class TestAnchorLoss:
    """Three samples: (3, 0) and (1, 1) of class 0, (3, 1) of class 1.

    Squared distances to the anchor of their class: 2² + 0² = 4, 0² + 1² = 1, 3² + 0² = 9.
    """

    SAMPLES: Sequence[Sequence[float]] = ((3.0, 0.0), (1.0, 1.0), (3.0, 1.0))
    LABELS: Sequence[int] = (0, 0, 1)

    def loss(self, classes: int = 2, samples: slice = slice(None), **options: Any) -> Tensor:
        """The supervised loss is 2."""
        anchors = torch.eye(classes, 2, dtype=torch.float64)
        context = client_context(anchors, [2, 1, 0, 0][:classes])
        batch = batch_of(self.SAMPLES[samples], self.LABELS[samples])
        return Anchors(**options).loss(context, batch, numbers(2.0).squeeze())

    def test_mean_over_samples(self) -> None:
        """2 + 0.3 · (4 + 1 + 9) / 3 = 2 + 0.3 · 14/3 = 3.4."""
        assert_close(float(self.loss(loss="sample", mu=0.3)), 3.4)

    def test_the_paper_s_weight_is_the_default(self) -> None:
        """2 + 0.1 · 14/3 = 2.4666…"""
        assert_close(float(self.loss(loss="sample")), 2 + 1.4 / 3)

    def test_per_class(self) -> None:
        """Class means (4 + 1) / 2 = 2.5 and 9; their sum over both classes is 11.5 / 2 = 5.75; 2 + 0.4 · 5.75 = 4.3."""
        assert_close(float(self.loss(loss="class", mu=0.4)), 4.3)

    def test_per_class_divides_by_all_classes_also_absent_ones(self) -> None:
        """With four classes of which two are absent: 2 + 0.4 · 11.5 / 4 = 3.15."""
        assert_close(float(self.loss(classes=4, loss="class", mu=0.4)), 3.15)

    def test_per_class_with_one_class_in_the_batch(self) -> None:
        """Only the two samples of class 0: 2 + 0.4 · 2.5 / 2 = 2.5."""
        assert_close(float(self.loss(samples=slice(2), loss="class", mu=0.4)), 2.5)

    @pytest.mark.parametrize("form", ["sample", "class"])
    def test_mu_zero_leaves_the_loss_alone(self, form: str) -> None:
        assert float(self.loss(loss=form, mu=0.0)) == 2.0

    @pytest.mark.parametrize(
        ("form", "expected"),
        [
            # μ · 2 (h − a_y) / 3, with h − a_y = (2, 0), (0, 1), (3, 0) and μ = 0.3
            ("sample", [[0.4, 0.0], [0.0, 0.2], [0.6, 0.0]]),
            # μ · 2 (h − a_y) / n_y / C, with n_y = 2, 2, 1 and C = 2
            ("class", [[0.3, 0.0], [0.0, 0.15], [0.9, 0.0]]),
        ],
    )
    def test_gradient_pulls_the_features_to_their_anchor(self, form: str, expected: list[list[float]]) -> None:
        features = numbers(*self.SAMPLES).requires_grad_()
        component = Anchors(per=form, mu=0.3)
        batch = batch_of(features, self.LABELS)
        component.loss(client_context(UNIT, [2, 1]), batch, numbers(2.0).squeeze()).backward()
        assert_close(features.grad, numbers(*expected))

    def test_features_that_are_not_trained_are_not_pulled(self) -> None:
        batch = batch_of(self.SAMPLES, self.LABELS)
        assert not Anchors().loss(client_context(UNIT, [2, 1]), batch, numbers(2.0).squeeze()).requires_grad

    @pytest.mark.parametrize("form", ["sample", "class"])
    def test_clients_stacked_along_a_leading_axis(self, form: str) -> None:
        """Two clients at once: each gets the loss it would get alone."""
        component = Anchors(per=form, mu=0.3)
        features = torch.stack([numbers(*self.SAMPLES), 2 * numbers(*self.SAMPLES)])
        labels = torch.tensor([[0, 0, 1], [1, 0, 1]])
        context, zero = client_context(UNIT, [2, 1]), torch.zeros((), dtype=torch.float64)
        both = component.loss(context, batch_of(features, labels), torch.zeros(2, dtype=torch.float64))
        alone = [component.loss(context, batch_of(h, y), zero) for h, y in zip(features, labels, strict=True)]
        assert_close(both, torch.stack(alone))


# -- eq. 5: the calibration -----------------------------------------------------------------------------------------
def gradients_of_eq_5(anchors: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    found = AnchorBatch.of(anchors, bias is not None).gradient(weight, bias)
    width = weight.shape[-1]
    used = width if bias is None else width + 1
    assert not found[..., used:].any()
    return [found[..., :width]] if bias is None else [found[..., :width], found[..., width]]


class TestCalibrationGradient:
    def test_classifier_of_zeros(self) -> None:
        """P is ½ everywhere, so (P − I) / C = [[−¼, ¼], [¼, −¼]]; A is the identity; the bias' columns add up to 0."""
        weight, bias = gradients_of_eq_5(UNIT, torch.zeros(2, 2).double(), torch.zeros(2).double())
        assert_close(weight, numbers([-0.25, 0.25], [0.25, -0.25]))
        assert_close(bias, numbers(0.0, 0.0))

    def test_bias_that_prefers_class_0(self) -> None:
        """b = (ln 3, 0), so both rows of P are (¾, ¼) and (P − I) / 2 = [[−⅛, ⅛], [⅜, −⅜]].

        Weight: row z is Σ_c error_cz · a_c, i.e. the transpose: [[−⅛, ⅜], [⅛, −⅜]]. Bias: the columns' sums, (¼, −¼).
        """
        weight, bias = gradients_of_eq_5(UNIT, torch.zeros(2, 2).double(), numbers(log(3), 0.0))
        assert_close(weight, numbers([-1 / 8, 3 / 8], [1 / 8, -3 / 8]))
        assert_close(bias, numbers(0.25, -0.25))

    def test_without_bias_and_with_longer_anchors(self) -> None:
        """a₀ = (2, 0), a₁ = (0, 1), W = [[½ ln 3, 0], [0, 0]]: logits of a₀ are (ln 3, 0), P = (¾, ¼); of a₁ (½, ½).

        (P − I) / 2 = [[−⅛, ⅛], [¼, −¼]]; its transpose times A = [[−¼, ¼], [¼, −¼]].
        """
        anchors = numbers([2.0, 0.0], [0.0, 1.0])
        gradients = gradients_of_eq_5(anchors, numbers([log(3) / 2, 0.0], [0.0, 0.0]), None)
        assert len(gradients) == 1
        assert_close(gradients[0], numbers([-0.25, 0.25], [0.25, -0.25]))

    @pytest.mark.parametrize("with_bias", [True, False])
    def test_is_what_autograd_finds(self, with_bias: bool) -> None:
        draw = torch.Generator().manual_seed(3)
        anchors, weight, bias = (
            torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in [(4, 3), (4, 3), (4,)]
        )
        parameters = [p.clone().requires_grad_() for p in ([weight, bias] if with_bias else [weight])]
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(anchors, *parameters), torch.arange(4))
        expected = torch.autograd.grad(loss, parameters)
        found = gradients_of_eq_5(anchors, weight, bias if with_bias else None)
        assert_close(found, list(expected), rtol=1e-12, atol=1e-14)

    def test_clients_stacked_along_a_leading_axis(self) -> None:
        draw = torch.Generator().manual_seed(4)
        weight = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)
        bias = torch.randn(2, 3, generator=draw, dtype=torch.float64)
        anchors = torch.randn(3, 5, generator=draw, dtype=torch.float64)
        both = gradients_of_eq_5(anchors, weight, bias)
        for client in range(2):
            alone = gradients_of_eq_5(anchors, weight[client], bias[client])
            assert_close([both[0][client], both[1][client]], alone)


class TestCalibrationStep:
    @staticmethod
    def calibrate(context: ClientContext, **options: Any) -> tuple[Tensor, Tensor | None]:
        component = Calibration(**{"optimiser": "sgd", **options})
        component.begin(context)
        component.after_step(context, batch_of(UNIT, [0, 1]))
        bias = context.model.head.bias
        return context.model.head.weight.data, None if bias is None else bias.data

    def test_sgd_with_the_local_rate(self) -> None:
        """From zero with η = 0.1: −0.1 · [[−¼, ¼], [¼, −¼]]."""
        weight, bias = self.calibrate(client_context(UNIT, [1, 1], lr=0.1))
        assert bias is not None
        assert_close(weight, numbers([0.025, -0.025], [-0.025, 0.025]))
        assert_close(bias, numbers(0.0, 0.0))

    def test_sgd_moves_the_bias_too(self) -> None:
        """b = (ln 3, 0) has the gradient (¼, −¼); with η = 0.4 it moves by (−0.1, 0.1)."""
        context = client_context(UNIT, [1, 1], lr=0.4)
        context.model.head.bias.data.copy_(numbers(log(3), 0.0))
        weight, bias = self.calibrate(context)
        assert_close(weight, -0.4 * numbers([-1 / 8, 3 / 8], [1 / 8, -3 / 8]))
        assert_close(bias, numbers(log(3) - 0.1, 0.1))

    def test_sgd_with_a_rate_of_its_own(self) -> None:
        weight, _ = self.calibrate(client_context(UNIT, [1, 1], lr=0.1), lr=2.0)
        assert_close(weight, numbers([0.5, -0.5], [-0.5, 0.5]))

    def test_classifier_without_bias(self) -> None:
        weight, bias = self.calibrate(client_context(UNIT, [1, 1], lr=0.1, bias=False))
        assert bias is None
        assert_close(weight, numbers([0.025, -0.025], [-0.025, 0.025]))

    @pytest.mark.parametrize(("options", "rate"), [({}, 0.001), ({"lr": 0.02}, 0.02)])
    def test_adam_first_moves_by_its_rate_against_the_sign(self, options: dict[str, float], rate: float) -> None:
        """Adam's first step is lr · g / (|g| + ε): the rate itself, whatever the local one is, downhill."""
        weight, _ = self.calibrate(client_context(UNIT, [1, 1], lr=0.1), optimiser="adam", **options)
        assert_close(weight, rate * numbers([1.0, -1.0], [-1.0, 1.0]), rtol=1e-6, atol=0)

    def test_calibrating_with_adam_is_training_the_head_with_torch_s(self) -> None:
        """Five calibrations of a random head, the moments carried from one to the next."""
        context = client_context(numbers([1.0, 0.5], [-0.5, 2.0]), [1, 1])
        theirs = torch.nn.Linear(2, 2).double()
        context.model.load(theirs.state_dict())
        torch_adam = torch.optim.Adam(theirs.parameters(), lr=1e-3)
        component = Calibration(optimiser="adam")
        component.begin(context)
        for _ in range(5):
            torch_adam.zero_grad()
            logits = theirs(context.broadcast["anchors"]["anchors"])
            torch.nn.functional.cross_entropy(logits, torch.arange(2)).backward()
            torch_adam.step()
            component.after_step(context, batch_of(UNIT, [0, 1]))
        assert_close(context.model.head.weight.data, theirs.weight.data, rtol=1e-12, atol=1e-14)
        assert_close(context.model.head.bias.data, theirs.bias.data, rtol=1e-12, atol=1e-14)


class TestWhenToCalibrate:
    """With a local rate of 0 only the calibration moves the classifier, so its end tells the number of steps."""

    BATCHES = 3  # 11 samples, 4 at a time

    @pytest.mark.parametrize("steps_each", [1, 2])
    @pytest.mark.parametrize(
        ("when", "times"), [("step", EPOCHS * BATCHES), ("epoch", EPOCHS), ("before", 1), ("after", 1), ("never", 0)]
    )
    def test_number_of_steps(self, when: str, times: int, steps_each: int) -> None:
        calibration = {"when": when, "steps": steps_each, "lr": 0.3, "optimiser": "sgd"}
        federation = toy_federation({"name": "fedfa", "calibration": calibration})
        start = {name: as_array(value) for name, value in federation.state.model.items()}
        federation.local = federation.local.model_copy(update={"lr": 0.0, "weight_decay": 0.0})
        federation.train(0)
        expected = calibrated(start, anchors_of(federation), times * steps_each, lr=0.3)
        for name, value in federation.model.state().items():
            np.testing.assert_allclose(as_array(value), expected[name], rtol=1e-12, atol=1e-14)

    def test_before_is_fedavg_from_the_calibrated_classifier(self) -> None:
        federation = self.federation(when="before")
        start = {name: as_array(value) for name, value in federation.state.model.items()}
        fedavg = toy_federation("fedavg", weights=calibrated(start, anchors_of(federation), 1, lr=0.3))
        self.assert_same_end(federation, fedavg)

    def test_after_is_fedavg_and_then_a_calibration(self) -> None:
        federation, fedavg = self.federation(when="after"), toy_federation("fedavg")
        federation.train(0)
        fedavg.train(0)
        trained = {name: as_array(value) for name, value in fedavg.model.state().items()}
        expected = calibrated(trained, anchors_of(federation), 1, lr=0.3)
        for name, value in federation.model.state().items():
            np.testing.assert_allclose(as_array(value), expected[name], rtol=1e-12, atol=1e-14)

    @staticmethod
    def federation(when: str) -> Federation:
        components = {"anchors": {"mu": 0.0}, "calibration": {"when": when, "lr": 0.3, "optimiser": "sgd"}}
        return toy_federation({"name": "fedfa", **components})

    @staticmethod
    def assert_same_end(one: Federation, other: Federation) -> None:
        one.train(0)
        other.train(0)
        assert_close(one.model.state(), other.model.state(), rtol=1e-12, atol=1e-14)


def calibrated(w: plain.Weights, anchors: plain.Array, steps: int, lr: float) -> plain.Weights:
    w = dict(w)
    for _ in range(steps):
        for name, slope in plain.calibration_gradient(w, anchors).items():
            w[name] = w[name] - lr * slope
    return w


# -- eq. 6 and 7: the class features --------------------------------------------------------------------------------
Epoch = Sequence[tuple[Sequence[Sequence[float]], Sequence[int]]]


def class_features(epochs: Sequence[Epoch], broadcast: Tensor, counts: Sequence[int], **options: Any) -> Tensor:
    """What a client estimates after these epochs of batches of (features, labels)."""
    component = Anchors(**options)
    context = client_context(broadcast, counts, batches=len(epochs[0]))
    component.begin(context)
    for epoch in epochs:
        for features, labels in epoch:
            component.after_step(context, batch_of(features, labels))
        component.after_epoch(context)
    sent = component.contribute(context)["anchors"]
    return sent.tensors["anchors"] / sent.weight.clamp(min=1)


class TestAccumulation:
    """Two batches: (2, 0) and (4, 0) of class 0 with (0, 3) of class 1; then (6, 6) of class 0 alone.

    λ = 0, so that the estimate is the epoch's own m.
    """

    EPOCH: Epoch = (([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0]], [0, 0, 1]), ([[6.0, 6.0]], [0]))

    def test_eq_6(self) -> None:
        """Class 0: ((3, 0) + (6, 6)) / 2 = (4.5, 3). Class 1: (0, 3) / 2, since the batch without it counts in B."""
        m = class_features([self.EPOCH], UNIT, [3, 1], momentum=0.0, class_mean="batch", weights="size")
        assert_close(m, numbers([4.5, 3.0], [0.0, 1.5]))

    def test_exact_mean(self) -> None:
        """Class 0: ((2, 0) + (4, 0) + (6, 6)) / 3 = (4, 2). Class 1: (0, 3)."""
        m = class_features([self.EPOCH], UNIT, [3, 1], momentum=0.0, class_mean="exact", weights="size")
        assert_close(m, numbers([4.0, 2.0], [0.0, 3.0]))

    @pytest.mark.parametrize("form", ["batch", "exact"])
    def test_each_epoch_starts_anew(self, form: str) -> None:
        other: Epoch = (([[9.0, 9.0], [9.0, 9.0]], [0, 1]), ([[9.0, 9.0]], [1]))
        options = {"momentum": 0.0, "class_mean": form, "weights": "size"}
        once = class_features([self.EPOCH], UNIT, [3, 1], **options)
        assert_close(class_features([other, self.EPOCH], UNIT, [3, 1], **options), once)

    def test_exact_mean_of_a_class_absent_from_an_epoch_is_the_last_one(self) -> None:
        """Possible with drop_last. Class 1 had the mean (0, 3) in the first epoch and does not occur in the second."""
        second: Epoch = (([[1.0, 1.0]], [0]), ([[1.0, 1.0]], [0]))
        m = class_features([self.EPOCH, second], UNIT, [3, 1], momentum=0.0, class_mean="exact", weights="size")
        assert_close(m, numbers([1.0, 1.0], [0.0, 3.0]))

    def test_features_of_the_forward_pass_before_the_step(self) -> None:
        """One client, one step on all its samples, λ = 0: the estimate is the class mean of the *initial* features."""
        x, y = toy_samples(1)[0]
        federation = toy_federation(FedFA(momentum=0.0), [(x, y)], batch_size=SIZES[0], epochs=1, lr=0.5)
        initial = {name: as_array(value) for name, value in federation.state.model.items()}
        _, h, _ = plain.forward(initial, x)
        federation.round()
        for c in range(2):
            np.testing.assert_allclose(anchors_of(federation)[c], h[y == c].mean(axis=0), rtol=1e-12)


class TestMomentum:
    """λ = ¼. The received anchor of class 0 is (16, 0); its mean is (4, 2) in the first epoch, (8, 6) in the second."""

    RECEIVED = numbers([16.0, 0.0], [0.0, 1.0])
    FIRST: Epoch = (([[4.0, 2.0]], [0]),)
    SECOND: Epoch = (([[8.0, 6.0]], [0]),)

    @pytest.mark.parametrize("class_mean", ["batch", "exact"])
    @pytest.mark.parametrize(
        ("average", "start", "after_first", "after_second"),
        [
            # ¼·0 + ¾·(4, 2);  ¼·(4, 2) + ¾·(8, 6)
            ("two-epochs", "zero", (3.0, 1.5), (7.0, 5.0)),
            # ¼·(16, 0) + ¾·(4, 2);  ¼·(4, 2) + ¾·(8, 6): eq. 7 forgets the start after two epochs
            ("two-epochs", "received", (7.0, 1.5), (7.0, 5.0)),
            # ¼·0 + ¾·(4, 2);  ¼·(3, 1.5) + ¾·(8, 6)
            ("running", "zero", (3.0, 1.5), (6.75, 4.875)),
            # ¼·(16, 0) + ¾·(4, 2);  ¼·(7, 1.5) + ¾·(8, 6)
            ("running", "received", (7.0, 1.5), (7.75, 4.875)),
        ],
    )
    def test_one_and_two_epochs(
        self, average: str, start: str, after_first: Sequence[float], after_second: Sequence[float], class_mean: str
    ) -> None:
        options = {"momentum": 0.25, "average": average, "start": start, "class_mean": class_mean, "weights": "size"}
        assert_close(class_features([self.FIRST], self.RECEIVED, [1, 0], **options)[0], numbers(*after_first))
        both = class_features([self.FIRST, self.SECOND], self.RECEIVED, [1, 0], **options)
        assert_close(both[0], numbers(*after_second))

    def test_lambda_one_leaves_the_anchors_alone(self) -> None:
        """The paper: with λ = 1 the anchors are not updated (here: a running average from the received ones)."""
        estimate = class_features([self.FIRST, self.SECOND], self.RECEIVED, [1, 0], momentum=1.0, weights="size")
        assert torch.equal(estimate, self.RECEIVED)

    @pytest.mark.parametrize("average", ["two-epochs", "running"])
    def test_lambda_zero_takes_the_last_epoch(self, average: str) -> None:
        """The paper: with λ = 0 the anchors are the mean features of the last epoch."""
        last = class_features(
            [self.FIRST, self.SECOND], self.RECEIVED, [1, 0], momentum=0.0, average=average, weights="size"
        )
        assert_close(last[0], numbers(8.0, 6.0))

    @pytest.mark.parametrize(("absent", "expected"), [("keep", (0.0, 1.0)), ("zero", (0.0, 0.0))])
    @pytest.mark.parametrize("average", ["two-epochs", "running"])
    @pytest.mark.parametrize("start", ["zero", "received"])
    def test_class_not_held(self, absent: str, expected: Sequence[float], average: str, start: str) -> None:
        """Class 1, whose received anchor is (0, 1), has no sample: returned as received, or as zero."""
        options = {"absent": absent, "average": average, "start": start, "weights": "size"}
        estimate = class_features([self.FIRST, self.SECOND], self.RECEIVED, [1, 0], **options)
        assert torch.equal(estimate[1], numbers(*expected))


# -- the server's average of the anchors ----------------------------------------------------------------------------
class TestAveraging:
    """The anchors were a₀ = (1, 0) and a₁ = (8, 8).

    Client A has 2 samples of class 0 and 1 of class 1, and returns ā₀ = (1, 0), ā₁ = (0, 2).
    Client B has 1 sample, of class 0, and returns ā₀ = (5, 4).
    """

    OLD = numbers([1.0, 0.0], [8.0, 8.0])
    A: tuple[Epoch, Sequence[int]] = ((([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [0, 0, 1]),), [2, 1])
    B: tuple[Epoch, Sequence[int]] = ((([[5.0, 4.0]], [0]),), [1, 0])

    def next_anchors(self, *clients: tuple[Epoch, Sequence[int]], **options: Any) -> Tensor:
        component = Anchors(momentum=0.0, **options)
        total = Aggregate()
        for epoch, counts in clients:
            context = client_context(self.OLD, counts, batches=len(epoch))
            component.begin(context)
            for features, labels in epoch:
                component.after_step(context, batch_of(features, labels))
            component.after_epoch(context)
            total.add({f"anchors/{group}": entry for group, entry in component.contribute(context).items()})
        server = ServerStep(0, {}, {"anchors": {"anchors": self.OLD.clone()}}, total, 2, {}, np.random.default_rng(0))
        component.step(server)
        return server.state["anchors"]["anchors"]

    def test_by_client_size(self) -> None:
        """Sizes 3 and 1. a₀ = (3·(1, 0) + (5, 4)) / 4 = (2, 1); a₁ = (3·(0, 2) + (8, 8)) / 4 = (2, 3.5)."""
        found = self.next_anchors(self.A, self.B, weights="size", absent="keep")
        assert_close(found, numbers([2.0, 1.0], [2.0, 3.5]))

    def test_by_client_size_with_zeros_for_absent_classes(self) -> None:
        """a₁ = (3·(0, 2) + (0, 0)) / 4 = (0, 1.5)."""
        found = self.next_anchors(self.A, self.B, weights="size", absent="zero")
        assert_close(found, numbers([2.0, 1.0], [0.0, 1.5]))

    @pytest.mark.parametrize("absent", ["keep", "zero"])
    def test_by_count(self, absent: str) -> None:
        """a₀ = (2·(1, 0) + 1·(5, 4)) / 3 = (7/3, 4/3); only A speaks for class 1, so a₁ = (0, 2)."""
        found = self.next_anchors(self.A, self.B, weights="count", absent=absent)
        assert_close(found, numbers([7 / 3, 4 / 3], [0.0, 2.0]))

    @pytest.mark.parametrize(
        ("weights", "absent", "expected"),
        [
            ("count", "keep", (8.0, 8.0)),
            ("count", "zero", (8.0, 8.0)),
            ("size", "keep", (8.0, 8.0)),
            # The paper read literally: every client returns zero for a class it does not hold.
            ("size", "zero", (0.0, 0.0)),
        ],
    )
    def test_class_that_nobody_holds(self, weights: str, absent: str, expected: Sequence[float]) -> None:
        found = self.next_anchors(self.B, weights=weights, absent=absent)
        assert_close(found, numbers([5.0, 4.0], expected))

    def test_without_update_nothing_is_sent_and_nothing_changes(self) -> None:
        fixed = toy_federation(FedFA(anchors=Anchors(update=False)))
        before = anchors_of(fixed)
        result = fixed.train(0)
        assert list(result.contribution) == ["fedavg/model"], "something about features was sent"
        assert result.client_state == {}
        fixed.round()
        np.testing.assert_array_equal(anchors_of(fixed), before)
        renewed = toy_federation("fedfa")
        assert list(renewed.train(0).contribution) == ["fedavg/model", "anchors/anchors"]
        renewed.round()
        assert not np.array_equal(anchors_of(renewed), before)


# -- the initial anchors --------------------------------------------------------------------------------------------
class TestInitialAnchors:
    @staticmethod
    def make(init: str, classes: int = 4, dim: int = 6, seed: int = 0) -> Tensor:
        return initial_anchors(init, classes, dim, np.random.default_rng(seed))

    @pytest.mark.parametrize("init", ["orthogonal", "fedavg"])
    @pytest.mark.parametrize(("classes", "dim"), [(4, 6), (6, 6)])
    def test_distinct_rows_of_the_identity(self, init: str, classes: int, dim: int) -> None:
        anchors = self.make(init, classes, dim)
        rows = anchors.argmax(1)
        assert len(set(rows.tolist())) == classes
        assert torch.equal(anchors, torch.eye(dim)[rows])

    @pytest.mark.parametrize("init", ["orthogonal", "random"])
    def test_random_directions_if_there_are_more_classes_than_dimensions(self, init: str) -> None:
        anchors = self.make(init, classes=50, dim=3)
        assert anchors.shape == (50, 3)
        assert_close(anchors.norm(dim=1), torch.ones(50))
        assert len(torch.unique(anchors, dim=0)) == 50
        assert float(anchors.mean(0).norm()) < 0.5, "directions should not all point one way"

    def test_simplex_etf_is_as_far_apart_as_can_be(self) -> None:
        """C unit vectors with all inner products −1 / (C − 1)."""
        anchors = self.make("etf", classes=4, dim=6)
        assert_close(anchors @ anchors.T, torch.full((4, 4), -1 / 3) + (4 / 3) * torch.eye(4))

    def test_etf_needs_room(self) -> None:
        with pytest.raises(
            AlgorithmError, match=r"algorithm\.anchors\.init = \"etf\".*two classes.*as many features: 4 and 3"
        ):
            self.make("etf", classes=4, dim=3)
        with pytest.raises(AlgorithmError, match="two classes"):
            self.make("etf", classes=1, dim=3)

    @pytest.mark.parametrize("init", ["orthogonal", "random", "etf"])
    def test_follow_from_the_seed(self, init: str) -> None:
        assert torch.equal(self.make(init, seed=1), self.make(init, seed=1))
        assert not torch.equal(self.make(init, seed=1), self.make(init, seed=2))

    @pytest.mark.parametrize("name", ["anchors", "anchors/anchors"])
    def test_from_a_file(self, tmp_path: Path, name: str) -> None:
        anchors = torch.arange(24.0).reshape(4, 6)
        save_file({name: anchors, "model/fc.bias": torch.zeros(4)}, tmp_path / "server.safetensors")
        assert torch.equal(self.make(str(tmp_path / "server.safetensors")), anchors)

    def test_file_of_another_task(self, tmp_path: Path) -> None:
        save_file({"anchors": torch.zeros(10, 192)}, tmp_path / "server.safetensors")
        with pytest.raises(AlgorithmError, match=r"server\.safetensors.*\(10, 192\).*needs \(4, 6\)"):
            self.make(str(tmp_path / "server.safetensors"))

    def test_file_without_anchors(self, tmp_path: Path) -> None:
        save_file({"fc.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
        with pytest.raises(AlgorithmError, match=r"model\.safetensors holds no anchors"):
            self.make(str(tmp_path / "model.safetensors"))

    def test_neither_a_name_nor_a_file(self) -> None:
        with pytest.raises(AlgorithmError, match=r"algorithm\.anchors\.init = \"orthogonol\".*orthogonal, random, etf"):
            self.make("orthogonol")

    def test_file_of_another_kind(self, tmp_path: Path) -> None:
        """A user's mistake like any other: an error that names the file, not a traceback of the file's parser."""
        (tmp_path / "anchors.npy").write_bytes(b"\x93NUMPY and so on, but no tensors of ours")
        with pytest.raises(FedfaError, match=r"anchors\.npy"):
            self.make(str(tmp_path / "anchors.npy"))

    def test_the_algorithm_uses_them(self, tmp_path: Path) -> None:
        ideal = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
        save_file({"anchors": ideal}, tmp_path / "ideal.safetensors")
        init = str(tmp_path / "ideal.safetensors")
        federation = toy_federation(FedFA(anchors=Anchors(initial=init)))
        np.testing.assert_array_equal(anchors_of(federation), ideal.double().numpy())


# -- what FedFA is without its ingredients --------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestReducesToFedAvg:
    @staticmethod
    def models(algorithm: dict[str, Any], rounds: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        federation = toy_federation(algorithm, dtype=dtype)
        return [federation.round().model for _ in range(rounds)]

    @pytest.mark.parametrize("update", [True, False])
    def test_without_loss_and_calibration(self, dtype: torch.dtype, update: bool) -> None:
        """μ = 0 and no calibration: bit for bit FedAvg, whether or not anchors are gathered."""
        components = {"anchors": {"mu": 0.0, "update": update}, "calibration": {"when": "never"}}
        assert_identical(
            self.models({"name": "fedfa", **components}, 2, dtype), self.models({"name": "fedavg"}, 2, dtype)
        )

    @pytest.mark.parametrize("optimiser", ["sgd", "adam"])
    @pytest.mark.parametrize("when", ["step", "epoch", "before", "after"])
    def test_first_round_with_init_fedavg(self, dtype: torch.dtype, when: str, optimiser: str) -> None:
        """One round of FedAvg gathers the anchors: bit for bit FedAvg; from the second round on it is FedFA."""
        components = {"anchors": {"init": "fedavg"}, "calibration": {"when": when, "optimiser": optimiser}}
        fedfa = self.models({"name": "fedfa", **components}, 2, dtype)
        fedavg = self.models({"name": "fedavg"}, 2, dtype)
        assert_identical(fedfa[:1], fedavg[:1])
        assert not torch.equal(fedfa[1]["classifier.weight"], fedavg[1]["classifier.weight"])
        assert not torch.equal(fedfa[1]["hidden.weight"], fedavg[1]["hidden.weight"])

    def test_first_round_with_init_fedavg_gathers_the_anchors(self, dtype: torch.dtype) -> None:
        federation = toy_federation(FedFA(anchors=Anchors(initial="fedavg")), dtype=dtype)
        before = federation.state.components["anchors"]["anchors"].clone()
        after = federation.round().components["anchors"]["anchors"]
        changed = (after != before).any(1).tolist()
        assert changed == [True, True, True, True, False]  # no client holds the last class
        assert list(federation.plan().broadcast["anchors"]) == ["anchors"], "the second round must use the anchors"


def assert_identical(found: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name


def test_a_client_smaller_than_a_dropped_batch_does_nothing() -> None:
    """With drop_last a client may have no batch at all: its model is unchanged, it sends no features."""
    federation = toy_federation("fedfa", drop_last=True, batch_size=9)  # the second client holds 7 samples
    result = federation.train(1)
    assert result.steps == 0
    assert all(not value.any() for value in result.contribution["fedavg/model"].tensors.values())
    assert "anchors/anchors" not in result.contribution
