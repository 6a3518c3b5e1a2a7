"""A toy federation that both the real code and the transcription can run, and the plumbing to run the real code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.part import Batch, ClientContext, LocalTraining, Task
from fedfa.learning.random import stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total
from fedfa.learning.tensors import PartTensors, clone
from fedfa.models.split import SplitModel
from fedfa.studies.settings import Settings
from tests.algorithms.transcription import Array, ClientData, Index, Weights

INPUTS, FEATURES, CLASSES = 3, 6, 5
BATCH, EPOCHS = 4, 3
HELD: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2, 3))
"""Classes each client draws its samples from; nobody holds class 4."""
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


class Samples:
    """A client's samples as the client loop wants them."""

    def __init__(self, x: Array, y: Index, classes: int = CLASSES, dtype: torch.dtype = torch.float64) -> None:
        self.x, self.y = torch.from_numpy(x).to(dtype), torch.from_numpy(y)
        self.label_counts = torch.bincount(self.y, minlength=classes)

    @property
    def size(self) -> int:
        return len(self.y)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]


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


def toy_settings(algorithm: Mapping[str, Any], **local: Any) -> Settings:
    """Settings as a user would write them: the algorithm's table, and the toy's batches and epochs."""
    return Settings.resolve({
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
    """The toy's clients as the transcription wants them, with their batches of this round."""
    return [ClientData(x, y, shuffled(seed, round, i, len(y))) for i, (x, y) in enumerate(samples)]


class Runner:
    """The real server and client code around a toy network, with all clients in every round."""

    def __init__(
        self,
        settings: Settings,
        samples: Sequence[tuple[Array, Index]],
        weights: Weights | None = None,
        *,
        seed: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.settings, self.seed = settings, seed
        self.clients = [Samples(x, y, dtype=dtype) for x, y in samples]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Network().to(dtype)
        self.model = SplitModel.of(network)
        if weights is not None:
            self.model.load({name: torch.from_numpy(value) for name, value in weights.items()})
        self.recipe: Recipe = settings.recipe()
        task = Task(self.model, CLASSES, len(samples), rounds=2)
        self.roles = self.recipe.roles(task)
        parts: PartTensors = {
            part: {name: value.to(dtype) for name, value in tensors.items()}
            for part, tensors in self.recipe.init(task, seed).items()
        }
        self.state = ServerState(0, clone(self.model.state()), parts)
        self.trainer = ClientTrainer(self.model, self.recipe, self.roles)

    def plan(self, local: LocalTraining | None = None) -> RoundPlan:
        state = self.state
        received = self.recipe.broadcast(state.parts, state.round)
        return RoundPlan(
            state.round, state.model, received, local or self.settings.local.in_round(state.round), self.seed, rounds=2
        )

    def train(self, client: int, local: LocalTraining | None = None) -> ClientResult:
        return self.trainer.train(self.plan(local), client, self.clients[client], {})

    def play(self, order: Sequence[int] | None = None) -> ServerState:
        """One round; clients are added up in this order."""
        total = Total(keep_each=self.recipe.needs_each)
        for client in order if order is not None else range(len(self.clients)):
            total.add(self.train(client).sums)
        self.state = finish_round(self.recipe, self.roles, self.state, total, len(self.clients), self.seed)
        return self.state

    @property
    def anchors(self) -> Array:
        return as_array(self.state.parts["anchors"]["anchors"])


def as_array(tensor: Tensor) -> Array:
    assert tensor.dtype == torch.float64, f"dropped to {tensor.dtype}"
    array: Array = tensor.detach().numpy().copy()
    return array


def client_context(
    anchors: Tensor, label_counts: Sequence[int], *, lr: float = 0.1, batches: int = 1, bias: bool = True
) -> ClientContext:
    """A client in the middle of nowhere, for calling single hooks: a classifier of zeros, these anchors received."""
    classes, dim = anchors.shape
    head = nn.Linear(dim, classes, bias=bias).double()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return ClientContext(
        client=0, round=0, rounds=1, parameters={},
        model=SplitModel.of(head), start={}, received={"anchors": {"anchors": anchors}}, kept={},
        local=LocalTraining(epochs=1, batch_size=4, lr=lr, momentum=0.0, weight_decay=0.0), size=sum(label_counts),
        count_labels=lambda: torch.tensor(label_counts), num_classes=classes, draws=lambda: np.random.default_rng(0),
        batches_per_epoch=batches,
    )  # fmt: skip


def batch_of(features: Sequence[Sequence[float]] | Tensor, labels: Sequence[int] | Tensor) -> Batch:
    """A batch that has these features; inputs and logits do not matter."""
    h = torch.as_tensor(features, dtype=torch.float64)
    y = torch.as_tensor(labels)
    return Batch(x=h, y=y, index=torch.arange(y.shape[-1]), features=h, logits=torch.zeros(0))
