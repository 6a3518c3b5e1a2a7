"""Runs as a reader compares them: chapters of runs on the same data, methods with their seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedfa.experiment.config import affects_result
from fedfa.experiment.layers import flat
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.seed_means import SeedMean


def _compared_config(run: RecordedRun) -> dict[str, Any]:
    """The configuration by dotted key without what may differ between the runs of one method."""
    return {
        key: value
        for key, value in flat(run.config).items()
        if affects_result(key) and key not in ("seed", "data.seed") and not key.startswith("diagnostics.")
    }


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve over seeds: mean, minimum and maximum."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodRuns:
    """One line of a chart: the runs of one configuration, one per seed."""

    name: str
    runs: tuple[RecordedRun, ...]

    @property
    def finished(self) -> bool:
        """Whether all seeds are finished."""
        return all(run.finished for run in self.runs)

    def curve(self, value: Callable[[Mapping[str, Any]], float | None], records: str = "evaluated") -> list[CurvePoint]:
        """A value by round, over the rounds that every seed has, so that all means are over the same seeds."""
        by_seed = []
        for run in self.runs:
            pairs = {int(r["round"]): value(r) for r in getattr(run, records)}
            by_seed.append({number: v for number, v in pairs.items() if v is not None})
        points = []
        for at in common_rounds(by_seed):
            values = [seed[at] for seed in by_seed if seed]
            points.append(CurvePoint(at, sum(values) / len(values), min(values), max(values)))
        return points

    def over_seeds(self, key: str, factor: float) -> SeedMean | None:
        """Mean of a figure of the results, times a factor, over the seeds that have it."""
        found = {run.seed: run.results.get(key) for run in self.runs}
        return SeedMean.over({seed: factor * value for seed, value in found.items() if isinstance(value, int | float)})

    def after_final_pass(self) -> tuple[float, float] | None:
        """Round and mean accuracy of the final pass, if every seed has one."""
        passes = [run.final_pass for run in self.runs]
        values = [one["accuracy"] for one in passes if one is not None and one.get("accuracy") is not None]
        if len(values) < len(self.runs) or not values:
            return None
        return max(float(one["round"]) for one in passes if one is not None), fmean(values)


def common_rounds(by_seed: Sequence[Mapping[int, Any]]) -> list[int]:
    """The rounds that all seeds with any round have."""
    started = [set(seed) for seed in by_seed if seed]
    return sorted(set.intersection(*started)) if started else []


@dataclass(frozen=True)
class Chapter:
    """Methods on the same data, split and network."""

    title: str
    group: str
    methods: tuple[MethodRuns, ...]

    @property
    def runs(self) -> list[RecordedRun]:
        """The runs of all methods."""
        return [run for method in self.methods for run in method.runs]

    @property
    def evaluated_on(self) -> str:
        """What the rounds were evaluated on: ``test``, ``validation``, or both."""
        return " and ".join(sorted({run.whose.get("on", "test") for run in self.runs})) or "test"

    def configs(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Config values that all methods share, and those that differ (one value per method)."""
        each = [_compared_config(method.runs[0]) for method in self.methods]
        common, differing = {}, {}
        for key in sorted({key for one in each for key in one}):
            values = [one.get(key) for one in each]
            if all(value == values[0] for value in values):
                common[key] = values[0]
            else:
                differing[key] = values
        return common, differing


def chapters_of(runs: Sequence[RecordedRun]) -> list[Chapter]:
    """Sort runs into chapters: by directory, and by data set, split and network.

    Runs named ``NAME-sSEED`` with equal configurations are the seeds of one method.
    """
    by_setting: dict[tuple[str, str], list[RecordedRun]] = {}
    for run in runs:
        by_setting.setdefault((run.group, setting_of(run.config)), []).append(run)
    settings = Counter(group for group, _ in by_setting)
    chapters = []
    for (group, setting), members in by_setting.items():
        name = Path(group).name if group else ""
        if len(members) == 1 and not group:
            name = members[0].label
        title = f"{name}: {setting}" if name and settings[group] > 1 else name or setting
        methods = sorted(_methods(members), key=lambda method: method.name)
        chapters.append(Chapter(title, group, tuple(methods)))
    return chapters


def setting_of(config: Mapping[str, Any]) -> str:
    """Data, split and network as text; runs with the same text are compared.

    Example:
        >>> setting_of({"data": {"name": "digits", "clients": 10}, "model": {"name": "mlp"}})
        'digits, 10 clients, mlp'
    """
    data, model = config.get("data", {}), config.get("model", {})
    clients = f"{data['clients']} clients" if data.get("clients") else ""
    texts = [str(data.get("name", "?")), clients, partition_text(data.get("partition")), str(model.get("name", "?"))]
    return ", ".join(filter(None, texts))


def partition_text(partition: Any) -> str:
    """The split of the data as text.

    Example:
        >>> partition_text({"kind": "shards", "classes_per_client": 2})
        'shards (classes per client 2)'
        >>> partition_text({"kind": "domains", "inner": {"kind": "iid"}})
        'domains (inner iid)'
    """
    if not isinstance(partition, Mapping):
        return str(partition or "")
    options = [
        f"{key.replace('_', ' ')} {partition_text(value) if isinstance(value, Mapping) else value}"
        for key, value in partition.items()
        if key != "kind"
    ]
    return str(partition.get("kind", "")) + (f" ({', '.join(options)})" if options else "")


def _methods(runs: Sequence[RecordedRun]) -> list[MethodRuns]:
    groups: dict[tuple[str, str], list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault((run.label, repr(sorted(_compared_config(run).items()))), []).append(run)
    methods: list[MethodRuns] = []
    for (name, _), members in groups.items():
        if len({run.seed for run in members}) < len(members):  # the same seed twice is not two seeds
            methods += [MethodRuns(str(run.path), (run,)) for run in members]
        else:
            methods.append(MethodRuns(name, tuple(sorted(members, key=lambda run: run.seed))))
    names = Counter(method.name for method in methods)
    return [MethodRuns(str(m.runs[0].path), m.runs) if names[m.name] > 1 else m for m in methods]
