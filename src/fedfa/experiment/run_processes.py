"""Warm processes for the runs of a sweep: a process that has finished a run takes the next one.

Starting Python and importing torch takes seconds, often longer than a short run. A process whose run failed ends; what
a run leaves in a process (methods of own files, the environment) is undone before the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 30.0
"""Seconds that a process may take to terminate."""


class RunProcess:
    """A process that runs commands of ``fedfa``, one after the other; see :mod:`fedfa.cli.child`.

    Args:
        command: Starts a child that watches this process: however this one ends, no training keeps running.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "fedfa.cli.child")) -> None:
        environment = {**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a command, whose output is added to a file."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log.resolve())}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died; poll() reports it
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def poll(self) -> int | None:
        """The exit code of the command, 0 if it succeeded; None while it runs."""
        assert self.process.stdout is not None
        code = self.process.poll()  # first: a reply before the end is not missed
        if self.process.stdout.read(1):
            return 0
        return code

    def said(self) -> str:
        """What the process said before its first command, as when it cannot start."""
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def terminate(self) -> None:
        """Ask the process to stop."""
        self.process.terminate()

    def close(self) -> None:
        """Wait until the process has stopped; kill it if it takes too long."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


class RunProcesses:
    """The processes of a sweep. Use it as a context manager to keep them for several comparisons."""

    def __init__(self) -> None:
        self._idle: list[RunProcess] = []

    def prestart(self) -> RunProcesses:
        """Start a process now, so that it imports what it needs while this one does."""
        self._idle.append(RunProcess())
        return self

    def take(self) -> RunProcess:
        """An idle process, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.process.poll() is None:
                return process
            process.close()
        return RunProcess()

    def give_back(self, process: RunProcess) -> None:
        """Keep a process for the next run, or bury it if it has ended."""
        if process.process.poll() is None:
            self._idle.append(process)
        else:
            process.close()

    def close(self) -> None:
        """End the idle processes."""
        for process in self._idle:
            process.terminate()
        for process in self._idle:
            process.close()
        self._idle.clear()

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
