"""The tasks in fedfa: data sets, configurations, runs, single clients. Only this module uses fedfa's internals."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench.contender_api import CNN, MLP, Task, arrays_file
from fedfa.data import DataSet, Samples, dataset_from, load
from fedfa.data.federation import ClientSamples
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.layers import assign
from fedfa.experiment.run import RunResult, run
from fedfa.learning.component import HOOKS
from fedfa.learning.tensors import ComponentTensors

SEED = 1
PICTURES = Task("pictures", clients=1_000_000, cohort=100, samples=10, epochs=5, batch_size=5)
"""Random 4×4 images for federations of any size."""


def dataset(task: Task) -> DataSet:
    """The data of a task, cut so that every client holds the same number of samples."""
    used = task.clients * task.samples
    if task.name == PICTURES.name:
        rng = np.random.default_rng(SEED)

        def images(number: int) -> tuple[np.ndarray, np.ndarray]:
            return rng.integers(0, 256, (number, 4, 4, 1), dtype=np.uint8), rng.integers(0, 10, number)

        return dataset_from(images(used), images(1000), classes=[*"0123456789"])
    if task.name == CNN.name:
        fashion = load("fashion-mnist")
        return replace(fashion, train=Samples(fashion.train.inputs[:used], fashion.train.labels[:used]))
    digits = load("digits")
    inputs = torch.cat([digits.train.inputs, digits.test.inputs])
    labels = torch.cat([digits.train.labels, digits.test.labels])
    return replace(digits, train=Samples(inputs[:used], labels[:used]), test=Samples(inputs[used:], labels[used:]))


def config(task: Task, *layers: Mapping[str, Any]) -> Config:
    """The configuration of a run of the task."""
    local = {name: getattr(task, name) for name in ("epochs", "batch_size", "lr", "weight_decay")}
    return Config.resolve(
        {
            "device": "cpu",
            "data": {"clients": task.clients, "partition": partition_of(task), "seed": SEED},
            "model": {"name": "cnn-fmnist"} if task.name == CNN.name else {"name": "mlp", "options": {"hidden": [32]}},
            "algorithm": {"name": "fedavg"},
            "cohort": {"clients": task.cohort},
            "local": local,
        },
        *layers,
    )


def partition_of(task: Task) -> str:
    """Two classes per client as in the paper; random where only speed matters."""
    return "shards:2" if task.name == CNN.name else "iid"


def run_task(task: Task, data: DataSet, layer: dict[str, Any], assigned: list[str], after_round: Any) -> RunResult:
    """Run the task through fedfa's public interface.

    Args:
        task: The task.
        data: Its data set.
        layer: Configuration of this run.
        assigned: ``KEY=VALUE`` as on the command line; these override the layer.
        after_round: Called after each round with its metrics.
    """
    with tempfile.TemporaryDirectory() as directory:
        return run(config(task, assign(layer, assigned)), Path(directory) / "run", data=data, watch=after_round)


def prepared(task: Task, algorithm: str, data: DataSet) -> Experiment:
    """An experiment with the task in this process, ready to train."""
    engine = {"workers": 1, "execution": "each"}
    layer = {"rounds": 3, "engine": engine, "algorithm": {"name": algorithm}}
    return Experiment.from_config(config(task, layer), data=data)


def client_round(experiment: Experiment) -> Callable[[int], float]:
    """A function that trains the client of a given number and returns the CPU seconds it took.

    The first call for a client is its first round. Every further call repeats its second round, with the client state
    of the first, so that the work is the same each time.
    """
    engine, state = experiment.engine(), experiment.state
    client_state: dict[int, ComponentTensors] = {}

    def train(client: int) -> float:
        round = int(client in client_state)
        plan = experiment.training.plan(replace(state, round=round), experiment.config.local.in_round(round))
        begun = time.process_time()  # one thread: other programs disturb it less than wall-clock time
        (result,) = engine.train(plan, [client], lambda number: client_state.get(number, {}))
        spent = time.process_time() - begun
        client_state.setdefault(client, result.client_state)
        return spent

    return train


def wrap_steps(experiment: Experiment, wrap: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Replace each hook, labelled ``"hook COMPONENT: NAME"``, and the fetching of batches, labelled ``"batch"``.

    This patches a class: use it only in a process that does nothing else.
    """
    for name in HOOKS:
        hooks = experiment.algorithm.hooks(name)
        # Bound methods have __self__; replacing them, and a method below, is the purpose of the profile.
        hooks[:] = [wrap(hook, f"hook {hook.__self__.name}: {name}") for hook in hooks]  # type: ignore[attr-defined]  # bound
    ClientSamples.batch = wrap(ClientSamples.batch, "batch")  # type: ignore[method-assign]  # on purpose


def write_arrays(task: Task, directory: Path) -> None:
    """Write the data of all clients, concatenated, for programs without fedfa."""
    federation = dataset(task).split(partition_of(task), task.clients, SEED)
    batches = [federation.client(k).batch(torch.arange(federation.client(k).size)) for k in range(task.clients)]
    if any(len(y) != task.samples for _, y in batches):
        raise AssertionError(f"every client of the task {task.name} must hold {task.samples} samples")
    x, y = (torch.cat(tensors).contiguous().numpy() for tensors in zip(*batches, strict=True))
    with arrays_file(task, directory).open("wb") as out:
        np.savez(out, x=x.reshape(len(x), -1) if task.name == MLP.name else x, y=y)
