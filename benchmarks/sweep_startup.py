"""How much longer a sweep of short runs takes than the same loop inside one process.

Eighteen runs of the digits (three learning rates × two μ × three seeds of FedFA) are trained by ``fedfa compare``'s
machinery, in as many processes as there are jobs, and by a loop in a process of its own. Both include their imports.

    python benchmarks/sweep_startup.py [--jobs N] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RATES, PULLS, SEEDS = (0.05, 0.1, 0.2), (0.01, 0.1), (1, 2, 3)

LOOP = """
import sys
from pathlib import Path
from benchmarks.sweep_startup import cells
from fedfa.experiment.run import run
for cell in cells(Path(sys.argv[1]), int(sys.argv[2])):
    run(cell.config, cell.directory)
"""
SWEEP = """
import sys
from pathlib import Path
from fedfa.experiment.run_processes import RunProcesses
processes = RunProcesses().prestart()
from benchmarks.sweep_startup import cells
from fedfa.experiment.sweep import Comparison
planned = cells(Path(sys.argv[1]), int(sys.argv[2]))
work = Comparison(planned, int(sys.argv[3]), lambda cell, record: None, processes=processes)
work.run()
assert not work.failed, work.failed
"""


def cells(out: Path, rounds: int) -> list[Any]:
    """The runs."""
    from fedfa.experiment.config import preset_layer
    from fedfa.experiment.sweep import plan_cells

    found = []
    for rate, pull in itertools.product(RATES, PULLS):
        layer = {"rounds": rounds, "local": {"lr": rate}, "algorithm": {"anchors": {"mu": pull}}}
        found += plan_cells(["fedfa"], SEEDS, [preset_layer("digits-c2"), layer], out / f"{rate}-{pull}")
    return found


def seconds(program: str, *arguments: str) -> float:
    """Wall time of a Python program."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=environment)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        loop = seconds(LOOP, f"{directory}/loop", str(asked.rounds))
        sweep = seconds(SWEEP, f"{directory}/sweep", str(asked.rounds), str(asked.jobs))
    print(f"loop in one process {loop:.1f} s, sweep with {asked.jobs} jobs {sweep:.1f} s: {sweep / loop:.2f} times")


if __name__ == "__main__":
    main()
