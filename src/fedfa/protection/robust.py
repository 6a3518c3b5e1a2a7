"""A robust rule in place of the mean, over the model and everything else that clients send.

Every group of the contribution (the model, FedFA's anchors, SCAFFOLD's control variates, …) is combined on its own: a
rule that compared clients by one distance over everything would not notice an attacker who changes only the anchors.
Clients count equally, because a weight is a client's own claim. Where a group has a weight per row (one row per class),
each row is combined over the clients that have weight there.

Bucketing: S. P. Karimireddy, L. He, M. Jaggi, *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing*,
ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.aggregate import Aggregate, Contribution, WeightedSum
from fedfa.learning.component import Protection, Traits
from fedfa.learning.context import ServerStep
from fedfa.learning.tensors import Tensors
from fedfa.protection import rules
from fedfa.protection.settings import RuleName

NAME = "robust"


class RobustRule(Protection):
    """Replaces the sums of the cohort by a robust centre times the cohort's weight."""

    name = NAME
    traits = Traits(single_contributions=True)

    rule: RuleName = "median"
    """The rule."""
    attackers: float = Field(0.2, ge=0, lt=0.5)
    """Largest share of the cohort that it has to resist."""
    bucket: int = Field(1, ge=1)
    """Clients that are averaged before the rule is applied."""
    radius: float | None = Field(None, gt=0)
    """Radius of centred clipping; left out, the median distance from the last aggregate."""

    def combine(self, server: ServerStep) -> None:
        """The robust centre of every group."""
        each, total = server.aggregate.each, server.aggregate
        bad = math.floor(self.attackers * len(each))
        if self.bucket > 1:
            order = server.rng.permutation(len(each))
            each = [_added([each[i] for i in order[k : k + self.bucket]]) for k in range(0, len(each), self.bucket)]
        sums: Contribution = {}
        for group in total.groups:
            weight = total[group].weight
            centre = self._centre(group, [one[group] for one in each if group in one], bad, server.state[self.name])
            sums[group] = WeightedSum({name: value * weight for name, value in centre.items()}, weight)
        server.aggregate = total.with_sums(sums)

    def _centre(self, group: str, entries: Sequence[WeightedSum], bad: int, state: Tensors) -> Tensors:
        """The centre of a group; where it has a weight per row, row by row."""
        first = entries[0]
        if not first.tensors:
            return {}
        names, shapes = list(first.tensors), [value.shape for value in first.tensors.values()]
        by_row = first.weight.dim() > 0
        rows = first.weight.shape[0] if by_row else 1
        weights = torch.stack([entry.weight.double().reshape(rows) for entry in entries])  # [n, rows]
        points = torch.cat(
            [torch.stack([e.tensors[name].double().reshape(rows, -1) for e in entries]) for name in names], 2
        )  # [n, rows, d]
        points = points / torch.where(weights == 0, 1.0, weights).unsqueeze(2)
        start = state.get(group)
        before = torch.zeros_like(points[0]) if start is None else start.double().reshape(points[0].shape)
        centres = torch.zeros_like(points[0])
        for row in range(rows):
            chosen = points[weights[:, row] > 0, row]
            centres[row] = self._apply(chosen, bad, before[row]) if len(chosen) else before[row] * 0
        if self.rule == "centred-clipping":
            state[group] = centres
        widths = [shape.numel() // rows for shape in shapes]
        parts = centres.split(widths, dim=1)
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def _apply(self, points: Tensor, bad: int, before: Tensor) -> Tensor:
        bad = min(bad, (len(points) - 1) // 2)
        match self.rule:
            case "median":
                return rules.median(points)
            case "trimmed-mean":
                return rules.trimmed_mean(points, bad)
            case "krum":
                return rules.krum(points, bad)
            case "multi-krum":
                return rules.krum(points, bad, len(points) - bad)
            case "geometric-median":
                return rules.geometric_median(points)
            case "centred-clipping":
                return rules.centred_clipping(points, before, self.radius)
            case "mean":
                return points.mean(0)


def _added(contributions: Sequence[Contribution]) -> Contribution:
    """The sum of some contributions."""
    total = Aggregate()
    for one in contributions:
        total.add(one)
    return {group: total[group] for group in total.groups}
