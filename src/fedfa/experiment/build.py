"""From a config to the things a run works with: data, network, algorithm, engine."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.algorithms.registry import expression_names
from fedfa.data import DataSet, Federation, dataset_from, load
from fedfa.data.validation import GIVEN, hold_out
from fedfa.engines.engine import Engine
from fedfa.engines.local import LocalEngine
from fedfa.engines.process_engine import with_workers
from fedfa.engines.ray_engine import RayEngine
from fedfa.engines.worker_count import choose_workers
from fedfa.errors import ConfigError, DataError, ModelError
from fedfa.experiment.config import OWN, Config
from fedfa.learning.metrics import Function, name_of
from fedfa.learning.random import torch_stream
from fedfa.learning.round import ServerState, Training
from fedfa.models.reference import network_reference
from fedfa.models.split import SplitModel
from fedfa.models.zoo import MODELS, build_model
from fedfa.stacking.choice import choose_execution
from fedfa.trees import NetworkInput, describe

log = logging.getLogger(__name__)

ModelSource = Callable[[], nn.Module] | nn.Module
"""Makes a network with fresh weights; or a network, whose weights are the initial ones."""

DataSource = Federation | DataSet | Any
"""A federation, a data set, or whatever :func:`~fedfa.data.dataset_from` makes one of."""


def load_dataset(config: Config) -> DataSet:
    """The data set that a config names, with its normalisation."""
    if config.data.name == OWN and not Path(OWN).exists():
        raise DataError(
            "the data of this run were given in Python and are not named in its config; give them again: "
            "fedfa.load(path, data=…) or fedfa.run(config, path, resume=True, data=…)"
        )
    directory = Path(config.data.dir).expanduser() if config.data.dir else None
    columns = config.data.columns
    dataset = load(config.data.name, data_dir=directory, offline=config.data.offline, columns=columns)
    return dataset.normalised(config.data.normalise)


def build_federation(config: Config, data: DataSource | None, validation: Any = None) -> Federation:
    """The clients: as given, or the data split as the config says; with validation samples where it asks for them.

    Args:
        config: What to do.
        data: The user's own data.
        validation: The user's own validation samples.
    """
    if isinstance(data, Federation):
        federation = data
    else:
        if data is None:
            data = load_dataset(config)
        dataset = data if isinstance(data, DataSet) else dataset_from(data)
        federation = dataset.split(config.data.partition, config.data.clients, config.data.seed)
    if config.data.validation is not None:
        federation = hold_out(federation, config.data.validation, config.data.seed, validation)
    if federation.standardise == "none" and len(federation.partition.order):  # a server of sites with own data has none
        federation = federation.standardised(config.data.standardise)
    return federation.augmented(config.data.augment) if federation.augmentation is None else federation


def with_own(config: Config, model: ModelSource | None, data: DataSource | None) -> Config:
    """The config of a run whose network or data are given in Python: it names nothing that is not used.

    A config that says so already (of a federation, or of an earlier release) stays as it is.
    """
    changed: dict[str, Any] = {}
    if model is not None and config.model.name != OWN:
        reference = network_reference(model) or OWN
        changed["model"] = config.model.model_copy(update={"name": reference, "options": {}})
    if data is not None and config.data.name != OWN:
        values: dict[str, Any] = {"name": OWN}
        if isinstance(data, Federation):
            values["clients"] = len(data)
            values |= {"standardise": data.standardise} if data.standardise != "none" else {}
            if (origin := data.origin) is not None:
                values = {
                    "name": origin.name, "normalise": origin.normalisation, "partition": origin.partition,
                    "clients": origin.clients, "seed": origin.seed, "dir": origin.data_dir or config.data.dir,
                    "standardise": config.data.standardise if origin.standardise == "none" else origin.standardise,
                    "augment": config.data.augment if origin.augment == "none" else origin.augment,
                    "label": origin.columns.label, "inputs": origin.columns.inputs,
                    "client_column": origin.columns.clients, "domain_column": origin.columns.domains,
                }  # fmt: skip
        changed["data"] = config.data.model_copy(update=values)
    return config.model_copy(update=changed)


def evaluation_layer(metrics: Sequence[str | Function], validation: Any) -> dict[str, Any]:
    """The config layer of metrics or validation samples that are given in Python."""
    layer: dict[str, Any] = {}
    if metrics:
        if isinstance(metrics, str) or callable(metrics):
            raise ConfigError(f"metrics is {metrics!r}; give a list of names and functions of (labels, scores)")
        layer["evaluation"] = {"metrics": [name_of(one) for one in metrics]}
    if validation is not None:
        layer["data"] = {"validation": validation if isinstance(validation, str) else GIVEN}
    return layer


def build_network(config: Config, example: NetworkInput, classes: int, model: ModelSource | None) -> SplitModel:
    """The network with its initial weights, split into features and classifier, and checked on an example input."""
    with torch_stream(config.seed, "model"):
        if isinstance(model, nn.Module):
            module = copy.deepcopy(model)  # the caller's network is not changed
        elif model is not None:
            if not callable(model):
                raise ModelError(
                    f"model is {model!r}; give an nn.Module class, a function that returns a network, or a network"
                )
            module = model()
        elif config.model.name == OWN:
            raise ModelError(
                "the network of this run was given in Python and is not named in its config; give it again: "
                "fedfa.load(path, model=…) or fedfa.run(config, path, resume=True, model=…)"
            )
        elif config.model.name in MODELS and not (isinstance(example, Tensor) and example.is_floating_point()):
            raise ModelError(
                f"the network {config.model.name!r} of fedfa reads one tensor of numbers, not {describe(example)}; "
                "give numbers as floats (x.astype('float32')), or a network of your own that reads these inputs"
            )
        else:
            shape = example.shape[1:] if isinstance(example, Tensor) else ()
            module = build_model(config.model.name, shape, classes, dict(config.model.options))
    if not isinstance(module, nn.Module):
        raise ModelError(f"model returned {type(module).__name__}; give an nn.Module, or a function that returns one")
    network = SplitModel.of(module, config.model.head, example)
    if network.num_classes != classes:
        raise ModelError(
            f"the network has {network.num_classes} outputs, but the data have {classes} classes; change the last layer"
        )
    return network


def build_engine(config: Config, training: Training, local: LocalEngine, cohort: int, state: ServerState) -> Engine:
    """The engine that a config asks for: the local one, or one around it. Stacked execution is tried from the state."""
    asked, pooled = config.engine.workers, training.algorithm.pools_data
    if config.engine.kind == "ray":
        if config.engine.execution == "stacked":
            raise ConfigError('engine.execution = "stacked" is for one machine; leave it out with engine.kind = "ray"')
        return RayEngine(local, config.engine.address, cohort if asked == "auto" else asked)
    workers = choose_workers(asked, cohort, _expected_seconds(config, local), local.device)
    if not pooled and (asked in ("auto", 1) or config.engine.execution == "stacked"):
        first = config.local.in_round(0, config.rounds)
        start = replace(state, round=0)
        local.stacked = choose_execution(config.engine.execution, training, local, start, first, cohort, workers)
    if local.stacked:
        log.info("clients of equal size are stacked, in this process")
        if asked not in ("auto", 1):
            log.warning("engine.workers = %s has no effect on stacked clients: they train in this process", asked)
        return local
    return with_workers(local, workers)


def _expected_seconds(config: Config, local: LocalEngine) -> float:
    """Roughly the time of all rounds in one process, to choose an engine."""
    sizes = local.federation.partition.sizes
    mean = round(float(sizes.mean()))
    steps = config.local.steps_on(mean)
    weights = sum(value.numel() for value in local.model.state().values())
    # The overhead of a step in Python, and 6 operations per weight and sample at about ten billion a second.
    step = 3e-4 + 6e-10 * weights * config.local.batch_size
    clients = 1 if local.algorithm.pools_data else len(sizes)
    return config.rounds * config.cohort.count(clients) * steps * step


def origin_of(config: Config, dataset: DataSet, network: SplitModel) -> dict[str, str]:
    """Fingerprints of what a result depends on besides the config."""
    shapes = {name: (tuple(value.shape), str(value.dtype)) for name, value in network.state().items()}
    # The constants for CIFAR-10 once differed from the reference code's; a run begun with them must not change midway.
    corrected = config.data.normalise == "authors" and dataset.name == "cifar10"
    constants = {"normalisation": _fingerprint(repr(dataset.normalisation).encode())} if corrected else {}
    return {
        "data": dataset.fingerprint,
        **constants,
        "network": _fingerprint(f"{network.module!r}\n{shapes}".encode()),
        **method_fingerprints(config.algorithm.name),
    }


def method_fingerprints(expression: str) -> dict[str, str]:
    """Fingerprints of the files of own methods in an algorithm expression."""
    files = [Path(name) for name in expression_names(expression) if name.endswith(".py")]
    return {f"method {path.name}": _fingerprint(path.read_bytes()) for path in files}


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextmanager
def single_thread() -> Iterator[None]:
    """A context in which torch uses one thread: results must not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
