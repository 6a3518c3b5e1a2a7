"""Supervisor that runs a command and leaves none of its processes behind.

A program of its own, ``python process_supervisor.py GRACE COMMAND …``. Flower's commands start further processes, some
in sessions of their own, so neither a process group nor the death of the first process ends them all. The supervisor
therefore adopts orphans (Linux: *child subreaper*), and ends all its descendants

- on SIGTERM: the command gets SIGTERM; what is left after GRACE seconds is killed;
- on SIGQUIT: everything is killed at once;
- at the end of its standard input. The parent holds the other end of that pipe and never writes. However the parent
  dies, the system closes the pipe, so processes cannot be left behind;
- when the command has ended. Its exit code becomes the supervisor's; death by signal N becomes 128 + N.

If the supervisor itself is killed, the system kills the command (Linux: *parent death signal*), and Flower's processes
watch their parents.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

SETTLE_SECONDS = 2.0
"""Time for the descendants of a command that has ended to end by themselves."""
KILL_SECONDS = 20.0
"""Time after which a killed process is given up: it hangs in the kernel."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(grace: float, command: list[str]) -> int:
    """Run the command; return the exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    caught: list[int] = []  # signals, in the order of their arrival
    wake = wake_on_signal()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda received, _: caught.append(received))
    supervisor = os.getpid()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(supervisor))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return 127
    code = _wait(child, grace, caught, wake)
    _end_descendants(at_once=signal.SIGQUIT in caught)
    return code


def wake_on_signal() -> int:
    """Return a descriptor that becomes readable at every signal, the end of a child included."""
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def _wait(child: subprocess.Popen[bytes], grace: float, caught: list[int], wake: int) -> int:
    """Wait until the command has ended, by itself or on request; return the exit code."""
    watched = [wake, sys.stdin.fileno()]
    deadline: float | None = None
    while (code := child.poll()) is None:
        left = None if deadline is None else deadline - time.monotonic()
        if signal.SIGQUIT in caught or (left is not None and left <= 0):
            kill(descendants(os.getpid()))
            child.kill()
            try:
                child.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                return 128 + signal.SIGKILL
            continue
        if deadline is None and caught:
            deadline = time.monotonic() + grace
            child.terminate()
            continue
        ready, _, _ = select.select(watched, [], [], left)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 512):
            watched.remove(sys.stdin.fileno())
            caught.append(signal.SIGHUP)  # the parent is gone
    return code if code >= 0 else 128 - code


def _end_descendants(at_once: bool) -> None:
    """End what the command left behind, after a moment to end by itself."""
    deadline = time.monotonic() + (0.0 if at_once else SETTLE_SECONDS)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        rest = descendants(os.getpid())
        if not rest or time.monotonic() > deadline + KILL_SECONDS:
            return
        if time.monotonic() > deadline:
            kill(rest)
        time.sleep(0.02)


def descendants(root: int) -> list[psutil.Process]:
    """Running descendants of a process, without zombies."""
    running = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    running.append(process)
    return running


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes that may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def die_with_parent(parent: int) -> None:
    """In a new child: reset signal handlers, and die when the parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
