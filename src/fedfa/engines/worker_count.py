"""Number of worker processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from fedfa.engines.process_pool import obstacle, start_method

WORTH_IT = 2.0
"""Seconds of training below which ``"auto"`` uses one process: starting workers would take a share of that."""


def available_cores() -> int:
    """Cores this process may use: its CPU affinity, limited by a container's quota and by OMP_NUM_THREADS.

    That variable is respected because it is set where other jobs run on the same machine, or by a cluster's scheduler.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(allowed, _quota() or allowed, int(threads) if threads.isdecimal() else allowed))


def choose_workers(asked: int | Literal["auto"], clients: int, seconds: float, device: torch.device) -> int:
    """Number of workers; 1 means this process alone.

    ``"auto"`` is one per core, but at most one per client of a round. It is 1 for short trainings, and where processes
    cannot fork: new interpreters run the caller's script again up to its ``if __name__ == "__main__"``, and only the
    caller knows whether there is one.

    Args:
        asked: The configured value.
        clients: Clients per round.
        seconds: Estimated duration of the training in one process.
        device: Device of the training.
    """
    if asked != "auto":
        return asked
    if seconds < WORTH_IT or start_method() != "fork" or obstacle(device) is not None:
        return 1
    return min(available_cores(), clients)


def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Whole cores in the CPU quota of this process's control group; None without a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    group = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    quotas = []
    for directory in {root, root / group}:
        try:
            quota, period = (directory / "cpu.max").read_text().split()
            quotas.append(int(quota) // int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(1, min(quotas)) if quotas else None
