"""Named variants: the paper's text, its reference code, and what goes beyond it.

The reference code is that of FedFA's authors, who trained every method of their comparison with it. Its training
settings (``TRAINING``) therefore make the variant ``authors`` of every method; FedFA's own differences are below.
"""

from __future__ import annotations

from collections.abc import Mapping

Variants = Mapping[str, Mapping[str, object]]

TRAINING: Mapping[str, object] = {
    "local.lr_decay": 0.99,
    "data.normalise": "authors",
    "cohort.selection": "authors",
    "cohort.rounding": "down",
}
"""How the reference code trains every method, where that differs from the paper's text."""

COMMON: Variants = {"paper": {}, "authors": TRAINING}
"""Variants of every method."""

# In the reference code FedAvg alone has a weight decay ten times smaller than every other method.
FEDAVG: Variants = {"paper": {}, "authors": {**TRAINING, "local.weight_decay": 0.0001}}

FEDFA: Variants = {
    "default": {},
    # Beyond the paper: a final calibration on anchors of the final network itself.
    "plus": {"algorithm.final.steps": 1000},
    "paper": {
        "algorithm.anchors.loss": "sample",
        "algorithm.anchors.class_mean": "batch",
        "algorithm.anchors.average": "two-epochs",
        "algorithm.anchors.start": "zero",
        "algorithm.anchors.absent": "zero",
        "algorithm.anchors.weights": "size",
        "algorithm.calibration.optimiser": "sgd",
    },
    "authors": {
        **TRAINING,
        "algorithm.anchors.loss": "class",
        "algorithm.anchors.class_mean": "batch",
        "algorithm.anchors.average": "running",
        "algorithm.anchors.start": "received",
        "algorithm.anchors.absent": "keep",
        "algorithm.anchors.weights": "size",
        "algorithm.calibration.optimiser": "adam",
    },
}
