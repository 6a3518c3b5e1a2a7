"""What an experiment consists of."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from fedfa.channel.channel import Channel
from fedfa.data import Federation
from fedfa.data.preprocessing import Preprocessing
from fedfa.diagnostics.observer import Observer, Schedule
from fedfa.diagnostics.probe import ClientProbe, Probe
from fedfa.engines.local import LocalEngine
from fedfa.errors import ConfigError
from fedfa.experiment.build import (
    DataSource,
    ModelSource,
    build_federation,
    build_network,
    origin_of,
    with_own,
)
from fedfa.experiment.config import Config
from fedfa.experiment.protected import budget_of, protected, protections, with_attackers
from fedfa.fleet.availability import DailyAvailability
from fedfa.fleet.clock import Clock
from fedfa.fleet.devices import build_fleet
from fedfa.fleet.selection import Selector
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.cohort import choose_cohort
from fedfa.learning.component import Component
from fedfa.learning.context import Role, Task
from fedfa.learning.device import choose_device
from fedfa.learning.metrics import Function, Metric, metric, name_of
from fedfa.learning.round import Training
from fedfa.protection.accounting import Budget
from fedfa.trees import NetworkInput

log = logging.getLogger(__name__)


class ExperimentSetup:
    """What an experiment consists of: federation, algorithm, network, clock, each made when it is first needed.

    Args:
        config: What to do.
        model: Your own network, instead of ``config.model.name``.
        data: Your own data, instead of ``config.data.name``.
        metrics: Functions that the config names but that were given in Python.
        validation: Your own validation samples, instead of ``config.data.validation``.
    """

    simulation: ClassVar[bool] = True
    """Whether clients are simulated; noise then comes from the seed and protects nobody."""

    def __init__(
        self,
        config: Config,
        model: ModelSource | None,
        data: DataSource | None,
        metrics: Sequence[str | Function] = (),
        validation: Any = None,
    ) -> None:
        self.config = with_own(config, model, data)
        self._model_source, self._data_source, self._validation_source = model, data, validation
        self._given_metrics = {name_of(one): one for one in metrics if not isinstance(one, str)}
        self._known_preprocessing: Preprocessing | None = None
        self._extra: list[Component] = []

    @cached_property
    def federation(self) -> Federation:
        """The clients and the test set."""
        return build_federation(self.config, self._data_source, self._validation_source)

    @property
    def clients(self) -> Federation:
        """The clients as the algorithm sees them: a single one with all the data, where it pools them."""
        if self.config.attack.poisons_data:
            return self._poisoned
        return self.federation.pooled() if self.algorithm.pools_data else self.federation

    @cached_property
    def _poisoned(self) -> Federation:
        return with_attackers(self.config, self.federation)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client."""
        return self.federation.partition.sizes

    @cached_property
    def metrics(self) -> list[Metric]:
        """What evaluations compute besides accuracy and loss."""
        return [metric(name, self._given_metrics) for name in self.config.evaluation.metrics]

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, with the components of protections and diagnostics where they are on."""
        config = self.config
        algorithm = config.build_algorithm()
        extra = [*self._extra, *([ClientProbe()] if config.diagnostics.on else [])]
        if protected(config):
            extra += protections(config, algorithm, self.budget, self._number_of_clients, self.simulation)
        return Algorithm([*algorithm.components, *extra], algorithm.title) if extra else algorithm

    @cached_property
    def budget(self) -> Budget | None:
        """The budget of differential privacy, where it is on; noise is calibrated for the planned rounds."""
        if not self.config.privacy.on:
            return None
        return budget_of(self.config, self._number_of_clients, int(np.count_nonzero(self.sizes)), self.cohort)

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, counted from 0."""
        cohort, sizes, partition = self.config.cohort, self.sizes, self.federation.partition
        holders = partition.holders if sizes is partition.sizes else None
        return choose_cohort(sizes, cohort.count(len(sizes)), cohort.selection, self.config.seed, round, holders)

    @property
    def preprocessing(self) -> Preprocessing:
        """How raw inputs become what the network reads, and the names of the classes."""
        if self._known_preprocessing is None:
            self._known_preprocessing = self.federation.preprocessing()
        return self._known_preprocessing

    @cached_property
    def training(self) -> Training:
        """The algorithm bound to the task."""
        config, preprocessing = self.config, self.preprocessing
        classes = len(preprocessing.classes)
        network = build_network(config, self._example(), classes, self._model_source)
        network = self.algorithm.adapt(network, config.seed)
        clients = 1 if self.algorithm.pools_data else self._number_of_clients
        task = Task(network, classes, clients, config.rounds, config.local.in_round(0, config.rounds))
        task = self.algorithm.with_roles(task, local_buffers=config.model.buffers == "local")
        training = Training(self.algorithm, task, config.seed)
        return replace(training, channel=Channel(config.channel, training)) if config.channel.on else training

    @property
    def channel(self) -> Channel | None:
        """What compresses between server and clients, where the config asks for it."""
        channel = self.training.channel
        assert channel is None or isinstance(channel, Channel)
        return channel

    def _example(self) -> NetworkInput:
        """A small batch as the network reads it; of zeros where the data are not loaded."""
        if self._known_preprocessing is not None and "federation" not in vars(self):
            return self._known_preprocessing.example()
        dataset = self.federation.dataset
        return dataset.normalisation.batch(dataset.train.inputs[:2])

    @property
    def _number_of_clients(self) -> int:
        known = self.config.data.clients if "federation" not in vars(self) else None
        return known or len(self.federation)

    @cached_property
    def clock(self) -> Clock | None:
        """The clock, where the config names devices."""
        config, cohort = self.config.fleet, self.config.cohort
        if not config.on:
            return None
        if config.may_be_stale and self.config.diagnostics.on:
            raise ConfigError(
                f'diagnostics compare clients of one round, but with fleet.policy = "{config.policy}" contributions '
                "of several arrive together; set diagnostics.every = 0 and diagnostics.features = []"
            )
        fleet = build_fleet(config, len(self.federation))
        clock = Clock(config, fleet, self.selector(fleet.availability), cohort.count(len(self.federation)))
        clock.check(self.training)
        return clock

    def selector(self, availability: DailyAvailability | None = None) -> Selector:
        """Draws clients as the config says, before anything is known of them."""
        cohort, partition = self.config.cohort, self.federation.partition
        selector = Selector(partition.sizes, partition.holders, cohort.selection, self.config.seed, availability)
        return selector if cohort.candidates is None else replace(selector, candidates=cohort.candidates)

    @property
    def task(self) -> Task:
        """The network with its initial weights, and the facts that components know before the first round."""
        return self.training.task

    @property
    def roles(self) -> Mapping[str, Role]:
        """Role of each tensor of the model."""
        return self.training.roles

    @cached_property
    def device(self) -> torch.device:
        """Where to compute."""
        return choose_device(self.config.device)

    def origin(self) -> dict[str, str]:
        """Fingerprints of what a result depends on besides the config."""
        own = self.federation.validation
        mark = {} if own is None or own.drawn else {"validation": own.fingerprint}
        fleet = {} if self.clock is None else {"fleet": self.clock.fleet.fingerprint}
        return {**origin_of(self.config, self.federation.dataset, self.task.model), **mark, **fleet}

    @property
    def is_personal(self) -> bool:
        """Whether clients keep tensors of the model, so that there is no single global model."""
        return Role.LOCAL in self.roles.values()

    @property
    def has_client_models(self) -> bool:
        """Whether clients have models of their own, beside the global one or in its place."""
        return self.is_personal or self.algorithm.personal_model is not None

    def local_engine(self) -> LocalEngine:
        """The engine that does everything in this process."""
        return LocalEngine(
            self.clients, self.task.model, self.algorithm, self.roles, self.device, self.config.evaluation.batch_size,
            metrics=self.metrics,
        )  # fmt: skip

    def observer(self) -> Observer | None:
        """Requests and measures diagnostics, where the config asks for them."""
        diagnostics = self.config.diagnostics
        if not diagnostics.on:
            return None
        return Observer(
            Schedule(self.config.rounds, diagnostics.every, diagnostics.features),
            Probe.of(self.federation.dataset, diagnostics.samples, self.config.data.seed),
            diagnostics.clients,
            self.clients,
            self.task.model,
            shared=not self.is_personal,
        )
