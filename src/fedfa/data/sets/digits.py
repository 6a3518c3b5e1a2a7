"""The 8×8 digits of scikit-learn: small, real, and available without a download."""

from __future__ import annotations

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, LoadOther
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import RawDataSet, RawSamples
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES


def _make(load: LoadOther) -> RawDataSet:
    bunch = import_optional("sklearn.datasets", "the data set digits").load_digits()
    images = np.clip(np.rint(bunch.images * (255 / 16)), 0, 255).astype(np.uint8)  # values are 0…16
    # Every fifth sample of each class: samples of a writer are adjacent, so both parts contain all writers.
    is_test = np.zeros(len(images), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(bunch.target == digit)[4::5]] = True
    samples = RawSamples(images, bunch.target)
    notes: dict[str, object] = {
        "split": "every fifth sample of a class is a test sample; the set has no official split"
    }
    return RawDataSet(samples.select(~is_test), samples.select(is_test), notes=notes)


DIGITS = DataSetDefinition(
    name="digits",
    title="Digits 8×8: 1,797 small handwritten digits, inside scikit-learn",
    classes=DIGIT_NAMES,
    shape=(8, 8, 1),
    homepage="https://archive.ics.uci.edu/dataset/80",
    terms="CC BY 4.0 (UCI); distributed with scikit-learn",
    editions=(Edition("complete", 1442, 355, digests=CHECKSUMS["digits"]),),
    make=_make,
    made_of="scikit-learn's digits",
)
