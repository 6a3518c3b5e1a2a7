"""A site's data, network and algorithm, prepared for one message.

Flower starts a new process for every message, so this runs often: data are memory-mapped, and only what the message
needs is imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fedfa.data import Columns, DataSet, Federation, Normalisation, Partition, Samples
from fedfa.data.records import Records
from fedfa.data.sources import read
from fedfa.data.user_data import assemble
from fedfa.engines.local import LocalEngine
from fedfa.errors import ConfigError, DataError, FederationError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.config import OWN, Config
from fedfa.experiment.experiment import Experiment
from fedfa.models.split import SplitModel

DataLoader = Callable[[Mapping[str, Any]], Any]
"""Returns the site's data, given its node config (on the server: the test data, given the run config)."""


class SiteExperiment(Experiment):
    """An experiment as one site sees it: nothing is simulated, and it draws no cohorts."""

    simulation: ClassVar[bool] = False

    def cohort(self, round: int) -> list[int]:
        """None: the server asks whom it chose."""
        return []


@dataclass(frozen=True)
class Site:
    """A client that is ready to train."""

    client: int
    experiment: Experiment
    engine: LocalEngine


def own_number(node_config: Mapping[str, Any]) -> int:
    """The site's client number.

    Example:
        >>> own_number({"partition-id": 2})
        2
    """
    number = node_config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ConfigError(
            f"partition-id = {number!r}: the node config must contain this site's number, counted from 0, e.g. "
            "--node-config 'partition-id=0 num-partitions=3'"
        )
    return number


def open_site(
    settings_text: str,
    client: int,
    node_config: Mapping[str, Any],
    load_data: DataLoader | None = None,
    make_model: ModelSource | None = None,
) -> Site:
    """Prepare the site to act as this client.

    Args:
        settings_text: The run's config as sent by the server (TOML).
        client: Client number that the server expects.
        node_config: The site's own config; ``data-dir``, ``device`` and ``threads`` are used here.
        load_data: Returns the site's own data, in place of its partition of a known data set.
        make_model: Returns the network, in place of the configured one.
    """
    if (own := own_number(node_config)) != client:
        raise FederationError(f"this site is number {own}, but the server addressed it as number {client}")
    torch.set_num_threads(int(node_config.get("threads", 1)))
    local: dict[str, Any] = {"device": node_config["device"]} if "device" in node_config else {}
    if "data-dir" in node_config:
        local["data"] = {"dir": str(node_config["data-dir"])}
    config = Config.resolve(tomllib.loads(settings_text), local)
    if config.privacy.on:  # how much noise is calibrated by the server; a site that adds a share is told with the plan
        clips = config.privacy.model_copy(update={"epsilon": None, "noise": 1.0})
        config = config.model_copy(update={"privacy": clips})
    if load_data is None:
        experiment = SiteExperiment.from_config(config, model=make_model)
        if not 0 <= client < len(experiment.sizes):
            raise FederationError(f"there is no client {client}: the partition has {len(experiment.sizes)}")
    else:
        refuse_common_statistics(config)
        dataset = own_dataset(load_data(node_config), require_model(make_model), config.model.head)
        federation = _single_client(dataset, client, config.data.clients or client + 1)
        experiment = SiteExperiment.from_config(config, model=make_model, data=federation)
    return Site(client, experiment, experiment.local_engine())


def require_model(make_model: ModelSource | None) -> ModelSource:
    """Check that an app with its own data has its own network."""
    if make_model is None:
        raise ConfigError("an app with its own load_data needs its own make_model too")
    return make_model


def refuse_common_statistics(config: Config) -> None:
    """Refuse to standardise with statistics of all sites: their data never meet.

    Raises:
        ConfigError: ``data.standardise`` is ``"federation"``.
    """
    if config.data.standardise == "federation":
        raise ConfigError(
            'data.standardise = "federation" needs the data of all clients in one place; sites with their own data use '
            '"client"'
        )


