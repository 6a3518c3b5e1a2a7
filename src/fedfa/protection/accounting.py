"""The privacy loss of a run: how much noise a budget needs, and what has been spent after each round.

The arithmetic is that of Google's ``dp-accounting``. The unit is a client: *all* that one client holds.

=============  ======================================  ===============================================================
cohort         neighbouring federations                bound
=============  ======================================  ===============================================================
Poisson        with and without a client               privacy loss distribution (PLD) of the subsampled Gaussian
everybody      with and without a client               PLD of the Gaussian
fixed size     a client's data replaced by others      Rényi divergences of sampling without replacement; replacing
                                                       moves the sum by up to twice the clip, so z/2 is accounted
seen           a client sends nothing but its noise    Rényi divergences of the Gaussian, for every round with the
                                                       client: the server knows cohorts, so drawing them gains nothing
=============  ======================================  ===============================================================

The last row is for noise that clients add in shares (:mod:`fedfa.protection.shares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from fedfa.errors import ConfigError
from fedfa.protection.settings import PrivacyConfig

Sampling = Literal["poisson", "everybody", "fixed size", "seen"]

_GRID = 1e-3
"""Width of the cells of a privacy loss distribution; the bound it gives is an upper one, some 10⁻⁴ above the limit."""
_PRECISION = 1e-3
"""How far below the budget the ε of calibrated noise may be, relatively."""
_LARGEST = 1e6
"""Largest noise multiplier."""


@dataclass(frozen=True)
class Mechanism:
    """Gaussian noise on the sum over a random cohort, round after round.

    Args:
        noise: Noise multiplier z: standard deviation of the noise, divided by the clip.
        sampling: How cohorts are drawn.
        clients: Clients from which cohorts are drawn.
        cohort: Clients in a cohort; with Poisson sampling their expected number.
        delta: δ.
        counts: Seen cohorts: after each round, in how many the client that was drawn most often took part.

    Example:
        >>> round(Mechanism(20.0, "everybody", 100, 100, 1e-5).epsilon(100), 2)
        1.99
    """

    noise: float
    sampling: Sampling
    clients: int
    cohort: int
    delta: float
    counts: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Probability of a client to be in a cohort."""
        return self.cohort / self.clients

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds."""
        if rounds not in self._known:
            if self.sampling in ("fixed size", "seen"):
                self._known[rounds] = self.rdp_epsilon(rounds)
            else:
                composed = self._one_round.self_compose(rounds)
                self._known[rounds] = float(composed.get_epsilon_for_delta(self._delta(rounds)))
        return self._known[rounds]

    def rdp_epsilon(self, rounds: int) -> float:
        """ε after so many rounds by Rényi divergences: for fixed-size cohorts the bound, otherwise a cross-check."""
        dp = _library()
        from dp_accounting import rdp

        relation = {
            "fixed size": dp.NeighboringRelation.REPLACE_ONE, "seen": dp.NeighboringRelation.REPLACE_SPECIAL,
        }.get(self.sampling, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)  # fmt: skip
        releases = rounds
        if self.sampling == "seen":
            event, releases = dp.GaussianDpEvent(self.noise), self._taken(rounds)
        elif self.sampling == "fixed size":
            event = dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, dp.GaussianDpEvent(self.noise / 2))
        else:
            event = dp.PoissonSampledDpEvent(self.rate, dp.GaussianDpEvent(self.noise))
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        accountant.compose(event, releases)
        return float(accountant.get_epsilon(self._delta(rounds)))

    def _taken(self, rounds: int) -> int:
        """Rounds of the client that took part most often; in rounds beyond the planned ones, everybody may."""
        known = min(rounds, len(self.counts))
        return (self.counts[known - 1] if known else 0) + rounds - known

    def _delta(self, rounds: int) -> float:
        """δ less the probability that a Poisson cohort had to be drawn again because it was empty."""
        return self.delta - (rounds * (1 - self.rate) ** self.clients if self.sampling == "poisson" else 0.0)

    @cached_property
    def _known(self) -> dict[int, float]:
        """ε by number of rounds, as far as it was computed."""
        return {0: 0.0}

    @cached_property
    def _one_round(self) -> Any:
        _library()
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_gaussian_mechanism(
            self.noise, sampling_prob=self.rate, value_discretization_interval=_GRID, use_connect_dots=True
        )


@dataclass(frozen=True)
class Budget:
    """The mechanism of a run and the largest ε that it may spend; infinite: it is only accounted."""

    mechanism: Mechanism
    epsilon: float

    def allows(self, rounds: int) -> bool:
        """Whether so many rounds stay within the budget."""
        return math.isinf(self.epsilon) or self.mechanism.epsilon(rounds) <= self.epsilon

    def record(self, rounds: int) -> dict[str, float]:
        """What a record says after so many rounds."""
        return {"epsilon": round(self.mechanism.epsilon(rounds), 6), "delta": self.mechanism.delta}


def budget(
    config: PrivacyConfig, *, poisson: bool, clients: int, cohort: int, rounds: int, counts: tuple[int, ...] = ()
) -> Budget:
    """The budget of a run, with noise calibrated for its planned rounds unless the config fixes it.

    Args:
        config: Config section.
        poisson: Whether clients are drawn independently.
        clients: Clients from which cohorts are drawn.
        cohort: Clients in a cohort.
        rounds: Planned rounds.
        counts: Noise by clients: see :class:`Mechanism`.

    Raises:
        ConfigError: No noise could keep to it, or cohorts could be empty too often.
    """
    sampling: Sampling = "poisson" if poisson else "fixed size"
    if cohort >= clients:
        sampling = "everybody"
    if config.distributed:
        sampling = "seen"
    delta = config.delta if config.delta is not None else min(1e-5, clients**-1.1)
    mechanism = Mechanism(config.noise or 1.0, sampling, clients, cohort, delta, counts)
    if sampling == "poisson" and rounds * (1 - mechanism.rate) ** clients > delta / 100:
        raise ConfigError(
            f'cohort.selection = "poisson" with {cohort} of {clients} clients on average leaves some rounds without '
            f"any client, which would show; with privacy.delta = {delta:g} and {rounds} rounds about "
            f"{math.ceil(math.log(100 * rounds / delta))} are needed: raise cohort.rate, or set cohort.selection = "
            '"uniform"'
        )
    if config.noise is None:
        assert config.epsilon is not None
        mechanism = calibrated(mechanism, config.epsilon, rounds)
    found = Budget(mechanism, config.epsilon if config.epsilon is not None else math.inf)
    if not found.allows(1):
        raise ConfigError(
            f"privacy.noise = {config.noise:g}: a single round spends {mechanism.epsilon(1):.3g}, more than "
            f"privacy.epsilon = {config.epsilon:g}; leave privacy.noise out, and as much as is needed is added"
        )
    return found


@lru_cache(maxsize=64)
def calibrated(mechanism: Mechanism, epsilon: float, rounds: int) -> Mechanism:
    """The mechanism with the noise multiplier whose ε after these rounds is the budget, or at most a thousandth less.

    Raises:
        ConfigError: There is none below a million.
    """

    def excess(noise: float) -> float:
        """Log ε / budget: nearly linear in the logarithm of the noise."""
        spent = replace(mechanism, noise=noise).epsilon(rounds)
        return math.log(max(spent, 1e-9) / epsilon) if math.isfinite(spent) else math.inf

    low = high = 1.0
    above = below = excess(1.0)
    while below > 0:
        low, above = high, below
        high *= 2
        if high > _LARGEST:
            raise ConfigError(
                f"privacy.epsilon = {epsilon:g}: no noise multiplier up to {_LARGEST:g} is enough for {rounds} rounds"
            )
        below = excess(high)
    while above <= 0:
        high, below = low, above
        low /= 2
        above = excess(low)
    while below < -_PRECISION:
        # The secant aims half the precision below the budget; the middle where it does not shrink the bracket well.
        aim = (above + _PRECISION / 2) / (above - below) if math.isfinite(above) else 0.5
        middle = low * (high / low) ** min(max(aim, 0.02), 0.98)
        found = excess(middle)
        if found > 0:
            low, above = middle, found
        else:
            high, below = middle, found
    found_mechanism = replace(mechanism, noise=high)
    spent, checked = found_mechanism.epsilon(rounds), found_mechanism.rdp_epsilon(rounds)
    if spent > checked * (1 + 1e-6):  # the exact bound cannot be the larger one
        raise ConfigError(
            f"privacy.epsilon = {epsilon:g}: the two accountants disagree (PLD {spent:g}, RDP {checked:g}); please "
            "report it"
        )
    return found_mechanism


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            "differential privacy is accounted by dp-accounting, which is not installed; pip install 'fedfa[privacy]'"
        ) from None
    return dp_accounting
