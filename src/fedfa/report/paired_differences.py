"""Differences between methods on equal seeds, and whether they exceed the noise between seeds.

Two methods that train with the same seed share initial weights, cohorts and the order of samples, so the difference of
their accuracies varies less from seed to seed than the accuracies do. With n such differences of mean m and standard
deviation s, the true difference lies in m ± t·s/√n with 95 % confidence, t being the 97.5 % point of Student's
distribution with n − 1 degrees of freedom. All of this holds for the one split and test set that the runs share.

A table has many differences, and of twenty that are none, one interval leaves 0 out. The verdict is therefore
corrected for all of them (S. Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, Scandinavian Journal of
Statistics 1979). It is withheld where two seeds (or one) would have to tell noise from a difference, and where all
seeds agree to the last digit, so that there is no noise to compare with.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfa.experiment.run_directory import RunDirectory
from fedfa.student import critical_value, two_sided_p

MEASURES: Mapping[str, str] = {"final_accuracy": "final", "last10_accuracy": "last 10"}
PAIRS_HEADER = ("difference", "seeds", "final, points", "last 10, points", "exceeds seed noise?")
ALL_PAIRS_UP_TO = 4
"""With more methods than this, each is compared with the first only."""
LEVEL = 0.05
"""Probability with which a table without a difference says yes anywhere."""
LEAST_SEEDS = 3
"""With fewer there is no verdict: the standard deviation of two numbers says next to nothing."""


@dataclass(frozen=True)
class Difference:
    """One method minus another, in percentage points, on the seeds that both have."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        n = len(self.values)
        return statistics.stdev(self.values) / math.sqrt(n) if n > 1 else None

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % interval; None for a single seed."""
        return None if self.error is None else critical_value(len(self.values) - 1) * self.error

    @property
    def unknown(self) -> str:
        """Why there is no verdict; empty if there is one."""
        if len(self.values) < LEAST_SEEDS:
            return "one seed" if len(self.values) == 1 else "two seeds"
        return "no spread between seeds" if not self.error or self.error < 1e-9 else ""

    @property
    def p(self) -> float:
        """Probability of a mean this far from 0 if there is no difference; 1 where there is no verdict."""
        if self.unknown or not self.error:
            return 1.0
        return two_sided_p(self.mean / self.error, len(self.values) - 1)

    def __str__(self) -> str:
        """``+3.10 ± 1.20``."""
        return f"{self.mean:+.2f}" + ("" if self.margin is None else f" ± {self.margin:.2f}")


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below 0.05 where a difference stands although there are so many tests.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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


@dataclass(frozen=True)
class PairedDifference:
    """Two methods on the seeds that both have."""

    one: str
    other: str
    differences: tuple[Difference, ...]
    """One minus the other, by measure."""
    verdict: str
    """Whether they exceed the noise between seeds, as text."""

    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        seeds = str(len(self.differences[0].values))
        return (f"{self.one} − {self.other}", seeds, *map(str, self.differences), self.verdict)

    def values(self) -> dict[str, object]:
        """The same as plain values."""
        measured = zip(MEASURES, self.differences, strict=True)
        numbers = {name: {"mean": each.mean, "margin": each.margin} for name, each in measured}
        seeds = len(self.differences[0].values)
        return {"one": self.one, "other": self.other, "seeds": seeds, **numbers, "exceeds_seed_noise": self.verdict}


def paired_rows(scores: Mapping[str, Scores]) -> list[tuple[str, ...]]:
    """A row per pair: the differences and the verdict, corrected for all differences of these rows."""
    return [pair.row() for pair in paired_differences(scores)]


def paired_differences(scores: Mapping[str, Scores]) -> list[PairedDifference]:
    """The pairs of methods that share a seed, with verdicts that are corrected for all their differences."""
    found = {
        (one, other): tuple(d for m in MEASURES if (d := difference(scores[one], scores[other], m)) is not None)
        for one, other in pairs(list(scores))
    }
    tested = [each for differences in found.values() for each in differences if not each.unknown]
    stands = dict(zip(tested, (p < LEVEL for p in holm([each.p for each in tested])), strict=True))
    return [
        PairedDifference(one, other, differences, verdict(differences, stands))
        for (one, other), differences in found.items()
        if differences
    ]


def verdict(differences: Sequence[Difference], stands: Mapping[Difference, bool]) -> str:
    """Whether the differences exceed the seed noise, as text.

    Args:
        differences: Of one pair, by measure.
        stands: Those with a verdict, and what it is.

    Example:
        >>> final, last = Difference((3.0, 3.1, 2.9)), Difference((3.0, -3.0, 1.0))
        >>> verdict((final, last), {final: True, last: False})
        'final: yes; last 10: no'
    """
    texts = [f"unknown: {each.unknown}" if each.unknown else "yes" if stands[each] else "no" for each in differences]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{measure}: {text}" for measure, text in zip(MEASURES.values(), texts, strict=True))


PAIRS_LEGEND = (
    "Differences on the same seeds, mean ± 95 % interval (Student); last 10 is the mean of the last ten evaluations, "
    "or of all where there are fewer. Yes: the difference exceeds the noise between seeds, after Holm's correction for "
    "all differences of the table. No: more seeds are needed, or there is no difference. Unknown: fewer than three "
    "seeds, or no spread between them. All of it is conditional on this split and test set."
)
