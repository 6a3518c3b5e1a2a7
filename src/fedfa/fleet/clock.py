"""Rounds on a clock: a policy decides in virtual time, then the clients are trained and aggregated as ever.

Virtual order is exact, physical order is free. A round has three parts: the policy computes which visits start and
which contributions arrive until the next server step (:mod:`fedfa.fleet.policies`); the clients that started are
trained by any engine, with the version of the model they received; what arrived enters the server step. Everything that
outlives a round is named tensors in the server state (:mod:`fedfa.fleet.memory`).

A client whose contribution is not counted keeps the state it had, as if it had not been asked; a state is stored when
the contribution that belongs to it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedfa.errors import ConfigError
from fedfa.fleet.config import FleetConfig
from fedfa.fleet.devices import Fleet
from fedfa.fleet.informed import KnownClients
from fedfa.fleet.memory import ClockMemory, detached
from fedfa.fleet.policies import Moment, asynchronous, synchronous
from fedfa.fleet.selection import Selector
from fedfa.fleet.staleness import as_model, as_update, check_combination, scale
from fedfa.fleet.visits import Travel, Visit, Window
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import LocalTraining
from fedfa.learning.round import ClientStates, Observer, RoundStatistics, ServerState, TrainClients, Training
from fedfa.learning.tensors import ComponentTensors


@dataclass(frozen=True)
class Clock:
    """The clock of a run.

    Args:
        config: Devices and policy.
        fleet: The devices.
        selector: Draws clients.
        cohort: Clients per round.
    """

    config: FleetConfig
    fleet: Fleet
    selector: Selector
    cohort: int

    def __post_init__(self) -> None:
        holders = len(self.selector.holders)
        for key, count in (("buffer", self.buffer), ("concurrency", self.concurrency)):
            if count > holders:
                raise ConfigError(f"fleet.{key} = {count}, but only {holders} clients hold samples; lower it")

    @property
    def buffer(self) -> int:
        """Contributions per server step of an asynchronous policy."""
        return 1 if self.config.policy == "fedasync" else self.config.buffer or self.cohort

    @property
    def concurrency(self) -> int:
        """Clients that train at a time under an asynchronous policy."""
        return self.config.concurrency or self.cohort

    def check(self, training: Training) -> None:
        """Refuse an algorithm that cannot work under the policy."""
        check_combination(training.algorithm, self.config)

    def round(
        self,
        training: Training,
        state: ServerState,
        local: LocalTraining,
        train: TrainClients,
        client_states: ClientStates,
        observer: Observer | None = None,
    ) -> tuple[ServerState, RoundStatistics, dict[str, Any]]:
        """The window up to the next server step: the state after it, statistics, and further values for the record."""
        memory, train = ClockMemory.of(state), training.carried(train)
        plan = training.plan(state, local)
        upload = memory.upload or self._size_of_one(plan, train)
        window = self._window(memory, state, Travel(
            self.fleet, self.selector.sizes, local, training.payload_nbytes(plan), upload
        ))  # fmt: skip
        delivery = _Delivery(self, training, state, window, memory, train, observer)
        after, statistics = training.apply(
            state, [visit.client for visit in window.started], local, delivery, client_states, observer=observer
        )
        renewed = ClockMemory(
            window.end, window.draws, delivery.largest or upload, window.running, delivery.waiting
        )  # fmt: skip
        after = renewed.added_to(after)
        if self.selector.informed:
            ended = [*window.arrived, *(visit for visits in window.lost.values() for visit in visits)]
            seconds = {visit.client: visit.end - visit.start for visit in ended}
            after = KnownClients.of(state).after(after.round, statistics.losses, seconds).added_to(after)
        return after, statistics, self._values(window, state.round)

    def final_pass(self, state: ServerState, statistics: RoundStatistics) -> dict[str, Any]:
        """Values for the record of a final pass: every client receives, reads its samples once, and sends."""
        clients, fleet = np.asarray(statistics.clients), self.fleet
        down, up = (total / len(clients) for total in (statistics.bytes_down, statistics.bytes_up))
        seconds = down / fleet.down[clients] + self.selector.sizes[clients] / fleet.speed[clients]
        return {"time": ClockMemory.of(state).time + float((seconds + up / fleet.up[clients]).max())}

    def _window(self, memory: ClockMemory, state: ServerState, travel: Travel) -> Window:
        selector = replace(self.selector, known=KnownClients.of(state)) if self.selector.informed else self.selector
        select = partial(selector.select, round=state.round)
        now = Moment(memory.time, state.round, memory.running, memory.draws, select, travel.visit)
        if self.config.asynchronous:
            return asynchronous(now, self.buffer, self.concurrency)
        return synchronous(now, self.config, self.cohort)

    def _size_of_one(self, plan: RoundPlan, train: TrainClients) -> int:
        """Bytes of a contribution: that of one client after a single step."""
        client = int(self.selector.holders[0])
        trial = replace(plan, local=plan.local.model_copy(update={"steps": 1}))
        (result,) = train(trial, [client], lambda _: {})
        return result.nbytes

    def _values(self, window: Window, version: int) -> dict[str, Any]:
        values: dict[str, Any] = {"time": window.end, "utilisation": window.utilisation()}
        values |= {outcome: len(visits) for outcome, visits in window.lost.items()}
        if self.config.may_be_stale:
            values["staleness"] = [version - visit.version for visit in window.arrived]
        if version < self.config.timeline:
            values["timeline"] = window.timeline()
        return values


class _Delivery:
    """Carries a plan to the clients that started, and delivers the contributions that arrive in this window.

    Contributions of earlier windows come first, in the order of arrival: a client may deliver one and start again in
    the same window, and then begins with the state that belongs to it.
    """

    def __init__(
        self,
        clock: Clock,
        training: Training,
        state: ServerState,
        window: Window,
        memory: ClockMemory,
        train: TrainClients,
        observer: Observer | None,
    ) -> None:
        self._config, self._algorithm, self._state = clock.config, training.algorithm, state
        self._memory, self._train, self._observer = memory, train, observer
        self._earlier = [visit for visit in window.arrived if visit.version < state.round]
        self._now = {visit.client for visit in window.arrived if visit.version == state.round}
        going_on = {visit.client: visit for visit in window.running if visit.arrives}
        self._trained: list[Visit] = [
            visit
            for visit in window.started
            if visit.arrives and (visit.client in self._now or going_on.get(visit.client) == visit)
        ]
        self.largest = 0
        """Bytes of the largest contribution that was made."""
        earlier = {visit.client for visit in going_on.values() if visit.version < state.round}
        self.waiting = {client: result for client, result in memory.results.items() if client in earlier}
        """Results that have not arrived yet, by client."""

    def __call__(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """The results that enter the server step; see :data:`~fedfa.learning.round.TrainClients`."""
        for visit in self._earlier:
            result = self._memory.results[visit.client]
            if self._config.policy == "fedasync":
                result = as_update(result, plan.model)
            yield self._scaled(result, self._state.round - visit.version)
        limits = {visit.client: visit.steps for visit in self._trained if visit.steps is not None}
        numbers = [visit.client for visit in self._trained]
        if not numbers:
            return
        for result in self._train(replace(plan, steps=limits), numbers, client_state):
            own = result if self._observer is None else self._observer.extract(result)
            self.largest = max(self.largest, own.nbytes)
            if result.client in self._now:
                yield self._scaled(result, 0)
                continue
            if self._config.policy == "fedasync":
                result = as_model(result, plan.model)
            self.waiting[result.client] = detached(result)

    def _scaled(self, result: ClientResult, staleness: int) -> ClientResult:
        config = self._config
        factor = 1.0 if config.staleness == "none" else (1.0 + staleness) ** -config.exponent
        return scale(result, factor * (config.mixing if config.policy == "fedasync" else 1.0), self._algorithm)
