"""How long a process took to come to its first message: interpreter, imports and Flower's own preparations."""

from __future__ import annotations

import os
from pathlib import Path

_told = False


def since_process_start() -> float | None:
    """Seconds since this process was started; None from the second call on, or where the system does not say."""
    global _told
    if _told:
        return None
    _told = True
    try:
        # Fields of proc(5), after the command's name in parentheses, which may hold blanks; the 22nd is the start time.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
