"""FedETF: the geometry of the fixed classifier, the balanced loss by hand, what moves in a round and what does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms.fedavg import FedAvg
from fedfa.algorithms.fedetf import FedETF, FrameHead
from fedfa.errors import AlgorithmError
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Role, Task
from fedfa.models.split import SplitModel
from tests.algorithms.toy import (
    CLASSES,
    FEATURES,
    INPUTS,
    Network,
    anchors_of,
    assert_clients_leave_no_trace,
    assert_same_bits,
    batch_of,
    client_context,
    toy_federation,
    toy_samples,
)


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def adapted(module: nn.Module, seed: int = 0, **options: Any) -> SplitModel:
    return FedETF(**options).adapt(SplitModel.of(module), np.random.default_rng(seed))


# -- the network ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (5, 6), (10, 64)])
def test_the_frame_is_a_simplex(classes: int, dim: int) -> None:
    """C rows of length one, every pair at cosine −1/(C−1), which is as far apart as C directions can be; sum zero."""
    frame = adapted(nn.Linear(dim, classes)).head.weight.detach().double()
    cosines = frame @ frame.T
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    assert_close(cosines, expected, rtol=0, atol=1e-5)
    assert_close(frame.sum(0), torch.zeros(dim, dtype=torch.float64), rtol=0, atol=1e-5)


def test_the_logits_are_beta_times_the_cosines_with_the_frame() -> None:
    model = adapted(Network().double(), beta=7.0)
    head = model.module.get_submodule("classifier")
    assert isinstance(head, FrameHead)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(4, INPUTS)))
    features, logits = model(x)
    hidden = model.module.get_submodule("hidden")(x).relu()
    cosines = functional.cosine_similarity(head.projection(hidden).unsqueeze(1), head.frame.weight, dim=-1)
    assert_close(logits, 7 * cosines, rtol=1e-6, atol=1e-6)
    assert_close(features @ head.frame.weight.T, logits)
    assert_close(features.norm(dim=-1), torch.full((4,), 7.0, dtype=torch.float64))


def test_the_projection_is_drawn_in_torch_s_range_without_its_global_generator() -> None:
    linears = [nn.Linear(100, 3) for _ in range(3)]
    before = torch.get_rng_state()
    models = [adapted(linear, seed) for linear, seed in zip(linears, (0, 0, 1), strict=True)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = ({n: v.clone() for n, v in model.state().items()} for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.frame.weight"], other["0.frame.weight"])
    projection = first["0.projection.weight"]
    assert projection.abs().max() <= 0.1
    assert projection.std() == pytest.approx(0.1 / 3**0.5, rel=0.05)  # of a uniform between ±0.1
    assert len(set(projection.flatten().tolist())) > 9000


class Nested(nn.Module):
    """The classifier is the last layer of a Sequential, and has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, 8)
        self.classifier = nn.Sequential(nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, CLASSES, bias=False))
        self.alias = self.classifier[2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.classifier[:2](self.body(x).flatten(1)).view(-1, self.alias.in_features)
        logits: Tensor = self.alias(x)
        return logits


@pytest.mark.parametrize(
    ("network", "head"),
    [
        (Network, "classifier.frame"),
        (Nested, "classifier.2.frame"),
        (lambda: nn.Linear(INPUTS, CLASSES), "0.frame"),
        (lambda: nn.Sequential(nn.Linear(INPUTS, 2), nn.Linear(2, CLASSES)), "1.frame"),
    ],
    ids=["attribute", "nested and aliased", "nothing but a classifier", "fewer features than classes"],
)
def test_any_network_gets_the_fixed_classifier(network: Callable[[], nn.Module], head: str) -> None:
    """And trains, with the frame untouched."""
    federation = toy_federation("fedetf", network=network)
    assert federation.model.head_name == head
    assert federation.model.num_classes == CLASSES
    assert federation.model.feature_dim >= CLASSES
    assert federation.training.roles[f"{head}.weight"] is Role.FROZEN
    assert [name for name, role in federation.training.roles.items() if role is Role.FROZEN] == [f"{head}.weight"]
    before = federation.state.model[f"{head}.weight"].clone()
    federation.round()
    assert torch.equal(federation.state.model[f"{head}.weight"], before)
    assert torch.equal(federation.model.head.weight, before)


def test_a_projection_narrower_than_the_classes_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"5 classes, and algorithm.fedetf.dim is 4"):
        adapted(Network(), dim=4)
    with pytest.raises(AlgorithmError, match="two classes or more"):
        adapted(nn.Linear(3, 1))


