"""Queries about processes for tests."""

import psutil


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
