"""Data sets of the user's own samples, from whatever :mod:`fedfa.data.sources` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.arguments import checks_arguments
from fedfa.data import cache
from fedfa.data.checks import check
from fedfa.data.preprocessing import Normalisation
from fedfa.data.raw import Array, RawDataSet, RawSamples, whole_number
from fedfa.data.records import Field, Records, pack, unpacked
from fedfa.data.samples import Columns, DataSet, Samples
from fedfa.data.sources import INPUTS, Parts, Source, objects, read
from fedfa.errors import DataError
from fedfa.learning.random import stream


@checks_arguments("dataset_from")
def dataset_from(
    train: Any,
    test: Any = None,
    *,
    validation: Any = None,
    name: str = "own",
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    label: str | None = None,
    inputs: Sequence[str] | None = None,
    clients: Any = None,
    domains: Any = None,
    writers: Any = None,
) -> DataSet:
    """Make a data set from your own samples.

    Args:
        train: A path (``.npz``, ``.csv``, ``.parquet``, a folder of class folders); a pair ``(inputs, labels)`` of
            arrays, the inputs also as a dictionary or tuple of arrays; a pandas ``DataFrame``; a torch ``Dataset`` of
            pairs or dictionaries; a Hugging Face data set; or a dictionary of these with the keys ``train``, ``test``
            and ``validation``. Images are ``uint8`` or ``uint16`` ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``;
            other integers stay integers (tokens); any other numbers become ``float32``.
        test: The same for the test samples. Where it is None and the source has no test samples, a random
            ``test_fraction`` of every class is held out.
        validation: The same for samples that are neither trained on nor tested on.
        name: Name for records and plots.
        classes: Names of the classes in the order of the labels; labels that are names are looked up in them. Default:
            those of the source, else the names among the training labels in alphabetical order, else the numbers.
        test_fraction: Share of samples to hold out.
        seed: Seed of that choice.
        label: Column of the labels, for tables and items that are dictionaries.
        inputs: Columns of the inputs; default: all other columns.
        clients: Who holds each training sample: a column, or one hashable value per sample. ``split("natural")`` makes
            one client of each.
        domains: The domain of each training sample, in the same form.
        writers: The same as ``clients``.

    Raises:
        DataError: The data cannot be read or cannot be trained on: values that are not finite, targets that are no
            classes, a single class …

    Example:
        >>> x, y = np.random.default_rng(1).normal(size=(100, 4)), np.arange(100) % 2
        >>> dataset_from((x, y))
        <DataSet own: 80 training + 20 test inputs of shape (4,), 2 classes>
    """
    if clients is not None and writers is not None:
        raise DataError("clients and writers both say who holds a sample; give one of them")
    owners = writers if clients is None else clients
    whole_number(seed, "seed")
    columns = Columns(
        label, _names(inputs, "inputs"), *(value if isinstance(value, str) else None for value in (owners, domains))
    )
    parts = read(train, columns)
    if owners is not None and not isinstance(owners, str):
        parts.train.clients = objects(owners)
    if domains is not None and not isinstance(domains, str):
        parts.train.domains = objects(domains)
    if test is not None:
        parts.test = read(test, columns).train
    if validation is not None:
        parts.validation = read(validation, columns).train
    return assemble(parts, name=name, classes=classes, test_fraction=test_fraction, seed=seed)


def assemble(
    parts: Parts,
    *,
    name: str,
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    hold_out_by: Array | None = None,
    checked: bool = True,
) -> DataSet:
    """A data set of what was read.

    Args:
        parts: Training samples and, where there are any, test and validation samples.
        name: Name of the data set.
        classes: Names of the classes.
        test_fraction: Share of each class to hold out where there are no test samples.
        seed: Seed of that choice.
        hold_out_by: Of each training sample the group in which to hold out; left out, all are one group.
        checked: Refuse data that cannot be trained on by themselves; sites of a federation may lack classes.
    """
    given = [part for part in (parts.train, parts.test, parts.validation) if part is not None]
    for part in given:
        if part.clients is not None and len(part.clients) != len(part):
            raise DataError(f"there are {len(part):,} samples, but {len(part.clients):,} clients")
        if part.domains is not None and len(part.domains) != len(part):
            raise DataError(f"there are {len(part):,} samples, but {len(part.domains):,} domains")
        if len(part) == 0:
            raise DataError("there are no samples: one of the given parts is empty")
    names, labels = number_labels(given, classes)
    owners, owner_numbers = _number([part.clients for part in given], "clients")
    domain_names, domain_numbers = _number([part.domains for part in given], "domains", dense=True)
    layout = _common_layout(given)
    made = [
        RawSamples(_packed(part.inputs, layout), number, domains=of_domain, writers=of_owner)
        for part, number, of_domain, of_owner in zip(given, labels, domain_numbers, owner_numbers, strict=True)
    ]
    train, test, validation = made[0], made[1] if parts.test is not None else None, None
    if parts.validation is not None:
        validation = made[-1]
    if test is None:
        train, test = _hold_out(train, test_fraction, seed, hold_out_by)
    raw = RawDataSet(train, test, validation=validation)
    normalisation = _statistics(train.inputs, layout)
    if checked:
        check(raw, normalisation, names)
    else:
        raw.check_shapes(len(names))
    return DataSet(
        name=name,
        train=_samples(train),
        test=_samples(test),
        classes=names,
        domains=domain_names,
        normalisation=normalisation,
        fingerprint=raw.fingerprint(raw.digests()),
        manifest={
            "name": name,
            "source": "the user's own data",
            "classes": list(names),
            "normalisation": normalisation.to_dict(),
            **({"domains": list(domain_names)} if domain_names else {}),
            **({"owners": list(owners)} if owners else {}),
            **{part: samples.counts(len(names), len(domain_names)) for part, samples in raw.parts()},
        },
        owners=owners,
        validation=None if validation is None else _samples(validation),
    )


def from_path(source: Path, directory: Path, *, columns: Columns = Columns(), again: bool = False) -> DataSet:  # noqa: B008 - frozen
    """Open the user's own file or folder through the cache; it is converted once, and ``again`` when it changes."""
    signature, given = _signature(source), columns.given()
    place = f"{source}{given if given else ''}"
    key = f"own-{source.stem}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    with cache.locked_for(directory, key):
        if not again and cache.is_cached(directory, key):
            stored = cache.open_cached(directory, key)
            if stored.manifest.get("signature") == signature:
                return replace(stored, name=source.stem)
        made = assemble(read(source, columns), name=source.stem)
        raw = RawDataSet(
            _raw(made.train), _raw(made.test), validation=None if made.validation is None else _raw(made.validation)
        )
        manifest = {**made.manifest, "title": source.stem, "terms": "the user's own", "signature": signature}
        cache.write(raw, key, directory, manifest, replace=True)
    return replace(cache.open_cached(directory, key), name=source.stem)


