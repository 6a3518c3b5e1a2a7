"""A lock between processes, so that two of them never convert one data set at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

try:
    import fcntl
except ImportError:  # not a POSIX system: the atomic rename alone keeps the cache whole, work may be done twice
    # (A module's name may not be None to the type checker; whoever uses it asks first.)
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs; the system frees it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that holds %s", path)
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems have no locks
                log.debug("no lock on %s: %s", path, error)
        yield
    finally:
        os.close(handle)
