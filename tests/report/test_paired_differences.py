"""Paired differences between methods on equal seeds, and their verdicts."""

from __future__ import annotations

import statistics

import pytest
from scipy import stats

from fedfa.report.paired_differences import Difference, difference, paired_rows, pairs, student, verdict


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 30, 31, 60, 1000])
def test_student_quantiles_match_scipy(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1.1e-3)


def test_difference_interval_is_that_of_the_paired_t_test() -> None:
    """0 lies outside the 95 % interval exactly if the test of paired differences has p < 0.05."""
    one, other = [83.1, 84.4, 85.0, 82.0], [80.2, 83.9, 81.0, 80.5]
    values = tuple(a - b for a, b in zip(one, other, strict=True))
    expected = stats.ttest_rel(one, other).confidence_interval(0.95)
    found = Difference(values)
    assert found.margin is not None
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx(tuple(expected), abs=2e-3)
    assert found.exceeds_noise == (stats.ttest_rel(one, other).pvalue < 0.05)


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


def test_verdict_of_one_seed_is_unknown() -> None:
    assert verdict(Difference((10.0,)), Difference((10.0,))) == "unknown: one seed"
    assert str(Difference((10.0,))) == "+10.00"


def test_verdict_of_a_difference_within_the_noise_is_no() -> None:
    assert verdict(Difference((10.0, -9.0, 1.0)), Difference((3.0, -2.0, 1.0))) == "no"


def test_pairs_of_few_methods_are_all_and_of_many_with_the_first() -> None:
    assert len(pairs(list("abcd"))) == 6
    assert pairs(list("abcde")) == [("b", "a"), ("c", "a"), ("d", "a"), ("e", "a")]
