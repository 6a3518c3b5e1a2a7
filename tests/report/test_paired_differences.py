"""Paired differences between methods on equal seeds, and their verdicts."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from scipy import stats

from fedfa.report.paired_differences import Difference, difference, holm, paired_rows, pairs
from fedfa.student import critical_value, two_sided_p


def rows_of(*differences: tuple[float, ...]) -> list[str]:
    """Verdicts of methods that exceed the first by these points."""
    seeds = range(len(differences[0]))
    score = {"zero": {seed: {"final_accuracy": 0.0, "last10_accuracy": 0.0} for seed in seeds}}
    for number, values in enumerate(differences):
        score[str(number)] = {s: {"final_accuracy": values[s], "last10_accuracy": values[s]} for s in seeds}
    return [row[4] for row in paired_rows(score) if row[0].endswith("− zero")]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 10, 31, 1000])
def test_students_distribution_matches_scipy(freedom: int) -> None:
    assert critical_value(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)
    for t in (0.0, 0.3, -2.0, 7.0):
        assert two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), rel=1e-9, abs=1e-14)


def test_difference_interval_is_that_of_the_paired_t_test() -> None:
    """0 lies outside the 95 % interval exactly if the test of paired differences has p < 0.05."""
    one, other = [83.1, 84.4, 85.0, 82.0], [80.2, 83.9, 81.0, 80.5]
    values = tuple(a - b for a, b in zip(one, other, strict=True))
    expected = stats.ttest_rel(one, other).confidence_interval(0.95)
    found = Difference(values)
    assert found.margin is not None
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx(tuple(expected), rel=1e-9)
    assert found.p == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-9)


def test_difference_uses_only_seeds_that_both_methods_have() -> None:
    def score(value: float) -> dict[str, float]:
        return {"final_accuracy": value, "last10_accuracy": value - 1}

    one, other = {1: score(80), 2: score(82), 3: score(99)}, {1: score(70), 2: score(73), 4: score(1)}
    found = difference(one, other, "final_accuracy")
    assert found is not None
    assert found.values == (10, 9)
    assert difference({1: score(80)}, {2: score(80)}, "final_accuracy") is None


def test_pairing_removes_the_spread_between_seeds() -> None:
    """Seeds move both methods by ten points, but the difference is always about two."""
    one = {seed: {"final_accuracy": value, "last10_accuracy": value} for seed, value in enumerate([62, 72.1, 81.9])}
    other = {seed: {"final_accuracy": value, "last10_accuracy": value} for seed, value in enumerate([60, 70, 80.0])}
    assert statistics.stdev([60, 70, 80]) == 10
    [row] = paired_rows({"fedavg": other, "fedfa": one})
    assert row[0] == "fedfa − fedavg"
    assert row[1] == "3"
    assert row[2].startswith("+2.00 ± 0.2")
    assert row[4] == "yes"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((10.0,), "unknown: one seed"),
        ((10.0, 10.1), "unknown: two seeds"),
        ((2.0, 2.0, 2.0), "unknown: no spread between seeds"),
        ((0.0, 0.0, 0.0), "unknown: no spread between seeds"),
        ((10.0, -9.0, 1.0), "no"),
        ((10.0, 10.1, 9.9), "yes"),
    ],
)
def test_verdict_is_withheld_where_the_seeds_cannot_tell(values: tuple[float, ...], verdict: str) -> None:
    """A zero-width interval excludes 0 without saying anything: the seeds gave the same number by chance."""
    assert rows_of(values) == [verdict]


def test_holm_against_its_definition() -> None:
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; and each at least the one before."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_verdicts_of_many_pairs_are_corrected() -> None:
    """A difference of p = 0.03 stands alone, but not as one of six."""
    values = (1.0, 1.3, 1.9)
    assert Difference(values).p == pytest.approx(0.0337, abs=5e-4)
    far, near = (10.0, 10.1, 9.9), (0.1, -0.1, 0.05)
    assert rows_of(far, values, near) == ["yes", "no", "no"]


def test_a_table_without_differences_says_yes_in_one_of_twenty_tables() -> None:
    """By simulation: four methods of equal accuracy, five seeds, six pairs and two measures that agree."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        accuracy = 80 + rng.normal(size=(4, 5))
        score = {
            str(m): {s: {"final_accuracy": v, "last10_accuracy": v} for s, v in enumerate(accuracy[m])}
            for m in range(4)
        }
        wrong += any("yes" in row[4] for row in paired_rows(score))
    assert wrong / 400 <= 0.06


def test_pairs_of_few_methods_are_all_and_of_many_with_the_first() -> None:
    assert len(pairs(list("abcd"))) == 6
    assert pairs(list("abcde")) == [("b", "a"), ("c", "a"), ("d", "a"), ("e", "a")]
