"""From settings to the things a run works with: federation, network, recipe, engine."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfa.algorithms.registry import recipe_names
from fedfa.data import DataSet, Federation, dataset_from, load, partition
from fedfa.engines.cores import choose_workers
from fedfa.engines.engine import Engine
from fedfa.engines.execution import choose_execution
from fedfa.engines.local import LocalEngine
from fedfa.engines.ray_engine import RayEngine
from fedfa.engines.workers import with_workers
from fedfa.errors import DataError, ModelError, SettingsError
from fedfa.insight.look import Look
from fedfa.insight.observer import Observer, Schedule
from fedfa.insight.probe import Probe
from fedfa.learning.client import RoundPlan
from fedfa.learning.cohort import choose_cohort
from fedfa.learning.device import choose_device
from fedfa.learning.part import LocalTraining, Role, Task
from fedfa.learning.random import torch_stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.server import ServerState
from fedfa.learning.tensors import clone, contiguous
from fedfa.models.split import SplitModel
from fedfa.models.zoo import build_model
from fedfa.studies.settings import OWN, Settings

log = logging.getLogger(__name__)

ModelMaker = Callable[[], nn.Module] | nn.Module
"""Makes a network with fresh weights; or a network, whose weights then are the initial ones."""

DataSource = DataSet | Any
"""A data set, or arrays, a path or a torch ``Dataset``, of which :func:`~fedfa.data.dataset_from` makes one."""


@dataclass(frozen=True)
class Laboratory:
    """What a run works with; everything in it follows from the settings (and the caller's own model or data)."""

    settings: Settings
    federation: Federation
    recipe: Recipe
    task: Task
    roles: Mapping[str, Role]
    device: torch.device

    def initial_state(self) -> ServerState:
        """The server before the first round."""
        parts = self.recipe.init(self.task, self.settings.seed)
        model = contiguous(clone(self.task.model.state()))
        return ServerState(0, model, {part: contiguous(tensors) for part, tensors in parts.items()})

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each client holds."""
        return self.federation.partition.sizes

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, counted from 0."""
        cohort, sizes, seed = self.settings.cohort, self.sizes, self.settings.seed
        holders = self.federation.partition.holders if sizes is self.federation.partition.sizes else None
        return choose_cohort(sizes, cohort.count(len(sizes)), cohort.selection, seed, round, holders)

    def plan(self, state: ServerState, local: LocalTraining) -> RoundPlan:
        """What the server sends to the clients that follow this state, and how they train."""
        return RoundPlan(
            round=state.round,
            model=state.model,
            received=self.recipe.broadcast(state.parts, state.round),
            local=local,
            seed=self.settings.seed,
            rounds=self.settings.rounds,
        )

    def origin(self) -> dict[str, str]:
        """Fingerprints of what a result depends on besides the settings."""
        module = self.task.model.module
        shapes = {name: (tuple(value.shape), str(value.dtype)) for name, value in self.task.model.state().items()}
        return {
            "data": self.federation.dataset.fingerprint,
            "network": _fingerprint(f"{module!r}\n{shapes}".encode()),
            **method_fingerprints(self.settings.algorithm.recipe),
        }

    @property
    def clients(self) -> Federation:
        """The clients as the method sees them: one with all the data, where it pools them."""
        return self.federation.pooled() if self.recipe.pools_data else self.federation

    def observer(self) -> Observer | None:
        """Looks inside, if the settings ask for it."""
        insight = self.settings.insight
        if not insight.on:
            return None
        return Observer(
            Schedule(self.settings.rounds, insight.every, insight.features),
            Probe.of(self.federation.dataset, insight.samples, self.settings.data.seed),
            insight.clients,
            self.clients,
            self.task.model,
            shared=Role.LOCAL not in self.roles.values(),
        )

    def local_engine(self) -> LocalEngine:
        """The engine that does everything in this process."""
        return LocalEngine(
            self.clients,
            self.task.model,
            self.recipe,
            self.roles,
            self.device,
            self.settings.evaluation.batch_size,
        )

    def engine(self, state: ServerState | None = None) -> Engine:
        """The engine that the settings ask for.

        Args:
            state: Where the run stands; left out, before the first round. What is tried out, is tried from there:
                a run that goes on needs nothing of what it began with.
        """
        local = self.local_engine()
        clients = 1 if self.recipe.pools_data else self.settings.cohort.count(len(self.federation))
        asked = self.settings.engine.workers
        if self.settings.engine.kind == "ray":
            if self.settings.engine.execution == "stacked":
                raise SettingsError(
                    'engine.execution = "stacked" is for one machine; with engine.kind = "ray" leave it out'
                )
            return RayEngine(local, self.settings.engine.address, clients if asked == "auto" else asked)
        workers = choose_workers(asked, clients, self._expected_seconds(), self.device)
        if not self.recipe.pools_data and (asked in ("auto", 1) or self.settings.engine.execution == "stacked"):
            state = self.initial_state() if state is None else replace(state, round=0)
            plan = self.plan(state, self.settings.local.in_round(0))
            local.stacked = choose_execution(self.settings.engine.execution, local, state, plan, clients, workers)
        if local.stacked:
            log.info("clients of equal size train side by side, in this process")
            if asked not in ("auto", 1):
                log.warning("engine.workers = %s has no effect on stacked clients: they train in this process", asked)
            return local
        return with_workers(local, workers)

    def _expected_seconds(self) -> float:
        """Roughly the time of all rounds in one process; for choosing an engine."""
        settings = self.settings
        sizes = self.federation.partition.sizes
        steps = settings.local.in_round(0).steps_on(round(float(sizes.mean())))
        weights = sum(value.numel() for value in self.task.model.state().values())
        # A step's own cost in Python, and 6 operations per weight and sample at some ten billion a second.
        step = 3e-4 + 6e-10 * weights * settings.local.batch_size
        return settings.rounds * settings.cohort.count(len(sizes)) * steps * step


def method_fingerprints(recipe: str) -> dict[str, str]:
    """Fingerprints of the files of own methods in a recipe."""
    files = [Path(name) for name in recipe_names(recipe) if name.endswith(".py")]
    return {f"method {path.name}": _fingerprint(path.read_bytes()) for path in files}


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def prepare(settings: Settings, *, model: ModelMaker | None = None, data: DataSource | None = None) -> Laboratory:
    """Build everything a run needs.

    Args:
        settings: The run's settings.
        model: Makes the network, instead of ``settings.model.name``.
        data: The data, instead of ``settings.data.name``.
    """
    dataset = load_dataset(settings) if data is None else _as_dataset(data)
    split = partition(
        dataset.train, settings.data.partition, settings.data.number_of_clients, dataset.num_classes, settings.data.seed
    )
    return assemble(settings, Federation(dataset, split), model)


def _as_dataset(data: DataSource) -> DataSet:
    return data if isinstance(data, DataSet) else dataset_from(data)


def assemble(settings: Settings, federation: Federation, model: ModelMaker | None = None) -> Laboratory:
    """What a run works with, around a federation that is there already.

    Args:
        settings: The run's settings.
        federation: The data and the clients.
        model: Makes the network, instead of ``settings.model.name``.
    """
    dataset = federation.dataset
    recipe = settings.recipe()
    if settings.insight.on:
        recipe = Recipe([*recipe.parts, Look()], recipe.title)
    network = recipe.adapt(make_network(settings, dataset, model), settings.seed)
    clients = 1 if recipe.pools_data else len(federation)
    task = Task(network, dataset.num_classes, clients, settings.rounds, settings.local.in_round(0))
    roles = recipe.roles(task, local_buffers=settings.model.buffers == "local")
    return Laboratory(settings, federation, recipe, task, roles, choose_device(settings.device))


def load_dataset(settings: Settings) -> DataSet:
    """The data set with the normalisation that was asked for."""
    if settings.data.name == OWN and not Path(OWN).exists():
        raise DataError(
            "the data of this run were given in Python, not named in its settings; go on from there, with "
            "fedfa.run(settings, folder, resume=True, data=…)"
        )
    directory = Path(settings.data.dir).expanduser() if settings.data.dir else None
    dataset = load(settings.data.name, data_dir=directory, offline=settings.data.offline)
    return dataset.normalised(settings.data.normalise)


def make_network(settings: Settings, dataset: DataSet, model: ModelMaker | None) -> SplitModel:
    """The network with its initial weights, split and checked on a sample."""
    example = dataset.normalisation.batch(dataset.train.inputs[:2])
    classes = len(dataset.classes)
    with torch_stream(settings.seed, "model"):
        if isinstance(model, nn.Module):
            module = copy.deepcopy(model)  # the caller's own stays as it is
        elif model is not None:
            module = model()
        elif settings.model.name == OWN:
            raise ModelError(
                "the network of this run was given in Python, not named in its settings; go on from there, with "
                "fedfa.run(settings, folder, resume=True, model=…)"
            )
        else:
            module = build_model(settings.model.name, example.shape[1:], classes, dict(settings.model.options))
    network = SplitModel.of(module, settings.model.head, example)
    if network.num_classes != classes:
        raise ModelError(
            f"the network has {network.num_classes} outputs, but {dataset.name} has {classes} classes; make the last "
            "layer fit"
        )
    return network
