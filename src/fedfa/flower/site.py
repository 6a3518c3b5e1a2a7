"""A site: its data, the network and the method, made ready for one message.

Flower starts a new process for every message, so what is made here is made often: data are memory-mapped, and nothing
is imported that the message does not need.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedfa.data import DataSet, Federation, Normalisation, Partition, Samples, dataset_from
from fedfa.engines.local import LocalEngine
from fedfa.errors import DataError, FederationError, SettingsError
from fedfa.models.split import SplitModel
from fedfa.studies.settings import OWN, Settings
from fedfa.studies.setup import Laboratory, ModelMaker, assemble, prepare

DataLoader = Callable[[Mapping[str, Any]], Any]
"""Gives the site's data, from its node config (on the server: the test data, from the run config)."""


@dataclass(frozen=True)
class Site:
    """What a site works with."""

    client: int
    laboratory: Laboratory
    engine: LocalEngine


def own_number(node_config: Mapping[str, Any]) -> int:
    """The site's number among the clients.

    Example:
        >>> own_number({"partition-id": 2})
        2
    """
    number = node_config.get("partition-id")
    if type(number) is not int or number < 0:
        raise SettingsError(
            f"partition-id = {number!r}: the node config must give this site's number, counted from 0, e.g. "
            "--node-config 'partition-id=0 num-partitions=3'"
        )
    return number


def open_site(
    settings_text: str,
    client: int,
    node_config: Mapping[str, Any],
    load_data: DataLoader | None = None,
    make_model: ModelMaker | None = None,
) -> Site:
    """Make ready what the site needs to be this client.

    Args:
        settings_text: The run's settings as the server sent them.
        client: Which client the site is to be.
        node_config: The site's own settings: ``data-dir``, ``device`` and ``threads`` are heeded here.
        load_data: Gives data of the site's own, instead of its part of a known set.
        make_model: Makes the network, instead of the one that the settings name.
    """
    if (own := own_number(node_config)) != client:
        raise FederationError(f"this site is number {own}, but was asked to be number {client}")
    torch.set_num_threads(int(node_config.get("threads", 1)))
    here: dict[str, Any] = {"device": node_config["device"]} if "device" in node_config else {}
    if "data-dir" in node_config:
        here["data"] = {"dir": str(node_config["data-dir"])}
    settings = Settings.resolve(tomllib.loads(settings_text), here)
    if load_data is None:
        laboratory = prepare(settings, model=make_model)
        if not 0 <= client < len(laboratory.sizes):
            raise FederationError(f"there is no client {client}: the split has {len(laboratory.sizes)}")
    else:
        dataset = own_dataset(load_data(node_config), require_model(make_model), settings.model.head)
        laboratory = assemble(settings, _one_of(dataset, client, settings.data.clients or client + 1), make_model)
    return Site(client, laboratory, laboratory.local_engine())


def require_model(make_model: ModelMaker | None) -> ModelMaker:
    """Data of one's own need a network of one's own."""
    if make_model is None:
        raise SettingsError("an app with its own load_data needs its own make_model too")
    return make_model


def own_dataset(loaded: Any, make_model: ModelMaker, head: str | None = None) -> DataSet:
    """What ``load_data`` returned, as a data set with as many classes as the network has outputs.

    A site may lack classes, so its labels cannot say how many there are; and constants that each site took from its own
    pictures would make the same picture look different at two sites. So pictures are only scaled to [0, 1].

    Args:
        loaded: ``{"train": …, "test": …}`` (the test part may be left out), or the training part alone; each a pair of
            arrays, a torch ``Dataset``, or a path. Or a :class:`~fedfa.data.DataSet`, which is taken as it is.
        make_model: Makes the network.
        head: Name of its classifier, where it cannot be found by itself.
    """
    if isinstance(loaded, DataSet):
        return loaded
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    if "train" not in parts or parts.keys() - {"train", "test"}:
        raise DataError(
            f"load_data returned the parts {', '.join(map(str, parts))}; give 'train' and, if wanted, 'test'"
        )
    train, test = parts["train"], parts.get("test")
    classes = [str(number) for number in range(outputs_of(make_model, head))]
    dataset = dataset_from(train, train if test is None else test, name=OWN, classes=classes)
    if test is None:
        dataset = replace(dataset, test=dataset.test.subset(torch.zeros(0, dtype=torch.int64)))
    return replace(dataset, normalisation=Normalisation())


def own_test_data(loaded: Any, make_model: ModelMaker, head: str | None = None) -> DataSet:
    """What ``load_test_data`` returned, as a data set whose test part counts.

    Args:
        loaded: The test samples in one of the forms of :func:`own_dataset`, alone or as ``{"test": …}``; or a
            :class:`~fedfa.data.DataSet`, of which the test part is taken with its normalisation.
        make_model: Makes the network.
        head: Name of its classifier, where it cannot be found by itself.
    """
    if not isinstance(loaded, DataSet):
        parts = dict(loaded) if isinstance(loaded, Mapping) else {"test": loaded}
        if "test" not in parts or parts.keys() - {"train", "test"}:
            raise DataError(f"load_test_data returned the parts {', '.join(map(str, parts))}; give 'test'")
        dataset = own_dataset(parts["test"], make_model, head)
        dataset = replace(dataset, test=dataset.train)
    else:
        dataset = loaded
    if len(dataset.test) == 0:
        raise DataError("load_test_data returned no test samples; give some, or leave it out")
    return dataset


def outputs_of(make_model: ModelMaker, head: str | None) -> int:
    """How many classes a network tells apart."""
    module = make_model if isinstance(make_model, torch.nn.Module) else make_model()
    return SplitModel.of(module, head).num_classes


def _one_of(dataset: DataSet, client: int, clients: int) -> Federation:
    """A federation of which this site sees itself alone."""
    if client >= clients:
        raise FederationError(f"this site is number {client}, but there are {clients}, numbered from 0")
    count = len(dataset.train)
    offsets = np.where(np.arange(clients + 1) > client, count, 0).astype(np.int64)
    return Federation(dataset, Partition(np.arange(count, dtype=np.int64), offsets))


def without_data(test: DataSet | None, classes: int, example: torch.Tensor, clients: int) -> Federation:
    """The server's view of sites that bring their own data: an example of an input, and test data if it has any."""
    blank = Samples(example, torch.zeros(len(example), dtype=torch.int64))
    nothing = Partition(np.zeros(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
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
    return Federation(dataset, nothing)
