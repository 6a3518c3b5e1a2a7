"""fedfa itself as a contender: a run through the public interface, timed round by round.

    python -m fedfa.bench.rounds --task cnn --rounds 7 --set engine.workers=2 --set algorithm.recipe=fedfa

What a round's time holds is what it holds for the others: drawing the cohort, training, summing, the server's step.
Evaluation and checkpoints come after the last round only, which is not counted; ``--everything`` leaves them at
fedfa's own cadence, every round, and counts them.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfa.bench.plain import TASKS, by_turn, clock, report


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--clients", type=int, help="fewer than the task has; all of them may then be in every round")
    parser.add_argument("--everything", action="store_true")
    asked = parser.parse_args(arguments)

    from fedfa.bench.tasks import dataset, settings
    from fedfa.studies.layers import assign
    from fedfa.studies.run import run

    last = asked.rounds + 1
    layer: dict[str, Any] = {"rounds": last}
    if not asked.everything:
        layer |= {"evaluation": {"every": last}, "checkpoint": {"every": last}}
    layer = assign(layer, asked.assignments)
    ends: list[float] = []
    task = replace(TASKS[asked.task], clients=asked.clients or TASKS[asked.task].clients)
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            settings(task, layer), Path(folder) / "run", data=dataset(task), watch=lambda _: ends.append(clock())
        )
    cpu = [record["cpu_seconds"] for record in result.metrics[1:-1]]
    # With evaluation and saving in it, the length of the first round is not known.
    began = None if asked.everything else ends[0] - result.metrics[0]["train_seconds"]
    report(ends[:-1], began, cpu_seconds=by_turn(cpu), accuracy=result.final_accuracy)


if __name__ == "__main__":
    main()
