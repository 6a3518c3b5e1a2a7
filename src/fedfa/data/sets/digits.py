"""The 8×8 digits that come with scikit-learn: small, real, and there without any download."""

from __future__ import annotations

import numpy as np

from fedfa.data.decoded import Arrays, Decoded
from fedfa.data.known import Edition, KnownSet, Parts
from fedfa.data.optional import needs
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES


def _make(parts: Parts) -> Decoded:
    bunch = needs("sklearn.datasets", "the data set digits").load_digits()
    images = np.clip(np.rint(bunch.images * (255 / 16)), 0, 255).astype(np.uint8)  # values are 0…16
    # Every fifth sample of each class: the writers come in runs, so that all of them are in both parts.
    is_test = np.zeros(len(images), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(bunch.target == digit)[4::5]] = True
    return Decoded(
        Arrays(images[~is_test], bunch.target[~is_test]),
        Arrays(images[is_test], bunch.target[is_test]),
        notes={"split": "every fifth sample of a class is a test sample; the set has no official split"},
    )


DIGITS = KnownSet(
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