def test_width_and_bias_of_the_projection_can_be_chosen() -> None:
    state = adapted(Network(), dim=9, bias=False).state()
    assert state["classifier.projection.weight"].shape == (9, FEATURES)
    assert state["classifier.frame.weight"].shape == (CLASSES, 9)
    assert "classifier.projection.bias" not in state


# -- the balanced loss ----------------------------------------------------------------------------------------------
def balanced(logits: Tensor, counts: list[int], **options: Any) -> Tensor:
    component = FedETF(**options)
    ctx = client_context(torch.zeros(len(counts), 2, dtype=torch.float64), counts)
    component.begin(ctx)
    return component.logits(ctx, batch_of(torch.zeros(len(logits), 2), [0] * len(logits)), logits)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_balanced_loss_by_hand(gamma: float) -> None:
    """Logits (1, 2, 9), counts (3, 1, 0): −log(3^γ e / (3^γ e + e²)) for label 0; class 2 is out."""
    shifted = balanced(numbers([1, 2, 9]), [3, 1, 0], gamma=gamma, absent="mask")
    loss = functional.cross_entropy(shifted, torch.tensor([0]))
    assert_close(loss, numbers(-log(3**gamma * exp(1) / (3**gamma * exp(1) + exp(2)))).squeeze())


def test_an_absent_class_counts_as_one_sample_as_in_the_published_code() -> None:
    """Logits (1, 2, 0), counts (3, 1, 0): −log(3e / (3e + e² + 1)) for label 0."""
    loss = functional.cross_entropy(balanced(numbers([1, 2, 0]), [3, 1, 0]), torch.tensor([0]))
    assert_close(loss, numbers(-log(3 * exp(1) / (3 * exp(1) + exp(2) + 1))).squeeze())


def test_without_gamma_the_logits_are_left_alone() -> None:
    logits = numbers([1, 2, 9])
    assert balanced(logits, [3, 1, 0], gamma=0.0) is logits


def test_the_gradient_of_the_temperature_by_hand() -> None:
    """Two classes, frame (v, −v). With s = v·μ the logits are (βs, −βs), and at equal counts and label 0

    ℓ = log(1 + e^(−2βs)), so ∂ℓ/∂β = −2s σ(−2βs): negative while the sample is on its side, β grows.
    """
    model = adapted(nn.Linear(2, 2).double(), beta=0.5)
    head = model.module.get_submodule("0")
    assert isinstance(head, FrameHead)
    with torch.no_grad():
        head.projection.weight.copy_(torch.eye(2))
        assert head.projection.bias is not None
        head.projection.bias.zero_()
    v = head.frame.weight[0]
    x = (3 * v + 4 * numbers(-v[1], v[0])).unsqueeze(0)  # at cosine 0.6 with v
    functional.cross_entropy(model(x)[1], torch.tensor([0])).backward()
    s = 0.6
    assert_close(head.beta.grad, numbers(-2 * s / (1 + exp(2 * 0.5 * s))).squeeze(), rtol=1e-5, atol=1e-7)
    assert head.frame.weight.grad is None


# -- whole rounds ---------------------------------------------------------------------------------------------------
def test_the_frame_is_not_sent_and_everything_else_is_averaged() -> None:
    """The temperature like any weight: Σ n_i β_i / Σ n_i."""
    federation = toy_federation("fedetf", lr=0.1)
    before = {name: value.clone() for name, value in federation.state.model.items()}
    federation.round()
    betas, sizes = [], []
    for result in federation.results:
        sums = result.contribution["fedavg/model"]
        assert "classifier.frame.weight" not in sums.tensors
        betas.append(float(before["classifier.beta"] + sums.tensors["classifier.beta"] / sums.weight))
        sizes.append(float(sums.weight))
    assert len(set(betas)) == 3
    after = federation.state.model
    assert float(after["classifier.beta"]) == pytest.approx(np.average(betas, weights=sizes), rel=1e-12)
    for name, value in before.items():
        assert torch.equal(after[name], value) is (name == "classifier.frame.weight"), name


