"""Small data sets and networks, and a bench that trains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.algorithms.fedavg import FedAvg
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.component import Component
from fedfa.learning.context import LocalTraining, Task
from fedfa.learning.random import torch_stream
from fedfa.learning.round import ClientStatesInMemory, ServerState, Training
from fedfa.learning.tensors import ComponentTensors, clone
from fedfa.models.split import SplitModel
from fedfa.stacking.trainer import StackedTrainer

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
    """An algorithm with a network, ready to train single clients or rounds."""

    def __init__(
        self, components: Sequence[Component] = (), network: SplitModel | None = None, local_buffers: bool = False
    ) -> None:
        self.network = network if network is not None else toy_network()
        self.start = clone(self.network.state())
        aggregates = any(component.traits.aggregates for component in components)
        self.algorithm = Algorithm(components if aggregates else [FedAvg(), *components])
        task = self.algorithm.with_roles(Task(self.network, CLASSES, 5, rounds=3), local_buffers=local_buffers)
        self.training = Training(self.algorithm, task, seed=1)
        self.trainer = StackedTrainer(self.network, self.algorithm, task.roles)

    def plan(
        self, round: int = 0, how: LocalTraining | None = None, broadcast: ComponentTensors | None = None, seed: int = 1
    ) -> RoundPlan:
        return RoundPlan(round, clone(self.start), broadcast or {}, how if how is not None else local(), seed, rounds=3)

    def state(self) -> ServerState:
        """The server state before the first round."""
        return ServerState(0, clone(self.start), self.algorithm.init(self.training.task, seed=1))

    def round(self, state: ServerState, each: Sequence[ToyData]) -> ServerState:
        """The state after a round of all these clients."""

        def train(plan: RoundPlan, clients: Sequence[int], client_state: Any) -> Iterator[ClientResult]:
            return (self.trainer.train(plan, client, each[client], client_state(client)) for client in clients)

        return self.training.apply(state, range(len(each)), local(), train, ClientStatesInMemory())[0]
