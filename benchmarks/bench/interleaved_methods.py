"""Cost of methods within one process: one epoch of a client with each method in turn.

    python -m benchmarks.bench.interleaved_methods --methods fedavg fedfa --slots 60

Whole runs that are minutes apart differ by more than a few per cent on most machines, whatever they do. Epochs of the
same client within a second resolve such differences. One thread, CPU time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.bench.contender import rotated
from benchmarks.bench.contender_api import TASKS, write_result
from benchmarks.bench.fedfa_tasks import client_round, dataset, prepared


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedfa"])
    parser.add_argument("--slots", type=int, default=60)
    parser.add_argument("--clients", type=int, default=5, help="number of different clients")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = replace(TASKS[options.task], epochs=1)
    data = dataset(task)
    train = {name: client_round(prepared(task, name, data)) for name in options.methods}
    for name in train:
        for client in range(options.clients):
            train[name](client)
    seconds: dict[str, list[float]] = {name: [] for name in train}
    for slot in range(options.slots):
        for name in rotated(options.methods, slot):
            seconds[name].append(train[name](slot % options.clients))
    write_result(cpu_seconds=seconds)


if __name__ == "__main__":
    main()
