"""What the system tells about processes: who belongs to whom, and their memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """A process and all below it; where the system does not tell (not Linux), the process alone."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return found


def memory_of(processes: Sequence[int]) -> int:
    """Bytes that processes which work together have in memory, what they share counted once; 0 where unknown.

    Pages of files (libraries) may be shared with strangers too, whose number must not matter: the largest part that one
    of the processes has counts for all. Other pages are shared among relatives only, so each counts its portion.
    """
    own = sum(_kilobytes(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for pid in processes)
    of_files = max((_kilobytes(pid, "status", "RssFile:") for pid in processes), default=0)
    return 1024 * (own + of_files)


def _kilobytes(pid: int, file: str, *names: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def resident_memory() -> int:
    """Bytes this process has in memory now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def session_members(session: int) -> Sequence[int]:
    """Processes of the contender's own session that are still there after it ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                members.append(int(entry.parent.name))
    return members
