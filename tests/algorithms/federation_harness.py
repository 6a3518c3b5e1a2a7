"""The harness of all tests of rounds: clients and a server in memory, around one network and ``Training.apply``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedfa.algorithms import FedAvg
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import MODEL, ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.component import Component
from fedfa.learning.context import LocalTraining, Task
from fedfa.learning.round import ClientStatesInMemory, ServerState, Training
from fedfa.learning.tensors import ComponentTensors, Tensors, flatten
from fedfa.models.split import SplitModel
from tests.algorithms.transcription import Array, Index


class Samples:
    """A client's samples in memory."""

    def __init__(self, x: Array, y: Index, classes: int, dtype: torch.dtype = torch.float64) -> None:
        self.x, self.y = torch.from_numpy(x).to(dtype), torch.from_numpy(y)
        self.label_counts = torch.bincount(self.y, minlength=classes)

    @property
    def size(self) -> int:
        return len(self.y)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]


class Federation:
    """Rounds of any cohort. Between rounds the server state takes the form that a checkpoint has.

    Args:
        algorithm: The method; FedAvg aggregates where no component does.
        network: The network, with its initial weights.
        clients: The clients' samples.
        local: How clients train; the learning rate decays with the rounds as it says.
        seed: Of all random streams.
        rounds: The planned number of rounds.
    """

    def __init__(
        self,
        algorithm: Algorithm | Component,
        network: nn.Module | SplitModel,
        clients: Sequence[Samples],
        local: LocalTraining,
        *,
        seed: int = 1,
        rounds: int = 4,
    ) -> None:
        components = algorithm.components if isinstance(algorithm, Algorithm) else [algorithm]
        aggregated = any(component.traits.aggregates for component in components)
        self.algorithm = Algorithm(components if aggregated else [FedAvg(), *components])
        split = network if isinstance(network, SplitModel) else SplitModel.of(network)
        self.model = self.algorithm.adapt(split, seed)
        task = Task(self.model, self.model.num_classes, len(clients), rounds, local.in_round(0))
        self.training = Training(self.algorithm, self.algorithm.with_roles(task), seed)
        self.trainer = ClientTrainer(self.model, self.algorithm, self.training.roles)
        self.clients, self.local = list(clients), local
        self.state = self.training.init()
        self.client_states = ClientStatesInMemory()
        self.results: list[ClientResult] = []
        """The clients' results of the last round."""

    def plan(self, *, final_pass: bool = False) -> RoundPlan:
        """What the server sends in the next round."""
        return self.training.plan(self.state, self.local.in_round(self.state.round), final_pass=final_pass)

    def train(self, client: int, *, final_pass: bool = False) -> ClientResult:
        """One client's share of the next round, without a server step; its state is stored."""
        (result,) = self._train(self.plan(final_pass=final_pass), [client], self.client_states.load)
        if not final_pass:
            self.client_states.save(client, self.state.round + 1, result.client_state)
        return result

    def round(self, cohort: Sequence[int] | None = None, *, final_pass: bool = False) -> ServerState:
        """One round, or the final pass, of these clients in this order; of all clients if left out."""
        cohort = range(len(self.clients)) if cohort is None else cohort
        local = self.local.in_round(self.state.round)
        state, statistics = self.training.apply(
            self.state, cohort, local, self._train, self.client_states, final_pass=final_pass, keep_results=True
        )
        self.state, self.results = ServerState.from_tensors(state.to_tensors()), statistics.results
        return self.state

    def run(self, rounds: int, cohort: Sequence[int] | None = None) -> Federation:
        """Some rounds, and the final pass if the algorithm has one."""
        for _ in range(rounds):
            self.round(cohort)
        if self.algorithm.has_final_pass:
            self.round(cohort, final_pass=True)
        return self

    def local_of(self, client: int, local: LocalTraining) -> LocalTraining:
        """How one client trains, where clients differ."""
        return local

    def _train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        for client in clients:
            own_plan = replace(plan, local=self.local_of(client, plan.local))
            yield self.trainer.train(own_plan, client, self.clients[client], client_state(client))

    def model_of(self, client: int) -> Tensors:
        """The model of a client between rounds: the server's, with the tensors that stay on the client."""
        return {**self.state.model, **self.client_states.load(client).get(MODEL, {})}

    def tensors(self) -> Tensors:
        """The server state and the client states, by name."""
        states = self.client_states.items()
        clients = {f"{client}:{name}": own for client, state in states for name, own in state.items()}
        return {**self.state.to_tensors(), **flatten(clients)}
