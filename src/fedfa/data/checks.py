"""What is wrong with data that users bring, found when they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from fedfa.data.preprocessing import Normalisation
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.records import Records, unpacked
from fedfa.data.samples import DataSet
from fedfa.errors import DataError

log = logging.getLogger(__name__)

WILD_SCALE = 100.0
"""Columns beyond this mean or deviation are worth a warning: gradients grow with the square."""


def check(raw: RawDataSet, normalisation: Normalisation, classes: tuple[str, ...]) -> None:
    """Refuse data that cannot be trained on, and warn of what is probably a mistake.

    Raises:
        DataError: Values that are not finite, labels out of range, no samples, or a single class.
    """
    raw.check_shapes(len(classes))
    for part, samples in raw.parts():
        for name, values in _numbers(samples, normalisation):
            _check_finite(values, f"the {_TITLES[part]} inputs{name}")
    present = np.unique(raw.train.labels)
    if len(present) < 2:
        raise DataError(
            f"all {len(raw.train.labels):,} training samples have one class, {classes[int(present[0])]!r}; a "
            "classifier needs two or more"
        )
    if missing := [name for label, name in enumerate(classes) if label not in present]:
        if len(missing) > 10 + 9 * len(present):
            raise DataError(
                f"the labels name {len(present)} classes, but run up to {int(present[-1])}: {len(missing):,} numbers "
                "between have no sample. Number the classes from 0, or give the labels as names"
            )
        log.warning("no training sample has the class %s", ", ".join(missing[:10]) + (" …" if missing[10:] else ""))
    _warn_of_duplicates(raw)


_TITLES = {"train": "training", "test": "test", "validation": "validation"}


def _numbers(samples: RawSamples, normalisation: Normalisation) -> Iterator[tuple[str, Array]]:
    """The float arrays of the inputs, with the name of the field."""
    if isinstance(normalisation, Records):
        fields = unpacked(samples.inputs, normalisation)
        yield from ((f" {name!r}", values) for name, values in fields.items() if values.dtype == np.float32)
    elif samples.inputs.dtype == np.float32:
        yield "", samples.inputs


def _check_finite(values: Array, what: str) -> None:
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        columns = ""
        if values.ndim == 2:
            wrong = np.flatnonzero(~np.isfinite(values).all(axis=0))
            columns = f" (column {', '.join(map(str, wrong[:5]))}{' …' if len(wrong) > 5 else ''}, counted from 0)"
        raise DataError(
            f"{what} hold NaN or infinite values in {len(bad):,} of {len(values):,} samples, the first at position "
            f"{bad[0]}{columns}: fill or remove them"
        )


def _warn_of_duplicates(raw: RawDataSet) -> None:
    """Only a warning: tables of few values repeat themselves, and some well-known sets hold a few duplicates."""
    for part, samples in raw.parts():
        if part == "train" or not len(samples.inputs):
            continue
        known = {row.tobytes() for row in _rows(raw.train.inputs)}
        count = sum(row.tobytes() in known for row in _rows(samples.inputs))
        if count:
            log.warning(
                "%s of %s %s samples are among the training samples, too: accuracy on them is no evidence",
                f"{count:,}", f"{len(samples.inputs):,}", _TITLES[part],
            )  # fmt: skip


def _rows(inputs: Array) -> Array:
    return np.ascontiguousarray(inputs).reshape(len(inputs), -1)


def warn_of_scales(dataset: DataSet) -> None:
    """Warn of a table that is trained on as it is although its numbers are large."""
    samples = dataset.train.inputs
    if dataset.normalisation.mean or samples.dtype != torch.float32 or samples.dim() != 2 or not len(samples):
        return
    values = samples.numpy()
    size = np.maximum(np.abs(values.mean(axis=0, dtype=np.float64)), values.std(axis=0, dtype=np.float64))
    if size.max(initial=0) > WILD_SCALE:
        log.warning(
            "column %d of the inputs has values around %.3g: training on such numbers often diverges; set "
            'data.standardise = "federation", or use federation.standardised()',
            int(size.argmax()), float(size.max()),
        )  # fmt: skip
