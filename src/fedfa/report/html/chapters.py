"""Runs as a reader compares them: chapters of runs on the same data, methods with their seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.report.html.reading import Run
from fedfa.studies.layers import flat
from fedfa.studies.run import FREE_ON_RESUME


def _beside(key: str) -> bool:
    """Settings that cannot change a result, and the two seeds: runs that differ in these only are one method."""
    return key in FREE_ON_RESUME or key in ("seed", "data.seed") or key.startswith("insight.")


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, their standard deviation (None for one seed), and how many there are."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve over seeds: the mean, the lowest and the highest."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Method:
    """One line of a chart: a method with its settings, run with one seed or several."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> bool:
        """Whether all seeds are."""
        return all(run.finished for run in self.runs)

    @property
    def recipe(self) -> str:
        """What was run, e.g. ``fedfa@authors``."""
        algorithm = self.runs[0].config.get("algorithm", {})
        variant = algorithm.get("variant")
        return f"{algorithm.get('recipe', '?')}{f'@{variant}' if variant else ''}"

    def curve(self, value: Callable[[Mapping[str, Any]], float | None], records: str = "evaluated") -> list[CurvePoint]:
        """A value by round: over the rounds that every seed has, so that a mean is always of the same seeds."""
        by_seed = []
        for run in self.runs:
            pairs = {int(r["round"]): value(r) for r in getattr(run, records)}
            by_seed.append({number: v for number, v in pairs.items() if v is not None})
        begun = [seed for seed in by_seed if seed]
        if not begun:
            return []
        common = sorted(set.intersection(*(set(seed) for seed in begun)))
        points = []
        for at in common:
            values = [seed[at] for seed in begun]
            points.append(CurvePoint(at, sum(values) / len(values), min(values), max(values)))
        return points

    def over(self, figure: Callable[[Run], float | None]) -> Spread | None:
        """A figure of each seed, summed up; None if no seed has it."""
        values = [value for run in self.runs if (value := figure(run)) is not None]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation, len(values))

    def after_survey(self) -> tuple[float, float] | None:
        """Round and mean accuracy of what followed the last round, where every seed has it."""
        surveys = [run.survey for run in self.runs]
        values = [s["accuracy"] for s in surveys if s is not None and s.get("accuracy") is not None]
        if len(values) < len(self.runs) or not values:
            return None
        return max(float(s["round"]) for s in surveys if s is not None), statistics.fmean(values)


@dataclass(frozen=True)
class Chapter:
    """Methods on the same data, split and network."""

    title: str
    place: str
    methods: tuple[Method, ...]

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [run for method in self.methods for run in method.runs]

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the first run, for what all have in common."""
        return self.runs[0].config

    def settings(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Settings that all methods share, and those in which they differ (a value for each method)."""
        each = [flat(method.runs[0].config) for method in self.methods]
        keys = sorted({key for one in each for key in one if not _beside(key)})
        common, differing = {}, {}
        for key in keys:
            values = [one.get(key) for one in each]
            if all(value == values[0] for value in values):
                common[key] = values[0]
            else:
                differing[key] = values
        return common, differing


def chapters_of(runs: Sequence[Run]) -> list[Chapter]:
    """Sort runs into chapters: by place, and by data set, split and network.

    Runs named ``NAME-sSEED`` with equal settings are the seeds of one method.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.place, setting_of(run.config)), []).append(run)
    places: dict[str, int] = {}
    for place, _ in groups:
        places[place] = places.get(place, 0) + 1
    chapters = []
    for (place, setting), members in groups.items():
        name = Path(place).name if place else ""
        if len(members) == 1 and not place:
            name = members[0].stem
        title = f"{name}: {setting}" if name and places[place] > 1 else name or setting
        methods = sorted(_methods(members), key=lambda method: method.name)
        chapters.append(Chapter(title, place, tuple(methods)))
    return chapters


def setting_of(config: Mapping[str, Any]) -> str:
    """Data, split and network in words; runs are compared where these words agree.

    Example:
        >>> setting_of({"data": {"name": "digits", "clients": 10}, "model": {"name": "mlp"}})
        'digits, 10 clients, mlp'
    """
    data, model = config.get("data", {}), config.get("model", {})
    words = [str(data.get("name", "?"))]
    if data.get("clients"):
        words.append(f"{data['clients']} clients")
    split = partition_words(data.get("partition"))
    return ", ".join([*words, *([split] if split else []), str(model.get("name", "?"))])


def partition_words(partition: Any) -> str:
    """How the data are split, in words.

    Example:
        >>> partition_words({"kind": "shards", "classes_per_client": 2})
        'shards (classes per client 2)'
        >>> partition_words({"kind": "domains", "inner": {"kind": "iid"}})
        'domains (inner iid)'
    """
    if not isinstance(partition, Mapping):
        return str(partition or "")
    options = [
        f"{key.replace('_', ' ')} {partition_words(value) if isinstance(value, Mapping) else value}"
        for key, value in partition.items()
        if key != "kind"
    ]
    return str(partition.get("kind", "")) + (f" ({', '.join(options)})" if options else "")


def _methods(runs: Sequence[Run]) -> list[Method]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in flat(run.config).items() if not _beside(key)}
        groups.setdefault((run.stem, repr(sorted(settings.items()))), []).append(run)
    methods: list[Method] = []
    for (stem, _), members in groups.items():
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):  # the same seed twice is not two seeds
            methods += [Method(str(run.folder), (run,)) for run in members]
        else:
            methods.append(Method(stem, tuple(sorted(members, key=lambda run: run.seed))))
    names = [method.name for method in methods]
    return [
        Method(str(method.runs[0].folder), method.runs) if names.count(method.name) > 1 else method
        for method in methods
    ]
