"""One federated round as a pure step: state and cohort in, state and statistics out.

:meth:`Training.apply` is the only place where a round is planned, carried to the clients, aggregated and finished on
the server. The simulator, Ray, Flower, the trial of stacked execution and the tests all call it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fedfa.errors import AlgorithmError, FedfaError, describe
from fedfa.learning.aggregate import Aggregate
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.component import Component
from fedfa.learning.context import LocalTraining, Role, ServerStep, Task
from fedfa.learning.random import stream
from fedfa.learning.tensors import ComponentTensors, Tensors, clone, contiguous, flatten, nbytes, unflatten

_MODEL = "model"


@dataclass(frozen=True)
class ServerState:
    """Everything the server carries from round to round, as named tensors. ``round`` counts the rounds done."""

    round: int
    model: Tensors
    components: ComponentTensors

    def to_tensors(self) -> Tensors:
        """As one flat dictionary, for checkpoints."""
        return {**flatten({_MODEL: self.model, **self.components}), "round": torch.tensor(self.round)}

    @classmethod
    def from_tensors(cls, flat: Mapping[str, torch.Tensor]) -> ServerState:
        """The inverse of :meth:`to_tensors`."""
        nested = unflatten({name: value for name, value in flat.items() if name != "round"})
        return cls(int(flat["round"]), nested.pop(_MODEL), nested)


class ClientStates(Protocol):
    """Where client state is stored between rounds: in memory, or in a run directory."""

    def load(self, client: int) -> ComponentTensors:
        """The state of a client; empty if it has none."""

    def save(self, client: int, round: int, state: ComponentTensors) -> None:
        """Store the state of a client after a round, counted from 1."""

    def discard(self, round: int) -> None:
        """Forget what was saved in a round that did not complete."""


class ClientStatesInMemory(dict[int, ComponentTensors]):
    """Client states in a dictionary by client."""

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[int, dict[int, ComponentTensors | None]] = (0, {})
        """The last round in which states were saved, and the states that were replaced in it."""

    def load(self, client: int) -> ComponentTensors:
        """See :class:`ClientStates`."""
        return self.get(client, {})

    def save(self, client: int, round: int, state: ComponentTensors) -> None:
        """See :class:`ClientStates`."""
        if not state and not self.load(client):
            return
        if self._before[0] != round:
            self._before = round, {}
        self._before[1].setdefault(client, self.get(client))
        self[client] = state

    def discard(self, round: int) -> None:
        """See :class:`ClientStates`."""
        if self._before[0] != round:
            return
        for client, state in self._before[1].items():
            if state is None:
                del self[client]
            else:
                self[client] = state
        self._before = round, {}


TrainClients = Callable[[RoundPlan, Sequence[int], Callable[[int], ComponentTensors]], Iterator[ClientResult]]
"""Carries a plan to clients: from the plan, the clients and a function that gives a client's state to their results, in
the order of the clients. An engine's ``train``."""


class Observer(Protocol):
    """Requests diagnostics from the clients of a round, without any effect on the training."""

    def request(self, plan: RoundPlan, clients: Sequence[int]) -> RoundPlan:
        """The plan with the request."""

    def extract(self, result: ClientResult) -> ClientResult:
        """The result without the response."""


class Channel(Protocol):
    """What tensors pass between the server and the clients."""

    def carry(self, train: TrainClients) -> TrainClients:
        """The same clients behind the channel."""

    def payload_nbytes(self, plan: RoundPlan) -> int:
        """Bytes that one client receives."""


@dataclass(frozen=True)
class RoundStatistics:
    """What was measured while the clients of a round trained."""

    clients: list[int]
    """Those that took part, in the order in which they were aggregated."""
    train_loss: float | None
    """Mean of the clients' mean local losses."""
    seconds: float
    cpu_seconds: float
    samples: int
    """Samples processed, counted once per epoch."""
    bytes_up: int
    bytes_down: int
    lr: float
    losses: Mapping[int, float] = field(default_factory=dict)
    """Mean local loss by client, where it is finite."""
    results: list[ClientResult] = field(default_factory=list, repr=False)
    """The clients' results, where :meth:`Training.apply` was asked to keep them."""


