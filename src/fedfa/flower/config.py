"""Conversion of Flower's flat run config into the configs of a run and of its federation."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedfa.error_messages import validation_message
from fedfa.errors import ConfigError
from fedfa.experiment.config import OWN, Config, Section, preset_layer
from fedfa.experiment.layers import assign, expression_and_variant, merge, nest, table

FEDERATION = "federation"


class FederationConfig(Section):
    """How the server waits for sites and validates them. Nothing here changes what a participating site computes."""

    sites: int = Field(0, ge=0)
    """Number of sites; 0: as the sites announce (``num-partitions`` in their node config)."""
    run_folder: str = ""
    """Run directory at the server; by default named after Flower's run id."""
    resume: bool = True
    """Resume the run in the run directory; if false, a directory that holds a run is an error."""
    wait_seconds: float = Field(300, gt=0)
    """How long to wait for enough sites, at the start and before a round is retried."""
    round_seconds: float = Field(3600, gt=0)
    """Deadline of a round, from sending the plan to the last reply."""
    grace_seconds: float = Field(0, ge=0)
    """How long to wait for further replies once the quorum is reached; 0: until the round's deadline."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Fraction of the cohort whose updates a round needs."""
    attempts: int = Field(3, ge=1)
    """Attempts at a round without quorum before the run ends; it can be resumed."""
    replace: bool = False
    """Replace a site that fails by another one; otherwise the round uses the sites that answered."""
    evaluation: Literal["server", "sites", "both"] = "server"
    """Where the global model is tested: on the server's test data, on the sites' own, or on both."""
    norm_limit: float = Field(0, ge=0, allow_inf_nan=True)
    """Largest L2 norm of a site's mean update; updates above it are rejected. 0: a hundred times the norm of the model
    that the round started from (or of 1, if that is larger); ``inf``: no limit. What components send besides (anchors,
    statistics) is bounded too, more generously, unless there is no limit."""
    share_limit: float = Field(0.5, gt=0, le=1)
    """Largest share of a round's weight, and of the test samples in an evaluation at the sites, that one site can have
    where there are three or more: a number of samples is a site's own claim. 1: no limit."""
    site_keys: str = ""
    """File at the server that binds numbers to keys (TOML: ``0 = "clinic-a.pub"``); a site with another key is refused.
    Empty: the first node that claims a number has it."""
    lost_state: Literal["renew", "refuse"] = "renew"
    """A site that lost its client state starts with empty state and a warning, or does not take part."""
    poll_seconds: float = Field(0.25, gt=0)
    """Interval between two polls for replies."""
    link_seconds: float = Field(300, gt=0)
    """How long the server's app tries to reach the SuperLink before the run ends; it can be resumed."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> FederationConfig:
        """Validate the values of the section.

        Raises:
            ConfigError: A key is unknown or a value is invalid.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(validation_message(error, cls, FEDERATION)) from None


class RunConfig:
    """The app's run config as config layers; completing it takes the number of sites.

    Keys: ``preset``, ``algorithm``, ``rounds``, ``seed``, ``settings`` (assignments in one string), ``federation.*``,
    and any config key of fedfa by its dotted name. An empty string counts as unset, because TOML has no null.

    Args:
        values: Flower's ``context.run_config``.
        own_data: Whether the sites bring their own data instead of partitions of a known data set.

    Example:
        >>> run_config = RunConfig({"preset": "digits-c2", "rounds": 2, "settings": "local.lr=0.05 local.epochs=1"})
        >>> config = run_config.config(sites=3)
        >>> config.data.clients, config.local.lr, config.cohort.count(3)
        (3, 0.05, 3)
    """

    def __init__(self, values: Mapping[str, Any], *, own_data: bool = False) -> None:
        rest = {key: value for key, value in values.items() if value != ""}
        self._base = preset_layer(str(rest.pop("preset"))) if "preset" in rest else {}
        text = str(rest.pop("settings", ""))
        try:
            assignments = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"settings = {text!r} cannot be split into assignments: {error}") from None
        layer: dict[str, Any] = {}
        if "algorithm" in rest:
            layer = {"algorithm": expression_and_variant(str(rest.pop("algorithm")))}
        for key, value in rest.items():
            layer = merge(layer, nest(key, value))
        layer = assign(layer, assignments)
        for section in ("data", "model"):
            table(layer, section, f"{section}.KEY = VALUE")
        self.own_data = own_data
        self.federation = FederationConfig.parse(layer.pop(FEDERATION, {}))
        self._layer = layer

    @property
    def head(self) -> str | None:
        """Name of the classifier, if configured."""
        head = self._layer.get("model", {}).get("head")
        return None if head is None else str(head)

    @property
    def masks(self) -> bool:
        """Whether contributions are summed securely."""
        return bool(self._layer.get("privacy", self._base.get("privacy", {})).get("masks", False))

    def check(self) -> None:
        """Reject a config that is invalid for any number of sites, before waiting for sites."""
        clients = self._layer.get("data", {}).get("clients", self.federation.sites or 1)
        if type(clients) is not int:
            raise ConfigError(f"data.clients = {clients!r} is not a number of sites; leave it out, or set an integer")
        self.config(clients)

    def config(self, sites: int) -> Config:
        """Complete config for this number of sites. By default every site takes part in every round."""
        clients = self._layer.get("data", {}).get("clients", sites)
        if clients != sites:
            raise ConfigError(
                f"data.clients = {clients}, but the federation has {sites} sites; leave data.clients out, or start as "
                "many sites"
            )
        cohort = {} if "cohort" in self._layer else {"cohort": {"clients": sites}}
        data: dict[str, Any] = {"clients": sites}
        if self.own_data:
            data |= {"name": OWN, "partition": "natural"}
        config = Config.resolve(self._base, cohort, {"data": data}, self._layer)
        if config.build_algorithm().pools_data:
            raise ConfigError(
                f"{config.algorithm.name!r} pools the data of all clients, which a federation between sites exists to "
                "avoid; run it with `fedfa run`"
            )
        if config.fleet.on:
            raise ConfigError(
                "fleet.devices simulates devices, and a federation between sites has real ones; leave the keys of "
                "fleet out, or simulate it with `fedfa run`"
            )
        if config.attack.kind != "none":
            raise ConfigError(
                f"attack.kind = {config.attack.kind!r}: attackers are simulated, and sites are real; use `fedfa run`"
            )
        guarded = config.privacy.on or config.privacy.masks
        if guarded and (self.federation.evaluation != "server" or self.federation.replace):
            raise ConfigError(
                "with [privacy] there are neither evaluations on the sites' data, which would tell of single sites, "
                'nor sites that replace others; set federation.evaluation = "server" and federation.replace = false'
            )
        if config.diagnostics.on:
            raise ConfigError(
                "diagnostics inspect clients, which only the simulator can do; leave diagnostics.every and "
                "diagnostics.features out"
            )
        return config
