"""How many processes to train in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from fedfa.engines.pool import obstacle, start_method

WORTH_IT = 2.0
"""Seconds of training below which processes are not started by themselves: it would take a share of that."""


def available_cores() -> int:
    """Cores this process may use: those it may run on, or fewer where a container's quota or OMP_NUM_THREADS say so.

    Whoever sets that variable has decided how many threads a process gets, because others run beside it or because a
    cluster's scheduler gave it that many.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    limits = [allowed, _quota() or allowed, int(threads) if threads.isdecimal() else allowed]
    return max(1, min(limits))


def choose_workers(asked: int | Literal["auto"], clients: int, seconds: float, device: torch.device) -> int:
    """How many workers to use; 1 is this process.

    ``"auto"`` is one per core but no more than clients in a round. It is this process alone where the whole training is
    a matter of moments, and where processes cannot be forked: new interpreters run the caller's script again up to its
    ``if __name__ == "__main__"``, and only the caller knows whether there is one.

    Args:
        asked: The setting.
        clients: Clients in a round.
        seconds: Roughly what the training will take in one process.
        device: Where it is done.
    """
    if asked != "auto":
        return asked
    if seconds < WORTH_IT or start_method() != "fork" or obstacle(device) is not None:
        return 1
    return min(available_cores(), clients)


def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Whole cores of the processor time that the control group (of a container) gets; None if it has no limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    inside = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    quotas = []
    for place in {root, root / inside}:
        try:
            quota, period = (place / "cpu.max").read_text().split()
            quotas.append(int(quota) // int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(1, min(quotas)) if quotas else None