@dataclass(frozen=True)
class Training:
    """An algorithm bound to a task: everything that stays the same from round to round.

    Args:
        algorithm: The method.
        task: The task, with the roles of the model's tensors (:meth:`Algorithm.with_roles`).
        seed: Seed of all random streams.
        channel: What tensors pass between server and clients; None: they arrive as they are.
    """

    algorithm: Algorithm
    task: Task
    seed: int
    channel: Channel | None = None

    @property
    def roles(self) -> Mapping[str, Role]:
        """Role of each tensor of the model."""
        return self.task.roles

    def init(self) -> ServerState:
        """The server state before the first round."""
        components = self.algorithm.init(self.task, self.seed)
        for name, tensors in components.items():
            _check_state(name, tensors)
        model = contiguous(clone(self.task.model.state()))
        return ServerState(0, model, {name: contiguous(tensors) for name, tensors in components.items()})

    def plan(self, state: ServerState, local: LocalTraining, *, final_pass: bool = False) -> RoundPlan:
        """What the server sends to the clients of the next round."""
        return RoundPlan(
            round=state.round,
            model=state.model if final_pass else self.algorithm.sent(state.components, state.model),
            broadcast=self.algorithm.broadcast(state.components),
            local=local,
            seed=self.seed,
            rounds=self.task.rounds,
            final_pass=final_pass,
        )

    def payload_nbytes(self, plan: RoundPlan) -> int:
        """Bytes that one client receives."""
        if self.channel is not None:
            return self.channel.payload_nbytes(plan)
        model = nbytes({name: value for name, value in plan.model.items() if self.roles[name].travels})
        return model + nbytes(flatten(plan.broadcast))

    def carried(self, train: TrainClients) -> TrainClients:
        """The clients behind the channel."""
        return train if self.channel is None else self.channel.carry(train)

    def apply(
        self,
        state: ServerState,
        clients: Sequence[int],
        local: LocalTraining,
        train: TrainClients,
        client_states: ClientStates,
        *,
        final_pass: bool = False,
        observer: Observer | None = None,
        keep_results: bool = False,
    ) -> tuple[ServerState, RoundStatistics]:
        """One round: plan, train the clients, aggregate, server step. ``state`` is not changed.

        Args:
            state: The server state before the round.
            clients: The cohort.
            local: How clients train in this round.
            train: Carries the plan to the clients; an engine's ``train``.
            client_states: Gives and stores the clients' state.
            final_pass: The final pass after the last round instead of a round; the round count stays.
            observer: Requests diagnostics.
            keep_results: Keep the clients' results in the statistics; for tests and analyses.
        """
        started = time.perf_counter()
        plan = self.plan(state, local, final_pass=final_pass)
        request = plan if observer is None else observer.request(plan, clients)
        aggregate = Aggregate(keep_each=self.algorithm.single_contributions)
        results: list[ClientResult] = []
        took_part: list[int] = []  # all of the cohort, unless the engine goes on without some
        samples, bytes_up, cpu_seconds = 0, 0, 0.0
        losses: list[tuple[int, float]] = []
        for result in train(request, clients, client_states.load):
            if observer is not None:
                result = observer.extract(result)
            aggregate.add(result.contribution, result.client)
            took_part.append(result.client)
            if not final_pass:
                client_states.save(result.client, state.round + 1, result.client_state)
            samples += result.sample_steps
            bytes_up += result.nbytes
            cpu_seconds += result.cpu_seconds
            if result.loss is not None and math.isfinite(result.loss):
                losses.append((result.client, result.loss))
            results += [result] if keep_results else []
        if took_part:
            after = self.server_step(state, aggregate, final_pass=final_pass)
        else:  # on a clock nobody may arrive in time
            after = replace(state, round=state.round if final_pass else state.round + 1)
        return after, RoundStatistics(
            clients=took_part,
            train_loss=sum(loss for _, loss in losses) / len(losses) if losses else None,
            seconds=time.perf_counter() - started,
            cpu_seconds=cpu_seconds,
            samples=samples,
            bytes_up=bytes_up,
            bytes_down=self.payload_nbytes(plan) * len(clients),
            lr=plan.local.lr,
            losses=dict(losses),
            results=results,
        )

    def server_step(self, state: ServerState, aggregate: Aggregate, *, final_pass: bool = False) -> ServerState:
        """The state after a round, from the state before it and the aggregate of the cohort.

        The aggregating component makes the update, the others transform it or renew their own state, and the update is
        added to the model. Nothing is changed in place.
        """
        server = ServerStep(
            round=state.round,
            model=state.model,
            state={c.name: dict(state.components.get(c.name, {})) for c in self.algorithm.enabled},
            aggregate=aggregate,
            num_clients=self.task.num_clients,
            roles=self.roles,
            rng=stream(self.seed, "server", state.round),
        )
        stage = "final pass" if final_pass else f"server step of round {state.round + 1}"
        for combine in self.algorithm.hooks("combine"):
            _guarded(combine, server, stage)
        for component in self.algorithm.enabled:
            if component.traits.final_pass is final_pass:
                _guarded(component.step, server, stage)
        return _updated(server, state.round if final_pass else state.round + 1)


def _guarded(hook: Callable[[ServerStep], None], server: ServerStep, stage: str) -> None:
    """Call a hook of the server; an error of any kind names component and stage."""
    component: Component = hook.__self__  # type: ignore[attr-defined]  # a bound method
    try:
        hook(server)
        _check_state(component.name, server.state[component.name])
    except FedfaError:
        raise
    except Exception as error:
        raise AlgorithmError(f"component {component.name!r}, {stage}: {describe(error)}") from error


def _check_state(component: str, tensors: Mapping[str, object]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise AlgorithmError(
                f"component {component!r} has {name!r} = {value!r} in its server state; state is named tensors: wrap "
                "it with torch.tensor(…)"
            )


def _updated(server: ServerStep, rounds: int) -> ServerState:
    model: Tensors = {}
    for name, value in server.model.items():
        if server.roles[name] is not Role.LOCAL and name in server.update:
            moved = value.double() + server.update[name]
            model[name] = (moved if value.is_floating_point() else moved.round()).to(value.dtype)
        else:
            model[name] = value
    return ServerState(rounds, contiguous(model), {name: contiguous(own) for name, own in server.state.items()})
