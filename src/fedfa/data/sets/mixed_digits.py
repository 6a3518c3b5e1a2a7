"""mixed-digits: ten classes in five styles, the paper's feature skew."""

from __future__ import annotations

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, LoadOther
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.resize import resize
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.learning.random import stream

#: The domains, in the order of their numbers.
DOMAINS = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
PER_CLASS = 743
_SIDE = 28


def _make(load: LoadOther) -> RawDataSet:
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
    make=_make,
    made_of="five data sets",
    domains=DOMAINS,
)
