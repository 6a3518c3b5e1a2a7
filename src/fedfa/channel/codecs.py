"""Codecs: float32 numbers to bytes and back. The bytes are really made, so their number is exact.

==============  =========================================================================  =================  ========
codec           what arrives                                                               bytes of n numbers  feedback
==============  =========================================================================  =================  ========
``float32``     the same                                                                   4n                 no
``float16``     rounded to half precision (±65504 at most)                                  2n                 no
``int8`` … 2    stochastic rounding to the nearest multiples of m/s, s = 2^(bits−1) − 1     bits·n/8 + 4/block no
``int1``        ±m, the sign drawn so that the mean is right                               n/8 + 4 per block  no
``sign``        the mean magnitude with each number's own sign                             n/8 + 4            yes
``topk``        the share of the numbers that are largest in magnitude                     8 per number sent  yes
``randomk``     a random share of the numbers; the server draws the same positions         4 per number sent  yes
                                                                                           + 8
==============  =========================================================================  =================  ========

``int8`` to ``int1`` are QSGD (D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnović, NeurIPS 2017) with the largest
magnitude m of each block of 512 numbers as its scale, as the paper uses it in practice. Rounding is unbiased: a number
between two multiples becomes the upper one with the probability that makes the expectation right. One bit has no zero,
so it is the sign of a coin whose bias is x/m.

``int8`` to ``int1`` may be followed by ``+deflate``: the bytes are compressed further with deflate's Huffman codes (RFC
1951, zlib's strategy without matches: quantised noise has no repetitions, but small integers are frequent). A first
byte says whether that made them fewer; if not, they travel as they are. An arithmetic coder would come closer to the
entropy and costs a loop per number in Python; zlib is part of Python and runs at the speed of C.

``sign``, ``topk`` and ``randomk`` are biased, and converge only with error feedback (S. P. Karimireddy, Q. Rebjock, S.
U. Stich, M. Jaggi, ICML 2019): what was not sent is added to the client's next update. It is client state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Packed = NDArray[np.uint8]

BLOCK = 512
"""Numbers that share a scale."""
_HALF = 65504.0


@dataclass(frozen=True)
class Codec:
    """How numbers travel.

    Args:
        encode: From ``[n]`` numbers and a random stream to bytes.
        decode: From bytes and n to the numbers. Bytes that cannot be n numbers are a ValueError.
        feedback: Whether what was lost is added to the next update.
        updates_only: Whether it loses too much for anything but updates.
    """

    encode: Callable[[Values, np.random.Generator], Packed]
    decode: Callable[[Packed, int], Values]
    feedback: bool = False
    updates_only: bool = False


def codec(name: str, share: float = 0.01) -> Codec:
    """The codec of this name; ``share`` is that of the numbers that ``topk`` and ``randomk`` send.

    Example:
        >>> one = codec("int4")
        >>> sent = one.encode(np.asarray([0.5, -1.0, 0.0], np.float32), np.random.default_rng(1))
        >>> len(sent), one.decode(sent, 3).tolist()[1:]
        (6, [-1.0, 0.0])
    """
    name, _, further = name.partition("+")
    if name not in CODECS or further not in ("", "deflate") or (further and name not in _BITS):
        raise ValueError(f"there is no codec {name}{further and '+'}{further}")
    if name in _BITS:
        bits = _BITS[name]
        if further:
            return Codec(
                lambda x, rng: _deflated(_quantise(x, bits, rng)),
                lambda data, n: _dequantise(_inflated(data, _quantised_size(n, bits)), bits, n),
            )
        return Codec(lambda x, rng: _quantise(x, bits, rng), lambda data, n: _dequantise(data, bits, n))
    if name == "float16":
        return Codec(lambda x, _: _bytes(np.clip(x, -_HALF, _HALF).astype("<f2")), _from_half)
    if name == "sign":
        return Codec(_sign, _from_sign, feedback=True, updates_only=True)
    if name == "topk":
        return Codec(lambda x, _: _largest(x, _count(share, len(x))), _from_largest, feedback=True, updates_only=True)
    if name == "randomk":
        return Codec(
            lambda x, rng: _random_share(x, _count(share, len(x)), rng), _from_random_share, feedback=True,
            updates_only=True,
        )  # fmt: skip
    return Codec(lambda x, _: _bytes(x.astype("<f4")), _from_single)


_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
QUANTISED = tuple(_BITS)
CODECS = ("float32", "float16", *QUANTISED, "sign", "topk", "randomk")


def _bytes(array: NDArray[np.generic]) -> Packed:
    return np.ascontiguousarray(array).view(np.uint8)


def _count(share: float, numbers: int) -> int:
    return min(numbers, max(1, math.ceil(share * numbers)))


def _expect(data: Packed, length: int) -> None:
    if len(data) != length:
        raise ValueError(f"{len(data)} bytes, not {length}")


def _from_single(data: Packed, numbers: int) -> Values:
    _expect(data, 4 * numbers)
    return data.view("<f4").astype(np.float32)


def _from_half(data: Packed, numbers: int) -> Values:
    _expect(data, 2 * numbers)
    return data.view("<f2").astype(np.float32)


# -- entropy coding ---------------------------------------------------------------------------------------------------
def _deflated(data: Packed) -> Packed:
    maker = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    packed = maker.compress(data.tobytes()) + maker.flush()
    if len(packed) < len(data):
        return np.frombuffer(b"\1" + packed, np.uint8)
    return np.concatenate([np.zeros(1, np.uint8), data])


def _inflated(data: Packed, length: int) -> Packed:
    if not len(data) or data[0] > 1:
        raise ValueError("neither deflated nor plain")
    if data[0] == 0:
        return np.ascontiguousarray(data[1:])
    try:  # no more than is wanted: the bytes may be anybody's
        return np.frombuffer(zlib.decompressobj(-zlib.MAX_WBITS).decompress(data[1:].tobytes(), length), np.uint8)
    except zlib.error as error:
        raise ValueError(str(error)) from None


# -- QSGD -------------------------------------------------------------------------------------------------------------
def _quantise(x: Values, bits: int, rng: np.random.Generator) -> Packed:
    blocks = -(-len(x) // BLOCK)
    padded = np.zeros(blocks * BLOCK, dtype=np.float32)
    padded[: len(x)] = x
    rows = padded.reshape(blocks, BLOCK)
    scale = np.abs(rows).max(1, keepdims=True).astype("<f4")
    relative = rows.astype(np.float64) / np.where(scale > 0, scale, 1).astype(np.float64)
    draws = rng.random(len(x))
    if bits == 1:
        codes = (draws < (relative.ravel()[: len(x)] + 1) / 2).astype(np.uint8)
    else:
        levels = 2 ** (bits - 1) - 1
        codes = (np.floor(relative.ravel()[: len(x)] * levels + draws) + levels).astype(np.uint8)
    return np.concatenate([_bytes(scale.ravel()), _pack(codes, bits)])


def _quantised_size(numbers: int, bits: int) -> int:
    return 4 * -(-numbers // BLOCK) + -(-numbers * bits // 8)


def _dequantise(data: Packed, bits: int, numbers: int) -> Values:
    _expect(data, _quantised_size(numbers, bits))
    blocks = -(-numbers // BLOCK)
    scale = data[: 4 * blocks].view("<f4").astype(np.float64)
    codes = _unpack(data[4 * blocks :], bits, numbers).astype(np.float64)
    relative = 2 * codes - 1 if bits == 1 else codes / (2 ** (bits - 1) - 1) - 1
    return (relative * np.repeat(scale, BLOCK)[:numbers]).astype(np.float32)


def _pack(codes: Packed, bits: int) -> Packed:
    if bits == 8:
        return codes
    if bits == 1:
        return np.packbits(codes)
    per_byte = 8 // bits
    padded = np.zeros(-(-len(codes) // per_byte) * per_byte, dtype=np.uint8)
    padded[: len(codes)] = codes
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    packed: Packed = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)
    return packed


def _unpack(data: Packed, bits: int, numbers: int) -> Packed:
    if bits == 8:
        return data
    if bits == 1:
        return np.unpackbits(data, count=numbers)
    shifts = np.arange(8 // bits, dtype=np.uint8) * bits
    return ((data[:, None] >> shifts) & np.uint8(2**bits - 1)).ravel()[:numbers]


# -- biased ones ------------------------------------------------------------------------------------------------------
def _sign(x: Values, _: np.random.Generator) -> Packed:
    scale = np.asarray([np.abs(x.astype(np.float64)).mean()], dtype="<f4")
    return np.concatenate([_bytes(scale), np.packbits(x >= 0)])


def _from_sign(data: Packed, numbers: int) -> Values:
    _expect(data, 4 + -(-numbers // 8))
    signs = 2 * np.unpackbits(data[4:], count=numbers).astype(np.float32) - 1
    values: Values = (signs * data[:4].view("<f4")).astype(np.float32)
    return values


def _largest(x: Values, count: int) -> Packed:
    # Ties go to the lower position, so that the choice does not depend on the sort's implementation.
    order = np.argsort(-np.abs(x), kind="stable")[:count]
    places = np.sort(order)
    return np.concatenate([_bytes(places.astype("<u4")), _bytes(x[places].astype("<f4"))])


def _from_largest(data: Packed, numbers: int) -> Values:
    half = len(data) // 2
    _expect(data, 8 * min(half // 4, numbers))
    places = data[:half].view("<u4")
    if len(places) and places.max() >= numbers:
        raise ValueError(f"there is no number {places.max()} of {numbers}")
    x = np.zeros(numbers, dtype=np.float32)
    x[places] = data[half:].view("<f4")
    return x


def _random_share(x: Values, count: int, rng: np.random.Generator) -> Packed:
    key = np.asarray([rng.integers(2**63)], dtype="<u8")
    return np.concatenate([_bytes(key), _bytes(x[_places(key, count, len(x))].astype("<f4"))])


def _from_random_share(data: Packed, numbers: int) -> Values:
    _expect(data, 8 + 4 * min(max(0, len(data) - 8) // 4, numbers))
    values = data[8:].view("<f4")
    x = np.zeros(numbers, dtype=np.float32)
    x[_places(data[:8].view("<u8"), len(values), numbers)] = values
    return x


def _places(key: NDArray[np.uint64], count: int, numbers: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(int(key[0]))).choice(numbers, count, replace=False)
