"""The components that a config's protections add to an algorithm."""

from __future__ import annotations

from fedfa.errors import AlgorithmError, ConfigError
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.protection.accounting import Mechanism
from fedfa.protection.attacks import Attack, attackers
from fedfa.protection.changes import state_groups
from fedfa.protection.privacy import Privacy
from fedfa.protection.robust import RobustRule
from fedfa.protection.secure.encoding import FixedPoint
from fedfa.protection.settings import AggregationConfig, AttackConfig, PrivacyConfig
from fedfa.protection.shares import NoiseShares


def protections(
    algorithm: Algorithm,
    aggregation: AggregationConfig,
    attack: AttackConfig,
    privacy: Privacy | None,
    masks: bool,
    clients: int,
    seed: int,
    relied_on: int = 1,
) -> list[Component]:
    """The components to add, in the order in which they act.

    Args:
        algorithm: The method; it is not changed.
        aggregation: Config section.
        attack: Config section.
        privacy: From :func:`private`, where it is on.
        masks: Whether contributions are summed securely.
        clients: Clients in the federation.
        seed: Seed of the training, which also chooses the attackers.
        relied_on: Noise by clients: how many of them must arrive.

    Raises:
        AlgorithmError: The algorithm cannot work under one of them; the message has the reason.
    """
    found: list[Component] = []
    if attack.kind != "none":
        if algorithm.pools_data:
            raise ConfigError(f"attack.kind = {attack.kind!r}: {algorithm.title!r} has no clients that could attack")
        if not attack.poisons_data or attack.scale is not None:
            chosen = tuple(attackers(attack, clients, seed))
            found.append(
                Attack(kind=attack.kind, scale=attack.scale, source=attack.source, target=attack.target,
                       clients=chosen, states=state_groups(algorithm.enabled))
            )  # fmt: skip
    if aggregation.robust:
        check(algorithm, "robust", f"aggregation.rule = {aggregation.rule!r}")
        found.append(RobustRule(**aggregation.model_dump()))
        if privacy is not None:
            raise ConfigError(
                f"aggregation.rule = {aggregation.rule!r} compares single contributions; the noise of privacy.epsilon "
                "is calibrated for their sum: choose one of the two"
            )
        if masks:
            raise ConfigError(
                f"aggregation.rule = {aggregation.rule!r} compares single contributions, which masks hide; leave out "
                "privacy.masks, or the rule"
            )
    found += [] if privacy is None else [privacy]
    distributed = privacy is not None and privacy.distributed
    if masks:
        check(algorithm, "masks", "privacy.masks = true")
        found.append(FixedPoint(clients=clients, towards_zero=distributed))
    if privacy is not None and privacy.distributed:
        found.append(NoiseShares(relied_on=relied_on, seed=seed, simulation=privacy.simulation))
    return found


def private(algorithm: Algorithm, config: PrivacyConfig, mechanism: Mechanism, *, simulation: bool) -> Privacy:
    """The component of differential privacy.

    Args:
        algorithm: The method; it is not changed.
        config: Config section.
        mechanism: With the noise to add.
        simulation: Whether clients and noise are simulated.

    Raises:
        ConfigError: Something would release what is not accounted.
    """
    check(algorithm, "privacy", "differential privacy")
    if config.distributed and not config.masks:
        raise ConfigError(
            'privacy.noise_by = "clients": a single share of noise protects nobody, only their sum does, so the server '
            'must not see single contributions: set privacy.masks = true, or privacy.noise_by = "server"'
        )
    names = {component.name for component in algorithm.enabled}
    if unknown := [name for name in config.scales if name.partition("/")[0] not in names]:
        raise ConfigError(f"privacy.scales.{unknown[0]}: the algorithm has the components {', '.join(sorted(names))}")
    if not all(scale > 0 for scale in config.scales.values()):
        raise ConfigError("privacy.scales: a relative scale is positive")
    return Privacy(
        noise=mechanism.noise, clip=config.clip, quantile=config.quantile, clip_lr=config.clip_lr,
        scales=config.scales, cohort=mechanism.cohort, states=state_groups(algorithm.enabled), simulation=simulation,
        distributed=config.distributed,
    )  # fmt: skip


def check(algorithm: Algorithm, protection: str, setting: str) -> None:
    """Refuse a protection that a component cannot work under.

    Raises:
        AlgorithmError: With the component's reason.
    """
    for component in algorithm.enabled:
        traits, reason = component.traits, component.refuses.get(protection)
        if reason is None and traits.single_contributions:
            reason = "it combines single contributions by a rule of its own"
        if reason is None and traits.pooled_data:
            reason = "there are no clients, but one site with all data"
        if reason is None and traits.final_pass and protection == "privacy":
            reason = "its pass over all clients after the last round is not accounted"
        if reason is not None:
            raise AlgorithmError(f"{setting} cannot be used with {component.name!r}: {reason}")
