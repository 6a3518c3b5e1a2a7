"""From settings to the things a run works with: federation, network, recipe, engine."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedfa.algorithms.registry import recipe_names
from fedfa.data import DataSet, Federation, load, partition
from fedfa.data.normalise import named_normalisation
from fedfa.engines.cores import choose_workers
from fedfa.engines.engine import Engine
from fedfa.engines.local import LocalEngine
from fedfa.engines.workers import with_workers
from fedfa.errors import ModelError
from fedfa.learning.device import choose_device
from fedfa.learning.part import Role, Task
from fedfa.learning.random import torch_stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.server import ServerState
from fedfa.learning.tensors import clone, contiguous
from fedfa.models.split import SplitModel
from fedfa.models.zoo import build_model
from fedfa.studies.settings import Settings

ModelMaker = Callable[[], nn.Module] | nn.Module
"""Makes a network with fresh weights; or a network, whose weights then are the initial ones."""


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

    def origin(self) -> dict[str, str]:
        """Fingerprints of what a result depends on besides the settings."""
        module = self.task.model.module
        shapes = {name: (tuple(value.shape), str(value.dtype)) for name, value in self.task.model.state().items()}
        files = [Path(name) for name in recipe_names(self.settings.algorithm.recipe) if name.endswith(".py")]
        return {
            "data": self.federation.dataset.fingerprint,
            "network": _fingerprint(f"{module!r}\n{shapes}".encode()),
            **{f"method {path.name}": _fingerprint(path.read_bytes()) for path in files},
        }

    def engine(self) -> Engine:
        """The engine that the settings ask for."""
        local = LocalEngine(
            self.federation.pooled() if self.recipe.pools_data else self.federation,
            self.task.model,
            self.recipe,
            self.roles,
            self.device,
            self.settings.evaluation.batch_size,
        )
        clients = 1 if self.recipe.pools_data else self.settings.cohort.count(len(self.federation))
        asked = self.settings.engine.workers
        return with_workers(local, choose_workers(asked, clients, self._expected_seconds(), self.device))

    def _expected_seconds(self) -> float:
        """Roughly the time of all rounds in one process; for choosing an engine."""
        settings = self.settings
        sizes = self.federation.partition.sizes
        steps = settings.local.in_round(0).steps_on(round(float(sizes.mean())))
        weights = sum(value.numel() for value in self.task.model.state().values())
        # A step's own cost in Python, and 6 operations per weight and sample at some ten billion a second.
        step = 3e-4 + 6e-10 * weights * settings.local.batch_size
        return settings.rounds * settings.cohort.count(len(sizes)) * steps * step


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def prepare(settings: Settings, *, model: ModelMaker | None = None, data: DataSet | None = None) -> Laboratory:
    """Build everything a run needs.

    Args:
        settings: The run's settings.
        model: Makes the network, instead of ``settings.model.name``.
        data: The data set, instead of ``settings.data.name``.
    """
    dataset = data if data is not None else load_dataset(settings)
    num_classes = len(dataset.classes)
    split = partition(
        dataset.train, settings.data.partition, settings.data.number_of_clients, num_classes, settings.data.seed
    )
    federation = Federation(dataset, split)
    recipe = settings.recipe()
    network = recipe.adapt(make_network(settings, dataset, model), settings.seed)
    clients = 1 if recipe.pools_data else len(federation)
    task = Task(network, num_classes, clients, settings.rounds, settings.local.in_round(0))
    roles = recipe.roles(task, local_buffers=settings.model.buffers == "local")
    return Laboratory(settings, federation, recipe, task, roles, choose_device(settings.device))


def load_dataset(settings: Settings) -> DataSet:
    """The data set with the normalisation that was asked for."""
    directory = Path(settings.data.dir).expanduser() if settings.data.dir else None
    dataset = load(settings.data.name, data_dir=directory, offline=settings.data.offline)
    return replace(
        dataset, normalisation=named_normalisation(settings.data.normalise, dataset.name, dataset.normalisation)
    )


def make_network(settings: Settings, dataset: DataSet, model: ModelMaker | None) -> SplitModel:
    """The network with its initial weights, split and checked on a sample."""
    example = dataset.normalisation.batch(dataset.train.inputs[:2])
    classes = len(dataset.classes)
    with torch_stream(settings.seed, "model"):
        if isinstance(model, nn.Module):
            module = copy.deepcopy(model)  # the caller's own stays as it is
        elif model is not None:
            module = model()
        else:
            module = build_model(settings.model.name, example.shape[1:], classes, dict(settings.model.options))
    network = SplitModel.of(module, settings.model.head, example)
    if network.num_classes != classes:
        raise ModelError(
            f"the network has {network.num_classes} outputs, but {dataset.name} has {classes} classes; make the last "
            "layer fit"
        )
    return network
