"""Methods in turns within one process: a client's epoch of one, then of the next, and so on.

    python -m fedfa.bench.turns --methods fedavg fedfa --turns 60

Whole runs one after the other, minutes apart, differ by more than a few per cent on most machines, whatever they do.
Rounds of the same client within a second of each other tell such differences; for that they are short, of one epoch.
One thread, processor time.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from fedfa.bench.plain import ENV_RESULT, TASKS


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedfa"])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--clients", type=int, default=5, help="that many different ones")
    asked = parser.parse_args(arguments)

    import torch

    from fedfa.bench.tasks import client_round, dataset, prepared

    torch.set_num_threads(1)
    task = replace(TASKS[asked.task], epochs=1)
    data = dataset(task)
    rounds = {name: client_round(prepared(task, name, data)) for name in asked.methods}
    for train in rounds.values():
        for client in range(asked.clients):
            train(client)
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(asked.turns):
        first = turn % len(rounds)  # each time beginning with another one
        for name in [*asked.methods[first:], *asked.methods[:first]]:
            seconds[name].append(rounds[name](turn % asked.clients))
    Path(os.environ[ENV_RESULT]).write_text(json.dumps({"cpu_seconds": seconds}), encoding="utf-8")


if __name__ == "__main__":
    main()
