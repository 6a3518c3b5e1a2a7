"""Student's distribution, for differences of means over a few seeds.

Student, *The Probable Error of a Mean*, Biometrika 1908. For whole degrees of freedom the distribution is a finite sum
(M. Abramowitz, I. A. Stegun, *Handbook of Mathematical Functions*, 1964, 26.7.3 and 26.7.4), so that no library is
needed.
"""

from __future__ import annotations

import math
from functools import lru_cache


def two_sided_p(t: float, freedom: int) -> float:
    """Probability that Student's variable is further from 0 than ``t``.

    Example:
        >>> round(two_sided_p(4.3027, 2), 4)
        0.05
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):  # each term is the one before times cos² k / (k + 1)
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1 - inside)


@lru_cache
def critical_value(freedom: int, level: float = 0.05) -> float:
    """The t that Student's variable exceeds on either side with this probability.

    Example:
        >>> round(critical_value(2), 3)
        4.303
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > level else (low, middle)
    return high
