"""The config section ``fleet``: the devices of the clients, and the policy of the rounds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from fedfa.checked_section import CheckedSection


class FleetConfig(CheckedSection):
    """The devices of the clients, and the policy of the rounds.

    Example:
        >>> FleetConfig(devices="lognormal", spread=0.5).on
        True
    """

    section: ClassVar[str] = "fleet"

    devices: str | None = None
    """``"equal"``, ``"lognormal"``, ``"phones"``, or a .csv or .json file with one device per client; left out, there
    are no devices and no clock."""
    seed: int = Field(1, ge=0)
    """Seed of the devices and their availability."""
    speed: float = Field(100.0, gt=0)
    """Samples per second that the median device trains on. It depends on the network: measure it on a device."""
    down: float = Field(4_318_000.0, gt=0)
    """Bytes per second that the median device receives (phones: measured links instead)."""
    up: float = Field(3_286_000.0, gt=0)
    """Bytes per second that the median device sends (phones: measured links instead)."""
    spread: float = Field(1.0, ge=0)
    """With ``devices = "lognormal"``: standard deviation of the logarithm of a speed."""
    availability: Literal["always", "daily"] = "always"
    """``"daily"``: devices come and go, with a daily cycle; see docs/fleet.md."""
    available: float = Field(0.3, gt=0, lt=1)
    """With ``availability = "daily"``: mean share of the time that a device is available."""
    swing: float = Field(4.0, ge=1)
    """With ``availability = "daily"``: how many times more often a device is available at the peak than half a day
    later."""
    session: float = Field(3600.0, ge=60)
    """With ``availability = "daily"``: mean length of a session in seconds."""
    policy: Literal["wait", "deadline", "fedbuff", "fedasync"] = "wait"
    """When the server steps: after all of the cohort; at the deadline at the latest; after each ``buffer``
    contributions, while ``concurrency`` clients train at a time; after each contribution."""
    deadline: float | None = Field(None, gt=0)
    """With ``policy = "deadline"``: virtual seconds from the start of a round to its end."""
    late: Literal["drop", "next", "partial"] = "drop"
    """With ``policy = "deadline"``: clients that would be late are cut off; or count in the round in which they arrive;
    or make only as many local steps as fit."""
    over_selection: float = Field(1.0, ge=1)
    """Synchronous policies: draw so many times the cohort, and count the first ones that make up the cohort."""
    buffer: int | None = Field(None, ge=1)
    """With ``policy = "fedbuff"``: contributions per server step; left out, the size of the cohort."""
    concurrency: int | None = Field(None, ge=1)
    """Asynchronous policies: clients that train at a time; left out, the size of the cohort."""
    staleness: Literal["polynomial", "none"] = "polynomial"
    """How a contribution that is τ server steps old is scaled: by (1 + τ)^−exponent, or not at all."""
    exponent: float = Field(0.5, ge=0)
    """Of ``staleness = "polynomial"``."""
    mixing: float = Field(0.6, gt=0, le=1)
    """With ``policy = "fedasync"``: share α of a client's model in the new model."""
    timeline: int = Field(10, ge=0)
    """Rounds whose visits are recorded one by one."""

    @property
    def on(self) -> bool:
        """Whether there is a clock."""
        return self.devices is not None

    @property
    def asynchronous(self) -> bool:
        """Whether clients start and arrive on their own."""
        return self.policy in ("fedbuff", "fedasync")

    @property
    def may_be_stale(self) -> bool:
        """Whether contributions to an older model can arrive."""
        return self.asynchronous or self.late == "next"

    @model_validator(mode="after")
    def _consistent(self) -> FleetConfig:
        if self.devices is None:
            changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if changed:
                raise ValueError(f"fleet.{changed[0]} has no effect without devices; set fleet.devices, e.g. to phones")
        if (self.policy == "deadline") != (self.deadline is not None):
            raise ValueError('fleet.policy = "deadline" and fleet.deadline = SECONDS belong together; set both')
        needs = {"late": "deadline", "buffer": "fedbuff", "mixing": "fedasync"}
        for name, policy in needs.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.policy != policy:
                raise ValueError(f'fleet.{name} belongs to fleet.policy = "{policy}", not to "{self.policy}"')
        if self.asynchronous and self.over_selection != 1:
            raise ValueError(f'fleet.over_selection has no meaning with fleet.policy = "{self.policy}"; leave it out')
        if not self.asynchronous and self.concurrency is not None:
            raise ValueError(f'fleet.concurrency has no meaning with fleet.policy = "{self.policy}"; leave it out')
        highest = self.available * 2 * self.swing / (self.swing + 1)
        if self.availability == "daily" and highest > 1:
            raise ValueError(
                f"fleet.available = {self.available:g} with fleet.swing = {self.swing:g} would need devices to be "
                f"available {highest:.0%} of the time at the peak; lower one of them"
            )
        return self
