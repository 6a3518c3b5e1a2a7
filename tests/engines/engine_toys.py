"""Engines on the blobs, and the comparison of two results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfa.data import DataSet, Federation, Partition
from fedfa.engines.local import LocalEngine
from fedfa.engines.process_engine import ProcessEngine
from fedfa.experiment.build import ModelSource
from fedfa.experiment.experiment import Experiment
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.tensors import ComponentTensors
from tests.experiment.run_toys import equal_tensors, small

UNWELL = "ValueError: client 3 does not feel well (troubled_method.py, line 31, in after_step)"
TROUBLED = str(Path(__file__).with_name("troubled_method.py"))

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")


def batch_norm_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def make_experiment(
    algorithm: str, data: DataSet, model: ModelSource | None = None, split: Partition | None = None, **more: Any
) -> Experiment:
    config = small(algorithm, engine={"workers": 1}, **more)
    return Experiment.from_config(config, data=data if split is None else Federation(data, split), model=model)


def local_engine(experiment: Experiment) -> LocalEngine:
    engine = experiment.engine()
    assert isinstance(engine, LocalEngine)
    return engine


@contextmanager
def process_engine(experiment: Experiment, workers: int, **more: Any) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(local_engine(experiment), workers, **more)
    try:
        yield engine
    finally:
        engine.close()


def plan_of(experiment: Experiment, round: int = 0) -> RoundPlan:
    """The plan of a round, with the weights that the network has now."""
    state = replace(experiment.training.init(), round=round)
    return experiment.training.plan(state, experiment.local.in_round(round))


def nothing(_client: int) -> ComponentTensors:
    return {}


def trouble(directory: Path, monkeypatch: pytest.MonkeyPatch, *notes: str) -> None:
    """Put notes for the troubled method; see there."""
    monkeypatch.setenv("FEDFA_TROUBLE", str(directory))
    directory.mkdir(exist_ok=True)
    for number, note in enumerate(notes):
        (directory / f"{note}-{number}").touch()


def equal_results(a: ClientResult, b: ClientResult) -> bool:
    """Bit for bit, strides and empty dictionaries included; times apart."""
    same_values = replace(a, contribution={}, client_state={}, cpu_seconds=0.0) == replace(
        b, contribution={}, client_state={}, cpu_seconds=0.0
    )
    same_state = a.client_state.keys() == b.client_state.keys() and all(
        equal_tensors(a.client_state[component], b.client_state[component]) for component in a.client_state
    )
    same_contribution = list(a.contribution) == list(b.contribution) and all(
        equal_tensors(a.contribution[group].tensors, b.contribution[group].tensors)
        and torch.equal(a.contribution[group].weight, b.contribution[group].weight)
        and all(
            t.stride() == b.contribution[group].tensors[n].stride() for n, t in a.contribution[group].tensors.items()
        )
        for group in a.contribution
    )
    return same_values and same_state and same_contribution
