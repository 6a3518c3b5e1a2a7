"""From Flower's flat run config to the settings of a run and of its federation."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedfa.errors import SettingsError
from fedfa.messages import validation_message
from fedfa.studies.layers import assign, merge, nest, recipe_and_variant, table
from fedfa.studies.settings import OWN, Section, Settings, preset_layer

FEDERATION = "federation"


class FederationSettings(Section):
    """How sites are found, waited for and trusted. Nothing here changes what a site that takes part computes."""

    sites: int = Field(0, ge=0)
    """How many sites the federation has; 0: what the sites say (``num-partitions`` of their node config)."""
    run_folder: str = ""
    """Where the server records the run; left out, a folder named after Flower's run id."""
    resume: bool = True
    """Go on with the run that the folder holds; without it such a folder is refused."""
    wait_seconds: float = Field(300, gt=0)
    """How long to wait for enough sites, at the start and before a round is tried again."""
    round_seconds: float = Field(3600, gt=0)
    """How long the sites of a round have, from sending to the last reply."""
    grace_seconds: float = Field(0, ge=0)
    """How long to wait for the others once the quorum is there; 0: until the round's time is over."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Share of the cohort whose updates a round needs."""
    attempts: int = Field(3, ge=1)
    """How often a round without quorum is tried before the run ends; it can be resumed."""
    replace: bool = False
    """Whether another site takes the place of one that fails; without it those that answered are the round."""
    evaluation: Literal["server", "sites", "both"] = "server"
    """Where the global model is tested: on the server's test data, on the sites' own, or on both."""
    norm_limit: float = Field(0, ge=0)
    """The largest L2 norm of a site's mean update; longer ones are rejected. 0: a hundred times the norm of the model
    it began with (of 1, if that is smaller), which only nonsense exceeds; ``inf``: no limit."""
    lost_state: Literal["renew", "refuse"] = "renew"
    """A site that lost what it kept between rounds begins anew, with a warning; or does not take part."""
    poll_seconds: float = Field(0.25, gt=0)
    """How often the server looks for replies."""
    link_seconds: float = Field(300, gt=0)
    """How long the server's app tries to reach the SuperLink before the run ends; it can be resumed."""


class RunConfig:
    """What the app's run config says, in layers; the number of sites is needed to complete it.

    Keys: ``preset``, ``algorithm``, ``rounds``, ``seed``, ``settings`` (assignments in one text), ``federation.*``, and
    any setting of fedfa by its dotted name. An empty text counts as left out, because TOML has no null.

    Args:
        values: Flower's ``context.run_config``.
        own_data: Whether the sites bring data of their own instead of parts of a known set.

    Example:
        >>> config = RunConfig({"preset": "digits-c2", "rounds": 2, "settings": "local.lr=0.05 local.epochs=1"})
        >>> settings = config.settings(sites=3)
        >>> settings.data.clients, settings.local.lr, settings.cohort.count(3)
        (3, 0.05, 3)
    """

    def __init__(self, values: Mapping[str, Any], *, own_data: bool = False) -> None:
        rest = {key: value for key, value in values.items() if value != ""}
        self._base = preset_layer(str(rest.pop("preset"))) if "preset" in rest else {}
        text = str(rest.pop("settings", ""))
        try:
            assignments = shlex.split(text)
        except ValueError as error:
            raise SettingsError(f"settings = {text!r} cannot be split into assignments: {error}") from None
        asked: dict[str, Any] = {}
        if "algorithm" in rest:
            asked = {"algorithm": recipe_and_variant(str(rest.pop("algorithm")))}
        for key, value in rest.items():
            asked = merge(asked, nest(key, value))
        asked = assign(asked, assignments)
        for section in ("data", "model"):
            table(asked, section, f"{section}.KEY = VALUE")
        self.own_data = own_data
        federation = asked.pop(FEDERATION, {})
        self._asked = asked
        try:
            self.federation = FederationSettings.model_validate(federation)
        except ValidationError as error:
            raise SettingsError(validation_message(error, FederationSettings, FEDERATION)) from None

    @property
    def head(self) -> str | None:
        """Name of the classifier, where the network's owner had to say it."""
        head = self._asked.get("model", {}).get("head")
        return None if head is None else str(head)

    def check(self) -> None:
        """Refuse what cannot be run however many sites there will be, before anybody is waited for."""
        clients = self._asked.get("data", {}).get("clients", self.federation.sites or 1)
        if type(clients) is not int:
            raise SettingsError(
                f"data.clients = {clients!r} is no number of sites; leave it out, or give a whole number"
            )
        self.settings(clients)

    def settings(self, sites: int) -> Settings:
        """The complete settings for so many sites; without a word on cohorts, every site takes part in every round."""
        asked = self._asked.get("data", {}).get("clients", sites)
        if asked != sites:
            raise SettingsError(
                f"data.clients = {asked}, but the federation has {sites} sites; leave data.clients out, or start as "
                "many sites"
            )
        cohort = {} if "cohort" in self._asked else {"cohort": {"clients": sites}}
        data: dict[str, Any] = {"clients": sites}
        if self.own_data:
            data |= {"name": OWN, "partition": "natural"}
        settings = Settings.resolve(self._base, cohort, {"data": data}, self._asked)
        if settings.recipe().pools_data:
            raise SettingsError(
                f"{settings.algorithm.recipe!r} pools all data at one place, which a federation between sites exists "
                "to avoid; run it with `fedfa run`"
            )
        if settings.insight.on:
            raise SettingsError(
                "insight looks inside clients, which only the simulator can; leave insight.every and "
                "insight.features out"
            )
        return settings
