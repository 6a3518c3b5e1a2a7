"""What the evaluation of a round measures: whose model, on which samples, averaged over what.

A record holds the evaluation under ``accuracy``, ``loss`` and so on. Unless these are of the global model on the test
set and all means are over its samples, ``evaluated`` says what they are:

- ``model``: ``"global"``, or ``"clients"`` where each client keeps tensors of its own (the mean over the round's
  clients);
- ``on``: ``"test"`` or ``"validation"``;
- ``samples``: all of them, those of the client's domains, or those that the client held out;
- ``averages``: what each value averages over, from the inside out (:func:`fedfa.learning.metrics.averages`).

``own_data`` is the accuracy on each client's own distribution: the accuracy on each class (of each domain), weighted by
the client's share of it. Over clients it has the mean, the mean of the worst tenth and the standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfa.data import Federation
from fedfa.engines.engine import Engine
from fedfa.errors import DataError
from fedfa.experiment.record import evaluation_values
from fedfa.learning.client import MODEL
from fedfa.learning.evaluate import EvaluatedOn, Evaluation, mean_evaluation
from fedfa.learning.metrics import averages
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import ComponentTensors, Tensors

if TYPE_CHECKING:
    from fedfa.experiment.experiment import Experiment


def evaluate_round(
    experiment: Experiment, engine: Engine, state: ServerState, clients: Sequence[int], on: EvaluatedOn
) -> dict[str, Any]:
    """The values of a record that an evaluation of a server state gives.

    Args:
        experiment: Which algorithm and data.
        engine: Evaluates.
        state: Whose model.
        clients: Those of the round.
        on: The set of samples.
    """
    broadcast, federation = experiment.algorithm.broadcast(state.components), experiment.clients
    each: dict[int, Evaluation] = {}
    by_client: dict[str, Any] = {}
    if experiment.is_personal:  # this round's clients, each with its own tensors on its own samples
        each = _each_client(experiment, engine, state, broadcast, clients, on)
        if not each:
            raise DataError(f"none of the round's clients has {on} samples; give clients more, or a larger share")
        evaluation = mean_evaluation(list(each.values()))
        by_client = {"client_accuracy": {str(client): one.accuracy for client, one in each.items()}}
    else:
        evaluation = engine.evaluate(state.model, broadcast, on=on)
    several, validation = bool(evaluation.domain_accuracy), federation.validation
    samples = "all"
    if experiment.is_personal and on == "validation" and validation is not None and validation.owners is not None:
        samples = "those that the client held out"
    elif experiment.is_personal and several:
        samples = "those of the client's domains"
    made = averages(experiment.metrics, domains=several, clients=experiment.is_personal)
    evaluated = {
        "model": "clients" if experiment.is_personal else "global", "on": on, "samples": samples, "averages": made,
    }  # fmt: skip
    if (whose := _whose_data(experiment)) != "none":
        everyone = whose == "all" or experiment.algorithm.pools_data
        holders = [int(one) for one in np.flatnonzero(experiment.sizes)] if everyone else list(clients)
        if experiment.has_client_models:
            missing = [client for client in holders if client not in each]
            each |= _each_client(experiment, engine, state, broadcast, missing, on)
            found = {client: each[client] for client in holders if client in each}
        else:
            found = dict.fromkeys(holders, evaluation)
        if own := own_accuracies(experiment.federation, found):
            whose_model = "clients" if experiment.has_client_models else "global"
            by_client["own_data"] = {"model": whose_model, "on": on, "of": whose, **spread(own)}
    plain = on == "test" and not (several or experiment.is_personal or experiment.metrics)
    return {**evaluation_values(evaluation), **by_client, **({} if plain else {"evaluated": evaluated})}


def _whose_data(experiment: Experiment) -> str:
    asked = experiment.config.evaluation.clients
    return asked or ("cohort" if experiment.has_client_models else "none")


def _each_client(
    experiment: Experiment,
    engine: Engine,
    state: ServerState,
    broadcast: ComponentTensors,
    clients: Sequence[int],
    on: EvaluatedOn,
) -> dict[int, Evaluation]:
    models = {client: own_model(experiment, state.model, client) for client in clients}
    return engine.evaluate_each(models, broadcast, on) if models else {}


def own_model(experiment: Experiment, model: Tensors, client: int) -> Tensors:
    """The weights of a client's own model: the global ones, with what the client keeps in their place."""
    kept = experiment.client_states.load(client)
    personal = kept.get(experiment.algorithm.personal_model or "", {})
    return {**model, **kept.get(MODEL, {}), **{name: personal[name] for name in personal if name in model}}


def own_accuracies(federation: Federation, found: Mapping[int, Evaluation]) -> list[float]:
    """The accuracy of a model on each client's own distribution of classes and domains.

    Classes that the evaluated set lacks are left out; so is a client of which nothing remains.
    """
    dataset, values = federation.dataset, []
    domains = dataset.train.domains if len(dataset.domains) > 1 else None
    for client, evaluation in found.items():
        samples = federation.client(client)
        by_domain = evaluation.domain_class_accuracy
        if domains is None or not by_domain:
            cells = list(zip(samples.label_counts.tolist(), evaluation.class_accuracy, strict=True))
        else:
            own = domains[samples.positions]
            cells = []
            for name, accuracies in by_domain.items():
                labels = samples.labels[own == dataset.domains.index(name)]
                counts = labels.bincount(minlength=dataset.num_classes).tolist()
                cells += list(zip(counts, accuracies, strict=True))
        known = [(count, value) for count, value in cells if count and value is not None]
        if known:
            values.append(math.fsum(count * value for count, value in known) / sum(count for count, _ in known))
    return values


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, mean of the worst tenth (at least one), and standard deviation over clients.

    Example:
        >>> spread([0.5, 1.0, 0.75, 0.75])
        {'clients': 4, 'mean': 0.75, 'worst_decile': 0.5, 'spread': 0.1767766952966369}
    """
    worst = sorted(values)[: math.ceil(len(values) / 10)]
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return {
        "clients": len(values), "mean": mean, "worst_decile": math.fsum(worst) / len(worst), "spread": deviation,
    }  # fmt: skip
