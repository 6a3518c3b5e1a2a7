"""Contributions that arrive late: how much they count, and which methods can use them.

A contribution is τ rounds stale if the server stepped τ times between its download and its arrival. FedBuff scales the
update by s(τ) = (1 + τ)^−a and divides the buffer's sum by the unscaled weights, so that stale updates make the step of
the server shorter (Nguyen et al. 2022, Algorithm 1, with a = ½). What that means differs between the things clients
send, and each component says it (:attr:`~fedfa.learning.component.Traits.stale`):

``damp``   an update: the sum is scaled, its weight is not (default of the aggregating component)
``weigh``  a value, such as class features: sum and weight are scaled, so that the mean leans to fresh ones (default of
           all others)
``keep``   an account that must stay complete, such as the change of a control variate

A component that cannot use contributions to an older model gives the reason (:attr:`Traits.late`), and policies under
which they can occur are refused.

FedAsync (C. Xie, S. Koyejo, I. Gupta, *Asynchronous Federated Optimization*, 2019) mixes the client's *model* into the
server's, w ← (1 − α s(τ)) w + α s(τ) w_i. As an update to the current model w that is α s(τ) (w_i − w), and
w_i − w = Δ_i + (w_τ − w), where Δ_i is what the client sends and w_τ is what it had received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fedfa.errors import AlgorithmError, ConfigError
from fedfa.fleet.config import FleetConfig
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientResult
from fedfa.learning.tensors import Tensors

_MODEL_GROUP = "fedavg/model"


def check_combination(algorithm: Algorithm, config: FleetConfig) -> None:
    """Refuse a method that cannot work under a policy.

    Raises:
        AlgorithmError: With the reason.
        ConfigError: There are no clients.
    """
    if algorithm.pools_data:
        raise ConfigError(f"{algorithm.title!r} has no clients whose devices could be timed; leave out fleet.devices")
    if not config.may_be_stale:
        return
    what = f'fleet.policy = "{config.policy}"' + (' with fleet.late = "next"' if config.policy == "deadline" else "")
    for component in algorithm.enabled:
        if component.traits.late:
            raise AlgorithmError(
                f"{component.name!r} cannot be combined with {what}: {component.traits.late}; choose fleet.policy = "
                '"wait", or "deadline" with late = "drop"'
            )
        if config.policy == "fedasync" and component.traits.aggregates and component.name != "fedavg":
            raise AlgorithmError(
                f"{component.name!r} cannot be combined with {what}: FedAsync mixes the models of clients, and this "
                'component aggregates something else; choose fleet.policy = "fedbuff"'
            )


def scale(result: ClientResult, factor: float, algorithm: Algorithm) -> ClientResult:
    """The result with its contribution scaled for its staleness."""
    if factor == 1.0:
        return result
    traits = {component.name: component.traits for component in algorithm.components}
    scaled = {}
    for name, entry in result.contribution.items():
        component, _, group = name.partition("/")
        default = "damp" if traits[component].aggregates else "weigh"
        rule = traits[component].stale.get(group, default)
        tensors = entry.tensors if rule == "keep" else {n: t * factor for n, t in entry.tensors.items()}
        scaled[name] = WeightedSum(tensors, entry.weight * factor if rule == "weigh" else entry.weight)
    return replace(result, contribution=scaled)


def as_model(result: ClientResult, received: Tensors) -> ClientResult:
    """The result with n (w_τ + Δ) in place of n Δ: what FedAsync mixes, whatever the server's model is by then."""
    return _shifted(result, received, 1.0)


def as_update(result: ClientResult, current: Tensors) -> ClientResult:
    """The result of :func:`as_model` with n (w_τ + Δ − w) in its place: an update to the current model w."""
    return _shifted(result, current, -1.0)


def _shifted(result: ClientResult, model: Mapping[str, torch.Tensor], sign: float) -> ClientResult:
    entry = result.contribution[_MODEL_GROUP]
    shifted = {}
    for name, value in entry.tensors.items():
        moved = value.double() + sign * entry.weight.double() * model[name].double()
        # In double precision until it is an update again, which is small.
        shifted[name] = moved if sign > 0 or not model[name].is_floating_point() else moved.to(model[name].dtype)
    return replace(result, contribution={**result.contribution, _MODEL_GROUP: WeightedSum(shifted, entry.weight)})
