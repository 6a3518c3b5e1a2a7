"""Codecs: unbiased where they claim it, exact in bytes, lossless bookkeeping with error feedback."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedfa.channel.codecs import BLOCK, codec

FLOATS = arrays(np.float32, st.integers(1, 1100), elements=st.floats(-100, 100, width=32))
ALL = ["float32", "float16", "int8", "int4", "int2", "int1", "sign", "topk", "randomk"]


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def sent_bytes(name: str, numbers: int, share: float) -> int:
    """Bytes by the formulas of the documentation."""
    blocks, few = -(-numbers // BLOCK), min(numbers, max(1, int(np.ceil(share * numbers))))
    bits = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
    if name in bits:
        return -(-numbers * bits[name] // 8) + 4 * blocks
    return {
        "float32": 4 * numbers, "float16": 2 * numbers, "sign": -(-numbers // 8) + 4, "topk": 8 * few,
        "randomk": 4 * few + 8,
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@given(x=FLOATS)
def test_bytes_are_those_of_the_documentation(name: str, x: np.ndarray) -> None:
    one = codec(name, 0.1)
    packed = one.encode(x, rng())
    assert packed.dtype == np.uint8
    assert packed.nbytes == sent_bytes(name, len(x), 0.1)
    arrived = one.decode(packed, len(x))
    assert arrived.dtype == np.float32
    assert arrived.shape == x.shape


@pytest.mark.parametrize("bits", [8, 4, 2])
@given(x=FLOATS)
def test_quantised_numbers_are_neighbours_on_the_grid(bits: int, x: np.ndarray) -> None:
    """Multiples of m/s, less than one step away; zeros and the largest numbers arrive as they are."""
    one, levels = codec(f"int{bits}"), 2 ** (bits - 1) - 1
    arrived = one.decode(one.encode(x, rng()), len(x))
    for first in range(0, len(x), BLOCK):
        part, found = x[first : first + BLOCK].astype(np.float64), arrived[first : first + BLOCK].astype(np.float64)
        scale = np.abs(part).max()
        assert (np.abs(found - part) <= scale / levels * (1 + 1e-5) + 1e-30).all()
        assert (found[part == 0] == 0).all()
        np.testing.assert_allclose(found[np.abs(part) == scale], part[np.abs(part) == scale], rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_quantisation_is_unbiased(bits: int) -> None:
    """E Q(x) = x. Over N draws the mean lies within five deviations of x; one draw deviates by at most half a step.

    The step is m/s, or 2m with one bit.
    """
    x = np.asarray([0.9, -0.35, 0.123, -0.77, 0.0, 1.0, -0.01], np.float32)
    one, draws = codec(f"int{bits}"), 4000
    generator = rng(7)
    mean = np.mean([one.decode(one.encode(x, generator), len(x)).astype(np.float64) for _ in range(draws)], axis=0)
    step = 2.0 if bits == 1 else 1 / (2 ** (bits - 1) - 1)
    assert np.abs(mean - x).max() < 5 * step / 2 / np.sqrt(draws)


def test_what_the_biased_codecs_send() -> None:
    x = np.asarray([3.0, -1.0, 0.5, -5.0, 0.0, 2.0, 1.0, -0.5, 0.25, 0.75], np.float32)
    top = codec("topk", 0.3)
    assert top.decode(top.encode(x, rng()), 10).tolist() == [3.0, 0, 0, -5.0, 0, 2.0, 0, 0, 0, 0]
    sign = codec("sign")
    assert sign.decode(sign.encode(x, rng()), 10).tolist() == (np.float32(1.4) * np.where(x >= 0, 1, -1)).tolist()
    some = codec("randomk", 0.3)
    arrived = some.decode(some.encode(x, rng()), 10)
    assert np.isin(arrived, [*x, 0]).all()
    assert (arrived != 0).sum() in (2, 3)
    equal = np.ones(10, np.float32)
    assert top.decode(top.encode(equal, rng()), 10).tolist() == [1.0] * 3 + [0.0] * 7  # ties: the first ones


def test_float16_saturates_instead_of_becoming_infinite() -> None:
    half = codec("float16")
    assert half.decode(half.encode(np.asarray([1e9, -1e9, 0.1], np.float32), rng()), 3).tolist() == [
        65504.0, -65504.0, float(np.float16(0.1)),
    ]  # fmt: skip


# -- entropy coding and bytes of anybody -------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@given(x=FLOATS)
def test_deflate_changes_only_the_number_of_bytes(bits: int, x: np.ndarray) -> None:
    plain, deflated = codec(f"int{bits}"), codec(f"int{bits}+deflate")
    sent = deflated.encode(x, rng())
    assert sent.nbytes <= sent_bytes(f"int{bits}", len(x), 0.1) + 1
    assert (deflated.decode(sent, len(x)) == plain.decode(plain.encode(x, rng()), len(x))).all()


def test_deflate_comes_close_to_the_entropy() -> None:
    """Normal numbers in 4 bits, the largest of 512 about 3.1 standard deviations: the 15 integers have an entropy of
    about 3.2 bits. Huffman codes of pairs (a byte holds two) stay within a tenth of a bit per number."""
    x = rng(3).normal(size=100 * BLOCK).astype(np.float32)
    codes = np.rint(codec("int4").decode(codec("int4").encode(x, rng()), len(x)).reshape(-1, BLOCK)
                    / np.abs(x.reshape(-1, BLOCK)).max(1, keepdims=True) * 7).astype(int)  # fmt: skip
    shares = np.bincount(codes.ravel() + 7) / codes.size
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    bits = 8 * (codec("int4+deflate").encode(x, rng()).nbytes - 4 * 100) / len(x)
    assert entropy <= bits < entropy + 0.1


@pytest.mark.parametrize("name", [*ALL, "int8+deflate", "int2+deflate"])
@given(data=st.binary(max_size=200), numbers=st.integers(1, 100))
def test_bytes_of_anybody_are_numbers_or_a_value_error(name: str, data: bytes, numbers: int) -> None:
    try:
        found = codec(name).decode(np.frombuffer(data, np.uint8), numbers)
    except ValueError:
        return
    assert found.shape == (numbers,)
    assert found.dtype == np.float32


@pytest.mark.parametrize("name", ["int9", "float32+deflate", "int8+zstd", "", "topk+deflate"])
def test_unknown_codecs(name: str) -> None:
    with pytest.raises(ValueError, match="there is no codec"):
        codec(name)