def number_labels(parts: Sequence[Source], classes: Sequence[str] | None) -> tuple[tuple[str, ...], list[Array]]:
    """Names of the classes, and the labels of every part as numbers."""
    given = _names(classes, "classes")
    if given is not None and (len(set(given)) != len(given) or not given):
        raise DataError(f"classes = {list(given)}: give every class one name of its own")
    stated = {part.names for part in parts if part.names is not None}
    if len(stated) > 1:
        one, other = (_short(names) for names in sorted(stated)[:2])
        raise DataError(f"training and test samples have different classes: {one} and {other}")
    for part in parts:
        _check_labels(part.labels)
    if all(part.labels.dtype.kind in "US" for part in parts):
        if given is None and stated:
            (given,) = stated
        names = given or tuple(sorted({str(label) for label in parts[0].labels.tolist()}))
        numbers = {name: number for number, name in enumerate(names)}
        for part in parts:
            if unknown := sorted({str(label) for label in part.labels.tolist()} - numbers.keys()):
                raise DataError(f"the label {unknown[0]!r} is not among the classes {_short(names)}")
        return names, [np.array([numbers[str(label)] for label in part.labels.tolist()]) for part in parts]
    if any(part.labels.dtype.kind in "US" for part in parts):
        raise DataError("the labels of one part are names, of another numbers; training and test need one form")
    labels = [part.labels.astype(np.int64) for part in parts]
    if given is None and not stated:
        lowest, highest = min(int(one.min()) for one in labels), max(int(one.max()) for one in labels)
        if lowest < 0:
            raise DataError(f"labels run from {lowest} to {highest}; classes are numbered from 0")
        distinct = len(np.unique(np.concatenate(labels)))
        if highest > 10 * distinct + 10:
            raise DataError(
                f"there are {distinct} different labels, but they run up to {highest}; number the classes from 0, or "
                "give the labels as names"
            )
        return tuple(str(number) for number in range(highest + 1)), labels
    return given or next(iter(stated)), labels


