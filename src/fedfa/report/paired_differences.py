"""Differences between methods on equal seeds, and whether they exceed the noise between seeds.

Two methods that train with the same seed share initial weights, cohorts and the order of samples, so the difference of
their accuracies varies less from seed to seed than the accuracies do. With n such differences of mean m and standard
deviation s, the true difference lies in m ± t·s/√n with 95 % confidence, t being the 97.5 % point of Student's
distribution with n − 1 degrees of freedom (Student 1908). If 0 is inside, other seeds could reverse the order.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfa.experiment.run_directory import RunDirectory

MEASURES: Mapping[str, str] = {"final_accuracy": "final", "last10_accuracy": "last 10"}
PAIRS_HEADER = ("difference", "seeds", "final, points", "last 10, points", "exceeds seed noise?")
ALL_PAIRS_UP_TO = 4
"""With more methods than this, each is compared with the first only."""

_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % points of Student's distribution for 1 to 30 degrees of freedom."""


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution.

    Example:
        >>> student(2)
        4.303
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion; two terms are off by less than 0.001 from here on.
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Difference:
    """One method minus another, in percentage points, on the seeds that both have."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % interval; None for a single seed."""
        n = len(self.values)
        return student(n - 1) * statistics.stdev(self.values) / math.sqrt(n) if n > 1 else None

    @property
    def exceeds_noise(self) -> bool | None:
        """Whether 0 lies outside the interval; None for a single seed."""
        return None if self.margin is None else abs(self.mean) > self.margin

    def __str__(self) -> str:
        """``+3.10 ± 1.20``."""
        return f"{self.mean:+.2f}" + ("" if self.margin is None else f" ± {self.margin:.2f}")


Scores = Mapping[int, Mapping[str, float]]
"""Accuracies in percent, by seed and measure."""


def scores_of(runs: Mapping[str, Sequence[Path]]) -> dict[str, Scores]:
    """The accuracies of finished runs by method and seed."""
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for method, directories in runs.items():
        for directory in directories:
            summary = RunDirectory(directory).summary()
            if summary is not None:
                found.setdefault(method, {})[int(summary["seeds"]["training"])] = {
                    measure: 100 * float(summary[measure]) for measure in MEASURES
                }
    return dict(found)


def difference(one: Scores, other: Scores, measure: str) -> Difference | None:
    """One minus the other on the seeds that both have; None if there are none."""
    seeds = sorted(one.keys() & other.keys())
    return Difference(tuple(one[s][measure] - other[s][measure] for s in seeds)) if seeds else None


def pairs(methods: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of methods to compare: all pairs of a few, else each method with the first.

    Example:
        >>> pairs(["fedavg", "fedfa", "moon"])
        [('fedfa', 'fedavg'), ('moon', 'fedavg'), ('moon', 'fedfa')]
    """
    if len(methods) > ALL_PAIRS_UP_TO:
        return [(method, methods[0]) for method in methods[1:]]
    return [(later, earlier) for earlier, later in itertools.combinations(methods, 2)]


def paired_rows(scores: Mapping[str, Scores]) -> list[tuple[str, ...]]:
    """A row per pair: the differences and the verdict."""
    rows: list[tuple[str, ...]] = []
    for one, other in pairs(list(scores)):
        found = {m: difference(scores[one], scores[other], m) for m in MEASURES}
        final, last = found["final_accuracy"], found["last10_accuracy"]
        if final is not None and last is not None:
            rows.append((f"{one} − {other}", str(len(final.values)), str(final), str(last), verdict(final, last)))
    return rows


def verdict(final: Difference, last: Difference) -> str:
    """Whether the differences exceed the seed noise, as text.

    Example:
        >>> verdict(Difference((3.0, 3.1, 2.9)), Difference((3.0, -3.0, 1.0)))
        'final: yes; last 10: no'
    """
    if final.exceeds_noise is None or last.exceeds_noise is None:
        return "unknown: one seed"
    text = {True: "yes", False: "no"}
    if final.exceeds_noise == last.exceeds_noise:
        return text[final.exceeds_noise]
    return f"final: {text[final.exceeds_noise]}; last 10: {text[last.exceeds_noise]}"


PAIRS_LEGEND = (
    "Differences on the same seeds, mean ± 95 % interval (Student). Yes: the interval does not contain 0, so the "
    "difference exceeds the noise between seeds. No: more seeds are needed, or there is no difference. "
    "Pairs are tested separately: of twenty pairs without a difference, about one gives yes."
)
