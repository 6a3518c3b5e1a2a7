"""The reference: training in bare torch without any federation, plain or tuned.

    python -m benchmarks.bench.torch_loop --task cnn --processes 2 --rounds 7 [--tuned [--without memory]]

Each process takes its share of every round's optimiser steps on a model of its own; a barrier ends each round. Nothing
is sent, averaged, reset or checked, so whatever a simulator needs beyond this is overhead. *Plain* is the loop of a
tutorial. *Tuned* is the same arithmetic with channels-last tensors, pooling before ReLU, the fused optimiser and freed
memory kept in the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.bench.contender_api import TASKS, Task, client_tensors, clock, network, report

OPTIMISATIONS = ("channels-last", "pool-first", "fused", "memory")
"""What *tuned* consists of. None changes the arithmetic."""
WAIT = 600.0
"""Seconds after which a process stops waiting for another."""


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--without", choices=OPTIMISATIONS, action="append", default=[])
    parser.add_argument("--bfloat16", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(options.processes), context.Queue()
    processes = [
        context.Process(target=work, args=(rank, options, barrier, queue)) for rank in range(options.processes)
    ]
    for process in processes:
        process.start()
    try:
        began, ends = queue.get(timeout=WAIT * options.rounds)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    report(ends, began)


def work(rank: int, options: argparse.Namespace, barrier: Any, queue: Any) -> None:
    """Train the share of one process."""
    optimisations = set(OPTIMISATIONS) - set(options.without) if options.tuned else set()
    if "memory" in optimisations:
        from fedfa.engines.allocator import keep_freed_memory

        keep_freed_memory()
    torch.set_num_threads(1)
    task = TASKS[options.task]
    data, model = client_tensors(task), network(task, pool_first="pool-first" in optimisations)
    if "channels-last" in optimisations and task.name == "cnn":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
        data = [(x.to(memory_format=torch.channels_last), y) for x, y in data]
    fused = "fused" in optimisations or None
    optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=fused)
    generator = torch.Generator().manual_seed(rank)
    barrier.wait(WAIT)
    began, ends = time.time(), []
    for number in range(options.rounds):
        for client in range(rank, task.cohort, options.processes):
            x, y = data[(number * task.cohort + client) % task.clients]
            train(task, model, optimiser, x, y, generator, options.bfloat16)
        barrier.wait(WAIT)
        ends.append(clock())
    if rank == 0:
        queue.put((began, ends))


def train(task: Task, model: Any, optimiser: Any, x: Tensor, y: Tensor, generator: Any, bfloat16: bool) -> None:
    """Train on the samples of one client."""
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
