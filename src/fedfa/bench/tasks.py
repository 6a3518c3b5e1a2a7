"""The tasks as fedfa sees them: data sets and settings; and their data written out for everybody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.bench.plain import CNN, Task, arrays_file
from fedfa.data import DataSet, Federation, Samples, load
from fedfa.learning.tensors import PartTensors
from fedfa.studies.settings import Settings
from fedfa.studies.setup import Laboratory, prepare

SEED = 1


def dataset(task: Task) -> DataSet:
    """The data of a task: so many that every client has the same number."""
    used = task.clients * task.samples
    if task.name == CNN.name:
        fashion = load("fashion-mnist")
        return replace(fashion, train=Samples(fashion.train.inputs[:used], fashion.train.labels[:used]))
    digits = load("digits")
    inputs = torch.cat([digits.train.inputs, digits.test.inputs])
    labels = torch.cat([digits.train.labels, digits.test.labels])
    return replace(digits, train=Samples(inputs[:used], labels[:used]), test=Samples(inputs[used:], labels[used:]))


def settings(task: Task, *layers: Mapping[str, Any]) -> Settings:
    """The settings of a run of the task."""
    model = {"name": "cnn-fmnist"} if task.name == CNN.name else {"name": "mlp", "options": {"hidden": [32]}}
    return Settings.resolve(
        {
            "device": "cpu",
            "data": {"clients": task.clients, "partition": partition_of(task), "seed": SEED},
            "model": model,
            "algorithm": {"recipe": "fedavg"},
            "cohort": {"clients": task.cohort},
            "local": {
                "epochs": task.epochs,
                "batch_size": task.batch_size,
                "lr": task.lr,
                "weight_decay": task.weight_decay,
            },
        },
        *layers,
    )


def partition_of(task: Task) -> str:
    """Two classes per client as in the paper; by chance where the task is only about speed."""
    return "shards:2" if task.name == CNN.name else "iid"


def prepared(task: Task, algorithm: str, data: DataSet) -> Laboratory:
    """A run of the task in this process, ready to begin."""
    return prepare(
        settings(
            task, {"rounds": 3, "engine": {"workers": 1, "execution": "each"}, "algorithm": {"recipe": algorithm}}
        ),
        data=data,
    )


def client_round(lab: Laboratory) -> Callable[[int], float]:
    """A function that trains a client by its number and returns the processor time it took.

    A client's first call is its first round. All others are its second one, again and again: what it kept of the first
    is there, and what it has to do is the same each time.
    """
    engine, state, asked = lab.engine(), lab.initial_state(), lab.settings
    kept: dict[int, PartTensors] = {}

    def train(client: int) -> float:
        round = int(client in kept)
        plan = lab.plan(replace(state, round=round), asked.local.in_round(round))
        begun = time.process_time()  # of one thread: what others do on the machine counts less than by the clock
        (result,) = engine.train(plan, [client], lambda number: kept.get(number, {}))
        spent = time.process_time() - begun
        kept.setdefault(client, result.kept)
        return spent

    return train


def write_arrays(task: Task, folder: Path) -> Path:
    """Write the data of all clients, one after the other, as any program reads them."""
    from fedfa.data import parse_partition

    data = dataset(task)
    federation = Federation.split(data, parse_partition(partition_of(task)), task.clients, SEED)
    batches = [federation.client(k).batch(torch.arange(federation.client(k).size)) for k in range(task.clients)]
    if any(len(y) != task.samples for _, y in batches):
        raise AssertionError(f"clients of the task {task.name} are not of {task.samples} samples each")
    x = torch.cat([x for x, _ in batches]).contiguous().numpy()
    y = torch.cat([y for _, y in batches]).numpy()
    if task.name != CNN.name:
        x = x.reshape(len(x), -1)
    file = arrays_file(task, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        np.savez(out, x=x, y=y)
    return file
