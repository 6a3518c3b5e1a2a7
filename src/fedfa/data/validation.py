"""Validation samples: what choosing (best round, early stopping, tuning) looks at, so that the test set is left alone.

``data.validation`` says where they come from:

- ``server:0.1``: this share of the clients' samples, the same share of every class and domain, moves to the server;
- ``clients:0.1``: this share of each client's samples is held out on the client (at least one sample of a client that
  has two). The model is evaluated on all of them together; a client's own model on the client's;
- a path, or samples given in Python: a set of the user's own. The clients keep everything.

What is held out is drawn from a stream of ``data.seed``, after the split: the split itself stays as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.data.preprocessing import Normalisation
from fedfa.data.records import Records
from fedfa.data.samples import DataSet, Samples
from fedfa.data.user_data import dataset_from
from fedfa.errors import ConfigError, DataError
from fedfa.learning.random import stream

if TYPE_CHECKING:
    from fedfa.data.federation import Federation

GIVEN = "own"
"""Stands in a config for validation samples that were given in Python."""


@dataclass(frozen=True)
class HeldOut:
    """A share of the training samples, as a config names it."""

    where: Literal["server", "clients"]
    share: float


def parse_validation(text: str) -> HeldOut | str:
    """What ``data.validation`` says: a share to hold out, or the path of a set.

    Example:
        >>> parse_validation("clients:0.1"), parse_validation("mine/val.npz")
        (HeldOut(where='clients', share=0.1), 'mine/val.npz')
    """
    where, colon, share = text.partition(":")
    if where not in ("server", "clients"):
        if not text.strip():
            raise ConfigError('data.validation is empty; write "server:0.1", "clients:0.1" or the path of a set')
        return text
    try:
        value = float(share) if colon else np.nan
    except ValueError:
        value = np.nan
    if not 0 < value < 1:
        raise ConfigError(f'data.validation = {text!r}: write {where} and a share between 0 and 1, as "{where}:0.1"')
    return HeldOut("server" if where == "server" else "clients", value)


@dataclass(frozen=True, eq=False)
class ValidationSet:
    """Validation samples, and where each client holds its own out, the client of each."""

    samples: Samples
    owners: Tensor | None = None
    drawn: bool = False
    """Whether they were held out of the training samples."""

    def of(self, client: int) -> Samples | None:
        """The samples that this client held out; None where they are not the clients'."""
        return None if self.owners is None else self.samples.subset((self.owners == client).nonzero().squeeze(1))

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the content."""
        digest = hashlib.blake2b(digest_size=16)
        for values in (self.samples.inputs, self.samples.labels):
            digest.update(str((values.dtype, tuple(values.shape))).encode())
            digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()


def hold_out(federation: Federation, text: str, seed: int, given: Any = None) -> Federation:
    """The federation with validation samples, which its clients then no longer train on.

    Args:
        federation: The clients; not changed.
        text: See :func:`parse_validation`.
        seed: Seed of the split.
        given: Validation samples given in Python: a pair of arrays, a torch ``Dataset``, a path or a ``Samples``.
    """
    if text == GIVEN or given is not None:
        if given is None:
            raise DataError(
                "the validation samples of this run were given in Python and are not named in its config; give them "
                "again: validation=(inputs, labels)"
            )
        return federation.with_validation(ValidationSet(_own(given, federation.dataset)))
    spec = parse_validation(text)
    if isinstance(spec, str):
        return federation.with_validation(ValidationSet(_own(spec, federation.dataset)))
    split = federation.partition
    held = _of_clients(split, spec.share, seed) if spec.where == "clients" else _of_all(federation, spec.share, seed)
    if not held.any() or held.all():
        raise DataError(
            f"data.validation = {text!r} would hold out {int(held.sum())} of {len(held)} samples; choose another share"
        )
    owners = split.owners()
    kept = np.bincount(owners[~held], minlength=len(split))
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    samples = federation.dataset.train.subset(torch.from_numpy(split.order[held]))
    whose = torch.from_numpy(owners[held]) if spec.where == "clients" else None
    return federation.with_validation(ValidationSet(samples, whose, drawn=True), Partition(split.order[~held], offsets))


def _of_clients(split: Partition, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which entries of ``split.order`` each client holds out."""
    held = np.zeros(len(split.order), dtype=bool)
    for client in split.holders:
        first, size = int(split.offsets[client]), int(split.sizes[client])
        count = min(max(round(share * size), 1), size - 1)
        held[first + stream(seed, "validation", int(client)).permutation(size)[:count]] = True
    return held


def _of_all(federation: Federation, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which entries of ``split.order`` the server holds out: the same share of every class of every domain."""
    split, train = federation.partition, federation.dataset.train
    held = np.zeros(len(split.order), dtype=bool)
    groups: IntArray = train.labels.numpy()[split.order]
    if train.domains is not None:
        groups = groups + federation.dataset.num_classes * train.domains.numpy()[split.order]
    draw = stream(seed, "validation")
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        held[draw.permutation(places)[: round(share * len(places))]] = True
    return held


def _own(given: Any, dataset: DataSet) -> Samples:
    """The user's own validation samples, in the form of the data set's."""
    if isinstance(given, Samples):
        samples = given
    else:
        made = dataset_from(given, given, classes=dataset.classes)
        samples = made.train
        has, needs = (_layout(one.normalisation, one.train.inputs) for one in (made, dataset))
        if has != needs:
            raise DataError(f"validation inputs are {_words(has)}, but those of {dataset.name} {_words(needs)}")
    if samples.inputs.shape[1:] != dataset.test.inputs.shape[1:] or samples.inputs.dtype != dataset.test.inputs.dtype:
        raise DataError(
            f"validation inputs are {samples.inputs.dtype} {list(samples.inputs.shape[1:])}, but those of "
            f"{dataset.name} {dataset.test.inputs.dtype} {list(dataset.test.inputs.shape[1:])}"
        )
    if len(samples) == 0:
        raise DataError("the validation set has no samples")
    return samples


_Layout = list[tuple[str, str, list[int]]]


def _layout(normalisation: Normalisation, inputs: Tensor) -> _Layout:
    """Name, type and shape of each array of an input; arrays of a dictionary are stored as bytes in this order."""
    if isinstance(normalisation, Records):
        return [(one.name, one.dtype, list(one.shape)) for one in normalisation.fields]
    return [("", str(inputs.dtype).removeprefix("torch."), list(inputs.shape[1:]))]


def _words(layout: _Layout) -> str:
    return ", ".join(f"{name} {kind} {shape}".strip() for name, kind, shape in layout)
