"""The toy task that both the real code and the transcription can run: its data, its network, its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.algorithms import Anchors
from fedfa.experiment.config import Config
from fedfa.learning.aggregate import flatten_contribution
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext, LocalTraining
from fedfa.learning.random import stream, torch_stream
from fedfa.learning.tensors import Tensors, clone, flatten
from fedfa.models.split import SplitModel
from tests.algorithms.federation_harness import Federation, Samples
from tests.algorithms.transcription import Array, ClientData, Index, Weights

INPUTS, FEATURES, CLASSES = 3, 6, 5
BATCH, EPOCHS = 4, 3
HELD: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2, 3))
"""Classes each client draws its samples from; no client holds class 4."""
SIZES = (11, 7, 13)
"""None is a multiple of the batch size, so every last batch is incomplete (the third one holds a single sample)."""


class Network(nn.Module):
    """One hidden layer and a linear classifier."""

    def __init__(self, inputs: int = INPUTS, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, features)
        self.classifier = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(functional.relu(self.hidden(x)))
        return logits


class Normalised(nn.Module):
    """The toy network with BatchNorm, whose statistics gather while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(INPUTS, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.classifier = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(self.hidden(x)).relu())
        return logits


def toy_samples(seed: int) -> list[tuple[Array, Index]]:
    """Inputs and labels of the clients: every class a client may hold occurs at least once, and their means differ."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, INPUTS))
    clients = []
    for held, size in zip(HELD, SIZES, strict=True):
        y = np.array([*held, *rng.choice(held, size - len(held))], dtype=np.int64)
        clients.append((centres[y] + 0.5 * rng.normal(size=(size, INPUTS)), y))
    return clients


def toy_weights(seed: int) -> Weights:
    """Initial weights with hidden biases that keep most ReLUs open, so that every term of the gradient is at work."""
    rng = np.random.default_rng(1000 + seed)
    return {
        "hidden.weight": rng.normal(size=(FEATURES, INPUTS)),
        "hidden.bias": 0.5 + 0.5 * rng.normal(size=FEATURES),
        "classifier.weight": 0.5 * rng.normal(size=(CLASSES, FEATURES)),
        "classifier.bias": 0.1 * rng.normal(size=CLASSES),
    }


def toy_config(algorithm: Mapping[str, Any], **local: Any) -> Config:
    """A config as a user would write it: the algorithm's table, and the toy's batches and epochs."""
    return Config.resolve({
        "algorithm": dict(algorithm), "local": {"batch_size": BATCH, "epochs": EPOCHS, **local},
    })  # fmt: skip


def shuffled(
    seed: int, round: int, client: int, size: int, batch: int = BATCH, epochs: int = EPOCHS
) -> list[list[Index]]:
    """The batches of a client's round, from the project's own stream."""
    rng = stream(seed, "shuffle", round, client)
    orders = [rng.permutation(size) for _ in range(epochs)]
    return [[order[start : start + batch] for start in range(0, size, batch)] for order in orders]


def transcribed_clients(samples: Sequence[tuple[Array, Index]], seed: int, round: int) -> list[ClientData]:
    """The toy's clients for the transcription, with their batches of this round."""
    return [ClientData(x, y, shuffled(seed, round, i, len(y))) for i, (x, y) in enumerate(samples)]


def toy_federation(
    algorithm: str | Mapping[str, Any] | Algorithm | Component,
    samples: Sequence[tuple[Array, Index]] | None = None,
    *,
    weights: Weights | None = None,
    network: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
    rounds: int = 4,
    **local: Any,
) -> Federation:
    """The toy's clients and network with a method.

    Args:
        algorithm: An expression, a config's table ``algorithm``, or the object.
        samples: The clients' inputs and labels; the toy's if left out.
        weights: Initial weights of the toy's network.
        network: Makes another network.
        dtype: Of inputs and network.
        seed: Of all random streams of the training; not of the initial weights.
        rounds: The planned number of rounds.
        local: Values of the local training that differ from the config's.
    """
    if isinstance(algorithm, Algorithm | Component):
        config, built = toy_config({"name": "fedavg"}, **local), Algorithm([]) + algorithm
    else:
        config = toy_config({"name": algorithm} if isinstance(algorithm, str) else algorithm, **local)
        built = config.build_algorithm()
    samples, training = toy_samples(1) if samples is None else samples, config.local
    if built.pools_data:  # one site does the work of all clients
        training = training.model_copy(update={"steps": sum(training.steps_on(len(y)) for _, y in samples)})
        samples = [(np.concatenate([x for x, _ in samples]), np.concatenate([y for _, y in samples]))]
    with torch_stream(0, "network"):
        split = SplitModel.of((network or Network)().to(dtype))
    if network is None:
        split.load({name: torch.from_numpy(value) for name, value in (weights or toy_weights(1)).items()})
    clients = [Samples(x, y, CLASSES, dtype) for x, y in samples]
    return Federation(built, split, clients, training, seed=seed, rounds=rounds)


