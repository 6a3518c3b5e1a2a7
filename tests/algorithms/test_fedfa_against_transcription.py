"""The real client and server code against the numpy transcription, in double precision.

The same initial weights, anchors and batches go into both; whatever comes out must agree to rounding. The clients
differ in size, lack classes, and end every epoch with an incomplete batch (see :mod:`toy`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.algorithms import transcription as plain
from tests.algorithms.federation_harness import Federation
from tests.algorithms.toy import (
    CLASSES,
    FEATURES,
    SIZES,
    anchors_of,
    as_array,
    toy_federation,
    toy_samples,
    toy_weights,
    transcribed_clients,
)

SEEDS = (1, 2)
DEFAULT = plain.FedFA(
    anchor_loss="sum of class means over all classes",
    calibration="fresh Adam",
    class_mean="exact",
    momentum="running average",
    momentum_starts_from="the received anchors",
    not_held="as received",
)
VARIANTS: dict[str, plain.FedFA] = {"paper": plain.PAPER, "authors": plain.AUTHORS, "default": DEFAULT}

OTHER_NUMBERS: dict[str, Any] = {"lr": 0.2, "weight_decay": 0.05, "momentum": 0.9}
"""Far from the paper's: larger steps make a wrong factor stand out, and λ = 0.3 tells λ from 1 − λ."""
OTHER_ANCHORS = {"mu": 0.7, "momentum": 0.3}


def assert_same(real: plain.Array, transcribed: plain.Array) -> None:
    np.testing.assert_allclose(real, transcribed, rtol=1e-9, atol=1e-12)


def assert_same_model(real: dict[str, torch.Tensor], transcribed: plain.Weights) -> None:
    assert real.keys() == transcribed.keys()
    for name in real:
        assert_same(as_array(real[name]), transcribed[name])


def assert_rows_of_the_identity(anchors: plain.Array) -> None:
    rows = anchors.argmax(axis=1)
    assert len(set(rows)) == CLASSES
    np.testing.assert_array_equal(anchors, np.eye(FEATURES)[rows])


def rate(variant: str, lr: float, round: int) -> float:
    return plain.authors_rate(lr, round) if variant == "authors" else lr


