"""Supervised child processes with log files; they cannot outlive this process."""

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

from fedfa.errors import FederationError
from fedfa.flower.environment import without_telemetry
from fedfa.flower.operate import process_supervisor

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GRACE = 8.0
"""Seconds between SIGTERM and SIGKILL."""


class OperationError(FederationError):
    """A process of the federation could not be started, ended too early or did not answer in time."""


class SupervisedProcess:
    """A running command with all its descendants; see :mod:`fedfa.flower.operate.process_supervisor`."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], grace: float = GRACE
    ) -> None:
        self.name, self.log = name, log
        self.command = " ".join([Path(command[0]).name, *command[1:]])
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", process_supervisor.__file__, str(grace), *command],
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which then ends the others
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._supervisor.poll()

    def pids(self) -> list[int]:
        """Ids of the command's process and of its descendants."""
        return [process.pid for process in process_supervisor.descendants(self._supervisor.pid)]

    def terminate(self) -> None:
        """Ask the command to end, without waiting for it."""
        if self.exit_code is None:
            self._supervisor.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and its descendants at once."""
        if self.exit_code is None:
            self._supervisor.send_signal(signal.SIGQUIT)
        self.wait(process_supervisor.KILL_SECONDS + 5.0)

    def wait(self, seconds: float) -> int | None:
        """Wait until all its processes have ended; return the exit code, or None after this many seconds."""
        try:
            return self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """Close the pipe to the supervisor, which then ends what is left."""
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()

    def output(self) -> str:
        """Its output since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return _COLOUR.sub("", file.read().decode(errors="replace"))


class ProcessGroup(contextlib.AbstractContextManager["ProcessGroup"]):
    """All processes of a federation; a context manager that ends all of them on exit."""

    def __init__(self, grace: float = GRACE) -> None:
        self.running: dict[str, SupervisedProcess] = {}
        self._grace = grace

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> SupervisedProcess:
        """Start a command; an earlier one of the same name must have ended."""
        earlier = self.running.get(name)
        if earlier is not None and earlier.exit_code is None:
            raise OperationError(f"{name} is already running")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.running[name] = SupervisedProcess(name, command, log, environment, self._grace)
        return self.running[name]

    def stop(self) -> None:
        """End all processes, the last one first, and wait for them; if interrupted, kill them."""
        order = list(reversed(self.running.values()))
        try:
            for process in order:
                process.terminate()
            deadline = time.monotonic() + self._grace + process_supervisor.SETTLE_SECONDS + 5.0
            for process in order:
                process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in order:
                if process.exit_code is None:
                    process.kill()
                process.release()

    def wait_for(
        self, what: str, ready: Callable[[], bool], *, seconds: float, needed: Sequence[SupervisedProcess]
    ) -> None:
        """Wait for a condition.

        Args:
            what: Description for messages, e.g. ``"the SuperLink to answer"``.
            ready: The condition.
            seconds: Time limit.
            needed: Processes that must keep running meanwhile.

        Raises:
            OperationError: A needed process ended, or time is up; the message quotes the log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            for process in needed:
                if process.exit_code is not None:
                    raise OperationError(
                        f"{process.name} ended (exit code {process.exit_code}) while waiting for {what}\n"
                        f"{log_excerpt(process)}"
                    )
            if time.monotonic() > deadline:
                logs = "\n".join(log_excerpt(process) for process in needed)
                raise OperationError(f"timed out after {seconds:.0f} s waiting for {what}\n{logs}")
            time.sleep(0.2)


def log_excerpt(process: SupervisedProcess, lines: int = 12) -> str:
    """Log lines around the last one that mentions an error; if there is none, the last lines."""
    written = [line for line in process.output().splitlines() if line.strip()]
    signs = ("error", "exception", "traceback", "failed", "refused", "cannot")
    # Web servers and Flower's own retries log harmless errors as INFO.
    errors = [n for n, line in enumerate(written) if any(sign in line.lower() for sign in signs) and "INFO" not in line]
    chosen = written[-lines:] if not errors else written[max(0, errors[-1] - lines + 3) : errors[-1] + 3]
    text = "\n".join(f"  | {line}" for line in chosen) or "  | (empty)"
    return f"  {process.log}:\n{text}"


def private_environment(home: Path, **others: str) -> dict[str, str]:
    """Environment for Flower's processes: their own home, no telemetry, this Python's commands first."""
    commands = str(Path(sys.executable).parent)
    local = "localhost,127.0.0.1,::1"
    return {
        **without_telemetry(),
        "FLWR_HOME": str(home),
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        # A network proxy cannot reach this machine's own ports.
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), local])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), local])),
        **others,
    }
