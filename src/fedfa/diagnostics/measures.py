"""Measures as functions of tensors: K clients, n probe samples, C classes, features of dimension d.

All computations use double precision and a fixed order. Undefined values (the mean of no pairs, the cosine of a zero
vector) are NaN, and means skip them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 40
"""Bins of the histograms of cosines, over [-1, 1]."""


def pairs_mean(matrix: Tensor) -> Tensor:
    """Average a symmetric ``[K, K, …]`` over pairs of different clients.

    Example:
        >>> float(pairs_mean(torch.tensor([[1.0, 3.0], [3.0, 1.0]])))
        3.0
    """
    first, second = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[first, second].nanmean(0)


# -- features ---------------------------------------------------------------------------------------------------------
def feature_distances(features: Tensor) -> Tensor:
    """Compute L2 distances between two clients' features of the same sample: ``[K, n, d]`` → ``[K, K, n]``.

    Example:
        >>> feature_distances(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]]))[0, 1].tolist()
        [5.0]
    """
    features = features.double()
    clients, samples = features.shape[:2]
    distances = features.new_zeros(clients, clients, samples)
    for first in range(clients):
        for second in range(first + 1, clients):
            distance = torch.linalg.vector_norm(features[first] - features[second], dim=-1)
            distances[first, second] = distances[second, first] = distance
    return distances


def distance_by_class(distances: Tensor, labels: Tensor, classes: int, has_class: Tensor | None = None) -> Tensor:
    """Average the distances over the samples of a class and pairs of different clients, ``[C]``.

    Args:
        distances: ``[K, K, n]``.
        labels: ``[n]``.
        classes: C.
        has_class: ``[K, C]``; if given, only pairs whose clients both have the class count.
    """
    by_class = torch.full((classes,), torch.nan, dtype=distances.dtype)
    for label in range(classes):
        matrix = distances[..., labels == label].mean(-1)
        if has_class is not None:
            both = has_class[:, label].unsqueeze(0) & has_class[:, label].unsqueeze(1)
            matrix = torch.where(both, matrix, torch.nan)
        by_class[label] = pairs_mean(matrix)
    return by_class


@dataclass(frozen=True)
class Histogram:
    """Counts of cosines in :data:`BINS` equal bins over [-1, 1], and their sum."""

    counts: Tensor
    total: float

    @property
    def pairs(self) -> int:
        """Number of cosines."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Mean cosine; NaN if there are none."""
        return self.total / self.pairs if self.pairs else torch.nan


def pair_similarities(features: Tensor, labels: Tensor, own: Tensor) -> tuple[Histogram, Histogram]:
    """Count cosines between features of *different* clients, for samples of one class and of different classes.

    Args:
        features: ``[K, n, d]``.
        labels: ``[n]``.
        own: ``[K, n]``, the samples that count for a client: those of its own classes.

    Returns:
        Positive pairs, negative pairs.
    """
    directions = _directions(features.double())
    counts = torch.zeros(2, BINS, dtype=torch.int64)
    totals = [0.0, 0.0]
    for first in range(len(features)):
        for second in range(first + 1, len(features)):
            a, b = own[first], own[second]
            cosines = directions[first, a] @ directions[second, b].mT
            same = labels[a].unsqueeze(1) == labels[b].unsqueeze(0)
            for kind, chosen in enumerate((same, ~same)):
                values = cosines[chosen]
                values = values[~values.isnan()].clamp(-1, 1)
                bins = ((values + 1) / 2 * BINS).long().clamp(max=BINS - 1)
                counts[kind] += torch.bincount(bins, minlength=BINS)
                totals[kind] += float(values.sum())
    return Histogram(counts[0], totals[0]), Histogram(counts[1], totals[1])


def linear_cka(features: Tensor) -> Tensor:
    """Compute linear centred kernel alignment between clients: ``[K, n, d]`` → ``[K, K]``.

    ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of the centred features, in Frobenius norms; computed as ⟨XXᵀ, YYᵀ⟩ / (‖XXᵀ‖ ‖YYᵀ‖), which
    needs one product per client, not per pair. It is 1 for features that differ by a rotation and a scale.
    (S. Kornblith et al., *Similarity of Neural Network Representations Revisited*, ICML 2019.)
    """
    centred = features.double() - features.double().mean(1, keepdim=True)
    return cosines((centred @ centred.mT).flatten(1))


