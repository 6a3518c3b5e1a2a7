"""Small experiments under protection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfa import Experiment, LocalTraining
from fedfa.data import DataSet
from fedfa.learning.round import RoundStatistics, ServerState


def experiment(
    data: DataSet,
    settings: Mapping[str, Any],
    algorithm: str = "fedavg",
    *,
    clients: int = 8,
    partition: str = "iid",
    cohort: int | float | None = None,
    workers: int = 1,
    rounds: int | None = None,
    local: LocalTraining | None = None,
) -> Experiment:
    """An experiment with a tiny network; by default every client takes part in every round."""
    return Experiment(
        algorithm,
        data=data.split(partition, clients=clients, seed=3),
        model="mlp",
        cohort=clients if cohort is None else cohort,
        local=local or LocalTraining(epochs=2 if algorithm == "fedrep" else 1, batch_size=16, lr=0.1),
        workers=workers,
        planned_rounds=rounds,
        device="cpu",
        settings={"model": {"options": {"hidden": [8]}}, "engine": {"execution": "each"}, **settings},
    )


def one_round(made: Experiment) -> tuple[ServerState, RoundStatistics]:
    """The first round with all clients, and what each of them sent."""
    engine = made.local_engine()
    everyone = list(range(len(made.federation)))
    return made.training.apply(made.state, everyone, made.local, engine.train, made.client_states, keep_results=True)
