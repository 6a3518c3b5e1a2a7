"""K networks as one compute what each computes alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from fedfa.models.split import SplitModel
from fedfa.models.zoo import build_model
from fedfa.stacking.products import product, product_calls
from fedfa.stacking.stacked_model import NotStackableError, StackedModel

SIZE = st.integers(1, 24) | st.sampled_from([1, 100, 257])


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 5),
    rows=SIZE,
    inner=SIZE,
    columns=SIZE,
    with_bias=st.booleans(),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
@example(clients=3, rows=257, inner=8, columns=1, with_bias=False, turned=False, seed=0)
@example(clients=3, rows=257, inner=1, columns=128, with_bias=True, turned=False, seed=0)
@example(clients=3, rows=1, inner=200, columns=257, with_bias=False, turned=True, seed=0)
def test_stacked_products_have_the_bits_of_single_ones(
    clients: int, rows: int, inner: int, columns: int, with_bias: bool, turned: bool, seed: int
) -> None:
    """On both sides of the size at which torch changes its way (400); vectors too, which are multiplied otherwise."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(clients, rows, inner, generator=draw)
    left = torch.randn(clients, inner, rows, generator=draw).mT if turned else left  # as in a gradient
    right = torch.randn(clients, columns, inner, generator=draw).mT  # as a weight is used
    bias = torch.randn(clients, columns, generator=draw) if with_bias else None
    together = product(left, right, bias)
    again = torch.full_like(together, torch.nan)
    for call in product_calls(left, right, again, bias):
        call()
    assert torch.equal(again, together)
    for k in range(clients):
        alone = product(left[k], right[k], None if bias is None else bias[k])
        assert torch.equal(together[k], alone)
        assert_close(alone, left[k] @ right[k] + (0 if bias is None else bias[k]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(257, 1, 200), (257, 8, 1), (1, 200, 257), (1, 257, 1), (9, 9, 9)]
)
def test_gradients_of_stacked_products_have_the_bits_of_single_ones(rows: int, inner: int, columns: int) -> None:
    """Without a bias: an inner size of one adds nothing, but its gradients are products of vectors."""
    draw = torch.Generator().manual_seed(3)
    left = torch.randn(3, rows, inner, generator=draw, requires_grad=True)
    weight = torch.randn(3, columns, inner, generator=draw, requires_grad=True)
    weights = torch.randn(3, rows, columns, generator=draw)
    together = torch.autograd.grad(product(left, weight.mT), (left, weight), weights)
    for k in range(3):
        one, other = left[k].detach().requires_grad_(), weight[k].detach().requires_grad_()
        alone = torch.autograd.grad(product(one, other.mT), (one, other), weights[k])
        assert all(torch.equal(a[k], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("rows", [2, 40])
def test_a_matrix_that_all_share_counts_for_each(rows: int) -> None:
    draw = torch.Generator().manual_seed(1)
    shared, own = torch.randn(rows, 6, generator=draw), torch.randn(3, 6, 5, generator=draw)
    assert_close(product(shared, own), shared @ own)
    assert_close(product(own.mT, shared.T), own.mT @ shared.T)


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    grey, colour = torch.randn(3, 1, 28, 28), torch.randn(2, 3, 32, 32)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    tied[2].weight = tied[0].weight
    return {
        "mlp": (build_model("mlp", (1, 28, 28), 10), grey),
        "logistic": (build_model("logistic", (7,), 3), torch.randn(4, 7)),
        "cnn-fmnist": (build_model("cnn-fmnist", (1, 28, 28), 10), grey),
        "cnn-mixed-digits": (build_model("cnn-mixed-digits", (3, 28, 28), 10), torch.randn(2, 3, 28, 28)),
        "resnet18-gn": (build_model("resnet18-gn", (3, 32, 32), 10), colour),
        "no bias": (
            nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)),
            torch.randn(6, 5),
        ),
        "batch norm": (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.randn(6, 5)),
        "dropout": (nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)), torch.randn(6, 5)),
        "circular": (
            nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 2)),
            torch.randn(2, 1, 4, 4),
        ),
        "tied": (tied, torch.randn(3, 4)),
        "reshaping": (Reshaping(), torch.randn(4, 6)),
        "whole batch": (WholeBatch(), torch.randn(4, 6)),
        "dropout in forward": (DroppingOut().eval(), torch.randn(4, 6)),
        **{f"{kind} hook": (hooked(kind), torch.randn(4, 6)) for kind in ("forward", "backward", "weight")},
    }


def hooked(kind: str) -> nn.Module:
    """A network with a hook of its author's."""
    body, head = nn.Linear(6, 5), nn.Linear(5, 2)
    if kind == "forward":
        body.register_forward_hook(lambda _module, _args, _output: None)
    elif kind == "backward":
        head.register_full_backward_hook(lambda _module, _into, _out: None)
    else:
        body.weight.register_hook(lambda gradient: gradient / 2)
    return nn.Sequential(body, nn.ReLU(), head)