# -- updates ----------------------------------------------------------------------------------------------------------
def cosines(vectors: Tensor) -> Tensor:
    """Compute cosines between the vectors of clients: ``[K, m]`` → ``[K, K]``.

    Example:
        >>> cosines(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    directions = _directions(vectors.double())
    return (directions @ directions.mT).clamp(-1, 1)


def row_cosines(updates: Tensor) -> Tensor:
    """Compute cosines of classifier updates row by row: ``[K, C, m]`` → ``[K, K, C]``."""
    directions = _directions(updates.double())
    return torch.einsum("icm,jcm->ijc", directions, directions).clamp(-1, 1)


def gram(updates: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute inner products of whole updates, ``[K, K]``; each update is a list of tensors in the same order."""
    clients = len(updates)
    products = torch.zeros(clients, clients, dtype=torch.float64)
    for tensors in zip(*updates, strict=True):
        flat = [tensor.reshape(-1) for tensor in tensors]
        for start in range(0, len(flat[0]), 1 << 20):  # in chunks: whole networks in double precision may not fit
            chunk = torch.stack([values[start : start + (1 << 20)] for values in flat]).double()
            products += chunk @ chunk.mT
    return products


@dataclass(frozen=True)
class Drift:
    """Length and direction of the clients' updates."""

    norms: Tensor
    """``[K]``"""
    to_mean: Tensor
    """``[K]``, distance from the mean of the updates."""
    cosines: Tensor
    """``[K, K]``"""
    agreement: Tensor
    """‖mean‖² / mean ‖·‖²: 1 if all updates are equal, 1/K if they are orthogonal."""


def drift(products: Tensor) -> Drift:
    """Derive drift from the inner products. For updates u_i with mean m: ‖u_i − m‖² = ‖u_i‖² − 2 u_i·m + ‖m‖²."""
    squares, to_all, of_mean = products.diagonal(), products.mean(1), products.mean()
    norms = squares.sqrt()
    lengths = torch.where(norms > 0, norms, torch.nan)
    return Drift(
        norms,
        (squares - 2 * to_all + of_mean).clamp(min=0).sqrt(),
        (products / lengths.unsqueeze(0) / lengths.unsqueeze(1)).clamp(-1, 1),
        of_mean / squares.mean() if squares.any() else torch.tensor(torch.nan, dtype=torch.float64),
    )


# -- classifier -------------------------------------------------------------------------------------------------------
def classifier_gradient(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Gradient of the mean cross-entropy with respect to the classifier's weight, ``[C, d]``: (P − Y)ᵀ H / n.

    Args:
        features: H, ``[n, d]``.
        labels: ``[n]``; Y has their one-hot rows.
        weight: ``[C, d]``.
        bias: ``[C]`` or None.
    """
    errors = scores(features, weight, bias).softmax(-1) - torch.nn.functional.one_hot(labels, len(weight))
    return errors.mT @ features.double() / len(labels)


def scores(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the linear classifier's outputs in double precision, ``[n, C]``."""
    outputs = features.double() @ weight.double().mT
    return outputs if bias is None else outputs + bias.double()


# -- anchors ----------------------------------------------------------------------------------------------------------
def anchor_geometry(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Norms, movement and cosines ``[C, C]`` of anchors ``[C, d]``, before and after a round."""
    before, after = before.double(), after.double()
    between = cosines(after)
    return {
        "norms": torch.linalg.vector_norm(after, dim=-1),
        "movement": torch.linalg.vector_norm(after - before, dim=-1),
        "mean_cosine": pairs_mean(between),
        "cosines": between,
    }


def _directions(vectors: Tensor) -> Tensor:
    """Unit vectors along the last axis; NaN for zero vectors."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(lengths > 0, lengths, torch.nan)
