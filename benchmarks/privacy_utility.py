"""Accuracy against ε: does the advantage of anchors survive the noise?

    python -m benchmarks.privacy_utility --out results/privacy                    # everything in privacy_utility.toml
    python -m benchmarks.privacy_utility --only 'digits-c2/*' --out DIRECTORY     # a part of it

Clip and learning rate of every algorithm and budget are chosen with the first seed by the accuracy on the server's
validation samples (mean of the last evaluations), from one grid; the other seeds run with the choice. Reported is the
accuracy of the final models on the test set. Every run adds one line to ``runs-SETTING.jsonl`` as soon as it ends
(``epsilon`` null: no budget); started again, finished runs are not repeated. ``table.md`` and ``accuracy.svg`` are made
from these lines.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.experiment.config import Config, preset_layer
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.layers import expression_and_variant, merge
from fedfa.experiment.run import processor_name, source_commit
from fedfa.learning.evaluate import evaluate

PLAN = Path(__file__).with_suffix(".toml")
LAST = 3
"""Evaluations at the end whose mean chooses."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run."""

    setting: str
    algorithm: str
    epsilon: float
    lr: float
    clip: float | None
    seed: int
    layer: Mapping[str, Any]
    """The setting's config."""
    privacy: Mapping[str, Any]
    """The algorithm's own privacy settings."""

    @property
    def name(self) -> str:
        """For example ``digits-c2/fedfa epsilon 4 lr 0.1 clip 1 seed 1``."""
        clip = "" if self.clip is None else f" clip {self.clip:g}"
        return f"{self.setting}/{self.algorithm} epsilon {self.epsilon:g} lr {self.lr:g}{clip} seed {self.seed}"

    def config(self) -> Config:
        """The complete configuration. Without a budget there is neither clip nor noise."""
        private = {"epsilon": self.epsilon, "clip": self.clip, **self.privacy} if self.clip is not None else {}
        asked = {
            "seed": self.seed, "algorithm": expression_and_variant(self.algorithm.partition("-")[0]),
            "data": {"validation": "server:0.1"}, "local": {"lr": self.lr}, "privacy": private,
            "evaluation": {"every": 5}, "engine": {"workers": 1, "execution": "stacked"},
        }  # fmt: skip
        return Config.resolve(merge(dict(self.layer), asked))


def groups(plan: Mapping[str, Any]) -> Iterator[list[Trial]]:
    """For every setting, algorithm and budget the runs to choose from."""
    for name, setting in plan["settings"].items():
        layer = merge(preset_layer(setting["preset"]), setting["config"])
        pairs = [(a, float(e)) for e in plan["epsilons"] for a in plan["algorithms"] if "-" not in a]
        pairs += [(one["algorithm"], float(one["epsilon"])) for one in setting["extra"]]
        for algorithm, epsilon in pairs:
            points = [(one["lr"], one["clip"] if math.isfinite(epsilon) else None) for one in plan["grid"]]
            yield [
                Trial(name, algorithm, epsilon, lr, clip, plan["seeds"][0], layer, plan["algorithms"][algorithm])
                for lr, clip in dict.fromkeys(points)
            ]


