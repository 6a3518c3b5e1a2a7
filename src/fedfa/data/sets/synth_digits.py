"""synth-digits: rendered colour digits, a substitute for Ganin's SynthDigits but not a copy of it."""

from __future__ import annotations

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, LoadOther
from fedfa.data.raw import RawDataSet, RawSamples
from fedfa.data.rendering.glyphs import digit_masks, thickened_masks
from fedfa.data.rendering.paint import paint
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.learning.random import stream

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


def _make(load: LoadOther) -> RawDataSet:
    return RawDataSet(render(_TRAIN, 0), render(_TEST, 1), notes={"renderer": 1, "seed": _SEED})


SYNTH_DIGITS = DataSetDefinition(
    name="synth-digits",
    title="synth-digits: 12,000 rendered colour digits, a substitute for Ganin's SynthDigits",
    classes=DIGIT_NAMES,
    shape=(32, 32, 3),
    homepage="docs/data.md",
    terms="made by fedfa (MIT licence) from font outlines included in matplotlib",
    editions=(Edition("renderer 1", _TRAIN, _TEST, (1000,) * 10, CHECKSUMS["synth-digits"]),),
    make=_make,
    made_of="rendered fonts",
)