@pytest.mark.parametrize("numbers", ["as named", "others"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", SEEDS)
class TestFedFA:
    @staticmethod
    def prepare(variant: str, numbers: str, seed: int) -> tuple[Federation, plain.Sgd, plain.FedFA]:
        algorithm: dict[str, Any] = {"name": "fedfa", "variant": variant}
        rules, local = VARIANTS[variant], {}
        if numbers == "as named":
            sgd = plain.Sgd(lr=0.01, weight_decay=0.001)
        else:
            algorithm, local = {**algorithm, "anchors": OTHER_ANCHORS}, OTHER_NUMBERS
            sgd, rules = plain.Sgd(**OTHER_NUMBERS), replace(rules, mu=0.7, lam=0.3)
        federation = toy_federation(algorithm, toy_samples(seed), weights=toy_weights(seed), seed=seed, **local)
        return federation, sgd, rules

    def test_one_round_of_each_client(self, variant: str, numbers: str, seed: int) -> None:
        federation, sgd, rules = self.prepare(variant, numbers, seed)
        weights, anchors = toy_weights(seed), anchors_of(federation)
        for client, data in enumerate(transcribed_clients(toy_samples(seed), seed, round=0)):
            result = federation.train(client)
            trained, estimate = plain.fedfa_client(weights, anchors, data, sgd, rules)

            change = result.contribution["fedavg/model"]
            assert float(change.weight) == SIZES[client]
            for name, value in change.tensors.items():
                np.testing.assert_allclose(
                    as_array(value), SIZES[client] * (trained[name] - weights[name]), rtol=1e-9, atol=1e-11
                )
            sent = result.contribution["anchors/anchors"]
            counts = np.bincount(data.y, minlength=CLASSES)[:, None].astype(np.float64)
            share = counts if rules.anchor_weights == "samples of the class" else np.float64(SIZES[client])
            np.testing.assert_array_equal(sent.weight.numpy(), share)
            assert_same(as_array(sent.tensors["anchors"]), share * estimate)

    def test_two_rounds_of_the_federation(self, variant: str, numbers: str, seed: int) -> None:
        federation, sgd, rules = self.prepare(variant, numbers, seed)
        weights, anchors = toy_weights(seed), anchors_of(federation)
        assert_rows_of_the_identity(anchors)
        for t in range(2):
            now = replace(sgd, lr=rate(variant, sgd.lr, t))
            weights, anchors = plain.fedfa_round(
                weights, anchors, transcribed_clients(toy_samples(seed), seed, t), now, rules
            )
            state = federation.round()
            assert state.round == t + 1
            assert_same_model(state.model, weights)
            assert_same(anchors_of(federation), anchors)


@pytest.mark.parametrize("weights", ["size", "count"])
@pytest.mark.parametrize("absent", ["keep", "zero"])
@pytest.mark.parametrize("start", ["zero", "received"])
@pytest.mark.parametrize("average", ["two-epochs", "running"])
@pytest.mark.parametrize("class_mean", ["batch", "exact"])
@pytest.mark.parametrize(("loss", "optimiser"), [("sample", "adam"), ("class", "sgd")])  # not paired so in any variant
def test_any_combination_of_the_switches(
    loss: str, optimiser: str, class_mean: str, average: str, start: str, absent: str, weights: str
) -> None:
    anchors_options = {
        **OTHER_ANCHORS, "loss": loss, "class_mean": class_mean, "average": average, "start": start, "absent": absent,
        "weights": weights,
    }  # fmt: skip
    rules = plain.FedFA(
        anchor_loss="mean over samples" if loss == "sample" else "sum of class means over all classes",
        calibration="SGD with the local rate" if optimiser == "sgd" else "fresh Adam",
        class_mean="eq. 6" if class_mean == "batch" else "exact",
        momentum="eq. 7" if average == "two-epochs" else "running average",
        momentum_starts_from="zero" if start == "zero" else "the received anchors",
        not_held="zero" if absent == "zero" else "as received",
        anchor_weights="samples" if weights == "size" else "samples of the class",
        mu=0.7,
        lam=0.3,
    )
    algorithm = {"name": "fedfa", "anchors": anchors_options, "calibration": {"optimiser": optimiser}}
    federation = toy_federation(algorithm, **OTHER_NUMBERS)
    weights_and_anchors = plain.fedfa_round(
        toy_weights(1),
        anchors_of(federation),
        transcribed_clients(toy_samples(1), 1, 0),
        plain.Sgd(**OTHER_NUMBERS),
        rules,
    )
    state = federation.round()
    assert_same_model(state.model, weights_and_anchors[0])
    assert_same(anchors_of(federation), weights_and_anchors[1])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("variant", ["paper", "authors"])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_rounds_of_fedavg(seed: int, variant: str, weighting: Literal["samples", "uniform"]) -> None:
    algorithm = {"name": "fedavg", "variant": variant, "fedavg": {"weighting": weighting}}
    federation = toy_federation(algorithm, toy_samples(seed), weights=toy_weights(seed), seed=seed)
    weights = toy_weights(seed)
    for t in range(2):
        # The published code gives FedAvg, and only FedAvg, a tenth of the weight decay.
        sgd = plain.Sgd(lr=rate(variant, 0.01, t), weight_decay=0.0001 if variant == "authors" else 0.001)
        weights = plain.fedavg_round(weights, transcribed_clients(toy_samples(seed), seed, t), sgd, weighting)
        assert_same_model(federation.round().model, weights)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_rounds_of_fedavg_with_momentum(seed: int) -> None:
    federation = toy_federation("fedavg", toy_samples(seed), weights=toy_weights(seed), seed=seed, **OTHER_NUMBERS)
    weights = toy_weights(seed)
    for t in range(2):
        clients = transcribed_clients(toy_samples(seed), seed, t)
        weights = plain.fedavg_round(weights, clients, plain.Sgd(**OTHER_NUMBERS))
        assert_same_model(federation.round().model, weights)


# -- the transcription itself: its derivatives by difference quotients, so that it is no second guess ---------------
@pytest.mark.parametrize("rules", VARIANTS.values(), ids=VARIANTS)
def test_the_transcribed_gradient_is_the_slope_of_the_objective(rules: plain.FedFA) -> None:
    (x, y), *_ = toy_samples(5)
    weights, anchors = toy_weights(5), np.random.default_rng(5).normal(size=(CLASSES, FEATURES))

    def objective(w: plain.Weights) -> float:
        _, h, logits = plain.forward(w, x)
        supervised = -np.mean(np.log(plain.softmax(logits)[np.arange(len(y)), y]))
        distance = np.sum((h - anchors[y]) ** 2, axis=1)
        if rules.anchor_loss == "mean over samples":
            aligned = np.mean(distance)
        else:
            aligned = sum(np.mean(distance[y == c]) for c in np.unique(y)) / CLASSES
        return float(supervised + rules.mu * aligned)

    slopes, _ = plain.gradient(weights, x, y, anchors, rules)
    assert_is_slope(objective, weights, slopes)


def test_the_transcribed_calibration_gradient_is_the_slope_of_eq_5() -> None:
    weights, anchors = toy_weights(6), np.random.default_rng(6).normal(size=(CLASSES, FEATURES))

    def eq_5(w: plain.Weights) -> float:
        logits = anchors @ w["classifier.weight"].T + w["classifier.bias"]
        return float(-np.mean(np.log(np.diag(plain.softmax(logits)))))

    assert_is_slope(eq_5, weights, plain.calibration_gradient(weights, anchors))


def assert_is_slope(function: Any, at: plain.Weights, slopes: plain.Weights) -> None:
    step = 1e-6
    for name, slope in slopes.items():
        measured = np.zeros_like(slope)
        for entry in np.ndindex(slope.shape):
            moved = np.zeros_like(slope)
            moved[entry] = step
            up, down = {**at, name: at[name] + moved}, {**at, name: at[name] - moved}
            measured[entry] = (function(up) - function(down)) / (2 * step)
        np.testing.assert_allclose(slope, measured, rtol=1e-6, atol=1e-8)
