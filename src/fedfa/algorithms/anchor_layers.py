"""Anchors at several layers of a network: which features are aligned, and under which names.

Without ``layers`` only what enters the classifier is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedfa.errors import AlgorithmError
from fedfa.learning.context import Batch
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel

LAST = "anchors"
"""Name of the anchors of what enters the classifier; they calibrate it."""


def aligned_features(batch: Batch, layers: Sequence[str]) -> Tensors:
    """The features to align, by the name of their anchors."""
    return {LAST: batch.features, **{_name(layer): _pooled(batch.outputs[layer]) for layer in layers[:-1]}}


def anchor_widths(model: SplitModel, layers: Sequence[str]) -> dict[str, int]:
    """Width of the aligned features, by the name of their anchors.

    Raises:
        AlgorithmError: The last layer is not what enters the classifier, or there is no example input.
    """
    if not layers:
        return {LAST: model.feature_dim}
    model.watch(layers)
    example = model.try_out()
    if example is None:
        raise AlgorithmError("algorithm.anchors.layers needs an example input to find the layers' widths")
    if model.outputs[layers[-1]] is not example[0]:
        raise AlgorithmError(
            f"algorithm.anchors.layers: the last one, {layers[-1]!r}, must be the module whose output enters the "
            f"classifier {model.head_name!r}, because its anchors calibrate the classifier"
        )
    return {LAST: model.feature_dim, **{_name(layer): _pooled(model.outputs[layer]).shape[-1] for layer in layers[:-1]}}


def _name(layer: str) -> str:
    return f"{LAST}.{layer}"


def _pooled(output: Tensor) -> Tensor:
    """A layer's output as one vector per sample: the channels of an image are averaged over it."""
    return output.flatten(2).mean(-1) if output.dim() > 2 else output