def run(trial: Trial) -> Record:
    """The record of one run."""
    began, experiment = time.process_time(), Experiment.from_config(trial.config())
    records = list(experiment.rounds(progress=False))
    found = [one.accuracy for one in records if one.accuracy is not None]
    test, network = experiment.federation.dataset.test, experiment.task.model
    network.load(experiment.weights())
    on_test = evaluate(network, test.inputs, test.labels, experiment.federation.dataset.normalisation.batch)
    return {
        "run": trial.name, "setting": trial.setting, "algorithm": trial.algorithm,
        "epsilon": trial.epsilon if math.isfinite(trial.epsilon) else None,
        "lr": trial.lr, "clip": trial.clip, "seed": trial.seed, "rounds": len(records),
        "spent": records[-1].get("epsilon"), "delta": records[-1].get("delta"),
        "validation": round(statistics.fmean(found[-LAST:]), 4), "test": round(on_test.accuracy, 4),
        "commit": source_commit(), "machine": processor_name(), "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def chosen(records: list[Record]) -> list[list[Record]]:
    """For every setting, algorithm and budget the runs of the best point of the grid, one for each seed."""
    keys = dict.fromkeys((one["setting"], one["algorithm"], one["epsilon"]) for one in records)
    found = []
    for key in sorted(keys):
        own = [one for one in records if (one["setting"], one["algorithm"], one["epsilon"]) == key]
        first = min(one["seed"] for one in own)
        best = max((one for one in own if one["seed"] == first), key=lambda one: float(one["validation"]))
        found.append([one for one in own if (one["lr"], one["clip"]) == (best["lr"], best["clip"])])
    return found


def table(records: list[Record]) -> str:
    """Budgets in columns; means over seeds of the test accuracy, with the range."""
    groups = {(g[0]["setting"], g[0]["algorithm"], g[0]["epsilon"]): g for g in chosen(records)}
    budgets = sorted({epsilon for _, _, epsilon in groups})
    head = " | ".join(f"ε = {'∞' if math.isinf(epsilon) else f'{epsilon:g}'}" for epsilon in budgets)
    lines = [f"| setting | algorithm | {head} |", f"|---|---|{'--:|' * len(budgets)}"]
    for setting, algorithm in dict.fromkeys((s, a) for s, a, _ in groups):
        cells = []
        for epsilon in budgets:
            tests = [100 * one["test"] for one in groups.get((setting, algorithm, epsilon), [])]
            spread = f" ± {(max(tests) - min(tests)) / 2:.1f}" if len(tests) > 1 else ""
            cells.append(f"{statistics.fmean(tests):.1f}{spread}" if tests else "–")
        lines.append(f"| {setting} | {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def choices(records: list[Record]) -> str:
    """Learning rate and clip that the validation samples chose."""
    lines = ["| setting | algorithm | ε | lr | clip | validation |", "|---|---|--:|--:|--:|--:|"]
    for group in chosen(records):
        one = group[0]
        epsilon, clip = ("∞", "–") if one["clip"] is None else (f"{one['epsilon']:g}", f"{one['clip']:g}")
        score = f"{100 * one['validation']:.1f}"
        lines.append(f"| {one['setting']} | {one['algorithm']} | {epsilon} | {one['lr']:g} | {clip} | {score} |")
    return "\n".join(lines) + "\n"


def figure(records: list[Record], file: Path) -> None:
    """Test accuracy against ε, one panel per setting."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fedfa"
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys(one["setting"] for one in records))
    drawn, axes = plt.subplots(1, len(settings), figsize=(4.2 * len(settings), 3.2), squeeze=False)
    for panel, setting in zip(axes[0], settings, strict=True):
        groups = [g for g in chosen(records) if g[0]["setting"] == setting]
        budgets = sorted({g[0]["epsilon"] for g in groups})
        for algorithm in dict.fromkeys(g[0]["algorithm"] for g in groups):
            own = [g for g in groups if g[0]["algorithm"] == algorithm]
            places = [budgets.index(g[0]["epsilon"]) for g in own]
            means = [statistics.fmean(100 * one["test"] for one in g) for g in own]
            panel.plot(places, means, marker="o", label=algorithm)
            panel.scatter(
                [place for place, g in zip(places, own, strict=True) for _ in g],
                [100 * one["test"] for g in own for one in g], s=8, color=panel.lines[-1].get_color(),
            )  # fmt: skip
        panel.set_xticks(range(len(budgets)), ["∞" if math.isinf(e) else f"{e:g}" for e in budgets])
        panel.set(title=setting, xlabel="ε", ylabel="test accuracy, %")
        panel.legend()
    drawn.tight_layout()
    drawn.savefig(file, metadata={"Date": None})
    plt.close(drawn)


def read(folder: Path) -> list[Record]:
    """The recorded runs, whichever file of the folder they are in."""
    lines = [line for file in sorted(folder.glob("runs*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    found = [json.loads(line) for line in lines]
    return [{**one, "epsilon": math.inf if one["epsilon"] is None else one["epsilon"]} for one in found]


def main() -> None:
    """Run what is missing; write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of the runs' names")
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = tomllib.loads(PLAN.read_text(encoding="utf-8"))

    def missing(trial: Trial) -> None:
        if fnmatch.fnmatch(trial.name, options.only) and trial.name not in {one["run"] for one in read(options.out)}:
            line = json.dumps(run(trial))
            with (options.out / f"runs-{trial.setting}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    for group in groups(plan):
        for trial in group:
            missing(trial)
        done = {one["run"]: one["validation"] for one in read(options.out)}
        if all(trial.name in done for trial in group):
            best = max(group, key=lambda trial: float(done[trial.name]))
            for seed in plan["seeds"][1:]:
                missing(Trial(**{**vars(best), "seed": seed}))
    records = read(options.out)
    (options.out / "table.md").write_text(f"{table(records)}\n{choices(records)}", encoding="utf-8")
    figure(records, options.out / "accuracy.svg")


if __name__ == "__main__":
    main()
