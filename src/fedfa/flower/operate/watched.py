"""Flower's SuperNode or SuperLink, watched: one that has lost its connection or a part of itself is started again.

A program, ``python -m fedfa.flower.operate.watched supernode|superlink OPTION …``. Flower's SuperNode gives up at the
first HTTP 500 of the SuperLink (a locked database is enough), or when a heartbeat fails, and then stays alive without a
connection, so that no service manager restarts it; both commands go on without their executor if it dies. Here Flower's
own code runs in a child that waits longer, ends with :data:`LOST` in all these cases, and the parent starts another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from fedfa.flower.environment import without_telemetry
from fedfa.flower.operate.process_supervisor import die_with_parent

LOST = 75
"""Exit code of a child that should be started again; EX_TEMPFAIL of sysexits.h."""
RESTARTED = "starting it again"
"""Words in the log of a command that is started again."""
_CHILD = "--child"
_EXECUTOR = "flower-superexec"
_LONGEST_PAUSE = 30.0
_REFUSED_SECONDS = 300.0
"""How long after a loss the SuperLink may refuse a SuperNode: until it has noticed that the earlier one is gone."""


def watched_command(name: str) -> list[str]:
    """The command to which the options of ``flower-supernode`` or ``flower-superlink`` are added."""
    return [sys.executable, "-P", "-m", "fedfa.flower.operate.watched", name]


# -- the parent -------------------------------------------------------------------------------------------------------
def watch(name: str, options: Sequence[str]) -> int:
    """Run the command until it ends for good; return its exit code."""
    asked_to_end: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        asked_to_end.append(number)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
            signal.signal(number, forward)
    pause, lost = 1.0, -_REFUSED_SECONDS
    parent = os.getpid()
    while True:
        started = time.monotonic()
        child = subprocess.Popen(
            [*watched_command(name), _CHILD, *options],
            env=without_telemetry(),
            preexec_fn=lambda: die_with_parent(parent),
        )
        code = child.wait()
        if asked_to_end or code == 0:
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        if code == LOST or code < 0:  # it gave up, or something killed it
            lost = now
        elif now - lost > _REFUSED_SECONDS:
            return code
        pause = 1.0 if now - started > _REFUSED_SECONDS else min(2 * pause, _LONGEST_PAUSE)
        _say(f"flower-{name} ended (exit code {code}); {RESTARTED} in {pause:.0f} s")
        time.sleep(pause)
        if asked_to_end:
            return 128 + asked_to_end[0]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"fedfa: {text}\n".encode())


# -- the child --------------------------------------------------------------------------------------------------------
def run_child(name: str, options: Sequence[str]) -> None:
    """Run Flower's command in this process; end the process when the command has lost something it needs."""
    from fedfa.flower.environment import disable_telemetry

    disable_telemetry()
    sys.argv = [f"flower-{name}", *options]
    _wait_for_locks()
    threading.excepthook = lambda failure: _give_up(f"{failure.exc_type.__name__}: {failure.exc_value}")
    threading.Thread(target=_watch_executor, daemon=True).start()
    if name == "superlink":
        from flwr.superlink.cli import flower_superlink

        flower_superlink()
        return
    from flwr.supernode.cli import flower_supernode

    flower_supernode()
    _give_up("it lost its connection to the SuperLink")


def _wait_for_locks() -> None:
    """Have Flower wait longer for a locked database, and ask again after an HTTP 500; it has no options for either.

    The wait is shorter than the 30 seconds after which Flower repeats a request.
    """
    import importlib

    database: Any = importlib.import_module("flwr.supercore.sql_mixin")
    database.SQLITE_PRAGMAS = (*database.SQLITE_PRAGMAS, ("busy_timeout", "25000"))
    retries: Any = importlib.import_module("flwr.supercore.retry.http_retry")
    retries._RETRYABLE_STATUS_CODES |= {500}


def _watch_executor() -> None:
    import psutil

    seen: list[psutil.Process] = []
    while True:
        time.sleep(1.0 if seen else 0.1)  # it may end as soon as it has started
        with contextlib.suppress(psutil.Error):
            seen = seen or [one for one in psutil.Process().children() if _is_executor(one)]
        for executor in seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                if executor.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    continue
            _give_up(f"{_EXECUTOR} ended")


def _is_executor(process: Any) -> bool:
    """Also one that has ended, which has a name of at most 15 letters and no command any more."""
    return str(process.name()).startswith(_EXECUTOR[:15]) or any(_EXECUTOR in part for part in process.cmdline())


def _give_up(why: str) -> None:
    _say(why)
    os._exit(LOST)  # not sys.exit: other threads keep the process alive, which is the very problem


if __name__ == "__main__":
    if sys.argv[2:3] == [_CHILD]:
        run_child(sys.argv[1], sys.argv[3:])
    else:
        sys.exit(watch(sys.argv[1], sys.argv[2:]))
