"""Robust means: closed forms, and what a minority of arbitrary points can do to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfa.protection import rules

RULES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "median": lambda points, bad: rules.median(points),
    "trimmed-mean": rules.trimmed_mean,
    "krum": rules.krum,
    "multi-krum": lambda points, bad: rules.krum(points, bad, len(points) - bad),
    "geometric-median": lambda points, bad: rules.geometric_median(points),
    "centred-clipping": lambda points, bad: rules.centred_clipping(points, points[0]),
}


def draw(seed: int, n: int, d: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)))


def test_median_and_trimmed_mean_are_numpys() -> None:
    for n in (1, 2, 5, 8):
        points = draw(n, n, 3)
        assert torch.allclose(rules.median(points), torch.from_numpy(np.median(points.numpy(), axis=0)))
    ordered = np.sort(draw(7, 9, 4).numpy(), axis=0)
    assert torch.allclose(rules.trimmed_mean(draw(7, 9, 4), 2), torch.from_numpy(ordered[2:7].mean(0)))
    assert torch.allclose(rules.trimmed_mean(draw(7, 9, 4), 0), draw(7, 9, 4).mean(0))


def test_krum_scores_by_hand() -> None:
    # n = 5, one bad: the two nearest neighbours of each. Squared distances of 0, 1, 3, 4.5, 50 give the scores
    # 1+9, 1+4, 2.25+4, 2.25+12.25, …: the second wins, and the best three besides it are the third and the first.
    points = torch.tensor([[0.0], [1.0], [3.0], [4.5], [50.0]], dtype=torch.float64)
    assert rules.krum(points, 1).tolist() == [1.0]
    assert rules.krum(points, 1, 3).tolist() == [pytest.approx((1 + 3 + 0) / 3)]
    assert rules.krum(points, 1, 4).tolist() == [pytest.approx(8.5 / 4)]


def test_geometric_median_of_a_triangle_is_fermats_point() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]], dtype=torch.float64)
    assert torch.allclose(rules.geometric_median(points), points.mean(0), atol=1e-8)
    # An angle of 120° or more: the vertex itself.
    flat = torch.tensor([[0.0, 0.0], [2.0, 0.1], [-2.0, 0.1]], dtype=torch.float64)
    assert torch.allclose(rules.geometric_median(flat), flat[0], atol=1e-4)


def test_centred_clipping_by_hand() -> None:
    # From 0 with radius 1: 1 and 1 move by themselves, 1000 by 1: v = 1. Then 0, 0, 1: 4/3. Then -1/3, -1/3, 1: 13/9.
    points = torch.tensor([[1.0], [1.0], [1000.0]], dtype=torch.float64)
    assert float(rules.centred_clipping(points, torch.zeros(1, dtype=torch.float64), 1.0)) == pytest.approx(13 / 9)
    wide = rules.centred_clipping(points, torch.zeros(1, dtype=torch.float64), 1e6)
    assert float(wide) == pytest.approx(1002 / 3)  # nothing is clipped: the mean


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), d=st.integers(1, 5))
def test_a_shift_of_all_points_shifts_the_centre_and_equal_points_are_it(name: str, seed: int, n: int, d: int) -> None:
    points, bad = draw(seed, n, d), (n - 1) // 4
    shift = 10 * draw(seed + 1, 1, d)
    moved = RULES[name](points + shift, bad) - RULES[name](points, bad)
    assert torch.allclose(moved, shift[0], atol=1e-6)
    assert torch.allclose(RULES[name](points[:1].repeat(n, 1), bad), points[0])


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median"])
@given(seed=st.integers(0, 2**31), n=st.integers(2, 12))
def test_the_order_of_the_points_does_not_matter(name: str, seed: int, n: int) -> None:
    points = draw(seed, n, 3)
    other = points[torch.from_numpy(np.random.default_rng(seed).permutation(n))]
    assert torch.allclose(RULES[name](points, 1), RULES[name](other, 1), atol=1e-7)


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**31), honest=st.integers(5, 12), size=st.sampled_from([3.0, 1e3, 1e12]))
def test_a_minority_cannot_move_the_centre_far(name: str, seed: int, honest: int, size: float) -> None:
    """Fewer than n/2 − 1 arbitrary points (as Krum needs): the centre stays within a few radii of the honest ones.

    For the geometric median the bound is 2(1 − a)/(1 − 2a) radii, which for a ≤ 3/10 is 3.5; for coordinate rules each
    coordinate lies between honest values.
    """
    bad = (honest - 1) // 4
    good, evil = draw(seed, honest, 4), size * (1 + draw(seed + 1, max(bad, 1), 4).abs())[:bad]
    centre = RULES[name](torch.cat([good, evil]), bad)
    middle = good.mean(0)
    radius = float((good - middle).norm(dim=1).max())
    assert float((centre - middle).norm()) <= 3.5 * radius + 1e-6
    if name in ("median", "trimmed-mean"):
        assert bool(((centre >= good.amin(0)) & (centre <= good.amax(0))).all())
    if name == "krum" and size > 100:
        assert any(torch.equal(centre, point) for point in good)
