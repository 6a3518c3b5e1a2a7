"""The yardsticks: training without any federation around it, plain and tuned.

    python -m fedfa.bench.loop --task cnn --processes 2 --rounds 7 [--tuned [--without memory]]

Each process makes its share of every round's optimiser steps on a model of its own; a barrier keeps the rounds in step.
Nothing is sent, averaged, reset or checked: what a simulator does besides is its overhead. *Plain* is the loop of every
tutorial. *Tuned* is the same arithmetic with channels-last tensors, pooling before ReLU, the fused optimiser and freed
memory kept in the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

from torch import Tensor

from fedfa.bench.plain import TASKS, Task, client_tensors, clock, network, report

GAINS = ("channels-last", "pool-first", "fused", "memory")
"""What *tuned* is made of. None changes the arithmetic."""
WAIT = 600.0
"""Seconds after which a process that waits for another gives up."""


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--without", choices=GAINS, action="append", default=[])
    parser.add_argument("--bfloat16", action="store_true")
    asked = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(asked.processes), context.Queue()
    gains = set(GAINS) - set(asked.without) if asked.tuned else set()
    common = (asked.task, asked.rounds, asked.processes, gains, asked.bfloat16, barrier, queue)
    processes = [context.Process(target=work, args=(rank, *common)) for rank in range(asked.processes)]
    for process in processes:
        process.start()
    try:
        began, ends = queue.get(timeout=WAIT * asked.rounds)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    report(ends, began)


def work(
    rank: int, name: str, rounds: int, processes: int, gains: set[str], bfloat16: bool, barrier: Any, queue: Any
) -> None:
    """One process's share."""
    import torch

    from fedfa.engines.allocator import keep_freed_memory

    if "memory" in gains:
        keep_freed_memory()
    torch.set_num_threads(1)
    task = TASKS[name]
    data, model = client_tensors(task), network(task, pool_first="pool-first" in gains)
    if "channels-last" in gains and task.name == "cnn":
        # (torch's type stubs lack this argument.)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        data = [(x.to(memory_format=torch.channels_last), y) for x, y in data]
    fused = "fused" in gains or None
    optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=fused)
    generator = torch.Generator().manual_seed(rank)
    barrier.wait(WAIT)
    began, ends = time.time(), []
    for number in range(rounds):
        for client in range(rank, task.cohort, processes):
            x, y = data[(number * task.cohort + client) % task.clients]
            train(task, model, optimiser, x, y, generator, bfloat16)
        barrier.wait(WAIT)
        ends.append(clock())
    if rank == 0:
        queue.put((began, ends))


def train(task: Task, model: Any, optimiser: Any, x: Tensor, y: Tensor, generator: Any, bfloat16: bool) -> None:
    """One client's epochs."""
    import torch
    from torch.nn import functional

    for _ in range(task.epochs):
        order = torch.randperm(len(y), generator=generator)
        for first in range(0, len(y), task.batch_size):
            chosen = order[first : first + task.batch_size]
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = functional.cross_entropy(model(x[chosen]), y[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


if __name__ == "__main__":
    main()
