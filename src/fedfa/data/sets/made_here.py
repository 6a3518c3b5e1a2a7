"""Data sets that need no download: small digits (a file beside this one), rendered colour digits, mixed digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, LoadOther
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.rendering import digit_masks, paint, thickened_masks
from fedfa.data.resize import resize
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.learning.random import stream


def _make_digits(load: LoadOther) -> RawDataSet:
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        values, labels = file["images"], file["labels"].astype(np.int64)
    images = np.clip(np.rint(values * (255 / 16)), 0, 255).astype(np.uint8)  # values are 0…16
    # Every fifth sample of each class: samples of a writer are adjacent, so both parts contain all writers.
    is_test = np.zeros(len(images), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(labels == digit)[4::5]] = True
    samples = RawSamples(images, labels)
    notes: dict[str, object] = {
        "split": "every fifth sample of a class is a test sample; the set has no official split"
    }
    return RawDataSet(samples.select(~is_test), samples.select(is_test), notes=notes)


DIGITS = DataSetDefinition(
    name="digits",
    title="Digits 8×8: 1,797 small handwritten digits, part of fedfa",
    classes=DIGIT_NAMES,
    shape=(8, 8, 1),
    homepage="https://archive.ics.uci.edu/dataset/80",
    terms="CC BY 4.0: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
    editions=(Edition("complete", 1442, 355, digests=CHECKSUMS["digits"]),),
    make=_make_digits,
    made_of="a file of fedfa",
)


_TRAIN, _TEST, _BLOCK = 10000, 2000, 500
_SEED = 1  # of the data set, the same for every run


def render(count: int, part: int, seed: int = _SEED) -> RawSamples:
    """Paint ``count`` digits, the ten classes in turn; part 0 (training) and 1 (test) have separate random streams."""
    masks, grown = digit_masks(), thickened_masks(4)
    labels = np.arange(count, dtype=np.int64) % 10
    blocks = [
        paint(labels[start : start + _BLOCK], masks, grown, stream(seed, "synth-digits", part, start))
        for start in range(0, count, _BLOCK)
    ]
    return RawSamples(np.concatenate(blocks), labels)


def _make_synth_digits(load: LoadOther) -> RawDataSet:
    return RawDataSet(render(_TRAIN, 0), render(_TEST, 1), notes={"renderer": 1, "seed": _SEED})


SYNTH_DIGITS = DataSetDefinition(
    name="synth-digits",
    title="synth-digits: 12,000 rendered colour digits, a substitute for Ganin's SynthDigits",
    classes=DIGIT_NAMES,
    shape=(32, 32, 3),
    homepage="docs/data.md",
    terms="made by fedfa (MIT licence) from font outlines included in matplotlib",
    editions=(Edition("renderer 1", _TRAIN, _TEST, (1000,) * 10, CHECKSUMS["synth-digits"]),),
    make=_make_synth_digits,
    made_of="rendered fonts",
)


#: The domains, in the order of their numbers.
DOMAINS = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
PER_CLASS = 743
_SIDE = 28


def _make_mixed_digits(load: LoadOther) -> RawDataSet:
    train: list[RawSamples] = []
    test: list[RawSamples] = []
    sources: dict[str, object] = {}
    for number, name in enumerate(DOMAINS):
        domain = load(name)
        labels = domain.train.labels.numpy()
        chosen = choose(labels, number)
        train.append(_converted(domain.train.inputs.numpy()[chosen], labels[chosen], number))
        test.append(_converted(domain.test.inputs.numpy(), domain.test.labels.numpy(), number))
        sources[name] = {"fingerprint": domain.fingerprint, "edition": domain.manifest.get("edition")}
    return RawDataSet(_joined(train), _joined(test), notes={"made_of": sources, "per_class": PER_CLASS})


def choose(labels: Array, domain: int) -> Array:
    """Positions of 743 random samples of each class, or of all where there are fewer, without repetition."""
    rng = stream(1, "mixed-digits", domain)
    chosen = [rng.permutation(np.flatnonzero(labels == digit))[:PER_CLASS] for digit in range(10)]
    return np.sort(np.concatenate(chosen))


def _converted(images: Array, labels: Array, number: int) -> RawSamples:
    resized = resize(images, _SIDE, _SIDE)
    coloured = resized if resized.shape[-1] == 3 else np.repeat(resized, 3, axis=-1)
    return RawSamples(coloured, labels, domains=np.full(len(labels), number))


def _joined(parts: list[RawSamples]) -> RawSamples:
    return RawSamples(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.labels for part in parts]),
        domains=np.concatenate([part.domains for part in parts if part.domains is not None]),
    )


MIXED_DIGITS = DataSetDefinition(
    name="mixed-digits",
    title="Mixed digits: MNIST, SVHN, USPS, synth-digits and MNIST-M at one size",
    classes=DIGIT_NAMES,
    shape=(_SIDE, _SIDE, 3),
    homepage="docs/data.md",
    terms="those of its five sets; because of SVHN: non-commercial use only",
    editions=(
        Edition("with the subsets of SVHN and MNIST-M", 36298, 26007, digests=CHECKSUMS["mixed-digits"]),
        Edition("with other editions of its parts"),
    ),
    make=_make_mixed_digits,
    made_of="five data sets",
    domains=DOMAINS,
)
