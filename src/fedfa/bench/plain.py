"""What every contender shares: the tasks, their data as plain arrays, the network as plain torch, the report.

Nothing here needs more than numpy and torch, and nothing of fedfa: other simulators, each in an environment of its own,
import this module too. So all train the same network on the same clients, and count the same.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ENV_ARRAYS, ENV_RESULT, ENV_STARTED = "FEDFA_BENCH_ARRAYS", "FEDFA_BENCH_RESULT", "FEDFA_BENCH_STARTED"
"""Environment of a contender: folder of the arrays, file for the report, wall-clock time of its launch."""
ENV_TURN_PORT = "FEDFA_BENCH_TURN_PORT"
"""Likewise, where contenders take turns: a port of this machine, which is told of the end of each turn with a byte and
answers with one when the next may begin."""
ENV_ROUNDS_IN_TURN = "FEDFA_BENCH_ROUNDS_IN_TURN"
"""Likewise: how many rounds a turn has, if not one."""


@dataclass(frozen=True)
class Task:
    """One fixed piece of work: ``rounds`` of a cohort's local training with plain SGD."""

    name: str
    clients: int
    cohort: int
    samples: int
    """Of each client."""
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float

    @property
    def sample_steps(self) -> int:
        """Samples seen in a round, counted once per epoch."""
        return self.cohort * self.epochs * self.samples

    @property
    def steps(self) -> int:
        """Optimiser steps of a client in a round."""
        return self.epochs * -(-self.samples // self.batch_size)


CNN = Task("cnn", clients=100, cohort=10, samples=600, epochs=5, batch_size=64, lr=0.01, weight_decay=1e-3)
"""The paper's setting for Fashion-MNIST."""
MLP = Task("mlp", clients=100, cohort=10, samples=17, epochs=5, batch_size=8, lr=0.01, weight_decay=1e-3)
"""8×8 digits and a network so small that all that is not arithmetic shows."""
TASKS = {task.name: task for task in (CNN, MLP)}


def arrays_file(task: Task, folder: Path | None = None) -> Path:
    """Where the arrays of a task are."""
    return (folder or Path(os.environ[ENV_ARRAYS])) / f"{task.name}.npz"


def client_tensors(task: Task, folder: Path | None = None) -> list[tuple[Tensor, Tensor]]:
    """Each client's inputs, normalised, and labels."""
    with np.load(arrays_file(task, folder), allow_pickle=False) as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    ends = [(k * task.samples, (k + 1) * task.samples) for k in range(task.clients)]
    return [(x[first:last].clone(), y[first:last].clone()) for first, last in ends]


def network(task: Task, *, pool_first: bool = False) -> nn.Sequential:
    """The task's network, always with the same weights.

    Args:
        task: Which.
        pool_first: Max-pooling before ReLU: the same function, less work.
    """
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


def rounds_in_turn() -> int:
    """How many rounds a contender works before another one does."""
    return int(os.environ.get(ENV_ROUNDS_IN_TURN, "1"))


def by_turn(rounds: Sequence[float]) -> list[float]:
    """What was measured in every round, averaged over each turn (a last one that is not whole is left out)."""
    turn = rounds_in_turn()
    return [sum(rounds[first : first + turn]) / turn for first in range(0, len(rounds) - turn + 1, turn)]


def report(ends: Sequence[float], began: float | None = None, **more: Any) -> None:
    """Write down how long rounds took, or, where a turn has several, how long one took on the average of each turn.

    Args:
        ends: Wall-clock time at the end of every round; the first one is the warm-up and counts to no turn.
        began: When the first round began, if the program knows.
        more: Whatever else is worth keeping.
    """
    started = float(os.environ.get(ENV_STARTED, ends[0]))
    found = {
        "seconds": by_turn([late - early for early, late in pairwise(ends)]),
        "first": ends[0] - started,
        **({} if began is None else {"startup": began - started}),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        **more,
    }
    Path(os.environ[ENV_RESULT]).write_text(json.dumps(found), encoding="utf-8")


class Clock:
    """The moment at the end of a round; where contenders take turns and one ends here, asking waits for the next.

    Meanwhile the clock stands still, so the difference between two moments is the contender's own time. All processes
    of a contender that would begin the next round by themselves ask it; those that are given their work need not.
    """

    def __init__(self) -> None:
        self._waited = 0.0
        self._line: socket.socket | None = None
        self._left = 0
        """Rounds still to come before the next wait."""

    def __call__(self) -> float:
        """The moment, comparable between processes."""
        now = time.time()
        moment = now - self._waited
        if self._left:
            self._left -= 1
        elif port := os.environ.get(ENV_TURN_PORT):
            self._left = rounds_in_turn() - 1
            if self._line is None:
                self._line = socket.create_connection(("127.0.0.1", int(port)))
            self._line.sendall(b".")
            if not self._line.recv(1):
                raise SystemExit("nobody gives turns any more")
            self._waited += time.time() - now
        return moment


clock = Clock()
