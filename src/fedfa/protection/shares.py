"""Noise in shares: every client adds discrete Gaussian noise below its mask, so that the server is not trusted with it.

P. Kairouz, Z. Liu, T. Steinke, *The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation*, ICML 2021.

A clipped contribution in units of 2⁻²⁴ receives whole numbers of standard deviation σ_g / √t, where σ_g = z · C · s_g
is what the sum needs and t the number of clients that are relied on (``privacy.honest`` times the planned cohort). The
sum over t clients or more has at least the variance σ_g², whoever is lost; fewer are not summed: the server asks for no
shares, and sites with all others as neighbours refuse to give any.

The sum of discrete Gaussians is not one itself. By the authors' Proposition 14 its Rényi divergence of order α is at
most α‖Δ‖² / 2tσ² + τd with τ = 10 Σ_{k<t} exp(−2π²σ² k / (k + 1)), σ being the deviation of a share in units and d the
number of coordinates. With σ ≥ 8, which is checked, τ is below 10⁻²⁶⁰ for a million clients, so the first term, that of
the Gaussian, is what is accounted.

Overflow: a share of noise beyond 40 deviations has a probability below 10⁻³⁴⁰; that clip and 40 deviations fit into a
client's part of the range is checked before noise is drawn, from numbers that are no secret.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.learning.component import Protection
from fedfa.learning.context import ClientContext, ServerStep
from fedfa.learning.random import stream
from fedfa.protection.noise import Bits, discrete_gaussian, simulated_bits, system_bits
from fedfa.protection.privacy import NAME as PRIVACY
from fedfa.protection.privacy import Privacy
from fedfa.protection.secure.encoding import FRACTION_BITS, FixedPoint

UNIT = 2.0**-FRACTION_BITS
_TAIL = 40
"""Deviations of a share that the range has to hold."""
_COARSEST = 8
"""Smallest deviation of a share, in units."""


class NoiseShares(Protection):
    """Adds the client's share of the noise to its clipped contribution in fixed point."""

    name = "noise"

    relied_on: int = Field(1, ge=1)
    """t: clients whose shares are enough."""
    seed: int = 0
    """Of the run, for simulated noise."""
    simulation: bool = True
    """Draw noise from the run's seed; otherwise from the operating system."""

    def protect(self, ctx: ClientContext, contribution: Contribution) -> Contribution:
        """The contribution with noise in every tensor of every group; weights are 1 for everybody."""
        sent = ctx.broadcast[PRIVACY]
        clip, room = float(sent["clip"]), ctx.component(FixedPoint).largest
        privacy = ctx.component(Privacy).model_copy(update={"noise": float(sent["noise"])})
        bits: Bits = system_bits
        if self.simulation:
            bits = simulated_bits(stream(self.seed, "noise share", ctx.round, ctx.client))
        noisy: Contribution = {}
        for group, entry in contribution.items():
            deviation = privacy.deviation(group, clip) / math.sqrt(self.relied_on)
            _check_range(group, deviation, privacy.largest(group, clip), room)
            tensors = {name: value + _noise(value, deviation, bits) for name, value in entry.tensors.items()}
            noisy[group] = WeightedSum(tensors, entry.weight)
        return noisy

    def combine(self, server: ServerStep) -> None:
        """Refuse a sum of too few shares; engines that reach sites refuse before they unmask it."""
        arrived = len(server.aggregate.members)
        if arrived < self.relied_on:
            raise AlgorithmError(
                f"{arrived} clients are in the sum, but the noise of {self.relied_on} is needed "
                "(privacy.honest times the planned cohort)"
            )


def _noise(value: Tensor, deviation: float, bits: Bits) -> Tensor:
    drawn = discrete_gaussian(deviation / UNIT, value.numel(), bits)
    return torch.from_numpy(drawn).to(value.device).reshape(value.shape).double() * UNIT


def _check_range(group: str, deviation: float, largest: float, room: float) -> None:
    if deviation < _COARSEST * UNIT:
        raise AlgorithmError(
            f"privacy.noise_by = 'clients': a client's noise on {group} would have a deviation of {deviation:.2g}, too "
            f"close to the unit {UNIT:.2g} of fixed point; raise privacy.clip or the scale of the component"
        )
    if largest + _TAIL * deviation > room:
        raise AlgorithmError(
            f"privacy.noise_by = 'clients': noise of deviation {deviation:.3g} on {group} does not fit into the range "
            f"±{room:g} of a client in fixed point; lower privacy.clip or the scale of the component"
        )
