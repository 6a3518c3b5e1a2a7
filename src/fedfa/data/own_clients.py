"""Clients of the user's own: one set of samples for each, as hospitals or devices have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfa.arguments import checks_arguments
from fedfa.data.federation import Federation
from fedfa.data.raw import Array
from fedfa.data.samples import Columns
from fedfa.data.sources import INPUTS, Parts, Source, read
from fedfa.data.user_data import assemble
from fedfa.errors import DataError


@checks_arguments("federation_from")
def federation_from(
    clients: Mapping[Any, Any] | Sequence[Any],
    test: Any = None,
    *,
    name: str = "own",
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    label: str | None = None,
    inputs: Sequence[str] | None = None,
    domains: str | None = None,
) -> Federation:
    """A federation of your own clients: a list of their samples, or a dictionary by name.

    Args:
        clients: For each client anything that :func:`~fedfa.data.dataset_from` accepts, such as ``(inputs, labels)`` or
            a ``DataFrame``; or ``{"train": …, "test": …}``.
        test: Test samples that all share. Left out, the clients' own test samples together, else a random
            ``test_fraction`` of each class of each client.
        name: Name for records and plots.
        classes: Names of the classes in the order of the labels.
        test_fraction: Share of samples to hold out.
        seed: Seed of that choice.
        label: Column of the labels, for tables and items that are dictionaries.
        inputs: Columns of the inputs; default: all other columns.
        domains: Column of the domains.

    Raises:
        DataError: A client is empty or does not fit the others; names the client.

    Example:
        >>> draw = np.random.default_rng(1)
        >>> hospital = lambda size: (draw.normal(size=(size, 3)), np.arange(size) % 2)
        >>> federation = federation_from({"north": hospital(40), "south": hospital(20)})
        >>> federation, federation.names
        (<Federation own: 2 clients; 48 samples, 16 to 32 per client>, ('north', 'south'))
    """
    named = dict(clients) if isinstance(clients, Mapping) else None
    if named is None and (isinstance(clients, str) or not isinstance(clients, Sequence)):
        raise DataError(f"clients is {type(clients).__name__}; give a list of sets of samples, or a dictionary by name")
    if not clients:
        raise DataError("there are no clients; give at least one")
    columns = Columns(label, None if inputs is None else tuple(inputs), None, domains)
    given = list(named.items()) if named is not None else list(enumerate(clients))
    width = len(str(len(given) - 1))  # so that names sort as numbers do
    trained, tested = [], []
    for who, source in given:
        try:
            parts = read(source, columns)
        except DataError as error:
            raise DataError(f"client {who!r}: {error}") from None
        if len(parts.train) == 0:
            raise DataError(f"client {who!r} has no training samples; leave it out")
        own = str(who) if named is not None else f"{who:0{width}}"
        for part in (parts.train, parts.test):
            if part is not None:
                part.clients = np.array([own] * len(part), dtype=object)
        trained.append((who, parts.train))
        tested += [] if parts.test is None else [(who, parts.test)]
    if named is not None and len({str(who) for who in named}) < len(named):
        raise DataError("two clients have the same name; give each its own")
    if test is not None and tested:
        raise DataError("test samples are given for all and for clients; give one of them")
    whole = Parts(_joined(trained), read(test, columns).train if test is not None else None)
    if tested:
        whole.test = _joined(tested)
    groups = None if whole.test is not None else _numbered(whole.train.clients)
    dataset = assemble(whole, name=name, classes=classes, test_fraction=test_fraction, seed=seed, hold_out_by=groups)
    return Federation.of(dataset, "natural", None, 1)


def _numbered(values: Array | None) -> Array:
    assert values is not None
    numbers: Array = np.unique(values.astype(str), return_inverse=True)[1]
    return numbers


def _joined(sources: Sequence[tuple[Any, Source]]) -> Source:
    """The samples of all clients, one after the other."""
    (who, first), *others = sources
    for other_name, other in others:
        if _form(first.inputs) != _form(other.inputs):
            raise DataError(
                f"the inputs of client {other_name!r} are {_form(other.inputs)}, but those of client {who!r} are "
                f"{_form(first.inputs)}"
            )
        if first.labels.dtype.kind != other.labels.dtype.kind or first.names != other.names:
            raise DataError(f"the labels of client {other_name!r} are of another kind than those of client {who!r}")
        if (first.domains is None) != (other.domains is None):
            raise DataError(f"client {other_name!r} and client {who!r} differ in whether they name domains")
    every = [source for _, source in sources]
    inputs: INPUTS
    if isinstance(first.inputs, dict):
        inputs = {key: np.concatenate([one.inputs[key] for one in every]) for key in first.inputs}  # type: ignore[call-overload]  # one form
    elif isinstance(first.inputs, tuple):
        inputs = tuple(np.concatenate(each) for each in zip(*(one.inputs for one in every), strict=True))
    else:
        inputs = np.concatenate([one.inputs for one in every])
    return Source(
        inputs,
        np.concatenate([one.labels for one in every]),
        first.names,
        np.concatenate([one.clients for one in every if one.clients is not None]),
        None if first.domains is None else np.concatenate([one.domains for one in every if one.domains is not None]),
    )


def _form(inputs: INPUTS) -> str:
    if isinstance(inputs, dict):
        return ", ".join(f"{key} {_form(values)}" for key, values in inputs.items())
    if isinstance(inputs, tuple):
        return ", ".join(map(_form, inputs))
    kind = inputs.dtype if inputs.dtype.kind != "f" else "numbers"
    return f"{list(inputs.shape[1:])} of {kind}"
