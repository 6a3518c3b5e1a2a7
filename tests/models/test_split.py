"""Unmodified networks as features and a linear classifier."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfa.errors import ModelError
from fedfa.models.split import SplitModel

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class HeadFirst(nn.Module):
    """The classifier is registered before the layers that it follows in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x))
        return logits


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5)
        self.tail = nn.ModuleDict({"classifier": nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.tail["classifier"](self.encoder(x).relu())
        return logits


class WithSoftmax(HeadFirst):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


def test_the_last_layer_registered_is_the_head_if_nothing_else_is_known() -> None:
    split = SplitModel.of(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert (split.head_name, split.feature_dim, split.num_classes) == ("2", 4, 2)


def test_a_head_that_is_not_registered_last_is_found_by_example() -> None:
    split = SplitModel.of(HeadFirst(), example=X)
    assert (split.head_name, split.feature_dim, split.num_classes) == ("fc", 4, 2)


def test_a_nested_head_is_found() -> None:
    split = SplitModel.of(Nested(), example=X)
    assert (split.head_name, split.feature_dim) == ("tail.classifier.1", 5)
    assert SplitModel.of(Nested(), head="tail.classifier.1").head_name == "tail.classifier.1"


@pytest.mark.parametrize("module", [HeadFirst(), Nested().eval(), nn.Sequential(nn.Linear(6, 2))])
def test_features_are_the_heads_input_with_their_graph(module: nn.Module) -> None:
    split = SplitModel.of(module, example=X)
    x = X.clone().requires_grad_()
    features, logits = split(x)
    assert torch.equal(logits, module(x))
    assert torch.allclose(split.head(features), logits)
    (gradient,) = torch.autograd.grad(features.square().sum(), x)
    assert gradient.abs().sum() > 0


def test_gradient_through_the_features_reaches_the_body_and_not_the_head() -> None:
    module = HeadFirst()
    features, _ = SplitModel.of(module, example=X)(X)
    features.square().sum().backward()
    assert module.fc.weight.grad is None
    assert module.body.get_parameter("0.weight").grad is not None


def test_finding_the_head_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    SplitModel.of(module, example=X)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(not layer._forward_hooks for layer in module.modules())


def test_the_graph_is_not_kept_alive() -> None:
    split = SplitModel.of(HeadFirst(), example=X)
    split(X)
    assert split._features is None


def test_something_after_the_head_is_refused_with_advice() -> None:
    with pytest.raises(ModelError, match=r"WithSoftmax.*raw logits of its last linear layer.*no softmax"):
        SplitModel.of(WithSoftmax(), example=X)


def test_a_network_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Sequential has no nn\.Linear"):
        SplitModel.of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()))


@pytest.mark.parametrize("example", [None, X])
def test_a_wrong_name_lists_the_right_ones(example: Tensor | None) -> None:
    with pytest.raises(ModelError, match=r"HeadFirst has no linear layer 'classifier'; .* fc, body\.0"):
        SplitModel.of(HeadFirst(), head="classifier", example=example)


def test_a_linear_layer_that_is_not_the_last_is_refused_as_head() -> None:
    with pytest.raises(ModelError, match=r"'body\.0'.*raw logits"):
        SplitModel.of(HeadFirst(), head="body.0", example=X)


def test_an_input_the_network_cannot_take_is_named() -> None:
    with pytest.raises(ModelError, match=r"HeadFirst does not accept inputs of shape \(7,\)"):
        SplitModel.of(HeadFirst(), example=torch.zeros(2, 7))


def test_images_of_the_wrong_size_are_named() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(2 * 24 * 24, 10))
    assert SplitModel.of(network, example=torch.zeros(2, 1, 28, 28)).feature_dim == 1152
    with pytest.raises(ModelError, match=r"Sequential does not accept inputs of shape \(1, 32, 32\)"):
        SplitModel.of(network, example=torch.zeros(2, 1, 32, 32))


def test_state_is_live_and_load_copies() -> None:
    split = SplitModel.of(HeadFirst(), head="fc")
    given = {"fc.bias": torch.tensor([5.0, 6.0])}
    split.load(given)
    assert split.state()["fc.bias"].tolist() == [5.0, 6.0]
    given["fc.bias"].zero_()
    assert split.state()["fc.bias"].tolist() == [5.0, 6.0]
    with torch.no_grad():
        split.head.bias.add_(1)
    assert split.state()["fc.bias"].tolist() == [6.0, 7.0]


def test_buffers_are_distinguished_from_weights() -> None:
    split = SplitModel.of(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)))
    assert split.buffer_names() == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert SplitModel.of(HeadFirst()).buffer_names() == set()


def test_a_head_without_bias_works() -> None:
    split = SplitModel.of(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False)), example=X)
    features, logits = split(X)
    assert torch.allclose(features @ split.head.weight.T, logits)


class WithExtraState(nn.Linear):
    """Keeps something that is not a tensor."""

    def get_extra_state(self) -> object:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None:
        """Nothing to put back."""


def test_state_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match="keep it in buffers"):
        SplitModel.of(nn.Sequential(WithExtraState(2, 2)))
