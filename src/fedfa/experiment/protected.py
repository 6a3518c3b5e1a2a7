"""The protections that a config asks for: which components they add, what attackers train on, the privacy budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedfa.data import Federation
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.experiment.config import Config
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.cohort import INFORMED
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
    if config.privacy.on or config.privacy.masks:
        _refuse_looks_at_clients(config, algorithm)
    privacy = None
    if budget is not None:
        privacy = assembly.private(algorithm, config.privacy, budget.mechanism, simulation=simulation)
    return assembly.protections(
        algorithm, config.aggregation, config.attack, privacy, config.privacy.masks, clients, config.seed,
        relied_on(config, clients),
    )  # fmt: skip


def relied_on(config: Config, clients: int) -> int:
    """Noise by clients: how many of a cohort must arrive; 1 where the server adds it."""
    return math.ceil(config.privacy.honest * config.cohort.count(clients)) if config.privacy.distributed else 1


def _refuse_looks_at_clients(config: Config, algorithm: Algorithm) -> None:
    """Refuse whatever tells about single clients beside the protected sum, or changes what was protected."""
    for section, on in (("fleet", config.fleet.on), ("channel", config.channel.on)):
        if on:
            raise ConfigError(
                f"[privacy] cannot be combined with [{section}]: cohorts that a clock decides on and compressed "
                "contributions are neither accounted nor summed under masks; leave one of them out"
            )
    if config.cohort.selection in INFORMED:
        raise ConfigError(
            f'cohort.selection = "{config.cohort.selection}" goes by the losses of single clients, which differential '
            'privacy and masks rule out; set it to "uniform" or "poisson"'
        )
    if config.privacy.on and config.local.drop_last:
        raise ConfigError(
            "local.drop_last = true: a client with fewer samples than a batch would send less than the others, which "
            "differential privacy rules out; set it to false"
        )
    if config.diagnostics.on:
        raise ConfigError(
            "diagnostics look into single clients, which differential privacy and masks rule out; leave "
            "diagnostics.every and diagnostics.features out"
        )
    if config.data.validation is not None and config.data.validation.startswith("clients"):
        raise ConfigError(
            f"data.validation = {config.data.validation!r}: accuracies on samples of clients are neither accounted by "
            'differential privacy nor summed under masks; use "server:0.1", samples that the server itself holds'
        )
    whose = config.evaluation.clients or ("cohort" if algorithm.personal_model is not None else "none")
    if whose != "none":
        raise AlgorithmError(
            "differential privacy and masks rule out evaluations of single clients: set evaluation.clients = "
            '"none", and the global model is evaluated'
        )


def budget_of(config: Config, clients: int, holders: int, cohort_of: Callable[[int], Sequence[int]]) -> Budget:
    """The budget of differential privacy; noise is calibrated for the planned rounds.

    Args:
        config: What to do.
        clients: Number of clients.
        holders: Number of clients with samples, from which cohorts are drawn.
        cohort_of: The clients of a round.

    Raises:
        ConfigError: Cohorts are drawn in a way that is not accounted.
    """
    if config.cohort.selection not in ("poisson", "uniform"):
        raise ConfigError(
            f'cohort.selection = "{config.cohort.selection}" is not accounted; with differential privacy set it to '
            '"poisson" or "uniform"'
        )
    poisson, cohort = config.cohort.selection == "poisson", config.cohort.count(clients)
    counts: tuple[int, ...] = ()
    if config.privacy.distributed:
        if poisson:
            raise ConfigError(
                'cohort.selection = "poisson" with privacy.noise_by = "clients": the server, which is not trusted '
                "there, knows who takes part, so drawing clients at random gains nothing, and small cohorts would have "
                'too little noise; set cohort.selection = "uniform"'
            )
        counts = _most_often(config.rounds, clients, cohort_of)
    return budget(config.privacy, poisson=poisson, clients=holders, cohort=cohort, rounds=config.rounds, counts=counts)


def _most_often(rounds: int, clients: int, cohort_of: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
    """After each round, in how many the client that was drawn most often took part."""
    taken, most = np.zeros(clients, dtype=np.int64), []
    for round in range(rounds):
        taken[list(cohort_of(round))] += 1
        most.append(int(taken.max()))
    return tuple(most)


def with_attackers(config: Config, federation: Federation) -> Federation:
    """The federation with the samples of attackers poisoned."""
    chosen = attackers(config.attack, len(federation), config.seed)
    return poisoned(federation, config.attack, chosen, config.seed)
