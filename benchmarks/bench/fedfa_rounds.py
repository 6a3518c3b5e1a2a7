"""fedfa as a contender: one run, timed round by round.

    python -m benchmarks.bench.fedfa_rounds --task cnn --rounds 7 --set engine.workers=2 --set algorithm.name=fedfa
    python -m benchmarks.bench.fedfa_rounds --task pictures --clients 1000000 --cohort 100 --set engine.workers=1

A round covers what it covers for every contender: sampling the cohort, training, aggregation, the server step.
Evaluation and checkpoint follow the last round, which is not counted; with ``--everything`` they follow every round, as
is fedfa's default, and count.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.bench.contender_api import TASKS, clock, report, rounds_per_slot, slot_means
from benchmarks.bench.fedfa_tasks import PICTURES, dataset, run_task
from benchmarks.bench.processes import resident_memory


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    known = {**TASKS, PICTURES.name: PICTURES}
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=known, default="cnn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", dest="assigned", action="append", default=[])
    parser.add_argument("--clients", type=int, help="replaces the task's number of clients")
    parser.add_argument("--cohort", type=int, help="replaces the task's number of clients per round")
    parser.add_argument("--everything", action="store_true")
    options = parser.parse_args(arguments)

    task = known[options.task]
    task = replace(task, clients=options.clients or task.clients, cohort=options.cohort or task.cohort)
    last = options.rounds + 1
    layer: dict[str, Any] = {"rounds": last}
    if not options.everything:
        layer |= {"evaluation": {"every": last}, "checkpoint": {"every": last}}
    data = dataset(task)
    data_bytes = sum(tensor.nbytes for part in (data.train, data.test) for tensor in (part.inputs, part.labels))
    ends: list[float] = []
    memory: list[int] = []

    def after_round(_: dict[str, Any]) -> None:
        ends.append(clock())
        if len(ends) % rounds_per_slot() == 0 or len(ends) == last:  # it takes a while beside a short round
            memory.append(resident_memory())

    begun = time.time()
    result = run_task(task, data, layer, options.assigned, after_round)
    # With evaluation and checkpoint in it, the length of the first round is unknown.
    began = None if options.everything else ends[0] - result.metrics[0]["train_seconds"]
    report(
        ends[:-1],
        began,
        cpu_seconds=slot_means([record["cpu_seconds"] for record in result.metrics[1:-1]]),
        accuracy=result.final_accuracy,
        clients=task.clients,
        cohort=task.cohort,
        setup=ends[0] - begun,  # with the first round
        resident_mb=(max(memory) - data_bytes) / 2**20,
        data_mb=data_bytes / 2**20,
    )


if __name__ == "__main__":
    main()
