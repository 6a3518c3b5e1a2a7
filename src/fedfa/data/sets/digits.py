"""The 8×8 digits that come with scikit-learn: small, real, and there without any download."""

from __future__ import annotations

import numpy as np

from fedfa.data.decoded import Arrays, Decoded
from fedfa.data.known import Edition, KnownSet, Parts
from fedfa.data.optional import needs
from fedfa.data.sets.mnist import DIGIT_NAMES


def _make(parts: Parts) -> Decoded:
    bunch = needs("sklearn.datasets", "the data set digits").load_digits()
    # Values are 0…16; the test part is every fifth sample, so that the writers, who come in runs, are in both.
    images = np.clip(np.rint(bunch.images * (255 / 16)), 0, 255).astype(np.uint8)
    is_test = np.arange(len(images)) % 5 == 4
    return Decoded(
        Arrays(images[~is_test], bunch.target[~is_test]),
        Arrays(images[is_test], bunch.target[is_test]),
        notes={"split": "every fifth sample is a test sample; the set has no official split"},
    )


DIGITS = KnownSet(
    name="digits",
    title="Digits 8×8: 1,797 small handwritten digits, inside scikit-learn",
    classes=DIGIT_NAMES,
    shape=(8, 8, 1),
    homepage="https://archive.ics.uci.edu/dataset/80",
    terms="CC BY 4.0 (UCI); distributed with scikit-learn",
    editions=(Edition("complete", 1438, 359),),
    make=_make,
)
