"""Accuracy by aggregation rule, attack and share of attackers: one table.

    python benchmarks/robustness.py --out results/robustness/digits                      # digits, the whole grid
    python benchmarks/robustness.py --preset fmnist-c2 --rounds 100 --out DIRECTORY      # Fashion-MNIST
    python benchmarks/robustness.py --attacks sign-flip alie --shares 0.2 --out DIRECTORY  # a part of it

Every run adds one line to ``runs.csv`` as soon as it ends; started again, finished runs are not repeated. ``table.md``
holds the accuracy of the final model in per cent and, for the backdoor, the share of patched test pictures of other
classes that the model takes for the attacker's class.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.layers import assign
from fedfa.learning.evaluate import evaluate
from fedfa.protection.attacks import triggered

ALGORITHMS = ("fedavg", "fedfa")
ATTACKS = ("sign-flip", "scaling", "label-flip", "alie", "inner-product", "backdoor", "anchor-poisoning")
SHARES = (0.1, 0.2, 0.3)
RULES = (
    "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping", "median/2",
    "multi-krum/2",
)  # fmt: skip
"""``RULE/N``: in buckets of N clients."""
SCALES = {"sign-flip": 5.0, "anchor-poisoning": 10.0}
"""Strengths that differ from the attack's default."""


class Cell(NamedTuple):
    """One run of the grid."""

    algorithm: str
    attack: str
    share: float
    rule: str
    seed: int


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """The runs that were asked for; without attackers once, whatever the attack."""
    found = []
    for algorithm, rule, seed in itertools.product(arguments.algorithms, arguments.rules, arguments.seeds):
        found.append(Cell(algorithm, "none", 0.0, rule, seed))
        for attack, share in itertools.product(arguments.attacks, arguments.shares):
            if attack != "anchor-poisoning" or algorithm == "fedfa":
                found.append(Cell(algorithm, attack, share, rule, seed))
    return found


def config_of(cell: Cell, preset: str, rounds: int | None, settings: Sequence[str]) -> Config:
    """The config of one run. The rule knows the true share of attackers, as is usual in comparisons of rules."""
    rule, _, bucket = cell.rule.partition("/")
    assumed = {} if cell.attack == "none" else {"attackers": cell.share}
    layer: dict[str, object] = {
        "seed": cell.seed,
        "algorithm": {"name": cell.algorithm},
        "aggregation": {"rule": rule, "bucket": int(bucket or 1), **assumed},
        "evaluation": {"every": 10_000},
        "engine": {"workers": 1, "execution": "each"},
    }
    if cell.attack != "none":
        strength = {"scale": SCALES[cell.attack]} if cell.attack in SCALES else {}
        layer["attack"] = {"kind": cell.attack, "share": cell.share, **strength}
    return Config.preset(preset, layer, {"rounds": rounds} if rounds else {}, assign({}, list(settings)))


def measure(config: Config) -> dict[str, str]:
    """The final accuracy and, for a backdoor, its success; in per cent."""
    experiment = Experiment.from_config(config)
    accuracy = [record.accuracy for record in experiment.rounds(progress=False)][-1]
    assert accuracy is not None
    success = ""
    if config.attack.kind == "backdoor":
        dataset, network = experiment.federation.dataset, experiment.task.model
        test = triggered(dataset, config.attack.target)
        network.load(experiment.weights())
        success = f"{100 * evaluate(network, test.inputs, test.labels, dataset.normalisation.batch).accuracy:.1f}"
    return {"accuracy": f"{100 * accuracy:.1f}", "backdoor_success": success}


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rules in columns; algorithm, attack and share in rows; means over seeds."""
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    lines = [f"| algorithm | attack | share | {' | '.join(rules)} |", f"|---|---|--:|{'--:|' * len(rules)}"]
    for key in dict.fromkeys((row["algorithm"], row["attack"], row["share"]) for row in rows):
        shown = []
        for rule in rules:
            found = [r for r in rows if (r["algorithm"], r["attack"], r["share"]) == key and r["rule"] == rule]
            values = [[float(r[name]) for r in found if r[name]] for name in ("accuracy", "backdoor_success")]
            means = [f"{sum(one) / len(one):.1f}" for one in values if one]
            shown.append(" / ".join(means) or "–")
        lines.append(f"| {key[0]} | {key[1]} | {float(key[2]):.0%} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", "Backdoor: accuracy / success of the attack."]) + "\n"


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits-c2")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--attacks", nargs="+", default=ATTACKS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "runs.csv"
    names = [*Cell._fields, "accuracy", "backdoor_success"]
    rows = list(csv.DictReader(file.open(newline=""))) if file.exists() else []
    done = {tuple(row[name] for name in Cell._fields) for row in rows}
    with file.open("a", newline="") as out:
        writer = csv.DictWriter(out, names)
        if not rows:
            writer.writeheader()
        for cell in cells(arguments):
            if tuple(map(str, cell)) in done:
                continue
            config = config_of(cell, arguments.preset, arguments.rounds, arguments.settings)
            row = {**{name: str(value) for name, value in cell._asdict().items()}, **measure(config)}
            writer.writerow(row)
            out.flush()
            rows.append(row)
    (arguments.out / "table.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
