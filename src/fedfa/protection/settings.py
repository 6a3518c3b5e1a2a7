"""Config sections ``aggregation``, ``attack`` and ``privacy``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RuleName = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping"]
AttackName = Literal[
    "none", "sign-flip", "scaling", "label-flip", "alie", "inner-product", "backdoor", "anchor-poisoning"
]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class AggregationConfig(_Settings):
    """How contributions are combined."""

    rule: RuleName = "mean"
    """``"mean"``: the algorithm's own weighted sums. The others resist clients that send anything; see
    docs/robustness.md."""
    attackers: float = Field(0.2, ge=0, lt=0.5)
    """Largest share of the cohort that the rule has to resist: what a trimmed mean cuts at each end, and Krum's f."""
    bucket: int = Field(1, ge=1)
    """Clients that are averaged, in random groups, before the rule is applied; 2 helps where clients differ much."""
    radius: float | None = Field(None, gt=0)
    """Radius of centred clipping; left out, the median distance from the last aggregate."""

    @property
    def robust(self) -> bool:
        """Whether a robust rule is on."""
        return self.rule != "mean"


class AttackConfig(_Settings):
    """Simulated attackers among the clients."""

    kind: AttackName = "none"
    """What attackers do; see docs/robustness.md."""
    share: float = Field(0.2, gt=0, lt=1)
    """Share of all clients that attack."""
    scale: float | None = Field(None, gt=0)
    """Strength: the factor of sign-flip (1), scaling (10), inner-product (0.5), label-flip and backdoor (1); the
    standard deviations of alie (as many as hide it); how far anchor-poisoning moves (1: onto the other class)."""
    source: int = Field(0, ge=0)
    """anchor-poisoning: the class whose anchor is moved."""
    target: int = Field(1, ge=0)
    """anchor-poisoning: the class onto whose anchor it is moved; backdoor: the class of patched pictures."""
    poisoned: float = Field(0.5, gt=0, le=1)
    """backdoor: share of an attacker's samples that carry the patch."""

    @property
    def poisons_data(self) -> bool:
        """Whether attackers train on changed samples."""
        return self.kind in ("label-flip", "backdoor")


class PrivacyConfig(_Settings):
    """Differential privacy of clients, on where ``epsilon`` or ``noise`` is set; secure sums. See docs/privacy.md."""

    epsilon: float | None = Field(None, gt=0)
    """Budget ε of the whole run. The run stops before a round that would exceed it."""
    delta: float | None = Field(None, gt=0, lt=1)
    """δ; left out, 10⁻⁵ or N^−1.1 for N clients, whichever is smaller."""
    noise: float | None = Field(None, gt=0)
    """Noise multiplier: standard deviation of the noise on the sum, divided by the clip. Left out, as much as
    ``epsilon`` needs for the planned rounds."""
    noise_by: Literal["server", "clients"] = "server"
    """Who adds it. ``"clients"``: each adds a share of discrete Gaussian noise below its mask, and the server is not
    trusted with it; needs ``masks``."""
    honest: float = Field(0.5, gt=0, le=1)
    """Noise by clients: share of the planned cohort that has to arrive and to keep its noise to itself. The shares are
    so large that those of this many are enough; fewer are not summed."""
    clip: float = Field(1.0, gt=0)
    """Largest joint norm of everything that leaves a client; with ``quantile``, at the start."""
    quantile: float | None = Field(None, gt=0, lt=1)
    """Adaptive clip: share of clients whose norm should lie below it, e.g. 0.5; left out, the clip stays."""
    clip_lr: float = Field(0.2, gt=0)
    """Learning rate of the adaptive clip."""
    scales: dict[str, float] = Field(default_factory=dict)
    """Relative scales in the joint norm by component, e.g. ``privacy.scales.anchors = 10``; 1 where left out. A
    component with a large scale uses up less of the clip and receives more noise."""
    masks: bool = False
    """Secure sums: a federation's server sees masked contributions and their sum, never a single one. A simulation has
    the same bits, without masks."""

    @property
    def on(self) -> bool:
        """Whether contributions are clipped and noise is added."""
        return self.epsilon is not None or self.noise is not None

    @property
    def distributed(self) -> bool:
        """Whether clients add the noise."""
        return self.on and self.noise_by == "clients"
