"""Anchors at several layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedfa.algorithms import Anchors, FedFA
from fedfa.algorithms.anchor_layers import aligned_features
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError, ModelError
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.context import LocalTraining, Role, Task
from fedfa.learning.random import stream
from fedfa.learning.round import Training
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel
from tests.algorithms.federation_harness import Federation, Samples
from tests.algorithms.toy import batch_of, client_context


class Net(nn.Module):
    """An image network whose layers have widths 3 (a convolution), 5 and 4 (what enters the classifier)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.fc1 = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4, 5), nn.ReLU())
        self.fc2 = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.fc2(self.fc1(self.conv(x))))
        return logits


def split() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel.of(Net(), example=torch.zeros(2, 1, 4, 4))


def state_of(layers: tuple[str, ...], **options: Any) -> Tensors:
    component = Anchors(layers=layers, **options)
    return component.init(Task(split(), 2, 3, 1), stream(1, "test"))


def test_each_layer_has_anchors_of_its_width_and_the_last_is_what_calibrates() -> None:
    state = state_of(("conv", "fc1", "fc2"))
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "anchors": (2, 4), "anchors.conv": (2, 3), "anchors.fc1": (2, 5),
    }  # fmt: skip
    torch.testing.assert_close(state["anchors.fc1"] @ state["anchors.fc1"].T, torch.eye(2))


def test_naming_only_the_last_layer_is_the_same_as_naming_none() -> None:
    assert torch.equal(state_of(("fc2",))["anchors"], state_of(())["anchors"])


def test_the_last_layer_must_enter_the_classifier() -> None:
    with pytest.raises(AlgorithmError, match="'fc1', must be the module whose output enters the classifier 'head'"):
        state_of(("fc2", "fc1"))


def test_an_unknown_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no module 'fc9'.*did you mean"):
        state_of(("fc9",))


def test_channels_are_averaged_over_the_image() -> None:
    batch = batch_of([[1.0, 0.0]], [0])
    batch.outputs.update(image=torch.arange(8.0).reshape(1, 2, 2, 2), vector=torch.ones(3, 2))
    aligned = aligned_features(batch, ("image", "vector", "last"))
    assert aligned["anchors.image"].tolist() == [[1.5, 5.5]]
    assert aligned["anchors.vector"].shape == (3, 2)


def test_the_loss_adds_the_distances_of_all_layers() -> None:
    """By hand, loss "sample", μ = 0.5, two samples of classes 0 and 1.

    Features (1, 0), (0, 3) and anchors (0, 0), (0, 1): distances 1 and 4. Inner outputs (2,), (2,) and anchors (0,),
    (1,): distances 4 and 1. Sums per sample 5 and 5, mean 5, times μ: 2.5.
    """
    component = Anchors(layers=("inner", "last"), per="sample", mu=0.5)
    anchors = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    context = client_context(anchors, [1, 1])
    context.broadcast["anchors"]["anchors.inner"] = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    batch = batch_of([[1.0, 0.0], [0.0, 3.0]], [0, 1])
    batch.outputs["inner"] = torch.full((2, 1), 2.0, dtype=torch.float64)
    component.begin(context)
    assert float(component.loss(context, batch, torch.tensor(1.0))) == pytest.approx(1 + 2.5)
    component.after_step(context, batch)
    component.after_epoch(context)
    sums = component.contribute(context)["anchors"]
    assert set(sums.tensors) == {"anchors", "anchors.inner"}
    # λ = 0.5, start = the received anchors: (0 + 2)/2 and (1 + 2)/2, each times the client's two samples
    assert sums.tensors["anchors.inner"].tolist() == [[2.0], [3.0]]


def test_one_round_moves_the_anchors_of_every_layer() -> None:
    draw = np.random.default_rng(1)
    data = Samples(draw.normal(size=(6, 1, 4, 4)), np.array([0, 1] * 3), classes=2, dtype=torch.float32)
    algorithm = FedFA(anchors=Anchors(layers=("fc1", "fc2")))
    federation = Federation(algorithm, split(), [data], LocalTraining(epochs=1, batch_size=3, lr=0.1, weight_decay=0))
    before = federation.state.components["anchors"]
    after = federation.round().components["anchors"]
    for name in ("anchors", "anchors.fc1"):
        assert not torch.allclose(after[name], before[name])


def test_a_run_with_two_layers_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = Config.preset(
        "digits-c2",
        {
            "rounds": 2, "device": "cpu", "model": {"name": "mlp", "options": {"hidden": [16, 8]}},
            "algorithm": {"name": "fedfa", "anchors": {"layers": ["fc1", "fc2"]}},
        },
    )  # fmt: skip
    whole = run(config, tmp_path / "whole")
    run(config.model_copy(update={"rounds": 1}), tmp_path / "resumed")
    resumed = run(config, tmp_path / "resumed", resume=True)
    assert all(torch.equal(whole.model[name], resumed.model[name]) for name in whole.model)


def test_a_classifier_that_may_not_be_trained_cannot_be_calibrated() -> None:
    model = split()
    model.head.weight.requires_grad_(False)
    task = Task(model, 2, 1, 1)

    def training(algorithm: Algorithm) -> Training:
        return Training(algorithm, algorithm.with_roles(task), seed=1)

    with pytest.raises(AlgorithmError, match=r"head\.weight of this network is not trained.*when = \"never\""):
        training(build_algorithm("fedfa")).init()
    uncalibrated = training(build_algorithm("fedfa", {"calibration": {"when": "never"}}))
    assert uncalibrated.init().round == 0
    assert uncalibrated.roles["head.weight"] is Role.FROZEN
