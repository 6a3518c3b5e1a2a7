"""Process trees and their memory, read from /proc; where there is none, every answer is the minimal one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path


def process_tree(root: int) -> set[int]:
    """A process, its descendants, and the members of the session that it leads."""
    relations = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent, _, session = entry.read_text(errors="replace").rpartition(")")[2].split()[1:4]
            relations[int(entry.parent.name)] = int(parent), int(session)
    tree = {root}
    while more := {
        pid for pid, (parent, session) in relations.items() if pid not in tree and (parent in tree or session == root)
    }:
        tree |= more
    return tree


def memory_of(processes: Collection[int]) -> int:
    """Bytes of memory that related processes use together, shared pages counted once.

    Pages of files (libraries) may be shared with unrelated processes, whose number must not matter: the largest value
    of any one process counts for all. Other pages are shared within the tree only: each process counts its portion.
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
    """Bytes of memory that this process uses now; cheap enough to read in every round."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
