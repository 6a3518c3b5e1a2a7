"""The table of tuned methods in docs/tuning.md: each method with its best values, found with the same budget.

    python -m benchmarks.tuned_table --work runs/tuned --jobs 2     # tunes, trains the winners, writes the records
    python -m benchmarks.tuned_table --only fedavg                  # one method; called again, all others continue

``fedfa tune`` chooses on validation samples with seed 1; the winners are trained again with seeds 2, 3 and 4, and
their chosen round is tested. The records (no weights) go to ``results/tuned-fmnist-c2-mlp``, the table to the page.
Started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedfa.experiment.layers import value_text
from fedfa.text_tables import markdown_table

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "tuned-fmnist-c2-mlp"
PAGE = ROOT / "docs" / "tuning.md"
BEGIN, END = "<!-- tuned-fmnist-c2-mlp: begin -->", "<!-- tuned-fmnist-c2-mlp: end -->"

SETTING = ["--preset", "fmnist-c2", "--set", "model.name=mlp"]
ROUNDS, TRIALS, TEST_ROUNDS, SEEDS = 50, 18, 100, (2, 3, 4)
RATE = "local.lr=log:0.003..0.3"
METHODS = {
    "fedavg": "local.weight_decay=log:0.00001..0.01",
    "fedprox": "algorithm.fedprox.mu=log:0.001..1",
    "feddyn": "algorithm.feddyn.alpha=log:0.001..1",
    "fedetf": "algorithm.fedetf.beta=log:1..100",
    "fedfa": "algorithm.anchors.mu=log:0.001..1",
}
"""Of each method the second parameter; the first is the learning rate."""
TITLES = {"fedavg": "FedAvg", "fedprox": "FedProx", "feddyn": "FedDyn", "fedetf": "FedETF", "fedfa": "FedFA"}


def tune_command(method: str, out: str) -> list[str]:
    """The arguments of ``fedfa`` that tune a method."""
    return [
        "tune", *SETTING, "--algorithm", method, "--rounds", str(ROUNDS), "--trials", str(TRIALS), "--seeds", "1",
        "--param", RATE, "--param", METHODS[method], "--out", out,
    ]  # fmt: skip


def test_command(method: str, values: dict[str, Any], out: str) -> list[str]:
    """The arguments of ``fedfa`` that train the winner with new seeds and test it."""
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value_text(value)}")]
    return [
        "compare", *SETTING, "--algorithm", method, *sets, "--set", "data.validation=clients:0.1",
        "--rounds", str(TEST_ROUNDS), "--seed", ",".join(map(str, SEEDS)), "--out", out,
    ]  # fmt: skip


def winner(trials: dict[str, Any]) -> dict[str, Any]:
    """The best trial that trained to the end: ``fedfa tune`` writes them in that order."""
    best: dict[str, Any] = next(one for one in trials["trials"] if one["scores"])
    assert best["rounds"] == ROUNDS
    return best


def measure(method: str, work: Path, jobs: int) -> None:
    """Tune a method, test its winner, and copy the records."""
    fedfa = [sys.executable, "-m", "fedfa"]
    tuned, tested = work / method, work / "test"
    subprocess.run([*fedfa, *tune_command(method, str(tuned)), "--jobs", str(jobs)], check=True)
    trials = json.loads((tuned / "trials.json").read_text("utf-8"))
    values = winner(trials)["values"]
    subprocess.run([*fedfa, *test_command(method, values, str(tested)), "--jobs", str(jobs)], check=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        target = RECORDS / f"{method}-s{seed}"
        target.mkdir(exist_ok=True)
        for name in ("config.toml", "metrics.jsonl", "summary.json"):
            shutil.copyfile(tested / target.name / name, target / name)
    summary = json.loads((target / "summary.json").read_text("utf-8"))
    record = {
        "command": shlex.join(["fedfa", *tune_command(method, f"runs/tuned/{method}")]),
        "commit": summary["commit"],  # trials are trained by the same call, before these
        "machine": summary["machine"]["processor"],
        **trials,
    }
    (RECORDS / f"{method}-trials.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def table(records: Path = RECORDS) -> str:
    """The table, from the records alone."""
    rows = []
    for method, title in TITLES.items():
        trials = json.loads((records / f"{method}-trials.json").read_text("utf-8"))
        best = winner(trials)
        summaries = [json.loads((records / f"{method}-s{seed}" / "summary.json").read_text("utf-8")) for seed in SEEDS]
        found = [100 * one["final_accuracy"] for one in summaries]
        values = ", ".join(f"`{key}` {value:.3g}" for key, value in best["values"].items())
        failed = sum("failed" in one for one in trials["trials"])
        validation = 100 * statistics.fmean(best["scores"])
        tested = f"**{statistics.fmean(found):.2f}** ± {statistics.stdev(found):.2f}"
        each = " ".join(f"{one:.2f}" for one in found)
        rows.append([title, values, str(failed), f"{validation:.2f}", tested, each])
    return markdown_table(["method", "chosen", "failed trials", "validation", "test", "test of each seed"], rows)


def refresh(text: str, made: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} needs the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Measure what is missing, and write the table once all methods are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(METHODS), action="append", help="default: all")
    parser.add_argument("--work", type=Path, default=Path("runs/tuned"), help="where it trains")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    asked = parser.parse_args()
    for method in asked.only or METHODS:
        measure(method, asked.work, asked.jobs)
    if all((RECORDS / f"{method}-s{SEEDS[-1]}" / "summary.json").exists() for method in METHODS):
        PAGE.write_text(refresh(PAGE.read_text("utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
