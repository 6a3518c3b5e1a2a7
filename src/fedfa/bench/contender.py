"""One contender: a program in a process of its own, measured from outside and by its own report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.bench.plain import ENV_ARRAYS, ENV_RESULT, ENV_ROUNDS_IN_TURN, ENV_STARTED, ENV_TURN_PORT
from fedfa.bench.processes import descendants, memory_of, session_members
from fedfa.bench.turn_taking import Turns

LOOK_EVERY = 2.0
"""Seconds between two looks at the memory: more often would cost the contender time."""


@dataclass(frozen=True)
class Contender:
    """What to start.

    Attributes:
        name: Short and unique in its section.
        title: For people.
        command: The program and its arguments; ``{port}`` becomes a free port.
        environment: Added to this process's own.
        limit: Seconds after which it counts as failed.
        note: What a reader should know about it.
        rounds_in_turn: Rounds it works before another one does, where contenders take turns.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    limit: float = 900.0
    note: str = ""
    rounds_in_turn: int = 1


def of_fedfa(
    name: str, title: str, module: str, *arguments: object, note: str = "", rounds_in_turn: int = 1
) -> Contender:
    """A program of this package, in this interpreter."""
    command = (sys.executable, "-m", f"fedfa.bench.{module}", *map(str, arguments))
    return Contender(name, title, command, note=note, rounds_in_turn=rounds_in_turn)


class Running:
    """A contender that was started; used with ``with``, nothing that it started outlives it.

    Args:
        contender: What to start.
        arrays: Folder with the tasks' data.
        in_turns: Let it wait for a turn after its first round and after each turn, see :meth:`give_turn`.

    Attributes:
        problem: What went wrong so far.
    """

    def __init__(self, contender: Contender, arrays: Path, *, in_turns: bool = False) -> None:
        self.contender = contender
        self.problem: str | None = None
        self._own = tempfile.TemporaryDirectory()
        self._result, self._output = Path(self._own.name) / "result.json", Path(self._own.name) / "output.txt"
        self._turns = Turns() if in_turns else None
        self._left = contender.limit
        self._memory, self._processes = 0, 1
        self._process: subprocess.Popen[bytes] | None = None
        command = [part.replace("{port}", str(_free_port())) for part in contender.command]
        environment = {**os.environ, **contender.environment}
        # A contender says itself how many threads it uses; what the caller's shell says must not decide for some.
        if "OMP_NUM_THREADS" not in contender.environment:
            environment.pop("OMP_NUM_THREADS", None)
        environment |= {ENV_ARRAYS: str(arrays), ENV_RESULT: str(self._result), ENV_STARTED: repr(time.time())}
        if self._turns is not None:
            environment |= {ENV_TURN_PORT: str(self._turns.port), ENV_ROUNDS_IN_TURN: str(contender.rounds_in_turn)}
        try:
            with self._output.open("wb") as sink:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
                )
        except OSError as error:
            self.problem = f"cannot be started: {error}"

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._own.cleanup()
        if self._turns is not None:
            self._turns.close()

    def give_turn(self) -> None:
        """Let it go on to the end of its next turn."""
        if self._turns is not None:
            self._turns.give()

    def waits(self) -> bool:
        """Whether all its processes that take turns have ended theirs."""
        return self._turns is not None and self._turns.wanted()

    def follow(self, *, to_its_turn: bool = False) -> bool:
        """Wait for its end (or until it waits for a turn), looking at the memory now and then; whether it goes on."""
        process = self._process
        if process is None:
            return False
        begun = time.monotonic()
        while process.poll() is None:
            if to_its_turn and self.waits():
                self._left -= time.monotonic() - begun
                self._look()  # now it costs nobody time; and turns may be too short for the looks below
                return True
            seconds = max(0.01, min(LOOK_EVERY, self._left - (time.monotonic() - begun)))
            if self._turns is not None and to_its_turn:
                looks = self._turns.listen(seconds)
            else:
                looks = _still_there(process, seconds)
            if time.monotonic() - begun >= self._left and process.poll() is None:
                self.problem = f"not done after {self.contender.limit:.0f} s"
                break
            if looks:
                self._look()
        self._end()
        return False

    def _look(self) -> None:
        """See how much memory it has, and how many processes."""
        if self._process is not None:
            members = descendants(self._process.pid)
            self._memory = max(self._memory, memory_of(members))
            self._processes = max(self._processes, len(members))

    def _end(self) -> None:
        """Nothing it started goes on."""
        if self._process is None:
            return
        leftover = set(session_members(self._process.pid))  # a session of its own: nobody else is in it
        if self._process.poll() is None:
            leftover |= set(descendants(self._process.pid))
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def report(self) -> dict[str, Any]:
        """What it reported, after its end; or ``{"failed": words}``.

        With it ``memory_mb``, the most that its processes had together (:func:`memory_of`), and ``processes``.
        """
        if self._process is None:
            return {"failed": self.problem}
        if self.problem is None and self._process.returncode == 0 and self._result.exists():
            report: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
            memory = self._memory / 2**20 if self._memory else None
            return {**report, "memory_mb": memory, "processes": self._processes}
        said = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = next((line.strip() for line in reversed(said) if re.search(r"\w", line)), "it said nothing")
        return {"failed": f"{self.problem or f'exit code {self._process.returncode}'}: {last[-300:]}"}


def _still_there(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process that long; whether it goes on."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def measure(contender: Contender, arrays: Path) -> dict[str, Any]:
    """Start a contender, wait for its end, take its report (see :meth:`Running.report`).

    Args:
        contender: What to start.
        arrays: Folder with the tasks' data.
    """
    with Running(contender, arrays) as running:
        running.follow()
        return running.report()


def measure_in_turns(
    contenders: Sequence[Contender], arrays: Path, tell: Callable[[Contender, str], None]
) -> list[dict[str, Any]]:
    """Start all, one after the other, each to the end of its first round; then each in its turn, to their ends.

    So what is compared lies within a minute, and the machine's moods, which last longer, meet all alike. A contender
    that does not reach the end of its first round is started once more.

    Args:
        contenders: What to start, in this order.
        arrays: Folder with the tasks' data.
        tell: Called with the contender whose turn it is, and a word of news.

    Returns:
        The report of each.
    """
    with contextlib.ExitStack() as all_of_them:

        def start(contender: Contender) -> Running:
            tell(contender, "start")
            running = all_of_them.enter_context(Running(contender, arrays, in_turns=True))
            running.follow(to_its_turn=True)
            return running

        everyone = []
        for contender in contenders:
            running = start(contender)
            if not running.waits() and "failed" in (report := running.report()):
                tell(contender, f"failed ({report['failed']}); once more")
                running = start(contender)
            everyone.append(running)
        going = [running for running in everyone if running.waits()]
        turn = 0
        while going:
            turn += 1
            first = turn % len(going)  # each time beginning with another one
            for running in [*going[first:], *going[:first]]:
                tell(running.contender, f"turn {turn}")
                running.give_turn()
                if not running.follow(to_its_turn=True):
                    going.remove(running)
        return [running.report() for running in everyone]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