def _check_labels(values: Array) -> None:
    if values.ndim != 1:
        raise DataError(f"labels must be one number or name per sample, not of shape {list(values.shape)}")
    if values.dtype.kind == "f":
        raise DataError(
            f"labels must be whole numbers or names, not {values.dtype}: these are targets of a regression, or numbers "
            "with missing values. fedfa trains classifiers; convert labels that are whole numbers to integers"
        )
    if values.dtype.kind not in "iubUS":
        raise DataError(f"labels must be whole numbers or names, not {values.dtype}")


def _number(
    parts: Sequence[Array | None], what: str, dense: bool = False
) -> tuple[tuple[str, ...], list[Array | None]]:
    """Names and numbers of hashable values; integers stay as they are unless they must be ``dense``."""
    known = [part for part in parts if part is not None]
    if not known:
        return (), list(parts)
    values: set[Hashable] = set()
    for part in known:
        for value in part.tolist():
            if value is None or value != value:
                raise DataError(f"{what}: a sample has none (the value is {value})")
            try:
                values.add(value)
            except TypeError:
                raise DataError(f"{what}: {value!r} is not hashable; give text, numbers or tuples") from None
    if not dense and all(part.dtype.kind == "i" for part in known):
        return (), list(parts)
    by_number = all(isinstance(value, int) for value in values)
    key: Callable[[Any], Any] = int if by_number else str
    ordered = sorted(values, key=key)
    names = tuple(str(value) for value in ordered)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{what}: two different values are written {twice!r}; give them different names")
    numbers = {value: number for number, value in enumerate(ordered)}
    return names, [None if part is None else np.array([numbers[value] for value in part.tolist()]) for part in parts]


# -- inputs -----------------------------------------------------------------------------------------------------------
def as_inputs(values: Array, *, masks: bool = False) -> Array:
    """Images as ``[N, H, W, C]`` of 8 or 16 bits, other integers as ``int64``, everything else as ``float32``.

    Args:
        values: ``[N, …]``.
        masks: Truth values stay truth values; otherwise they become numbers.
    """
    if values.dtype.kind not in "fiub":
        raise DataError(f"inputs must be numbers, not {values.dtype}")
    if 0 in values.shape[1:]:
        raise DataError(f"the inputs have shape {list(values.shape)}: a sample has no values")
    if values.dtype in (np.uint8, np.uint16) and values.ndim in (3, 4):
        if values.ndim == 4 and values.shape[1] in (1, 3) and values.shape[3] not in (1, 3):
            return values.transpose(0, 2, 3, 1)
        return values[..., None] if values.ndim == 3 else values
    if values.dtype == np.bool_ and masks:
        return values
    if values.dtype.kind in "iu" and values.dtype != np.uint8:
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise DataError("the inputs are integers beyond 64 bits with a sign; give them as floats")
        return values.astype(np.int64)
    with np.errstate(over="ignore"):  # found by the check for values that are not finite
        return values.astype(np.float32)


def _common_layout(parts: Sequence[Source]) -> Records | None:
    """Convert the inputs of all parts in place; the layout of inputs that are several tensors.

    Raises:
        DataError: The parts do not fit together.
    """
    for part in parts:
        if isinstance(part.inputs, dict):
            part.inputs = {name: as_inputs(values, masks=True) for name, values in part.inputs.items()}
        elif isinstance(part.inputs, tuple):
            part.inputs = tuple(as_inputs(values, masks=True) for values in part.inputs)
        else:
            part.inputs = as_inputs(part.inputs)
    first = _form(parts[0].inputs)
    for part in parts[1:]:
        _refuse_other_form(first, _form(part.inputs))
    inputs = parts[0].inputs
    if isinstance(inputs, dict | tuple):
        return pack(*_arrays(inputs))[1]
    return None


