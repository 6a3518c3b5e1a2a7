"""Small pieces to train with: data, networks, parts that write down what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.algorithms.fedavg import Averaging
from fedfa.learning.client import ClientTrainer, RoundPlan
from fedfa.learning.part import LocalTraining, Part, Role, Task
from fedfa.learning.random import torch_stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.tensors import PartTensors, clone
from fedfa.models.split import SplitModel

CLASSES, WIDTH = 3, 4


@dataclass(frozen=True)
class ToyData:
    """A client's samples."""

    inputs: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def label_counts(self) -> Tensor:
        return torch.bincount(self.labels, minlength=CLASSES)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.labels[positions]


def toy_data(size: int = 10, seed: int = 0) -> ToyData:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    return ToyData(torch.randn(size, WIDTH, generator=generator) + labels.unsqueeze(1), labels)


def toy_network(*inner: nn.Module) -> SplitModel:
    """``WIDTH → 5 → inner → CLASSES`` with weights that do not depend on anything else."""
    with torch_stream(0, "toy network"):
        return SplitModel.of(nn.Sequential(nn.Linear(WIDTH, 5), *inner, nn.ReLU(), nn.Linear(5, CLASSES)))


def local(epochs: int = 2, batch_size: int = 4, lr: float = 0.1, **more: Any) -> LocalTraining:
    return LocalTraining(epochs=epochs, batch_size=batch_size, lr=lr, **{"momentum": 0.0, "weight_decay": 0.0, **more})


class Bench:
    """A recipe with a network, ready to train clients one by one."""

    def __init__(
        self, parts: Sequence[Part[Any]] = (), network: SplitModel | None = None, buffers_local: bool = False
    ) -> None:
        self.network = network if network is not None else toy_network()
        self.start = clone(self.network.state())
        self.recipe = Recipe([Averaging(), *parts])
        self.task = Task(self.network, CLASSES, num_clients=5, rounds=3)
        self.roles: Mapping[str, Role] = self.recipe.roles(self.task, local_buffers=buffers_local)
        self.trainer = ClientTrainer(self.network, self.recipe, self.roles)

    def plan(
        self, round: int = 0, how: LocalTraining | None = None, received: PartTensors | None = None, seed: int = 1
    ) -> RoundPlan:
        return RoundPlan(round, clone(self.start), received or {}, how if how is not None else local(), seed, rounds=3)
