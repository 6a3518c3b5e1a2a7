"""Shamir's secret sharing of 32-byte secrets (A. Shamir, *How to Share a Secret*, CACM 1979).

A secret is the constant term of a random polynomial of degree t − 1 over the field of a prime; a share is its value at
x = 1, 2, …. Any t shares give the secret, fewer tell nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
"""A Mersenne prime, larger than any 32-byte secret."""
SECRET_BYTES = 32
SHARE_BYTES = 66
"""Bytes of a share, without its x."""


def share(secret: bytes, points: list[int], threshold: int) -> dict[int, bytes]:
    """Shares of a secret at these points (positive and different), of which ``threshold`` are needed.

    Example:
        >>> shares = share(bytes(31) + b"x", [1, 2, 3], 2)
        >>> reconstruct({1: shares[1], 3: shares[3]}) == bytes(31) + b"x"
        True
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(points):
        raise ValueError(f"a secret of {SECRET_BYTES} bytes and a threshold from 1 to {len(points)} are needed")
    if len(set(points)) < len(points) or not all(0 < x < PRIME for x in points):
        raise ValueError("points must be positive and different")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for x in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        shares[x] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def value_at(shares: Mapping[int, bytes], x: int) -> int:
    """The value at x of the polynomial of lowest degree through the shares."""
    total = 0
    for xi, yi in shares.items():
        numerator = denominator = 1
        for xj in shares:
            if xj != xi:
                numerator = numerator * (x - xj) % PRIME
                denominator = denominator * (xi - xj) % PRIME
        total += int.from_bytes(yi, "big") * numerator * pow(denominator, -1, PRIME)
    return total % PRIME


def reconstruct(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret, from as many shares as its threshold; None if these shares do not belong to a 32-byte secret."""
    value = value_at(shares, 0)
    return value.to_bytes(SECRET_BYTES, "big") if value < 2 ** (8 * SECRET_BYTES) else None
