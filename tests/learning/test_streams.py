from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfa.learning.random import stream, torch_stream


def test_a_few_values_are_frozen() -> None:
    """Whoever changes these changes every published number: old runs can then no longer be repeated."""
    assert stream(1, "shuffle", 3, 17).permutation(8).tolist() == [4, 2, 6, 0, 5, 1, 7, 3]
    assert stream(0, "cohort", 0).integers(1000, size=4).tolist() == [857, 363, 914, 75]
    assert stream(2**40, "init anchors").standard_normal() == 0.864123049562699
    with torch_stream(1, "model"):
        assert torch.rand(2, dtype=torch.float64).tolist() == [0.04189438990679317, 0.03264077443785174]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63), st.text(max_size=8), st.lists(st.integers(0, 10**6), max_size=3)),
        min_size=2,
        max_size=6,
        unique_by=repr,
    )
)
def test_streams_with_different_keys_differ_and_equal_keys_agree(keys: list[tuple[int, str, list[int]]]) -> None:
    draws = [stream(seed, purpose, *ids).integers(2**62, size=2).tolist() for seed, purpose, ids in keys]
    again = [stream(seed, purpose, *ids).integers(2**62, size=2).tolist() for seed, purpose, ids in keys]
    assert draws == again
    assert len({tuple(pair) for pair in draws}) == len(keys)


def test_numbers_of_numpy_make_the_same_key() -> None:
    three: int = np.array([3])[0]
    assert stream(1, "a", three).random() == stream(1, "a", 3).random()


def test_neighbouring_streams_are_uncorrelated() -> None:
    draws = np.stack([stream(1, "shuffle", 0, client).standard_normal(2000) for client in range(20)])
    correlations = np.corrcoef(draws) - np.eye(20)
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)  # five standard errors


def test_no_stream_depends_on_what_was_drawn_before() -> None:
    alone = stream(3, "b", 1).random(3).tolist()
    stream(3, "a", 1).random(1000)
    assert stream(3, "b", 1).random(3).tolist() == alone


def test_torch_stream_puts_the_global_state_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    torch.manual_seed(5)
    with torch_stream(1, "model"):
        first = torch.rand(3).tolist()
    assert torch.rand(4).tolist() == expected
    with torch_stream(1, "model"):
        assert torch.rand(3).tolist() == first
    with torch_stream(1, "other"):
        assert torch.rand(3).tolist() != first


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_torch_stream_puts_the_global_state_back_after_an_error(error: Callable[[], BaseException]) -> None:
    before = torch.get_rng_state()

    def draw_and_fail() -> None:
        with torch_stream(1, "model"):
            torch.rand(3)
            raise error()

    with pytest.raises((ValueError, KeyboardInterrupt)):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_leaves_numpys_global_generator_alone() -> None:
    np.random.seed(1)
    expected = np.random.get_state(legacy=True)[1].tolist()  # type: ignore[index]  # it is a tuple
    stream(1, "x").random(5)
    with torch_stream(1, "x"):
        torch.rand(2)
    assert np.random.get_state(legacy=True)[1].tolist() == expected  # type: ignore[index]  # it is a tuple


@given(st.integers(-(2**70), 2**70), st.text(max_size=8), st.lists(st.integers(0, 2**40), max_size=3))
def test_a_stream_is_the_one_whose_seed_is_the_key_as_a_number(seed: int, purpose: str, ids: list[int]) -> None:
    key = hashlib.blake2b(repr((seed, purpose, tuple(ids))).encode(), digest_size=16).digest()
    expected = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
    assert stream(seed, purpose, *ids).integers(2**63, size=3).tolist() == expected.integers(2**63, size=3).tolist()


def test_a_key_with_zeros_at_its_end_is_taken_as_that_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (bytes(16), b"\5" + bytes(15), b"\0\0\0\0\7" + bytes(11)):
        monkeypatch.setattr(hashlib, "blake2b", lambda *_, key=key, **__: SimpleNamespace(digest=lambda: key))
        expected = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        assert stream(1, "x").random() == expected.random()
