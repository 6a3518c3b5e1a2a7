"""A command in a box: when the box is told to end, or whoever opened it is gone, nothing of the command is left.

A program of its own, ``python box.py GRACE COMMAND …``, that needs the standard library only. Flower's commands start
further processes, some in sessions of their own, so neither a process group nor the death of the first process ends
them all. The box therefore adopts orphans (Linux: *child subreaper*), and ends every process below it

- on SIGTERM: the command is asked to end; what is left after GRACE seconds is killed;
- on SIGQUIT: everything is killed at once, as by a power cut;
- at the end of its standard input. The opener holds the other end of that pipe and never writes. However the opener
  dies, the system closes the pipe: there is no moment at which processes could be left behind;
- when the command has ended by itself. Its exit code is the box's own; a death by signal N is 128 + N.

Should the box itself be killed, the system kills the command (Linux: *parent death signal*), and Flower's processes
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
from collections.abc import Iterator

AFTERMATH = 2.0
"""Seconds for the processes below a command that has ended to notice it."""
UNKILLABLE = 20.0
"""Seconds after which a killed process is given up: it hangs in the system, and nobody can end it."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(grace: float, command: list[str]) -> int:
    """Run the command; the box's exit code."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    asked: list[int] = []  # signals, in the order of their arrival
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda caught, _: asked.append(caught))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    box = os.getpid()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with(box))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return 127
    code = _wait(child, grace, asked, wake)
    _end_all_below(at_once=signal.SIGQUIT in asked)
    return code


def _wait(child: subprocess.Popen[bytes], grace: float, asked: list[int], wake: int) -> int:
    """Until the command has ended, by itself or because somebody wants it so."""
    watched = [wake, sys.stdin.fileno()]
    deadline: float | None = None
    while (code := child.poll()) is None:
        left = None if deadline is None else deadline - time.monotonic()
        if signal.SIGQUIT in asked or (left is not None and left <= 0):
            for process in [*below(os.getpid()), child.pid]:
                _send(process, signal.SIGKILL)
            try:
                child.wait(UNKILLABLE)
            except subprocess.TimeoutExpired:
                return 128 + signal.SIGKILL
            continue
        if deadline is None and asked:
            deadline = time.monotonic() + grace
            child.terminate()
            continue
        ready, _, _ = select.select(watched, [], [], left)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 512):
            watched.remove(sys.stdin.fileno())
            asked.append(signal.SIGHUP)  # the opener is gone
    return code if code >= 0 else 128 - code


def _end_all_below(at_once: bool) -> None:
    """End what the command left behind: a moment to notice that it is gone, then no mercy."""
    deadline = time.monotonic() + (0.0 if at_once else AFTERMATH)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        rest = list(below(os.getpid()))
        if not rest or time.monotonic() > deadline + UNKILLABLE:
            return
        if time.monotonic() > deadline:
            for process in rest:
                _send(process, signal.SIGKILL)
        time.sleep(0.02)


def below(root: int) -> Iterator[int]:
    """Every living process that descends from one, the nearest first."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents():
        children.setdefault(parent, []).append(process)
    generation = children.get(root, [])
    while generation:
        yield from generation
        generation = [process for parent in generation for process in children.get(parent, [])]


def _parents() -> Iterator[tuple[int, int]]:
    """Each process and its parent, without those that are dead and only wait to be fetched."""
    if os.path.isdir("/proc/self"):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                try:
                    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                        state, parent = file.read().rpartition(")")[2].split()[:2]
                except OSError:  # ended meanwhile
                    continue
                if state not in "ZX":
                    yield int(name), int(parent)
        return
    listing = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True)
    for line in listing.communicate()[0].splitlines():
        process, parent, state = line.split()[:3]
        if not state.startswith("Z") and int(process) != listing.pid:
            yield int(process), int(parent)


def die_with(box: int) -> None:
    """In the command, before it is what it will be: die when the box dies."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != box:  # it died before we asked
        os._exit(1)


def _control(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
