"""What all contender programs share: tasks, data as plain arrays, the network in plain torch, clock and report.

Imports numpy and torch only, because the programs of other simulators import it in environments without fedfa; and
these where they are used, because clock and report need neither. All contenders train the same network on the same
clients and count the same work.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

# Environment of a contender: directory of the arrays, file for the report, wall-clock time of its launch.
ENV_ARRAYS, ENV_RESULT, ENV_STARTED = "FEDFA_BENCH_ARRAYS", "FEDFA_BENCH_RESULT", "FEDFA_BENCH_STARTED"
# Port of its gate (see gate.py), and how many rounds it trains between two stops there.
ENV_GATE_PORT, ENV_ROUNDS_PER_SLOT = "FEDFA_BENCH_GATE_PORT", "FEDFA_BENCH_ROUNDS_PER_SLOT"


@dataclass(frozen=True)
class Task:
    """A fixed amount of work per round: the local training of a cohort with plain SGD."""

    name: str
    clients: int
    cohort: int
    samples: int
    """Per client."""
    epochs: int
    batch_size: int
    lr: float = 0.01
    weight_decay: float = 1e-3

    @property
    def sample_steps(self) -> int:
        """Samples per round, counted once per epoch."""
        return self.cohort * self.epochs * self.samples

    @property
    def steps(self) -> int:
        """Optimiser steps per client and round."""
        return self.epochs * -(-self.samples // self.batch_size)


CNN = Task("cnn", clients=100, cohort=10, samples=600, epochs=5, batch_size=64)
"""The paper's setting for Fashion-MNIST."""
MLP = Task("mlp", clients=100, cohort=10, samples=17, epochs=5, batch_size=8)
"""8×8 digits and a network so small that overhead dominates."""
TASKS = {task.name: task for task in (CNN, MLP)}


def arrays_file(task: Task, directory: Path | None = None) -> Path:
    """File with the arrays of a task."""
    return (directory or Path(os.environ[ENV_ARRAYS])) / f"{task.name}.npz"


def client_tensors(task: Task) -> list[tuple[Tensor, Tensor]]:
    """Normalised inputs and labels of each client."""
    import numpy as np
    import torch

    with np.load(arrays_file(task), allow_pickle=False) as file:
        x, y = (torch.from_numpy(file[name]).split(task.samples) for name in "xy")
    return [(inputs.clone(), labels.clone()) for inputs, labels in zip(x, y, strict=True)]


def network(task: Task, *, pool_first: bool = False) -> nn.Sequential:
    """The network of a task, always with the same initial weights.

    Args:
        task: The task.
        pool_first: Max-pool before ReLU: the same function with less work.
    """
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if task.name == MLP.name:
            return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

        def shrink() -> list[nn.Module]:
            return [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(
            nn.Conv2d(1, 32, 5), *shrink(), nn.Conv2d(32, 32, 5), *shrink(), nn.Flatten(),
            nn.Linear(512, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10),
        )  # fmt: skip


def rounds_per_slot() -> int:
    """Rounds this contender trains between two stops at its gate."""
    return int(os.environ.get(ENV_ROUNDS_PER_SLOT, "1"))


def slot_means(rounds: Sequence[float]) -> list[float]:
    """Mean over the rounds of each slot; an incomplete last slot is left out."""
    size = rounds_per_slot()
    return [sum(rounds[first : first + size]) / size for first in range(0, len(rounds) - size + 1, size)]


def write_result(**result: Any) -> None:
    """Hand the measurement to the process that started this contender."""
    Path(os.environ[ENV_RESULT]).write_text(json.dumps(result), encoding="utf-8")


def report(ends: Sequence[float], began: float | None = None, **more: Any) -> None:
    """Write the seconds per round, as the mean of each slot.

    Args:
        ends: Clock time at the end of each round. The first round is the warm-up and belongs to no slot.
        began: When the first round began, if the program knows.
        more: Other values to record.
    """
    started = float(os.environ.get(ENV_STARTED, ends[0]))
    write_result(
        seconds=slot_means([late - early for early, late in pairwise(ends)]),
        first=ends[0] - started,
        **({} if began is None else {"startup": began - started}),
        versions={name: sys.modules[name].__version__ for name in ("torch", "numpy") if name in sys.modules},
        **more,
    )


class Clock:
    """Returns the time at the end of a round; at the end of a slot it first waits at the gate.

    The wait is not counted, so the difference of two readings is the contender's own time. Every process of a
    contender that would start the next round by itself must call it; processes that are given their work need not.
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self._gate: socket.socket | None = None
        self._rounds_left = 0

    def __call__(self) -> float:
        """Wall-clock time without the waits."""
        now = time.time()
        reading = now - self._waited
        if self._rounds_left:
            self._rounds_left -= 1
        elif port := os.environ.get(ENV_GATE_PORT):
            self._rounds_left = rounds_per_slot() - 1
            if self._gate is None:
                self._gate = socket.create_connection(("127.0.0.1", int(port)))
            self._gate.sendall(b".")
            if not self._gate.recv(1):
                raise SystemExit("the benchmark closed the gate")
            self._waited += time.time() - now
        return reading


clock = Clock()
