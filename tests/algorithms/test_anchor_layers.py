"""Anchors at several layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfa.algorithms.fedfa import Anchors, AnchorsOptions, pooled
from fedfa.algorithms.registry import build_recipe
from fedfa.errors import ModelError, RecipeError
from fedfa.learning.client import ClientTrainer, RoundPlan
from fedfa.learning.part import LocalTraining, Role, Task
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors, clone
from fedfa.models.split import SplitModel
from fedfa.studies.run import run
from fedfa.studies.settings import Settings
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
    part = Anchors(AnchorsOptions(layers=layers, **options))
    return part.init(Task(split(), 2, 3, 1), stream(1, "test"))


def test_each_layer_has_anchors_of_its_width_and_the_last_is_what_calibrates() -> None:
    state = state_of(("conv", "fc1", "fc2"))
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "anchors": (2, 4), "anchors.conv": (2, 3), "anchors.fc1": (2, 5),
    }  # fmt: skip
    torch.testing.assert_close(state["anchors.fc1"] @ state["anchors.fc1"].T, torch.eye(2))


def test_naming_only_the_last_layer_is_the_same_as_naming_none() -> None:
    assert torch.equal(state_of(("fc2",))["anchors"], state_of(())["anchors"])


def test_the_last_layer_must_enter_the_classifier() -> None:
    with pytest.raises(RecipeError, match="'fc1', must be the module whose output enters the classifier 'head'"):
        state_of(("fc2", "fc1"))


def test_an_unknown_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no module 'fc9'.*did you mean"):
        state_of(("fc9",))


def test_channels_are_averaged_over_the_image() -> None:
    image = torch.arange(8.0).reshape(1, 2, 2, 2)
    assert pooled(image).tolist() == [[1.5, 5.5]]
    assert pooled(torch.ones(3, 2)) is not None
    assert pooled(torch.ones(3, 2)).shape == (3, 2)


def test_the_loss_adds_the_distances_of_all_layers() -> None:
    """By hand, loss "sample", μ = 0.5, two samples of classes 0 and 1.

    Features (1, 0), (0, 3) and anchors (0, 0), (0, 1): distances 1 and 4. Inner outputs (2,), (2,) and anchors (0,),
    (1,): distances 4 and 1. Sums per sample 5 and 5, mean 5, times μ: 2.5.
    """
    part = Anchors(AnchorsOptions(layers=("inner", "last"), loss="sample", mu=0.5))
    anchors = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    context = client_context(anchors, [1, 1])
    context.received["anchors"]["anchors.inner"] = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    batch = batch_of([[1.0, 0.0], [0.0, 3.0]], [0, 1])
    batch.outputs["inner"] = torch.full((2, 1), 2.0, dtype=torch.float64)
    part.begin(context)
    assert float(part.loss(context, batch, torch.tensor(1.0))) == pytest.approx(1 + 2.5)
    part.after_step(context, batch)
    part.after_epoch(context)
    sums = part.contribute(context)["anchors"]
    assert set(sums.tensors) == {"anchors", "anchors.inner"}
    # λ = 0.5, start = the received anchors: (0 + 2)/2 and (1 + 2)/2, each times the client's two samples
    assert sums.tensors["anchors.inner"].tolist() == [[2.0], [3.0]]


def test_one_round_moves_the_anchors_of_every_layer() -> None:
    model = split()
    recipe = build_recipe("fedfa", {"anchors": {"layers": ["fc1", "fc2"]}})
    task = Task(model, 2, 1, 1)
    state, roles = recipe.init(task, 1), recipe.roles(task)

    class Data:
        size, label_counts = 6, torch.tensor([3, 3])
        x, y = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1] * 3)

        def batch(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.x[positions], self.y[positions]

    plan = RoundPlan(0, clone(model.state()), recipe.broadcast(state, 0), LocalTraining(1, 3, 0.1, 0, 0), 1, rounds=1)
    result = ClientTrainer(model, recipe, roles).train(plan, 0, Data(), {})
    sums = result.sums["anchors/anchors"].tensors
    for name in ("anchors", "anchors.fc1"):
        assert not torch.allclose(sums[name] / 6, state["anchors"][name])


def test_a_run_with_two_layers_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = Settings.preset(
        "digits-c2",
        {
            "rounds": 2, "device": "cpu", "model": {"name": "mlp", "options": {"hidden": [16, 8]}},
            "algorithm": {"recipe": "fedfa", "anchors": {"layers": ["fc1", "fc2"]}},
        },
    )  # fmt: skip
    whole = run(settings, tmp_path / "whole")
    run(settings.model_copy(update={"rounds": 1}), tmp_path / "parts")
    parts = run(settings, tmp_path / "parts", resume=True)
    assert all(torch.equal(whole.model[name], parts.model[name]) for name in whole.model)


def test_a_classifier_that_may_not_be_trained_cannot_be_calibrated() -> None:
    model = split()
    model.head.weight.requires_grad_(False)
    task = Task(model, 2, 1, 1)
    with pytest.raises(RecipeError, match=r"head\.weight of this network may not be trained.*when = \"never\""):
        build_recipe("fedfa").roles(task)
    assert build_recipe("fedfa", {"calibration": {"when": "never"}}).roles(task)["head.weight"] is Role.FROZEN
