"""FedAvg and FedFA once more, in plain numpy, for the tests to compare with.

Written from the paper's text and from what its published code is known to do, not from ``fedfa.algorithms``, which this
module must never import. Everything is double precision and spelled out: the network is one hidden layer, its
derivatives are written by hand, each optimiser is its update rule. Slow and plain on purpose.

Equations are numbered as in the paper: (3) anchor loss, (4) local objective, (5) calibration loss, (6) accumulation
over the batches of an epoch, (7) momentum over epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Index: TypeAlias = NDArray[np.int64]
Weights: TypeAlias = dict[str, Array]
"""``hidden.weight [d, inputs]``, ``hidden.bias [d]``, ``classifier.weight [C, d]``, ``classifier.bias [C]``."""


@dataclass(frozen=True)
class Sgd:
    """SGD as torch defines it: the weight decay is added to the gradient, the momentum starts as the gradient."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True)
class FedFA:
    """Where the paper's text and the authors' code part."""

    anchor_loss: Literal["mean over samples", "sum of class means over all classes"]
    calibration: Literal["SGD with the local rate", "fresh Adam"]
    class_mean: Literal["eq. 6", "exact"]
    momentum: Literal["eq. 7", "running average"]
    momentum_starts_from: Literal["zero", "the received anchors"]
    not_held: Literal["zero", "as received"]
    anchor_weights: Literal["samples", "samples of the class"] = "samples"
    mu: float = 0.1
    lam: float = 0.5


PAPER = FedFA(
    anchor_loss="mean over samples",
    calibration="SGD with the local rate",
    class_mean="eq. 6",
    momentum="eq. 7",
    momentum_starts_from="zero",
    not_held="zero",
)
AUTHORS = FedFA(
    anchor_loss="sum of class means over all classes",
    calibration="fresh Adam",
    class_mean="eq. 6",
    momentum="running average",
    momentum_starts_from="the received anchors",
    not_held="as received",
)


@dataclass(frozen=True)
class ClientData:
    """One client's samples and the order in which it sees them in a round: epochs of batches of positions."""

    x: Array
    y: Index
    epochs: Sequence[Sequence[Index]]


# -- the network ----------------------------------------------------------------------------------------------------
def softmax(logits: Array) -> Array:
    shifted: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def forward(w: Weights, x: Array) -> tuple[Array, Array, Array]:
    """What enters the ReLU, the features, the logits."""
    before = x @ w["hidden.weight"].T + w["hidden.bias"]
    h = np.maximum(before, 0.0)
    return before, h, h @ w["classifier.weight"].T + w["classifier.bias"]


def cross_entropy_slope(logits: Array, y: Index) -> Array:
    """Derivative of the mean cross-entropy of a batch by its logits: (p − one-hot) / n."""
    slope = softmax(logits)
    slope[np.arange(len(y)), y] -= 1.0
    return slope / len(y)


def anchor_slope(h: Array, y: Index, anchors: Array, rules: FedFA) -> Array:
    """Derivative of μ times the anchor loss (eq. 3, 4) by the features; ‖h − a‖² has the derivative 2 (h − a)."""
    difference = 2.0 * rules.mu * (h - anchors[y])
    if rules.anchor_loss == "mean over samples":
        return difference / len(y)
    in_batch = np.array([np.sum(y == label) for label in y], dtype=np.float64)
    return difference / in_batch[:, None] / len(anchors)


def gradient(w: Weights, x: Array, y: Index, anchors: Array | None, rules: FedFA | None) -> tuple[Weights, Array]:
    """Gradient of the local objective (eq. 4, or the cross-entropy alone), and the features of the batch."""
    before, h, logits = forward(w, x)
    by_logits = cross_entropy_slope(logits, y)
    by_h = by_logits @ w["classifier.weight"]
    if rules is not None:
        assert anchors is not None
        by_h = by_h + anchor_slope(h, y, anchors, rules)
    by_before = by_h * (before > 0.0)
    slopes = {
        "hidden.weight": by_before.T @ x,
        "hidden.bias": by_before.sum(axis=0),
        "classifier.weight": by_logits.T @ h,
        "classifier.bias": by_logits.sum(axis=0),
    }
    return slopes, h


def calibration_gradient(w: Weights, anchors: Array) -> Weights:
    """Gradient of eq. 5: all anchors as one batch of the classifier, each with its own class as label."""
    logits = anchors @ w["classifier.weight"].T + w["classifier.bias"]
    by_logits = cross_entropy_slope(logits, np.arange(len(anchors), dtype=np.int64))
    return {"classifier.weight": by_logits.T @ anchors, "classifier.bias": by_logits.sum(axis=0)}


# -- the client -----------------------------------------------------------------------------------------------------
def local_step(w: Weights, slopes: Weights, speed: Weights, sgd: Sgd) -> None:
    """One step of SGD on every weight, in place."""
    for name in w:
        slope = slopes[name] + sgd.weight_decay * w[name]
        speed[name] = sgd.momentum * speed[name] + slope if name in speed else slope
        w[name] = w[name] - sgd.lr * speed[name]


