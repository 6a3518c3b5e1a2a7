from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfa.errors import ConfigError
from fedfa.learning.cohort import Selection, choose_cohort

SELECTIONS: list[Selection] = ["uniform", "size", "authors"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.sampled_from(SELECTIONS), st.data())
def test_distinct_clients_that_hold_samples(sizes: list[int], selection: Selection, data: st.DataObject) -> None:
    held = [client for client, size in enumerate(sizes) if size]
    count = data.draw(st.integers(0, len(held)))
    cohort = choose_cohort(np.array(sizes), count, selection, seed=data.draw(st.integers(0, 999)), round=3)
    assert len(set(cohort)) == len(cohort) == count
    assert set(cohort) <= set(held)
    assert all(type(client) is int for client in cohort)  # plain numbers: they go into JSON


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_cohort_that_is_too_large_names_the_settings(selection: Selection) -> None:
    with pytest.raises(ConfigError, match=r"3 clients.*only 2 of 4 hold samples.*cohort\.clients.*cohort\.rate"):
        choose_cohort(np.array([5, 0, 5, 0]), 3, selection, seed=1, round=0)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_seed_may_be_large(selection: Selection) -> None:
    assert len(choose_cohort(np.full(9, 5), 3, selection, seed=2**32 - 1, round=1)) == 3


@pytest.mark.parametrize("selection", SELECTIONS)
def test_depends_on_seed_and_round_only(selection: Selection) -> None:
    sizes = np.arange(1, 101)
    cohort = choose_cohort(sizes, 10, selection, seed=1, round=4)
    assert choose_cohort(sizes, 10, selection, seed=1, round=4) == cohort
    assert choose_cohort(sizes, 10, selection, seed=1, round=5) != cohort
    assert choose_cohort(sizes, 10, selection, seed=2, round=4) != cohort


def test_authors_is_numpys_old_generator_seeded_anew_each_round() -> None:
    sizes = np.full(100, 600)
    for seed, round in ((1, 0), (7, 12)):
        expected = np.random.RandomState(seed + round).choice(range(100), 10, replace=False).tolist()
        assert choose_cohort(sizes, 10, "authors", seed, round) == expected
    assert choose_cohort(sizes, 10, "authors", 1, 1) == choose_cohort(sizes, 10, "authors", 2, 0)


def test_uniform_draws_everyone_equally_often_whatever_the_size() -> None:
    sizes = np.array([1000, 1, 1, 1, 1])
    counts = np.bincount([c for r in range(4000) for c in choose_cohort(sizes, 2, "uniform", 1, r)], minlength=5)
    expected, spread = 4000 * 2 / 5, np.sqrt(4000 * 0.4 * 0.6)
    assert np.all(np.abs(counts - expected) < 4.5 * spread)


def test_size_draws_in_proportion_to_the_samples() -> None:
    """One client a round: probability n_i / Σ n exactly."""
    sizes = np.array([10, 20, 30, 40, 0])
    counts = np.bincount([choose_cohort(sizes, 1, "size", 1, r)[0] for r in range(4000)], minlength=5)
    share = sizes / sizes.sum()
    assert np.all(np.abs(counts - 4000 * share) <= 4.5 * np.sqrt(4000 * share * (1 - share)))