_Form = list[tuple[str, list[int], str]]


def _form(inputs: INPUTS) -> _Form:
    """Name, shape and type of each array of one input."""
    arrays, names = _arrays(inputs)
    named = zip(names or [""] * len(arrays), arrays, strict=True)
    return [(name, list(values.shape[1:]), str(values.dtype)) for name, values in named]


def _refuse_other_form(train: _Form, test: _Form) -> None:
    if [name for name, *_ in train] != [name for name, *_ in test]:
        raise DataError("training and test inputs consist of different arrays")
    for (name, shape, kind), (_, other_shape, other_kind) in zip(train, test, strict=True):
        which = f" {name!r}" if name else ""
        if shape != other_shape:
            raise DataError(f"training inputs{which} are {shape}, but test inputs {other_shape}")
        if kind != other_kind:
            raise DataError(
                f"training inputs{which} are {kind}, but test inputs {other_kind}; uint8 and uint16 inputs are images "
                "[N, H, W, C] and are normalised, other inputs are not: pass both in one type"
            )


def _arrays(inputs: INPUTS) -> tuple[list[Array], list[str]]:
    if isinstance(inputs, dict):
        return list(inputs.values()), list(inputs)
    return (list(inputs), []) if isinstance(inputs, tuple) else ([inputs], [])


def _packed(inputs: INPUTS, layout: Records | None) -> Array:
    if layout is None:
        assert isinstance(inputs, np.ndarray)
        return inputs
    return pack(*_arrays(inputs))[0]


def _statistics(inputs: Array, layout: Records | None) -> Normalisation:
    if layout is None:
        return cache.statistics(inputs)
    stored = unpacked(inputs, layout)
    fields = [
        Field(one.name, one.dtype, one.shape, cache.statistics(values) if values.ndim == 4 else Normalisation())
        for one, values in zip(layout.fields, stored.values(), strict=True)
    ]
    return replace(layout, fields=tuple(fields))


def _hold_out(
    given: RawSamples, fraction: float, seed: int, groups: Array | None = None
) -> tuple[RawSamples, RawSamples]:
    """Hold out a random share of every class, at least one sample of each class that has two or more."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise DataError(f"test_fraction must lie between 0 and 1, not {fraction}")
    rng = stream(whole_number(seed, "seed"), "test-split")
    is_test = np.zeros(len(given.labels), dtype=bool)
    for group in (None,) if groups is None else np.unique(groups):
        inside = True if group is None else groups == group
        for label in np.unique(given.labels):
            members = rng.permutation(np.flatnonzero((given.labels == label) & inside))
            share = max(1, round(fraction * len(members))) if len(members) > 1 else 0
            is_test[members[:share]] = True
    if not is_test.any():
        raise DataError("no test samples can be held out: every class has a single sample; give test samples")
    return given.select(~is_test), given.select(is_test)


def _samples(raw: RawSamples) -> Samples:
    return Samples(**{name: torch.from_numpy(values) for name, values in raw.named()})


def _raw(samples: Samples) -> RawSamples:
    arrays: dict[str, Any] = {name: None if v is None else v.numpy() for name, v in vars(samples).items()}
    return RawSamples(**arrays)


def _signature(source: Path) -> str:
    """A checksum that changes with any file of the source."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    text = hashlib.sha256()
    for path in files:
        about = path.stat()
        text.update(f"{path.relative_to(source.parent)}|{about.st_size}|{about.st_mtime_ns};".encode())
    return text.hexdigest()


def _names(values: Any, what: str) -> tuple[str, ...] | None:
    """A list of names; None stays None."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise DataError(f"{what} = {values!r}: give a list of names")
    return tuple(str(value) for value in values)


def _short(names: tuple[str, ...] | None) -> str:
    return "unnamed" if names is None else ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
