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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.bench.plain import ENV_ARRAYS, ENV_RESULT, ENV_STARTED

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
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    limit: float = 900.0
    note: str = ""


def of_fedfa(name: str, title: str, module: str, *arguments: object, limit: float = 900.0, note: str = "") -> Contender:
    """A program of this package, in this interpreter."""
    command = (sys.executable, "-m", f"fedfa.bench.{module}", *map(str, arguments))
    return Contender(name, title, command, limit=limit, note=note)


def measure(contender: Contender, arrays: Path) -> dict[str, Any]:
    """Start it, wait for it, take its report.

    Args:
        contender: What to start.
        arrays: Folder with the tasks' data.

    Returns:
        The report, and with it ``memory_mb`` (the largest sum over its processes, shared pages counted once) and
        ``processes``; or ``{"failed": words}``.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output.txt"
        command = [part.replace("{port}", str(_free_port())) for part in contender.command]
        environment = {**os.environ, **contender.environment}
        # A contender says itself how many threads it uses; what the caller's shell says must not decide for some.
        if "OMP_NUM_THREADS" not in contender.environment:
            environment.pop("OMP_NUM_THREADS", None)
        environment |= {ENV_ARRAYS: str(arrays), ENV_RESULT: str(result), ENV_STARTED: repr(time.time())}
        try:
            with output.open("wb") as sink:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
                )
        except OSError as error:
            return {"failed": f"cannot be started: {error}"}
        memory, processes, problem = _accompany(process, contender.limit)
        if problem is None and process.returncode == 0 and result.exists():
            report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return {**report, "memory_mb": memory, "processes": processes}
        said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = next((line.strip() for line in reversed(said) if re.search(r"\w", line)), "it said nothing")
        return {"failed": f"{problem or f'exit code {process.returncode}'}: {last[-300:]}"}


def _accompany(process: subprocess.Popen[bytes], limit: float) -> tuple[float | None, int, str | None]:
    """Wait for the end, looking at the memory now and then; nothing it started outlives this."""
    until = time.monotonic() + limit
    most, count, problem = 0, 1, None
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(LOOK_EVERY, max(0.01, until - time.monotonic())))
                break
            if time.monotonic() >= until:
                problem = f"not done after {limit:.0f} s"
                break
            members = descendants(process.pid)
            most, count = max(most, sum(map(proportional_memory, members))), max(count, len(members))
    finally:
        leftover = set(_session_members(process.pid))  # a session of its own: nobody else is in it
        if process.poll() is None:
            leftover |= set(descendants(process.pid))
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return (most / 2**20 if most else None), count, problem


def descendants(pid: int) -> list[int]:
    """A process and all below it; where the system does not tell (not Linux), the process alone."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return found


def proportional_memory(pid: int) -> int:
    """Bytes a process has in memory, pages that several share divided among them; 0 where unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def resident_memory() -> int:
    """Bytes this process has in memory now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _session_members(session: int) -> Sequence[int]:
    """Processes of the contender's own session that are still there after it ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                members.append(int(entry.parent.name))
    return members


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