def own_dataset(loaded: Any, make_model: ModelSource, head: str | None = None) -> DataSet:
    """Convert the result of ``load_data`` to a data set with as many classes as the network has outputs.

    A site may lack classes, so its labels do not determine their number. Images are only scaled to [0, 1]: statistics
    of each site's own images would make the same image look different at two sites.

    Args:
        loaded: ``{"train": …, "test": …}`` (``test`` is optional), or the training split alone; each anything that
            :func:`~fedfa.data.dataset_from` accepts. Labels that are names need ``"classes"``, the same list at every
            site. A :class:`~fedfa.data.DataSet` is used unchanged.
        make_model: Returns the network.
        head: Name of its classifier, if it cannot be detected.
    """
    if isinstance(loaded, DataSet):
        return loaded
    splits = _splits(loaded, "load_data", "train", "'train' and, optionally, 'test' and 'classes'")
    outputs, classes = outputs_of(make_model, head), splits.get("classes")
    if classes is not None and len(classes) != outputs:
        raise DataError(f"load_data returned {len(classes)} classes, but the network has {outputs} outputs")
    parts = read(splits["train"], Columns())
    parts.test = parts.test if splits.get("test") is None else read(splits["test"], Columns()).train
    if parts.train.labels.dtype.kind in "US" and classes is None:
        raise DataError(
            "the labels are names; sites may lack classes, so every site must number them alike: return the names of "
            "all classes as 'classes', the same list at every site"
        )
    without_test = parts.test is None
    if without_test:
        parts.test = read(splits["train"], Columns()).train
    names = [str(number) for number in range(outputs)] if classes is None else classes
    dataset = assemble(parts, name=OWN, classes=names, checked=False)
    if isinstance(dataset.normalisation, Records):
        raise DataError("sites with their own data have inputs of one tensor; pack them into one")
    if not dataset.train.inputs.is_floating_point() or torch.isfinite(dataset.train.inputs).all():
        if without_test:
            dataset = replace(dataset, test=dataset.test.subset(torch.zeros(0, dtype=torch.int64)))
        return replace(dataset, normalisation=Normalisation())
    raise DataError("the site's inputs hold NaN or infinite values: fill or remove them")


def own_test_data(loaded: Any, make_model: ModelSource, head: str | None = None) -> DataSet:
    """Convert the result of ``load_test_data`` to a data set, of which only the test split is used.

    Args:
        loaded: Test samples in one of the forms of :func:`own_dataset`, alone or as ``{"test": …}``; or a
            :class:`~fedfa.data.DataSet`, whose test split is used with its normalisation.
        make_model: Returns the network.
        head: Name of its classifier, if it cannot be detected.
    """
    if isinstance(loaded, DataSet):
        dataset = loaded
    else:
        dataset = own_dataset(_splits(loaded, "load_test_data", "test", "'test'")["test"], make_model, head)
        dataset = replace(dataset, test=dataset.train)
    if len(dataset.test) == 0:
        raise DataError("load_test_data returned no test samples; return some, or leave it out")
    return dataset


def _splits(loaded: Any, function: str, required: str, expected: str) -> dict[Any, Any]:
    splits = dict(loaded) if isinstance(loaded, Mapping) else {required: loaded}
    if required not in splits or splits.keys() - {"train", "test", "classes"}:
        raise DataError(f"{function} returned the splits {', '.join(map(str, splits))}; return {expected}")
    return splits


def outputs_of(make_model: ModelSource, head: str | None) -> int:
    """Number of classes that a network distinguishes."""
    module = make_model if isinstance(make_model, torch.nn.Module) else make_model()
    return SplitModel.of(module, head).num_classes


def _single_client(dataset: DataSet, client: int, clients: int) -> Federation:
    """A federation in which only this client has data."""
    if client >= clients:
        raise FederationError(f"this site is number {client}, but there are {clients}, numbered from 0")
    count = len(dataset.train)
    offsets = np.where(np.arange(clients + 1) > client, count, 0).astype(np.int64)
    return Federation(dataset, Partition(np.arange(count, dtype=np.int64), offsets))


def without_data(test: DataSet | None, classes: int, example: torch.Tensor, clients: int) -> Federation:
    """The server's view of sites with their own data: an example input, and test data if there are any."""
    blank = Samples(example, torch.zeros(len(example), dtype=torch.int64))
    empty = Partition(np.zeros(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
    dataset = DataSet(
        name=OWN,
        train=blank,
        test=blank.subset(torch.zeros(0, dtype=torch.int64)) if test is None else test.test,
        classes=tuple(str(number) for number in range(classes)),
        domains=() if test is None else test.domains,
        normalisation=Normalisation() if test is None else test.normalisation,
        fingerprint="the sites' own",
        manifest={},
    )
    return Federation(dataset, empty)