class Reshaping(nn.Module):
    """Takes the first axis for the samples, which in a stack it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        result: Tensor = self.head(hidden - hidden.mean(0))
        return result


class WholeBatch(Reshaping):
    """Uses a number that belongs to a whole batch: in a stack, to the batches of all networks."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x / x.abs().max()))
        return result


class DroppingOut(Reshaping):
    """Draws at random, but only in training."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(nn.functional.dropout(self.body(x), 0.5, self.training))
        return result


@pytest.mark.parametrize("name", ["mlp", "logistic", "cnn-fmnist", "cnn-mixed-digits", "resnet18-gn", "no bias"])
def test_outputs_and_gradients_are_those_of_each_network(name: str) -> None:
    module, example = networks()[name]
    model = SplitModel.of(module.double(), example=example.double())
    stacked = StackedModel(model, 2)
    draw = torch.Generator().manual_seed(2)
    states = [{n: (1 + 0.1 * k) * v + 0.01 * k for n, v in model.state().items()} for k in (1, 2)]
    inputs = torch.randn(2, *example.shape, generator=draw, dtype=torch.float64)
    stacked.load_each(states)
    features, logits = stacked(inputs)
    logits.square().sum().backward()
    gradients = {n: p.grad for n, p in stacked.module.named_parameters()}
    for k, state in enumerate(states):
        model.load(state)
        model.module.zero_grad()
        mine, scores = model(inputs[k])
        scores.square().sum().backward()
        assert_close(features[k], mine)
        assert_close(logits[k], scores)
        for n, parameter in model.module.named_parameters():
            found, expected = gradients[n], parameter.grad
            assert found is not None
            assert expected is not None
            assert_close(found[k], expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))
    for one, other in zip(stacked.states(), states, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in other)


def test_making_a_stack_leaves_the_network_as_it_was() -> None:
    module, example = networks()["mlp"]
    model = SplitModel.of(module, example=example)
    before = {name: value.clone() for name, value in model.state().items()}
    next(module.parameters()).requires_grad_(False)
    stacked = StackedModel(model, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state().items())
    assert [p.requires_grad for p in stacked.module.parameters()] == [p.requires_grad for p in module.parameters()]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("batch norm", r"no stacked form of BatchNorm1d \(1\)"),
        ("dropout", r"no stacked form of Dropout \(1\)"),
        ("circular", "padding_mode='circular'"),
        ("tied", r"weights that two layers share \(2\.weight\)"),
        ("reshaping", "Reshaping does not compute the same when stacked"),
        ("whole batch", "WholeBatch does not compute the same when stacked"),
        ("dropout in forward", "DroppingOut does not compute the same when stacked"),
        ("forward hook", r"no stacked form of hooks \(of 0\)"),
        ("backward hook", r"no stacked form of hooks \(of 2\)"),
        ("weight hook", r"no stacked form of hooks \(of 0\.weight\)"),
    ],
)
def test_what_cannot_be_stacked_is_refused(name: str, reason: str) -> None:
    module, example = networks()[name]
    model = SplitModel.of(module, example=example)
    before, mode = {n: value.clone() for n, value in model.state().items()}, module.training
    draws = torch.get_rng_state()
    with pytest.raises(NotStackableError, match=reason):
        StackedModel(model, 2)
    assert module.training == mode
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[n]) for n, value in model.state().items())


@pytest.mark.parametrize(("rows", "inner", "columns"), [(6, 8, 1), (3, 17, 9), (9, 9, 9), (64, 192, 10), (17, 64, 33)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_has_the_same_bits_wherever_in_memory_it_lies(
    rows: int, inner: int, columns: int, turned: bool
) -> None:
    """Not a matter of course: see the first lines of ``fedfa/__init__.py``."""
    draw = torch.Generator().manual_seed(1)
    left, weight = torch.randn(rows, inner, generator=draw), torch.randn(columns, inner, generator=draw)
    right = weight.mT if turned else weight.mT.contiguous()
    expected = torch.mm(left, right)
    for offset in range(1, 16):
        one, other, out = (_moved(each, offset) for each in (left, right, expected))
        assert torch.equal(torch.mm(one, other), expected)
        assert torch.equal(torch.mm(one, other, out=out), expected)


def _moved(tensor: Tensor, offset: int) -> Tensor:
    room = torch.empty(tensor.numel() + offset)[offset:]
    place = room.view(tensor.shape) if tensor.is_contiguous() else room.view(tensor.mT.shape).mT
    return place.copy_(tensor)
