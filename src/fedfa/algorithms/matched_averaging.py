"""Matched averaging: hidden units are put in the global model's order before they are averaged (FedMA's matching).

H. Wang, M. Yurochkin, Y. Sun, D. Papailiopoulos, Y. Khazaeni, *Federated Learning with Matched Averaging*, ICLR 2020.

The hidden units of a layer have no order: a permutation of them, undone in the next layer's inputs, is the same
network. Averaging unit i of one client with unit i of another may therefore mix different things. Here the server
aligns each client's units with the global model's, layer by layer from the input: with the inputs already in order, a
unit is its row of incoming weights and its bias, and the permutation that minimises the summed squared distances is
found exactly (a linear assignment). The aligned models are averaged as FedAvg does. Where another order is no better,
the client's stays.

This is FedMA's matching, not all of FedMA. The published method also lets layers grow (a Beta-Bernoulli prior decides
which units are new), and freezes and retrains layer after layer, so that one pass costs as many communications as there
are layers. Both are left out on purpose:

- Layers that grow change the network between rounds. Nothing else here does: rounds, memory and bytes would no longer
  compare with those of any other method, and nothing that is stored by name and shape (anchors, momenta, control
  variates) could stand beside it.
- Retraining per layer is another protocol, with as many rounds as layers and growing weights; at an equal number of
  rounds it would train one layer while the others train all.

What is to be expected: clients that start a round from the same weights seldom leave the order of that start, and
without a permutation this *is* FedAvg, bit for bit. It matters where local training is long or clients bring models of
their own.

Networks: a chain of Conv2d (without groups) and Linear layers with element-wise activations, pooling, dropout and
flattening between. Norms with per-channel tensors and residual connections tie units across layers and are refused, as
are layers that a client keeps or that are frozen. The chain is read off the network by tracing it once; its layers'
positions are the server's state.

Sends per client and round: |w| down, |w| up, as FedAvg. Server state: nothing more; it must see each client's update,
so secure sums are impossible and memory grows with the cohort. Extra compute, on the server per client and layer of u
units with f inputs: O(u² f + u³). What the server learns: what it learns in FedAvg without secure sums.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.nn import functional

from fedfa.algorithms.fedavg import FedAvg
from fedfa.errors import AlgorithmError
from fedfa.learning.component import Traits
from fedfa.learning.context import Role, ServerStep, Task
from fedfa.learning.tensors import Tensors

Array = NDArray[np.float64]

# What commutes with a permutation of the units: it treats every unit alike and mixes none.
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity,
)  # fmt: skip
_FUNCTIONS = (
    torch.relu, torch.tanh, torch.sigmoid, functional.relu, functional.relu6, functional.leaky_relu, functional.elu,
    functional.gelu, functional.silu, functional.softplus, functional.max_pool2d, functional.avg_pool2d,
    functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d, functional.dropout, functional.dropout2d,
)  # fmt: skip
_METHODS = ("relu", "tanh", "sigmoid", "contiguous")


class MatchedAveraging(FedAvg):
    """The weighted mean of the clients' models, each in the global model's order."""

    name = "matching"
    traits = Traits(
        aggregates=True,
        shared_model=True,
        single_contributions=True,
        late="it matches the clients' networks, which an update to an older model does not give",
        excludes=dict.fromkeys(
            ("anchors", "fedproc", "fedproto", "moon"),
            "it compares features of different models unit by unit, and here the server changes the units' order",
        ),
    )

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Position of each layer in the chain; every layer must be trained and shared."""
        layers = layer_chain(task.model.module)
        for name in (f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")):
            if (role := task.roles.get(name, Role.SHARED)) is not Role.SHARED:
                raise AlgorithmError(
                    f"matching permutes the units of every layer, but {name!r} is {role.value}; it needs all layers "
                    "trained and shared"
                )
        _solver()
        return {layer: torch.tensor(number) for number, layer in enumerate(layers)}

    def step(self, server: ServerStep) -> None:
        """Align, then average."""
        group, positions = f"{self.name}/model", server.state[self.name]
        layers = sorted(positions, key=lambda layer: int(positions[layer]))
        names = [name for layer in layers for name in (f"{layer}.weight", f"{layer}.bias") if name in server.model]
        reference = {name: server.model[name].double().numpy() for name in names}
        server.update = server.aggregate.mean(group)
        for entry in (contribution[group] for contribution in server.aggregate.each):
            share = float(entry.weight / server.aggregate[group].weight) if entry.weight else 0.0
            if share == 0:
                continue
            client = {name: reference[name] + (entry.tensors[name].double() / entry.weight).numpy() for name in names}
            aligned = align(layers, reference, client)
            if aligned is not client:  # in the mean, exchange this client for its aligned form
                for name in names:
                    change = torch.from_numpy(aligned[name] - client[name])
                    server.update[name] = server.update[name] + share * change


def align(layers: Sequence[str], reference: Mapping[str, Array], client: Mapping[str, Array]) -> Mapping[str, Array]:
    """The client's weights with its hidden units in the reference's order; the same object if no order is better.

    Args:
        layers: Names of the layers from input to output; the units of the last one keep their places.
        reference: Weights to align with, by name.
        client: Weights to align.

    Example:
        >>> one = {"a.weight": np.array([[1.0], [2.0]]), "b.weight": np.array([[3.0, 4.0]])}
        >>> two = {"a.weight": np.array([[2.0], [1.0]]), "b.weight": np.array([[4.0, 3.0]])}
        >>> align(["a", "b"], one, two)["b.weight"].tolist()
        [[3.0, 4.0]]
    """
    solve = _solver()
    aligned, moved = dict(client), False
    for layer, following in pairwise(layers):
        weight, bias, next_weight = f"{layer}.weight", f"{layer}.bias", f"{following}.weight"
        units = len(aligned[weight])
        # Least squared distance is largest inner product: the lengths do not depend on the order.
        closeness = reference[weight].reshape(units, -1) @ aligned[weight].reshape(units, -1).T
        if bias in aligned:
            closeness += np.outer(reference[bias], aligned[bias])
        _, order = solve(closeness, maximize=True)
        gain = closeness[np.arange(units), order].sum() - closeness.trace()
        if gain <= 1e-12 * np.abs(closeness.diagonal()).sum():  # a tie (units that are equal) is no reason to move
            continue
        moved = True
        for name in (weight, bias):
            if name in aligned:
                aligned[name] = aligned[name][order]
        # A flattened map has the positions of one channel next to each other, so channels are the second axis here too.
        inputs = aligned[next_weight]
        aligned[next_weight] = inputs.reshape(len(inputs), units, -1)[:, order].reshape(inputs.shape)
    return aligned if moved else client


def layer_chain(module: nn.Module) -> list[str]:
    """Names of the Conv2d and Linear layers in the order in which the input passes them.

    Raises:
        AlgorithmError: The network is not such a chain; the message says where.

    Example:
        >>> layer_chain(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        ['0', '2']
    """
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # whatever a network's own code raises when it is given a symbol
        raise _not_a_chain(f"its forward pass cannot be traced ({type(error).__name__}: {error})") from error
    chain: list[str] = []
    present: fx.Node | None = None
    numbers: set[fx.Node] = set()  # sizes, which only shape what is passed on
    for node in graph.nodes:
        if node.op == "placeholder" and present is None:
            present = node
            continue
        if node.op == "output":
            if list(node.all_input_nodes) != [present]:
                raise _not_a_chain("it returns more than its last layer's output")
            continue
        if _is_size(node, present, numbers):
            numbers.add(node)
            continue
        if [source for source in node.all_input_nodes if source not in numbers] != [present]:
            raise _not_a_chain(f"{node.name!r} does not take the output before it and nothing else")
        _pass(node, module, chain)
        present = node
    parameters = dict(module.named_parameters())
    for layer, following in pairwise(chain):
        units, inputs = len(parameters[f"{layer}.weight"]), parameters[f"{following}.weight"].shape[1]
        if inputs % units:
            raise _not_a_chain(f"the {inputs} inputs of {following!r} are not those of {units} units of {layer!r}")
    return chain


def _pass(node: fx.Node, module: nn.Module, chain: list[str]) -> None:
    """Take in one operation: a layer joins the chain, what treats all units alike passes, all else is refused."""
    if node.op == "call_module":
        name = str(node.target)
        layer = module.get_submodule(name)
        if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1):
            if name in chain:
                raise _not_a_chain(f"{name!r} is used twice")
            chain.append(name)
        elif not isinstance(layer, _MODULES) and not (isinstance(layer, nn.Flatten) and layer.start_dim == 1):
            raise _not_a_chain(f"{name!r} is a {type(layer).__name__}")
    elif not (node.target in _FUNCTIONS or node.target in _METHODS or _flattens(node)):
        raise _not_a_chain(f"{node.name!r} is not an operation that treats all units alike")


def _flattens(node: fx.Node) -> bool:
    """Whether everything but the batch's axis becomes one axis."""
    if node.target in (torch.flatten, "flatten"):
        return node.args[1:] == (1,) or node.kwargs == {"start_dim": 1}
    sizes: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    return node.target in ("view", "reshape") and isinstance(sizes, Sequence) and len(sizes) == 2


def _is_size(node: fx.Node, present: fx.Node | None, numbers: set[fx.Node]) -> bool:
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return node.args[0] is present
    return node.target is operator.getitem and node.args[0] in numbers


def _not_a_chain(reason: str) -> AlgorithmError:
    return AlgorithmError(
        "matching needs a network that is a chain of Conv2d and Linear layers with activations, pooling and flattening "
        f"between, but {reason}; use another network (e.g. cnn-fmnist) or another method"
    )


def _solver() -> Any:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise AlgorithmError("matching needs scipy; install it with: pip install 'fedfa[data]'") from error
    return linear_sum_assignment