def adam_step(w: Weights, slopes: Weights, first: Weights, second: Weights, step: int) -> None:
    """Step number ``step`` (from 1) of Adam with lr 1e-3 and the usual betas, in place."""
    lr, beta1, beta2, epsilon = 1e-3, 0.9, 0.999, 1e-8
    for name, slope in slopes.items():
        first[name] = beta1 * first.get(name, np.zeros_like(slope)) + (1.0 - beta1) * slope
        second[name] = beta2 * second.get(name, np.zeros_like(slope)) + (1.0 - beta2) * slope**2
        unbiased_first = first[name] / (1.0 - beta1**step)
        unbiased_second = second[name] / (1.0 - beta2**step)
        w[name] = w[name] - lr * unbiased_first / (np.sqrt(unbiased_second) + epsilon)


def fedavg_client(broadcast: Weights, data: ClientData, sgd: Sgd) -> Weights:
    """One client's round of FedAvg."""
    w = dict(broadcast)
    speed: Weights = {}
    for batches in data.epochs:
        for batch in batches:
            slopes, _ = gradient(w, data.x[batch], data.y[batch], None, None)
            local_step(w, slopes, speed, sgd)
    return w


def fedfa_client(broadcast: Weights, anchors: Array, data: ClientData, sgd: Sgd, rules: FedFA) -> tuple[Weights, Array]:
    """One client's round of FedFA: Algorithm 1 between the two communications.

    Returns the trained weights and the client's estimate of the class features, one row per class.
    """
    C = len(anchors)
    w = dict(broadcast)
    speed: Weights = {}
    first: Weights = {}
    second: Weights = {}
    adam_steps = 0
    held = np.array([np.any(data.y == c) for c in range(C)])

    start = np.zeros_like(anchors) if rules.momentum_starts_from == "zero" else anchors.copy()
    epoch_means: list[Array] = [start]  # m^(0)
    running = start
    for batches in data.epochs:
        B = len(batches)
        m = np.zeros_like(anchors)
        sums, counts = np.zeros_like(anchors), np.zeros(C)
        for batch in batches:
            x, y = data.x[batch], data.y[batch]
            slopes, h = gradient(w, x, y, anchors, rules)
            local_step(w, slopes, speed, sgd)

            slopes = calibration_gradient(w, anchors)
            if rules.calibration == "fresh Adam":
                adam_steps += 1
                adam_step(w, slopes, first, second, adam_steps)
            else:
                for name, slope in slopes.items():
                    w[name] = w[name] - sgd.lr * slope

            for c in range(C):  # h is of the forward pass before the step
                of_class = h[y == c]
                if len(of_class) > 0:
                    m[c] += of_class.sum(axis=0) / (B * len(of_class))
                    sums[c] += of_class.sum(axis=0)
                    counts[c] += len(of_class)
        if rules.class_mean == "exact":
            m = sums / np.maximum(counts, 1.0)[:, None]
        epoch_means.append(m)
        running = rules.lam * running + (1.0 - rules.lam) * m

    if rules.momentum == "eq. 7":
        estimate = rules.lam * epoch_means[-2] + (1.0 - rules.lam) * epoch_means[-1]
    else:
        estimate = running
    absent = anchors if rules.not_held == "as received" else np.zeros_like(anchors)
    return w, np.where(held[:, None], estimate, absent)


# -- the server -----------------------------------------------------------------------------------------------------
def average(models: Sequence[Weights], weights: Sequence[float]) -> Weights:
    total = sum(weights)
    return {
        name: np.sum([share * model[name] for share, model in zip(weights, models, strict=True)], axis=0) / total
        for name in models[0]
    }


def fedavg_round(
    w: Weights, clients: Sequence[ClientData], sgd: Sgd, weighting: Literal["samples", "uniform"] = "samples"
) -> Weights:
    """One round of FedAvg with these clients."""
    trained = [fedavg_client(w, data, sgd) for data in clients]
    return average(trained, [float(len(data.y)) if weighting == "samples" else 1.0 for data in clients])


def fedfa_round(
    w: Weights, anchors: Array, clients: Sequence[ClientData], sgd: Sgd, rules: FedFA
) -> tuple[Weights, Array]:
    """One round of FedFA with these clients: the next model and the next anchors."""
    sizes = [float(len(data.y)) for data in clients]
    results = [fedfa_client(w, anchors, data, sgd, rules) for data in clients]
    model = average([trained for trained, _ in results], sizes)
    renewed = anchors.copy()
    for c in range(len(anchors)):
        counts = [float(np.sum(data.y == c)) for data in clients]
        shares = sizes if rules.anchor_weights == "samples" else counts
        if sum(shares) > 0:
            components = [share * estimate[c] for share, (_, estimate) in zip(shares, results, strict=True)]
            renewed[c] = np.sum(components, axis=0) / sum(shares)
    return model, renewed


def authors_rate(lr: float, round: int) -> float:
    """The published code's learning rate in a round counted from 0."""
    return float(lr * 0.99**round)
