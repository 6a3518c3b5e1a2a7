"""Trials of FedFA's variants and rivals on validation samples: one line each, also for those that fail.

    python -m benchmarks.trials --out results/trials                     # everything in benchmarks/trials.toml
    python -m benchmarks.trials --only 'fmnist-c2-mlp/*' --out DIRECTORY

The validation samples are a tenth of the training samples, moved to the server; the test set is never evaluated here.
Every trial adds one line to ``trials.jsonl`` as soon as it ends; started again, or beside another process, finished
trials are not repeated. ``table.md`` ranks them by the mean of the last accuracies.

A plan's entry is an algorithm, or an algorithm with its options by component, to which keys of the config may be added
that this algorithm alone gets: ``["fedavg", {}, {"local.lr" = 0.1}]``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.errors import FedfaError
from fedfa.experiment.config import Config, preset_layer
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.layers import expression_and_variant, merge, nest_all
from fedfa.experiment.run import processor_name, source_commit

PLAN = Path(__file__).with_suffix(".toml")
LAST = 6
"""Evaluations at the end whose mean counts."""


@dataclass(frozen=True)
class Trial:
    """An algorithm with options in a setting, with a seed."""

    setting: str
    algorithm: str
    options: Mapping[str, Any]
    seed: int
    layer: Mapping[str, Any]
    own: Mapping[str, Any] = field(default_factory=dict)
    """Config values of this trial, by dotted key."""

    @property
    def name(self) -> str:
        """For example ``fmnist-c2-mlp/fedetf+feddyn {"feddyn": {"alpha": 0.3}} seed 1``."""
        options = f" {json.dumps(self.options, sort_keys=True)}" if self.options else ""
        own = "".join(f" {key}={value}" for key, value in sorted(self.own.items()))
        return f"{self.setting}/{self.algorithm}{options}{own} seed {self.seed}"

    def config(self) -> Config:
        """The complete configuration."""
        algorithm = {**expression_and_variant(self.algorithm), **self.options}
        asked = {"seed": self.seed, "algorithm": algorithm, "data": {"validation": "server:0.1"}}
        return Config.resolve(merge(merge(dict(self.layer), nest_all(self.own)), asked))


def planned(plan: Mapping[str, Any]) -> Iterator[Trial]:
    """The trials of a plan: of each setting its algorithms, times seeds."""
    for name, setting in plan.items():
        layer = merge(preset_layer(setting["preset"]), setting.get("config", {}))
        for seed in setting["seeds"]:
            for entry in setting["algorithms"]:
                algorithm, *more = [entry] if isinstance(entry, str) else entry
                options, own = (*more, {}, {})[:2]
                yield Trial(name, algorithm, options, seed, layer, own)


def run(trial: Trial) -> dict[str, Any]:
    """The record of one trial."""
    record: dict[str, Any] = {
        "trial": trial.name, "setting": trial.setting, "algorithm": trial.algorithm, "options": trial.options,
        "own": trial.own, "seed": trial.seed, "commit": source_commit(), "machine": processor_name(),
    }  # fmt: skip
    began = time.perf_counter()
    try:
        experiment = Experiment.from_config(trial.config())
        found = [each.accuracy for each in experiment.rounds(progress=False) if each.accuracy is not None]
        record |= {"accuracies": found, "last": statistics.fmean(found[-LAST:]), "rounds": experiment.config.rounds}
    except FedfaError as error:
        record["failed"] = str(error)
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def table(records: list[dict[str, Any]]) -> str:
    """All trials, the best of each setting first."""
    lines = ["| setting | algorithm | options | seed | rounds | validation accuracy |", "|---|---|---|--:|--:|--:|"]
    for record in sorted(records, key=lambda one: (one["setting"], -one.get("last", 0.0))):
        set_ = {f"{c}.{k}": v for c, values in record["options"].items() for k, v in values.items()}
        options = ", ".join(f"{key} = {value}" for key, value in {**set_, **record["own"]}.items())
        result = f"{record['last']:.2%}" if "last" in record else f"failed: {record['failed']}"
        cells = [record["setting"], record["algorithm"], options, record["seed"], record.get("rounds", "–"), result]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of the trials' names")
    parser.add_argument("--share", default="0/1", help="which trials of several processes: 0/2 is every other one")
    parser.add_argument("--out", type=Path, default=Path("runs/trials"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "trials.jsonl"
    first, processes = map(int, options.share.split("/"))
    for trial in list(planned(tomllib.loads(PLAN.read_text(encoding="utf-8"))))[first::processes]:
        done = {record["trial"] for record in recorded(file)}
        if trial.name not in done and fnmatch.fnmatch(trial.name, options.only):
            line = json.dumps(run(trial)) + "\n"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(line)
            (options.out / "table.md").write_text(table(recorded(file)), encoding="utf-8")


def recorded(file: Path) -> list[dict[str, Any]]:
    """The trials that have ended, in this process or in others."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