def test_masked_a_client_with_a_single_class_does_not_move() -> None:
    """Its balanced softmax has one entry."""
    x, _ = toy_samples(1)[0]
    result = toy_federation(
        {"name": "fedetf", "fedetf": {"absent": "mask"}}, [(x, np.full(len(x), 1))], weight_decay=0.0
    ).train(0)
    assert result.loss == 0.0
    assert all(bool((value == 0).all()) for value in result.contribution["fedavg/model"].tensors.values())


def test_it_learns() -> None:
    federation = toy_federation("fedetf", toy_samples(1)[2:], lr=0.3, weight_decay=0.0)
    losses = []
    for _ in range(8):
        federation.round()
        losses.append(federation.results[0].loss or 0.0)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("other", ["fedfa", "ccvr", "fedlc"])
def test_methods_that_train_the_classifier_or_shift_the_logits_too_are_refused(other: str) -> None:
    with pytest.raises(AlgorithmError, match=r"fedetf|classifier\.frame\.weight"):
        toy_federation({"name": f"{other}+fedetf"})


def test_fedfa_s_anchors_without_calibration_align_the_projected_features() -> None:
    """The anchor loss trains the projection, the anchors follow its features, and the frame stays as it is."""
    anchored, plain = (
        toy_federation({"name": name, **options})
        for name, options in (("fedfa+fedetf", {"calibration": {"when": "never"}}), ("fedetf", {}))
    )
    before, start = anchored.state, anchors_of(anchored)
    assert_same_bits(before.model, plain.state.model)
    after, other = anchored.round().model, plain.round().model
    moved = np.abs(anchors_of(anchored) - start).max(axis=1) > 1e-3
    assert moved.tolist() == [True, True, True, True, False], "no client holds the last class"
    different = {name for name, value in other.items() if not torch.equal(value, after[name])}
    assert different == set(other) - {"classifier.frame.weight"}
    assert torch.equal(after["classifier.frame.weight"], before.model["classifier.frame.weight"])


@pytest.mark.parametrize("algorithm", ["fedetf", "moon+fedetf"])
def test_a_resumed_run_goes_on_with_the_same_frame(algorithm: str, tmp_path: Path) -> None:
    """Two rounds and one more are three rounds, to the last bit; the record's network is the adapted one."""

    def config(rounds: int) -> Config:
        return Config.preset("digits-c2", {
            "rounds": rounds, "algorithm": {"name": algorithm}, "cohort": {"rate": 0.2}, "local": {"epochs": 1},
        })  # fmt: skip

    run(config(2), tmp_path / "stopped")
    resumed = run(config(3), tmp_path / "stopped", resume=True)
    whole = run(config(3), tmp_path / "whole")
    assert any(name.endswith("frame.weight") for name in whole.model)
    assert all(torch.equal(value, resumed.model[name]) for name, value in whole.model.items())
    assert resumed.metrics[-1]["accuracy"] == whole.metrics[-1]["accuracy"]


class OwnHead(Component):
    """Wants every client to have its own classifier."""

    name = "own-head"

    def roles(self, task: Task) -> Mapping[str, Role]:
        return dict.fromkeys(task.model.head_tensors, Role.LOCAL)


def test_a_component_that_gives_clients_their_own_classifier_is_refused() -> None:
    """A frame that is local would be trained."""
    algorithm = Algorithm([FedAvg(), FedETF(), OwnHead()])
    model = algorithm.adapt(SplitModel.of(Network()), seed=1)
    with pytest.raises(
        AlgorithmError, match=r"'fedetf' and 'own-head' want 'classifier.frame.weight' to be frozen and local"
    ):
        algorithm.with_roles(Task(model, CLASSES, 3, rounds=1))


def test_clients_leave_no_trace() -> None:
    assert_clients_leave_no_trace("fedetf")
