"""The toy federation with clients that remember: what a method keeps on a client comes back in its next round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.part import Task
from fedfa.learning.random import torch_stream
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total, flatten_sums
from fedfa.learning.tensors import PartTensors, Tensors, clone, flatten
from fedfa.models.split import SplitModel
from tests.algorithms.toy import (
    CLASSES,
    FEATURES,
    INPUTS,
    Network,
    Samples,
    shuffled,
    toy_samples,
    toy_settings,
    toy_weights,
)
from tests.algorithms.transcription import Array, Index

LocalLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From features, logits, labels and positions of a batch to the loss."""


class Study:
    """Real clients and server around a small network in double precision, for any number of rounds and cohorts."""

    def __init__(
        self,
        algorithm: Mapping[str, Any],
        samples: Sequence[tuple[Array, Index]] | None = None,
        *,
        network: Callable[[], nn.Module] | None = None,
        seed: int = 1,
        rounds: int = 4,
        **local: Any,
    ) -> None:
        self.settings, self.seed, self.rounds = toy_settings(algorithm, **local), seed, rounds
        self.clients = [Samples(x, y) for x, y in (toy_samples(1) if samples is None else samples)]
        with torch_stream(seed, "network of the study"):
            split = SplitModel.of((network or Network)().double())
        if network is None:
            split.load({name: torch.from_numpy(value) for name, value in toy_weights(1).items()})
        self.recipe = self.settings.recipe()
        self.model = self.recipe.adapt(split, seed)
        task = Task(self.model, CLASSES, len(self.clients), rounds=rounds)
        self.roles = self.recipe.roles(task)
        self.state = ServerState(0, clone(self.model.state()), self.recipe.init(task, seed))
        self.trainer = ClientTrainer(self.model, self.recipe, self.roles)
        self.kept: dict[int, PartTensors] = {}

    def train(self, client: int) -> ClientResult:
        """A client's part of the present round; what it keeps is kept."""
        state, local = self.state, self.settings.local.in_round(self.state.round)
        received = self.recipe.broadcast(state.parts, state.round)
        plan = RoundPlan(state.round, state.model, received, local, self.seed, rounds=self.rounds)
        result = self.trainer.train(plan, client, self.clients[client], self.kept.get(client, {}))
        self.kept[client] = result.kept
        return result

    def play(self, cohort: Sequence[int] | None = None) -> list[ClientResult]:
        """One round with these clients (all of them if left out)."""
        results = [self.train(client) for client in (range(len(self.clients)) if cohort is None else cohort)]
        total = Total(keep_each=self.recipe.needs_each)
        for result in results:
            total.add(result.sums)
        self.state = finish_round(self.recipe, self.roles, self.state, total, len(self.clients), self.seed)
        return results

    def batches(self, client: int, **local: int) -> list[list[Tensor]]:
        """The positions in each batch of each epoch of this client's present round."""
        epochs = shuffled(self.seed, self.state.round, client, self.clients[client].size, **local)
        return [[torch.from_numpy(batch) for batch in epoch] for epoch in epochs]


def features_of(weights: Tensors, x: Tensor) -> Tensor:
    """What enters the toy network's classifier, written out."""
    return (x @ weights["hidden.weight"].T + weights["hidden.bias"]).relu()


def logits_of(weights: Tensors, h: Tensor) -> Tensor:
    """The toy network's classifier, written out."""
    return h @ weights["classifier.weight"].T + weights["classifier.bias"]


def descend(
    start: Tensors, data: Samples, epochs: Sequence[Sequence[Tensor]], lr: float, loss: LocalLoss
) -> tuple[Tensors, list[tuple[Tensor, Tensor]]]:
    """Plain gradient descent on a loss, by autograd: the trained weights, and each epoch's features and labels."""
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    seen = []
    for epoch in epochs:
        met: list[tuple[Tensor, Tensor]] = []
        for index in epoch:
            h = features_of(weights, data.x[index])
            value = loss(h, logits_of(weights, h), data.y[index], index)
            gradients = torch.autograd.grad(value, list(weights.values()))
            with torch.no_grad():
                for weight, gradient in zip(weights.values(), gradients, strict=True):
                    weight.sub_(lr * gradient)
            met.append((h.detach(), data.y[index]))
        seen.append((torch.cat([h for h, _ in met]), torch.cat([y for _, y in met])))
    return clone(weights), seen


def same_bits(one: Study, other: Study, rounds: int = 3) -> None:
    """Two studies whose global models are equal to the last bit after each of some rounds."""
    for _ in range(rounds):
        one.play()
        other.play()
        for name, value in one.state.model.items():
            assert torch.equal(value, other.state.model[name]), f"round {one.state.round}: {name}"


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


def clients_leave_no_trace(algorithm: Mapping[str, Any]) -> None:
    """One network serves all clients: nothing of one may reach another, nor may any write into what was sent.

    Bit for bit, in the second round, when clients have something they kept, with a network that has BatchNorm.
    """
    alone, after_others = (Study(algorithm, network=Normalised, batch_size=8) for _ in range(2))
    alone.play()
    after_others.play()
    sent = {name: value.clone() for name, value in after_others.state.to_tensors().items()}
    for client in (0, 1):
        after_others.train(client)
    one, other = alone.train(2), after_others.train(2)
    assert one.loss == other.loss
    for group, entry in flatten_sums(one.sums).items():
        assert torch.equal(entry, flatten_sums(other.sums)[group]), group
    for name, value in flatten(one.kept).items():
        assert torch.equal(value, flatten(other.kept)[name]), name
    for name, value in after_others.state.to_tensors().items():
        assert torch.equal(value, sent[name]), name
