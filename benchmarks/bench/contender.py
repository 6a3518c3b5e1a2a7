"""Contenders: programs that train the same task, each in a process of its own, measured interleaved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.bench.contender_api import ENV_ARRAYS, ENV_GATE_PORT, ENV_RESULT, ENV_ROUNDS_PER_SLOT, ENV_STARTED
from benchmarks.bench.gate import Gate
from benchmarks.bench.processes import memory_of, process_tree

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
"""The repository; programs run here."""
SAMPLE_SECONDS = 2.0
"""Time between two readings of the memory; shorter ones would cost the contender time."""


@dataclass(frozen=True)
class Contender:
    """A program to measure.

    Attributes:
        name: Unique in its section.
        title: Shown in tables.
        command: Program and arguments; ``{port}`` becomes a free port.
        environment: Added to the environment of this process.
        limit: Seconds of its own time after which it counts as failed.
        note: Shown with the title.
        rounds_per_slot: Rounds it trains before the next contender does.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    limit: float = 900.0
    note: str = ""
    rounds_per_slot: int = 1


class Running:
    """A started contender; must be closed.

    Args:
        contender: What to start.
        arrays: Directory with the data of the tasks.
    """

    def __init__(self, contender: Contender, arrays: Path) -> None:
        self.contender, self.gate = contender, Gate()
        self._problem: str | None = None
        self._scratch = tempfile.TemporaryDirectory()
        self._result, self._output = (Path(self._scratch.name) / name for name in ("result.json", "output.txt"))
        self._seconds_left = contender.limit
        self._memory = 0
        self._process: subprocess.Popen[bytes] | None = None
        command = [word.replace("{port}", str(_free_port())) for word in contender.command]
        # A contender sets its number of threads itself; a value from the caller's shell must not affect some of them.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment = inherited | dict(contender.environment) | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            ENV_ARRAYS: str(arrays), ENV_RESULT: str(self._result), ENV_STARTED: repr(time.time()),
            ENV_GATE_PORT: str(self.gate.port), ENV_ROUNDS_PER_SLOT: str(contender.rounds_per_slot),
        }  # fmt: skip
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._problem = f"cannot be started: {error}"

    def close(self) -> None:
        """Kill everything the contender started."""
        self._kill()
        self._scratch.cleanup()
        self.gate.close()

    def follow(self) -> bool:
        """Wait until the contender stops at its gate or ends; return whether it is still running."""
        process, begun = self._process, time.monotonic()
        while process is not None and process.poll() is None:
            left = self._seconds_left - (time.monotonic() - begun)
            if self.gate.all_waiting():
                self._seconds_left = left
                self._sample_memory()  # costs no contender time now, and slots may be shorter than SAMPLE_SECONDS
                return True
            if left <= 0:
                self._problem = f"not done after {self.contender.limit:.0f} s"
                break
            if not self.gate.listen(min(SAMPLE_SECONDS, left)):
                self._sample_memory()
        self._kill()
        return False

    def _sample_memory(self) -> None:
        if self._process is not None:
            self._memory = max(self._memory, memory_of(process_tree(self._process.pid)))

    def _kill(self) -> None:
        if self._process is None:
            return
        ended = self._process.poll() is not None
        for pid in process_tree(self._process.pid) - ({self._process.pid} if ended else set()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def report(self) -> dict[str, Any]:
        """The contender's report after its end, with ``memory_mb``; or ``{"failed": reason}``."""
        if self._process is None:
            return {"failed": self._problem}
        if self._problem is None and self._process.returncode == 0 and self._result.exists():
            report: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
            memory = self._memory / 2**20 if self._memory else None
            return {**report, "memory_mb": memory}
        output = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = next((line.strip() for line in reversed(output) if re.search(r"\w", line)), "no output")
        return {"failed": f"{self._problem or f'exit code {self._process.returncode}'}: {last[-300:]}"}


def measure_interleaved(
    contenders: Sequence[Contender], arrays: Path, notify: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Start each contender and let it finish its first round; then let them train slot by slot, one at a time.

    What is compared is thus measured within seconds or a minute, and slow phases of the machine, which last longer,
    affect all contenders alike. A contender that fails before the end of its first round is started once more.

    Args:
        contenders: What to start, in this order.
        arrays: Directory with the data of the tasks.
        notify: Called with a line of progress.

    Returns:
        The report of each contender.
    """
    with contextlib.ExitStack() as stack:

        def start(contender: Contender) -> tuple[Running, bool]:
            notify(f"{contender.title}: start")
            running = stack.enter_context(contextlib.closing(Running(contender, arrays)))
            return running, running.follow()

        started, active = [], []
        for contender in contenders:
            running, waiting = start(contender)
            if not waiting and "failed" in (report := running.report()):
                notify(f"{contender.title}: failed ({report['failed']}); starting it once more")
                running, waiting = start(contender)
            started.append(running)
            if waiting:
                active.append(running)
        slot = 0
        while active:
            slot += 1
            for running in rotated(active, slot):
                notify(f"{running.contender.title}: slot {slot}")
                running.gate.open()
                if not running.follow():
                    active.remove(running)
        return [running.report() for running in started]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items from another starting point, so that no contender always comes first."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
