"""Processes that cannot outlive whoever started them, each with its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fedfa.errors import FederationError
from fedfa.flower.environment import quiet
from fedfa.flower.operate import box

_BOX = Path(box.__file__)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GRACE = 8.0
"""Seconds between the request to end and the kill."""


class OperationError(FederationError):
    """A process of the federation could not be started, ended too early or did not answer in time."""


class Boxed:
    """A running command with everything that it starts; see :mod:`fedfa.flower.operate.box`.

    Args:
        name: For messages.
        command: What to run.
        log: Where its output goes; added at the end.
        environment: All of its environment variables.
        grace: Seconds between the request to end and the kill.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], grace: float = GRACE
    ) -> None:
        self.name, self.log = name, log
        self.command = " ".join([Path(command[0]).name, *command[1:]])
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            # -I -S: the box needs nothing but the standard library, and so starts in a few hundredths of a second.
            self._box = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_BOX), str(grace), *command],
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal is for us; we then end the boxes in order
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._box.poll()

    def processes(self) -> list[int]:
        """Every process in the box; the first is the command itself."""
        return list(box.below(self._box.pid))

    def ask_to_end(self) -> None:
        """Ask the command to end, without waiting for it."""
        if self.exit_code is None:
            self._box.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything in the box at once, as by a power cut."""
        if self.exit_code is None:
            self._box.send_signal(signal.SIGQUIT)
        self.wait(box.UNKILLABLE + 5.0)

    def wait(self, seconds: float) -> int | None:
        """Until everything in it has ended: the exit code, or None if it still runs after so many seconds."""
        try:
            return self._box.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def let_go(self) -> None:
        """Close our end of the pipe; whatever is left in the box ends by itself."""
        if self._box.stdin is not None:
            with contextlib.suppress(OSError):
                self._box.stdin.close()

    def output(self) -> str:
        """What it has written to its log since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return _COLOUR.sub("", file.read().decode(errors="replace"))


class Processes:
    """All processes of a federation; at the end of the ``with`` block none of them is left."""

    def __init__(self, grace: float = GRACE) -> None:
        self.running: dict[str, Boxed] = {}
        self._grace = grace

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Boxed:
        """Start a command; a former one of the same name must have ended."""
        former = self.running.get(name)
        if former is not None and former.exit_code is None:
            raise OperationError(f"{name} runs already")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.running[name] = Boxed(name, command, log, environment, self._grace)
        return self.running[name]

    def stop(self) -> None:
        """End all of them, the last one started first, and wait for it. Interrupted, it ends them the hard way."""
        order = list(reversed(self.running.values()))
        try:
            for one in order:
                one.ask_to_end()
            deadline = time.monotonic() + self._grace + box.AFTERMATH + 5.0
            for one in order:
                one.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for one in order:
                if one.exit_code is None:
                    one.kill()
                one.let_go()

    def wait_for(
        self, what: str, ready: Callable[[], bool], *, seconds: float, needed: Sequence[Boxed], pause: float = 0.2
    ) -> None:
        """Wait until something is so.

        Args:
            what: For the message, e.g. ``"the SuperLink to answer"``.
            ready: Whether it is so.
            seconds: How long at most.
            needed: Processes that must keep running meanwhile.
            pause: Seconds between two looks.

        Raises:
            OperationError: A process that is needed has ended, or time is up; with the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            for one in needed:
                if one.exit_code is not None:
                    raise OperationError(
                        f"{one.name} ended (exit code {one.exit_code}) while waiting for {what}\n{last_words(one)}"
                    )
            if time.monotonic() > deadline:
                logs = "\n".join(last_words(one) for one in needed)
                raise OperationError(f"waited {seconds:.0f} s in vain for {what}\n{logs}")
            time.sleep(pause)


def last_words(one: Boxed, lines: int = 12) -> str:
    """The lines of a log that tell most about a failure: from the first one that speaks of it, else the last ones."""
    written = [line for line in one.output().splitlines() if line.strip()]
    signs = ("error", "exception", "traceback", "failed", "refused", "cannot")
    # Warnings of web servers and of Flower's own retries are not what failed.
    telling = [
        n for n, line in enumerate(written) if any(sign in line.lower() for sign in signs) and "INFO" not in line
    ]
    chosen = written[-lines:] if not telling else written[max(0, telling[-1] - lines + 3) : telling[-1] + 3]
    text = "\n".join(f"  | {line}" for line in chosen) or "  | (nothing)"
    return f"  {one.log}:\n{text}"


def private_environment(home: Path, **others: str) -> dict[str, str]:
    """The environment for Flower's processes: a home of their own, no calls home, this Python's commands first."""
    commands = str(Path(sys.executable).parent)
    local = "localhost,127.0.0.1,::1"
    return {
        **quiet(),
        "FLWR_HOME": str(home),
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        # A proxy of the surrounding network knows nothing of this machine's own ports.
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), local])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), local])),
        **others,
    }
