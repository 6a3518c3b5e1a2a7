"""Engines on the blobs, and what makes two results the same."""

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

from fedfa.data import DataSet, Federation
from fedfa.data.partitions import Partition
from fedfa.engines.local import LocalEngine
from fedfa.engines.workers import WorkersEngine
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.tensors import PartTensors
from fedfa.studies.setup import Laboratory, ModelMaker, prepare
from tests.studies.study_toys import equal_tensors, small

TROUBLED = str(Path(__file__).with_name("troubled_method.py"))

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")


def batch_norm_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def laboratory(
    recipe: str, data: DataSet, model: ModelMaker | None = None, split: Partition | None = None, **more: Any
) -> Laboratory:
    lab = prepare(small(recipe, engine={"workers": 1}, **more), data=data, model=model)
    return lab if split is None else replace(lab, federation=Federation(data, split))


def local_engine(lab: Laboratory) -> LocalEngine:
    engine = lab.engine()
    assert isinstance(engine, LocalEngine)
    return engine


@contextmanager
def workers_engine(lab: Laboratory, workers: int, **more: Any) -> Iterator[WorkersEngine]:
    engine = WorkersEngine(local_engine(lab), workers, **more)
    try:
        yield engine
    finally:
        engine.close()


def plan_of(lab: Laboratory, round: int = 0) -> RoundPlan:
    """A round's plan, with the weights that the network has just now."""
    state = lab.initial_state()
    return RoundPlan(
        round=round,
        model=state.model,
        received=lab.recipe.broadcast(state.parts, round),
        local=lab.settings.local.in_round(round),
        seed=1,
        rounds=4,
    )


def nothing(_client: int) -> PartTensors:
    return {}


def trouble(folder: Path, monkeypatch: pytest.MonkeyPatch, *notes: str) -> None:
    """Put notes for the troubled method; see there."""
    monkeypatch.setenv("FEDFA_TROUBLE", str(folder))
    folder.mkdir(exist_ok=True)
    for number, note in enumerate(notes):
        (folder / f"{note}-{number}").touch()


def equal_results(a: ClientResult, b: ClientResult) -> bool:
    """Bit for bit, strides and empty dictionaries included; times apart."""
    same_values = replace(a, sums={}, kept={}, cpu_seconds=0.0) == replace(b, sums={}, kept={}, cpu_seconds=0.0)
    same_kept = a.kept.keys() == b.kept.keys() and all(equal_tensors(a.kept[part], b.kept[part]) for part in a.kept)
    same_sums = list(a.sums) == list(b.sums) and all(
        equal_tensors(a.sums[group].tensors, b.sums[group].tensors)
        and torch.equal(a.sums[group].weight, b.sums[group].weight)
        and all(t.stride() == b.sums[group].tensors[n].stride() for n, t in a.sums[group].tensors.items())
        for group in a.sums
    )
    return same_values and same_kept and same_sums
