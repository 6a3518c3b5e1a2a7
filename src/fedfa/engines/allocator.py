"""Keep freed memory in the process.

By default glibc returns every large freed block to the kernel, so each training step pays page faults for its
activations again. Raising two thresholds avoids that; without it the paper's CNN runs at three quarters of its speed.
Results do not change.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; return whether that took effect."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
