"""Differential privacy of clients: one clip over everything that leaves a client, Gaussian noise on the sum.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, *Learning Differentially Private Recurrent Language Models*, ICLR 2018;
adaptive clip: G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, *Differentially Private Learning with Adaptive
Clipping*, NeurIPS 2021.

A client's groups (model, anchors, control variates, …) become changes v_g: the group's own mean, without its weight,
minus the received state where the group is a state. A class that the client lacks contributes zero there. Together they
are scaled so that √Σ_g ‖v_g / s_g‖² ≤ C, with the relative scales s_g of the config. The server adds noise of standard
deviation z · C · s_g to the sums and divides by the planned cohort, not by the number of clients that came. So every
client counts equally: numbers of samples are not sent.

Adaptive: a client also sends ±½, whether its norm was below C. The noisy share b of those below moves the clip,
C ← C · exp(−η (b − γ)). Noise of σ_b on the count costs a part of the budget: with z' = (z⁻² − (2σ_b)⁻²)^(−½) in place
of z on the changes, both together are the mechanism that z accounts for.

Where clients add the noise (:mod:`fedfa.protection.shares`), the server divides only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.learning.component import Protection, Traits
from fedfa.learning.context import ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import Tensors
from fedfa.protection.changes import changes_of, received
from fedfa.protection.noise import from_system, simulated

NAME = "privacy"
_BELOW = f"{NAME}/below"
_ROUNDING = 1 - 1e-6
"""Contributions are clipped this little below C, so that rounding them to single precision cannot exceed it."""


class Privacy(Protection):
    """Clips on the client, adds noise on the server."""

    name = NAME
    traits = Traits(broadcasts=True, horizon=True)

    noise: float = Field(1.0, gt=0)
    """Noise multiplier z that is accounted."""
    clip: float = Field(1.0, gt=0)
    """Clip C at the start."""
    quantile: float | None = Field(None, gt=0, lt=1)
    """γ: share of clients whose norm should lie below the clip; left out, the clip stays."""
    clip_lr: float = Field(0.2, gt=0)
    """η of the adaptive clip."""
    scales: Mapping[str, float] = Field(default_factory=dict)
    """Relative scales by component, or by ``component/group``; 1 where left out."""
    cohort: int = Field(1, ge=1)
    """Planned number of clients in a round: the fixed denominator."""
    states: Mapping[str, str] = Field(default_factory=dict)
    """Groups that become a component's state, with its name."""
    simulation: bool = True
    """Draw noise from the run's seed; otherwise from the operating system."""
    distributed: bool = False
    """Clients add the noise, and read its multiplier in what the server sends."""

    @property
    def count_noise(self) -> float:
        """σ_b: noise on the number of clients below the clip; a twentieth of the cohort, as its authors propose."""
        return max(self.cohort / 20, self.noise)

    @property
    def change_noise(self) -> float:
        """Noise multiplier of the changes."""
        if self.quantile is None:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.count_noise) ** -2)

    def deviation(self, group: str, clip: float) -> float:
        """Standard deviation of the noise on a group's sum."""
        return self.count_noise if group == _BELOW else self.change_noise * clip * self._scale(group)

    def largest(self, group: str, clip: float) -> float:
        """Largest absolute value that a client sends in a group."""
        return 0.5 if group == _BELOW else clip * self._scale(group)

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """The clip. Tensors that clients keep or only average are refused: they are not accounted."""
        for role, advice in _REFUSED_ROLES.items():
            if names := [name for name, one in task.roles.items() if one is role]:
                raise AlgorithmError(f"differential privacy: {names[0]!r} is {role.value}; {advice}")
        values = {"clip": self.clip} | ({"noise": self.noise} if self.distributed else {})
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def protect(self, ctx: ClientContext, contribution: Contribution) -> Contribution:
        """Changes without weights, clipped together."""
        clip, held = float(ctx.broadcast[self.name]["clip"]), ctx.label_counts > 0
        changes: dict[str, Tensors] = {}
        for group, entry in contribution.items():
            changes[group] = changes_of(entry, received(group, self.states, ctx.broadcast))
            if group in self.states:  # exactly zero for absent classes, whatever the rounding of weights left
                changes[group] = {name: _rows(value, held) for name, value in changes[group].items()}
        squared = sum(
            float(value.square().sum()) / self._scale(group) ** 2
            for group, values in changes.items()
            for value in values.values()
        )
        norm = math.sqrt(squared)
        if not math.isfinite(norm):  # refused with the client's name by the checks that follow
            return contribution
        factor = min(1.0, clip * _ROUNDING / norm) if norm > 0 else 1.0
        sent = {
            group: WeightedSum.of({name: (factor * value).float() for name, value in values.items()}, 1)
            for group, values in changes.items()
        }
        if self.quantile is not None:
            below = torch.tensor(0.5 if norm <= clip else -0.5)
            sent[_BELOW] = WeightedSum.of({"below": below}, 1)
        return sent

    def combine(self, server: ServerStep) -> None:
        """Noise on the sums, fixed denominators, states again instead of their changes."""
        draw = (lambda _: 0.0) if self.distributed else simulated(server.rng) if self.simulation else from_system
        state, total = server.state[self.name], server.aggregate
        clip, weight = float(state["clip"]), torch.tensor(float(self.cohort), dtype=torch.float64)
        sums: Contribution = {}
        for group in total.groups:
            if group == _BELOW:
                continue
            spread, noisy = self.deviation(group, clip), {}
            reference = received(group, self.states, server.state)
            for name, value in total[group].tensors.items():
                noisy[name] = value + spread * draw(value.shape)
                if name in reference:
                    noisy[name] = noisy[name] + weight * reference[name].double()
            sums[group] = WeightedSum(noisy, weight)
        if self.quantile is not None:
            counted = float(total[_BELOW].tensors["below"]) if _BELOW in total else 0.0
            share = 0.5 + (counted + self.count_noise * float(draw(()))) / self.cohort
            state["clip"] = torch.tensor(clip * math.exp(-self.clip_lr * (share - self.quantile)), dtype=torch.float64)
        server.aggregate = total.with_sums(sums, self.cohort)

    def _scale(self, group: str) -> float:
        return self.scales.get(group, self.scales.get(group.partition("/")[0], 1.0))


_REFUSED_ROLES = {
    Role.LOCAL: "clients keep it, and the accuracy that is reported would be that of single clients' own models; share "
    "the whole model",
    Role.AVERAGED: "running statistics of a client's data would take up the clip; replace BatchNorm by GroupNorm",
}


def _rows(change: Tensor, held: Tensor) -> Tensor:
    """The change with rows of absent classes set to zero."""
    return torch.where(held.reshape(-1, *[1] * (change.dim() - 1)), change, 0.0)
