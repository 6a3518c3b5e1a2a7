"""The study of methods on a clock: virtual hours and megabytes to an accuracy, by policy and channel.

    python -m benchmarks.clock_study run --network mlp                        # everything that is missing
    python -m benchmarks.clock_study run --network cnn --cells 'float32/*/fedfa' --seeds 1 --budget 480
    python -m benchmarks.clock_study table --network mlp

The grid is declared in ``clock_study.toml``. Each cell is a run directory in ``results/clock-NETWORK``, and continues
where it stopped. ``table`` prints what docs/fleet.md shows: of every cell the virtual hours and megabytes (up and down)
until the first evaluation with each target, and the mean of the last ten accuracies.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedfa.experiment.config import Config
from fedfa.experiment.recorded_runs import RecordedRun, find_runs
from fedfa.experiment.sweep import Cell, Comparison
from fedfa.report.html.clock_figures import cost_to_reach
from fedfa.text_tables import markdown_table

DECLARED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RESULTS = Path("results")
_RECORDS = ("config.toml", "metrics.jsonl", "summary.json")


@dataclass(frozen=True)
class Place:
    """A cell of the grid: its name is ``CHANNEL/POLICY/METHOD``."""

    channel: str
    policy: str
    method: str

    @property
    def name(self) -> str:
        """As patterns match it."""
        return f"{self.channel}/{self.policy}/{self.method}"

    def config(self, network: str, rounds: int, seed: int) -> Config:
        """The complete configuration."""
        own = {"rounds": rounds, "seed": seed, "algorithm": {"name": self.method}}
        layers = [DECLARED["networks"][network], DECLARED["channels"][self.channel], DECLARED["policies"][self.policy]]
        return Config.resolve(DECLARED["config"], *layers, own)

    def directory(self, network: str, rounds: int, seed: int) -> Path:
        """Of its run."""
        group = f"clock-{network}" if rounds == DECLARED["config"]["rounds"] else f"clock-{network}-r{rounds}"
        return RESULTS / group / f"{self.channel}-{self.policy}" / f"{self.method}-s{seed}"


def places(patterns: Sequence[str] = ()) -> list[Place]:
    """The cells whose names match a pattern, in the order in which they run."""
    found = [Place(*each) for each in product(DECLARED["channels"], DECLARED["policies"], DECLARED["methods"])]
    return [one for one in found if not patterns or any(fnmatch.fnmatchcase(one.name, p) for p in patterns)]


def run(network: str, rounds: int, seeds: Sequence[int], patterns: Sequence[str], budget: float | None) -> None:
    """Run what is missing, one cell at a time; only records stay."""
    cells = [
        Cell(place.method, place.config(network, rounds, seed), place.directory(network, rounds, seed))
        for seed in seeds for place in places(patterns)
    ]  # fmt: skip
    work = Comparison(cells, 1, lambda cell, record: None, seconds=budget)
    work.run()
    for cell in cells:
        if cell.directory.exists() and (cell.directory / "summary.json").exists():
            for path in cell.directory.iterdir():
                if path.name not in _RECORDS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, reason in work.failed.items():
        sys.stderr.write(f"{name}: {reason}\n")


def table(network: str, rounds: int) -> str:
    """Every cell that has finished runs, as Markdown."""
    targets = DECLARED["targets"]
    heads = [text for target in targets for text in (f"h to {target:.0%}", f"MB to {target:.0%}")]
    lines = []
    for place in places():
        runs = _finished(place, network, rounds)
        if not runs:
            continue
        cells = [place.channel, place.policy, place.method]
        for target in targets:
            found = [cost for one in runs if (cost := cost_to_reach(one, target)) is not None]
            share = f" ({len(found)} of {len(runs)})" if 0 < len(found) < len(runs) else ""
            cells += [f"{statistics.fmean(c[0] for c in found):.2f}{share}" if found else "–"]
            cells += [f"{statistics.fmean(c[1] for c in found):.0f}" if found else "–"]
        last = statistics.fmean(one.accuracy("last10") for one in runs)
        hours = statistics.fmean(one.metrics[-1]["time"] / 3600 for one in runs)
        used = statistics.fmean(r["utilisation"] for one in runs for r in one.metrics if r["utilisation"] is not None)
        lines.append([*cells, f"{last:.1f}", f"{hours:.1f}", f"{used:.0%}", str(len(runs))])
    return markdown_table(["channel", "policy", "method", *heads, "last ten, %", "h in all", "used", "seeds"], lines)


def _finished(place: Place, network: str, rounds: int) -> list[RecordedRun]:
    directories = [place.directory(network, rounds, seed) for seed in DECLARED["seeds"]]
    return [one for one in find_runs([path for path in directories if path.exists()]).runs if one.finished]


def main() -> None:
    """Run or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--network", choices=list(DECLARED["networks"]), default="cnn")
    parser.add_argument("--rounds", type=int, default=DECLARED["config"]["rounds"])
    parser.add_argument("--seeds", type=int, nargs="+", default=DECLARED["seeds"])
    parser.add_argument("--cells", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="stop after this time; the same command continues"
    )
    asked = parser.parse_args()
    if asked.what == "run":
        run(asked.network, asked.rounds, asked.seeds, asked.cells, asked.budget)
    else:
        sys.stdout.write(table(asked.network, asked.rounds) + "\n")


if __name__ == "__main__":
    main()