def batches_of(federation: Federation, client: int) -> list[list[Tensor]]:
    """The positions in each batch of each epoch of a client's next round."""
    size, local = federation.clients[client].size, federation.local
    epochs = shuffled(federation.training.seed, federation.state.round, client, size, local.batch_size, local.epochs)
    return [[torch.from_numpy(batch) for batch in epoch] for epoch in epochs]


def anchors_of(federation: Federation) -> Array:
    """The anchors on the server."""
    return as_array(federation.state.components["anchors"]["anchors"])


def as_array(tensor: Tensor) -> Array:
    assert tensor.dtype == torch.float64, f"dropped to {tensor.dtype}"
    array: Array = tensor.detach().numpy().copy()
    return array


def client_context(
    anchors: Tensor, label_counts: Sequence[int], *, lr: float = 0.1, batches: int = 1, bias: bool = True
) -> ClientContext:
    """The context of a client, for single hooks: a classifier of zeros, these anchors in the broadcast."""
    classes, dim = anchors.shape
    head = nn.Linear(dim, classes, bias=bias).double()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return ClientContext(
        client=0, round=0, rounds=1, parameters={},
        model=SplitModel.of(head), start={}, broadcast={"anchors": {"anchors": anchors}}, client_state={},
        local=LocalTraining(epochs=1, batch_size=4, lr=lr, momentum=0.0, weight_decay=0.0), size=sum(label_counts),
        count_labels=lambda: torch.tensor(label_counts), num_classes=classes, make_rng=lambda: np.random.default_rng(0),
        batches_per_epoch=batches, components={"anchors": Anchors()},
    )  # fmt: skip


def batch_of(features: Sequence[Sequence[float]] | Tensor, labels: Sequence[int] | Tensor) -> Batch:
    """A batch that has these features; inputs and logits have no meaning."""
    h = torch.as_tensor(features, dtype=torch.float64)
    y = torch.as_tensor(labels)
    return Batch(x=h, y=y, index=torch.arange(y.shape[-1]), features=h, logits=torch.zeros(0))


LocalLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From features, logits, labels and positions of a batch to the loss."""


def features_of(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The features of the toy's network, written out."""
    return (x @ weights["hidden.weight"].T + weights["hidden.bias"]).relu()


def logits_of(weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """The classifier of the toy's network, written out."""
    return h @ weights["classifier.weight"].T + weights["classifier.bias"]


def descend(
    start: Tensors, data: Samples, epochs: Sequence[Sequence[Tensor]], lr: float, loss: LocalLoss
) -> tuple[Tensors, list[tuple[Tensor, Tensor]]]:
    """Plain gradient descent on a loss, by autograd: the trained weights, and each epoch's features and labels."""
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    seen = []
    for epoch in epochs:
        forward: list[tuple[Tensor, Tensor]] = []
        for index in epoch:
            h = features_of(weights, data.x[index])
            value = loss(h, logits_of(weights, h), data.y[index], index)
            gradients = torch.autograd.grad(value, list(weights.values()))
            with torch.no_grad():
                for weight, gradient in zip(weights.values(), gradients, strict=True):
                    weight.sub_(lr * gradient)
            forward.append((h.detach(), data.y[index]))
        seen.append((torch.cat([h for h, _ in forward]), torch.cat([y for _, y in forward])))
    return clone(weights), seen


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_same_rounds(one: Federation, other: Federation, rounds: int = 3) -> None:
    """Two federations whose global models are equal to the last bit after each of some rounds."""
    for _ in range(rounds):
        assert_same_bits(one.round().model, other.round().model)


def assert_clients_leave_no_trace(algorithm: str | Mapping[str, Any]) -> None:
    """One network serves all clients: nothing of one may reach another, nor may any write into the broadcast.

    Bit for bit, in the second round, when clients have state, with a network that has BatchNorm.
    """
    alone, after_others = (toy_federation(algorithm, network=Normalised, batch_size=8) for _ in range(2))
    alone.round()
    after_others.round()
    sent = clone(after_others.state.to_tensors())
    for client in (0, 1):
        after_others.train(client)
    one, other = alone.train(2), after_others.train(2)
    assert one.loss == other.loss
    assert_same_bits(flatten_contribution(other.contribution), flatten_contribution(one.contribution))
    assert_same_bits(flatten(other.client_state), flatten(one.client_state))
    assert_same_bits(after_others.state.to_tensors(), sent)
