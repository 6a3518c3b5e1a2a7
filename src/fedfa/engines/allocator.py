"""Keep freed memory in the process.

By default glibc hands every large freed block back to the kernel, and each training step then pays page faults for its
activations again. Raising two thresholds ends that; without it the paper's CNN has three quarters of its speed
(docs/performance.md). It changes no result.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; elsewhere do nothing.

    Returns:
        Whether it took effect.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
