"""Algorithms compared from Python: own network, own data, several seeds and config values, one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import expression_of
from fedfa.arguments import checks_arguments
from fedfa.data import Federation
from fedfa.errors import ConfigError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.experiment import ELSEWHERE, Callback, Experiment
from fedfa.experiment.layers import merge, nest_all, value_text
from fedfa.experiment.record import RoundRecord, accuracies
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.report.marks import marked, marks_of, marks_text
from fedfa.report.paired_differences import PAIRS_HEADER, PAIRS_LEGEND, Scores, paired_rows
from fedfa.seed_means import MEANING, SeedMean
from fedfa.text_tables import markdown_table

AnyAlgorithm = str | Algorithm | Component


@dataclass(frozen=True)
class ComparedRun:
    """One training of a comparison."""

    algorithm: str
    setting: str
    """The varied config values, e.g. ``"local.lr=0.1"``; empty where nothing is varied."""
    seed: int
    records: tuple[RoundRecord, ...]
    tested: Mapping[str, Any] | None = None
    """With validation samples, the evaluation of the chosen model on the test set."""

    @property
    def accuracies(self) -> dict[str, Any]:
        """Final and best accuracy, and the mean of the last ten evaluations."""
        return accuracies([record.to_dict() for record in self.records], self.tested)


@dataclass(frozen=True)
class ComparisonResult:
    """The runs of a comparison; print it for the tables."""

    runs: tuple[ComparedRun, ...]

    @property
    def algorithms(self) -> list[str]:
        """Their titles, in the order given."""
        return list(dict.fromkeys(run.algorithm for run in self.runs))

    @property
    def settings(self) -> list[str]:
        """The varied settings, in order."""
        return list(dict.fromkeys(run.setting for run in self.runs))

    def mean(self, algorithm: str, setting: str = "") -> SeedMean | None:
        """The final accuracy in percent over the seeds."""
        return SeedMean.over({seed: one["final_accuracy"] for seed, one in self._scores(algorithm, setting).items()})

    def table(self) -> str:
        """Algorithms × settings as Markdown: mean(standard deviation) over seeds, in brackets their number."""
        header = ["algorithm", *(setting or "final accuracy, %" for setting in self.settings)]
        rows = [
            [marked(name, self._marks(name)), *(str(self.mean(name, setting) or "–") for setting in self.settings)]
            for name in self.algorithms
        ]
        return markdown_table(header, rows)

    def differences(self, setting: str | None = None) -> str:
        """Differences between algorithms on the same seeds as Markdown; for every setting unless one is named."""
        blocks = []
        for chosen in self.settings if setting is None else [setting]:
            scores = {name: found for name in self.algorithms if (found := self._scores(name, chosen))}
            if rows := paired_rows(scores):
                title = f"**{chosen}**\n\n" if chosen else ""
                blocks.append(title + markdown_table(PAIRS_HEADER, rows))
        return "\n\n".join([*blocks, PAIRS_LEGEND] if blocks else [])

    def _marks(self, algorithm: str) -> list[str]:
        return [marks_of(run.records) for run in self.runs if run.algorithm == algorithm]

    def _scores(self, algorithm: str, setting: str) -> Scores:
        chosen = [run for run in self.runs if (run.algorithm, run.setting) == (algorithm, setting)]
        return {run.seed: {name: 100 * value for name, value in run.accuracies.items()} for run in chosen}

    def __str__(self) -> str:
        marks = marks_text(mark for name in self.algorithms for mark in self._marks(name))
        parts = [self.table(), " ".join(filter(None, [f"Final accuracy in percent, {MEANING}.", marks]))]
        return "\n\n".join([*parts, differences] if (differences := self.differences()) else parts)

    def __repr__(self) -> str:
        return f"<ComparisonResult: {len(self.algorithms)} algorithms, {len(self.runs)} runs>"

    def _repr_markdown_(self) -> str:
        return str(self)


_ELSEWHERE = {**ELSEWHERE, "seed": "give a list, seeds=[1, 2, 3]", "planned_rounds": "give rounds=…"}


@checks_arguments("compare", _ELSEWHERE, passes_to=Experiment.__init__)
def compare(
    algorithms: Sequence[AnyAlgorithm] | Mapping[str, AnyAlgorithm],
    *,
    data: Federation,
    model: str | ModelSource,
    rounds: int,
    seeds: Sequence[int] = (1,),
    vary: Mapping[str, Sequence[Any]] | None = None,
    out: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> ComparisonResult:
    """Train several algorithms on the same clients with the same seeds, and put the results side by side.

    Args:
        algorithms: Algorithms as :class:`~fedfa.Experiment` takes them; in a mapping, by the title for the tables.
        data: The clients, for all runs.
        model: The network, for all runs.
        rounds: Rounds of each run.
        seeds: Seeds of the training; the split of the data stays the same.
        vary: Values by dotted config key, e.g. ``{"local.lr": [0.1, 0.01]}``; every combination is trained.
        out: Save each run to a run directory below this one; left out, nothing is written.
        callbacks: Called after each round of each run.
        **options: Further arguments of :class:`~fedfa.Experiment`, e.g. ``cohort`` and ``local``.

    Example:
        >>> import fedfa
        >>> data = fedfa.data.load("digits").split("shards:2", clients=10)
        >>> result = compare(["fedavg", "fedfa"], data=data, model="mlp", rounds=1, cohort=2)
        >>> result.algorithms
        ['fedavg', 'fedfa']
    """
    titled = dict(algorithms) if isinstance(algorithms, Mapping) else {_title(one): one for one in algorithms}
    if len(titled) < len(algorithms):
        raise ConfigError("two algorithms have the same title; give a mapping with a title for each")
    if isinstance(seeds, int):
        raise ConfigError(f"seeds = {seeds}: give a list of seeds, e.g. seeds=[1, 2, 3]")
    common = dict(options.pop("settings", None) or {})
    runs = []
    for (title, algorithm), (setting, layer), seed in itertools.product(titled.items(), _settings(vary or {}), seeds):
        experiment = Experiment(
            algorithm, data=data, model=model, seed=seed, planned_rounds=rounds, callbacks=callbacks,
            settings=merge(common, layer), **options,
        )  # fmt: skip
        records = tuple(experiment.rounds(rounds))
        tested = experiment.test() if experiment.evaluated_on == "validation" else None
        runs.append(ComparedRun(title, setting, seed, records, tested))
        if out is not None:
            name = "-".join(filter(None, [title, setting.replace(", ", "-"), f"s{seed}"]))
            experiment.save(Path(out) / name.replace("/", "_"), overwrite=True)
    return ComparisonResult(tuple(runs))


def _title(algorithm: AnyAlgorithm) -> str:
    return algorithm if isinstance(algorithm, str) else expression_of(algorithm)[0]


def _settings(vary: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for values in itertools.product(*vary.values()):
        chosen = dict(zip(vary, values, strict=True))
        yield ", ".join(f"{key}={value_text(value)}" for key, value in chosen.items()), nest_all(chosen)
