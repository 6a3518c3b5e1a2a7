"""The protections that a config asks for: which components they add, what attackers train on, the privacy budget."""

from __future__ import annotations

from fedfa.data import Federation
from fedfa.errors import ConfigError
from fedfa.experiment.config import Config
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.protection import assembly
from fedfa.protection.accounting import Budget, budget
from fedfa.protection.attacks import attackers, poisoned


def protected(config: Config) -> bool:
    """Whether anything is added to the algorithm."""
    guarded = config.privacy.on or config.privacy.masks
    return guarded or config.aggregation.robust or config.attack.kind != "none"


def protections(
    config: Config, algorithm: Algorithm, budget: Budget | None, clients: int, simulation: bool
) -> list[Component]:
    """The components to add to the algorithm.

    Raises:
        FedfaError: With the reason why something cannot be combined.
    """
    privacy = None
    if budget is not None:
        privacy = assembly.private(algorithm, config.privacy, budget.mechanism, simulation=simulation)
    masks = config.privacy.masks
    if config.diagnostics.on and (masks or privacy is not None):
        raise ConfigError(
            "diagnostics look into single clients, which differential privacy and masks rule out; leave "
            "diagnostics.every and diagnostics.features out"
        )
    return assembly.protections(algorithm, config.aggregation, config.attack, privacy, masks, clients, config.seed)


def budget_of(config: Config, clients: int) -> Budget:
    """The budget of differential privacy; noise is calibrated for the planned rounds.

    Raises:
        ConfigError: Cohorts are drawn in a way that is not accounted.
    """
    if config.cohort.selection in ("size", "authors"):
        raise ConfigError(
            f'cohort.selection = "{config.cohort.selection}" is not accounted; with differential privacy set it to '
            '"poisson" or "uniform"'
        )
    poisson, cohort = config.cohort.selection == "poisson", config.cohort.count(clients)
    return budget(config.privacy, poisson=poisson, clients=clients, cohort=cohort, rounds=config.rounds)


def with_attackers(config: Config, federation: Federation) -> Federation:
    """The federation with the samples of attackers poisoned."""
    chosen = attackers(config.attack, len(federation), config.seed)
    return poisoned(federation, config.attack, chosen, config.seed)
