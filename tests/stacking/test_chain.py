"""The gradient of a chain of layers, without a graph: that of autograd, and nothing of it is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.models.split import SplitModel
from fedfa.stacking.chain import Chain
from fedfa.stacking.stacked_model import StackedModel

CLIENTS, INPUTS, CLASSES = 3, 12, 5


def stacked(*layers: nn.Module) -> StackedModel:
    """Clients with different weights."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), *layers)
    model = StackedModel(SplitModel(module, str(len(layers))), CLIENTS)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_(0, 0.3)
    return model


def batch(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, and the gradient with respect to the log-softmax."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS, size + 2, INPUTS, generator=draw)[:, 1:-1]  # cut out, as batches are
    y = torch.randint(CLASSES, (CLIENTS, size), generator=draw)
    return x, y, -functional.one_hot(y, CLASSES).float() / size


def by_autograd(model: StackedModel, x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradients of each client's network alone."""
    networks = [_alone(model, k) for k in range(CLIENTS)]
    for network, own_x, own_y in zip(networks, x, y, strict=True):
        functional.cross_entropy(network(own_x), own_y).backward()
    each = [[parameter.grad for parameter in network.parameters()] for network in networks]
    return [torch.stack([one for one in of_all if one is not None]) for of_all in zip(*each, strict=True)]


def _alone(model: StackedModel, client: int) -> nn.Sequential:
    state = model.states()[client]
    network = nn.Sequential()
    for number, layer in enumerate(model.module.children()):
        if isinstance(layer, nn.Linear):
            alone = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            alone.load_state_dict({name: state[f"{number}.{name}"] for name in alone.state_dict()})
            network.append(alone)
        elif isinstance(layer, nn.ReLU):
            network.append(nn.ReLU())
    return network


def gradients(model: StackedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.module.parameters() if parameter.grad is not None]


def chain_of(model: StackedModel) -> Chain:
    assert model.chain is not None
    return model.chain


NETWORKS: dict[str, list[nn.Module]] = {
    "one layer": [nn.Linear(INPUTS, CLASSES)],
    "two": [nn.Linear(INPUTS, 7), nn.ReLU(), nn.Linear(7, CLASSES)],
    "no bias": [nn.Linear(INPUTS, 40, bias=False), nn.ReLU(), nn.Linear(40, CLASSES, bias=False)],
    "no ReLU between": [nn.Linear(INPUTS, 2), nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, CLASSES)],
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seen", [True, False])
def test_the_gradient_is_that_of_autograd_to_the_last_bit(name: str, seen: bool) -> None:
    model = stacked(*NETWORKS[name])
    for seed, size in enumerate((8, 1, 8, 3, 1)):  # what was prepared for a size is used again
        x, y, targets = batch(size, seed)
        features, logits, log_shares = chain_of(model).set_gradients(x, targets, seen=seen)
        expected = by_autograd(model, x, y)
        assert len(gradients(model)) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
        own_features, own_logits = model(x)
        assert torch.equal(features, own_features)
        assert torch.equal(logits, own_logits)
        assert torch.equal(log_shares, own_logits.log_softmax(-1))


def test_what_somebody_may_keep_is_not_overwritten_by_the_next_step() -> None:
    model = stacked(*NETWORKS["two"])
    x, _, targets = batch(8, 1)
    found = [*chain_of(model).set_gradients(x, targets), *gradients(model)]
    before = [tensor.clone() for tensor in found]
    chain_of(model).set_gradients(-x, targets)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


def test_the_losses_of_steps_that_nobody_sees_are_kept() -> None:
    model = stacked(*NETWORKS["two"])
    x, _, targets = batch(8, 1)
    shares = chain_of(model).set_gradients(x, targets, seen=False).log_shares
    before = shares.clone()
    chain_of(model).set_gradients(-x, targets, seen=False)
    assert torch.equal(shares, before)


@pytest.mark.parametrize("which", ["weight", "bias", ""])
def test_weights_that_moved_to_another_place_are_found_there(which: str) -> None:
    model = stacked(*NETWORKS["two"])
    x, y, targets = batch(8, 1)
    chain_of(model).set_gradients(x, targets, seen=False)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith(which):
                parameter.data = parameter.data * 2  # as Module.to does: the parameter stays, what it holds does not
    chain_of(model).set_gradients(x, targets, seen=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), by_autograd(model, x, y), strict=True))


def test_many_sizes_of_batches_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.stacking.chain._ROOM", 60_000)
    model = stacked(*NETWORKS["two"])
    workspaces = chain_of(model)._workspaces
    most = 0
    for size in range(1, 60):
        x, y, targets = batch(size, size)
        chain_of(model).set_gradients(x, targets, seen=False)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), by_autograd(model, x, y), strict=True))
        assert sum(workspace.nbytes for workspace in workspaces.values()) <= 60_000
        most = max(most, len(workspaces))
    assert most > 5
    assert all(workspace.nbytes <= 30_000 for workspace in workspaces.values())  # the largest were not cached


def test_pictures_are_taken_as_vectors() -> None:
    one, other = stacked(*NETWORKS["two"]), stacked(*NETWORKS["two"])
    x, _, targets = batch(8, 1)
    chain_of(one).set_gradients(x, targets)
    chain_of(other).set_gradients(x.reshape(CLIENTS, 8, 1, 3, 4), targets)
    assert all(torch.equal(a, b) for a, b in zip(gradients(one), gradients(other), strict=True))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_network_has_a_chain_of_its_own(again: Callable[[StackedModel], StackedModel]) -> None:
    model = stacked(*NETWORKS["two"])
    x, y, targets = batch(8, 1)
    chain_of(model).set_gradients(x, targets, seen=False)
    other = again(model)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.mul_(2)
    before = [gradient.clone() for gradient in gradients(model)]
    chain_of(other).set_gradients(x, targets, seen=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(other), by_autograd(other, x, y), strict=True))
