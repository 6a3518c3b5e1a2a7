"""The numerical kernels of FedFA, with gradients in closed form: anchor loss, and classifier on the anchors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.optimisers import SIMD_WIDTH
from fedfa.stacking.products import product


def anchor_loss(features: Tensor, anchors: Tensor, y: Tensor, counts: Tensor | None = None) -> Tensor:
    """The mean squared distance of features to the anchor of their class: Σ_s w_s ‖h_s − a_{y_s}‖².

    Args:
        features: h, ``[…, B, d]``.
        anchors: a, ``[C, d]``.
        y: Labels, ``[…, B]``.
        counts: Left out, w_s = 1/B, the mean over samples (eq. 3). Given, the number n of samples of each sample's own
            class in the batch, ``[…, B, 1]``: w_s = 1/(C n), the mean over classes of the mean within each class.

    Returns:
        One number, or one per client: ``[…]``.

    Example:
        >>> anchor_loss(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    result: Tensor = _AnchorLoss.apply(features, anchors, y, counts)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _AnchorLoss(torch.autograd.Function):
    """The gradient with respect to h_s is 2 w_s (h_s − a_{y_s}); anchors are constants."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, anchors: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        difference = features - functional.embedding(y, anchors)
        ctx.save_for_backward(difference, counts)
        ctx.divisor = y.shape[-1] if counts is None else len(anchors)
        squares = difference.square() if counts is None else difference.square() / counts
        loss: Tensor = squares.sum((-2, -1)) / ctx.divisor
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        difference, counts = ctx.saved_tensors
        weight = (2 * gradients[0] / ctx.divisor)[..., None, None]
        return difference * (weight if counts is None else weight * counts.reciprocal()), None, None, None


@dataclass
class AnchorBatch:
    """The anchors as the one batch on which a classifier is calibrated (eq. 5): anchor c is of class c.

    With P = softmax(A Wᵀ + b) the gradient of the cross-entropy is (P − I)ᵀ A / C for the weight and the column mean of
    P − I for the bias. What stays the same in every step is computed once.
    """

    anchors: Tensor
    """A, ``[…, C, d]``."""
    shares: Tensor
    """A / C; for a classifier with bias with one more column, of a feature that is always one; then zeros up to a
    multiple of the SIMD width, for the optimiser."""
    labels: Tensor
    """I"""
    _views: tuple[Tensor, Tensor, Tensor | None] | None = field(default=None, repr=False)
    """The last direction, and its columns for the weight and the bias: Adam reuses one tensor in every step."""

    @classmethod
    def of(cls, anchors: Tensor, biased: bool) -> AnchorBatch:
        """The batch of anchors ``[C, d]``, for a classifier with or without bias."""
        classes, width = anchors.shape[0], anchors.shape[1] + biased
        shares = anchors.new_zeros(classes, -(-width // SIMD_WIDTH) * SIMD_WIDTH)
        shares[:, :width] = 1 / classes
        shares[:, : anchors.shape[1]] = anchors / classes
        return cls(anchors, shares, torch.eye(classes, dtype=anchors.dtype, device=anchors.device))

    def gradient(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gradient with respect to the weight, ``[…, C, d]``, with that of the bias as column d; then zeros.

        Args:
            weight: W, ``[…, C, d]``.
            bias: b, ``[…, C]`` or None.
        """
        error = product(self.anchors, weight.mT, bias).softmax(-1).sub_(self.labels)
        return product(error.mT, self.shares)

    def descend(self, weight: Tensor, bias: Tensor | None, direction: Tensor, rate: float) -> None:
        """Move the classifier by −rate · direction, where the direction has the columns of :meth:`gradient`."""
        if self._views is None or self._views[0] is not direction:
            width = weight.shape[-1]
            of_bias = None if bias is None else direction.select(-1, width)
            self._views = (direction, direction.narrow(-1, 0, width), of_bias)
        _, for_weight, for_bias = self._views
        weight.sub_(for_weight, alpha=rate)
        if bias is not None and for_bias is not None:
            bias.sub_(for_bias, alpha=rate)
