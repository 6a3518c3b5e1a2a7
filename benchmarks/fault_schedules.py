"""Faults from a seed, done to a real federation on this machine: does every run end, and with the right weights?

    python -m benchmarks.fault_schedules --seeds 0:200 [--minutes 10] [--out results/fault-schedules/schedules.jsonl]

One SuperLink and three SuperNodes with TLS and node keys stay up for all schedules, so that faults also meet what
earlier ones left. Each seed draws one to three faults (:func:`draw`); then a run of two rounds of SCAFFOLD is executed
by :class:`~fedfa.flower.operate.local_deployment.LocalDeployment`, and started again like an operator would where it
ends with a message. Sites reach the SuperLink through a proxy in this process, which delays, refuses, loses, repeats
and reorders requests; processes are killed and frozen; the database is locked; disks are file systems of 4 MiB that are
filled; a library loaded before all others moves a SuperNode's clock. What this machine does not allow (no mount, no
compiler) is left out, and the result says so.

A schedule fails if the run hangs, ends without a message, or ends with other weights than the simulator's for the
updates that arrived. Each schedule is one line of the result; seeds that are in it already are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import mmap
import os
import platform
import random
import shutil
import signal
import sqlite3
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fedfa.data import load
from fedfa.engines.local import LocalEngine
from fedfa.errors import FedfaError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import append_line, load_tensors, read_lines
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.flower import app_folder
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.local_deployment import LocalDeployment, as_run_config
from fedfa.flower.operate.process_supervisor import descendants
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.tensors import ComponentTensors

SITES, ROUNDS = 3, 2
SPAN = 20.0
"""Seconds after the submission over which faults are spread: about a run without faults on an idle machine."""
SUBMISSIONS = 6
"""How often a run is started; one that ended with a message is started again once the faults are over."""
NETWORK = ("delay", "HTTP 500", "answer lost", "connection cut", "repeated", "reordered", "upload stalled")
KILLS = (
    "SuperNode killed", "site executor killed", "ClientApp killed", "ServerApp killed", "SuperLink killed",
    "SuperLink executor killed",
)  # fmt: skip
DISKS = ("site disk full", "server disk full")
KINDS = (*NETWORK, *KILLS, "database locked", "site frozen", *DISKS, "clock")
RULES: Mapping[str, Any] = {
    "round_seconds": 30.0, "wait_seconds": 45.0, "attempts": 4, "link_seconds": 90.0, "poll_seconds": 1.0,
    "lost_state": "refuse",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    at: float
    """Seconds after the run was submitted."""
    kind: str
    site: int
    seconds: float
    """How long it lasts, where it lasts."""


def draw(seed: int, kinds: Sequence[str] = KINDS) -> tuple[float, list[Fault]]:
    """The quorum and the faults of a seed, in the order of their time.

    Example:
        >>> draw(3) == draw(3), draw(3) == draw(4)
        (True, False)
    """
    source = random.Random(seed)
    quorum = source.choice([0.6, 1.0])
    faults = [
        Fault(
            round(source.uniform(1.0, SPAN), 2), source.choice(kinds), source.randrange(SITES),
            round(source.uniform(1.0, 12.0), 2),
        )
        for _ in range(source.randint(1, 3))
    ]  # fmt: skip
    return quorum, sorted(faults, key=lambda fault: fault.at)


# -- the network ------------------------------------------------------------------------------------------------------
class FaultyProxy:
    """Passes a site's requests to the SuperLink, with the faults that are on."""

    def __init__(self, federation: LocalFederation, seed: int) -> None:
        keys = federation.folder / "keys"
        trust = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.pem", keys / "server.key")
        self.on: dict[str, int] = {}
        """Faults that are on, and how many of each."""
        self.hurt = 0
        """Requests to which a fault happened."""
        self._draw = random.Random(seed)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))

                def forward() -> tuple[int, list[tuple[str, str]], bytes]:
                    link = http.client.HTTPSConnection(federation.address, timeout=60, context=trust)
                    with contextlib.closing(link):
                        link.request("POST", self.path, body, dict(self.headers.items()))
                        answer = link.getresponse()
                        return answer.status, answer.getheaders(), answer.read()

                found = proxy._answer(self.path, forward)
                if found is None:
                    self.close_connection = True
                    return
                status, headers, content = found
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815  (the name that http.server asks for)

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # the other side is gone, as planned

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _answer(self, path: str, forward: Callable[[], Any]) -> Any:
        """The SuperLink's answer, or None to cut the connection."""
        on = [kind for kind, count in self.on.items() if count > 0]
        kind = self._draw.choice(on) if on else None
        early = self._draw.random() < 0.5
        uploads = path.endswith("push-object")  # the reply is announced, its parts do not come
        if kind is not None and (kind != "upload stalled" or uploads):
            self.hurt += 1
        if kind == "delay":
            time.sleep(self._draw.uniform(0.2, 3.0))
        elif kind == "reordered" and early:  # those that come later pass
            time.sleep(self._draw.uniform(0.5, 1.5))
        elif kind == "upload stalled" and uploads:
            while self.on.get(kind, 0) > 0:
                time.sleep(0.1)
        elif kind == "HTTP 500" or (kind == "connection cut" and early):
            return (500, [], b"") if kind == "HTTP 500" else None
        try:
            answer = forward()
            if kind == "repeated":
                again = forward()
                answer = again if early else answer
        except (OSError, http.client.HTTPException):
            return 502, [], b""  # as nginx answers while the SuperLink restarts
        if kind == "answer lost":
            return 500, [], b""
        return None if kind == "connection cut" else answer


# -- clocks and disks -------------------------------------------------------------------------------------------------
CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile double *offset;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void start(void) {
  real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("FAULTY_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) offset = found;
  close(file);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (code == 0 && offset && wall) now->tv_sec += (time_t)*offset;
  return code;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec; now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


class Clock:
    """The clock of a site's SuperNode, which can be moved while it runs."""

    def __init__(self, folder: Path, site: int, library: Path) -> None:
        file = folder / f"clock{site}"
        file.write_bytes(bytes(8))
        self._file, self._library = file, library
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 8)

    def move(self, seconds: float) -> None:
        """Let the clock be off by this much."""
        self._memory[:] = struct.pack("d", seconds)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Processes that are started meanwhile have this clock."""
        os.environ |= {"LD_PRELOAD": str(self._library), "FAULTY_CLOCK": str(self._file)}
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"], os.environ["FAULTY_CLOCK"]


def clock_library(folder: Path) -> Path | None:
    """Compile the library; None without a compiler."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK_SOURCE, encoding="utf-8")
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=False)
    return library if done.returncode == 0 else None


def mount_disk(path: Path) -> bool:
    """Mount a small file system here; return whether that is allowed."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a file system to its last byte."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        yield
    finally:
        filler.unlink(missing_ok=True)


# -- the federation and its faults ------------------------------------------------------------------------------------
class Laboratory(contextlib.AbstractContextManager["Laboratory"]):
    """A federation that stays up for many schedules, and what can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        disks = [folder / "disk-server", *(folder / f"disk{site}" for site in range(SITES))]
        self.mounted = [disk for disk in disks if mount_disk(disk)]
        library = clock_library(folder)
        self.clocks = [] if library is None else [Clock(folder, site, library) for site in range(SITES)]
        self.missing = [*([] if self.mounted == disks else DISKS), *([] if self.clocks else ["clock"])]
        self.federation = LocalFederation(folder / "flower")
        self.proxies: list[FaultyProxy] = []

    def start(self, data_dir: str) -> None:
        """Start everything and wait until all sites have joined."""
        load("digits", data_dir=Path(data_dir), offline=True)
        federation = self.federation
        federation.start_superlink()
        federation.register(*range(SITES))
        for site in range(SITES):
            self.proxies.append(FaultyProxy(federation, site))
            config: dict[str, Value] = {"partition-id": site, "num-partitions": SITES, "data-dir": data_dir}
            clock = self.clocks[site].environment() if self.clocks else contextlib.nullcontext()
            federation._fork_server_variables()  # started outside the site's clock
            with clock:
                federation.start_site(
                    site, {**config, "state-dir": str(self.folder / f"disk{site}")}, address=self.proxies[site].address
                )
        for site in range(SITES):
            federation.wait_for_site(site)

    def __exit__(self, *_: object) -> None:
        self.federation.__exit__()
        for proxy in self.proxies:
            proxy.server.shutdown()
        for disk in self.mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)

    def processes(self, name: str, words: str) -> list[psutil.Process]:
        """Processes of one of the federation's commands whose own command line has these words."""
        supervised = self.federation.processes.running.get(name)
        found = []
        for pid in [] if supervised is None else supervised.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def do(self, fault: Fault, giving_up: threading.Event) -> bool:
        """Do a fault, and undo it if it lasts; return whether it happened."""
        if fault.kind in NETWORK:
            proxy, before = self.proxies[fault.site], self.proxies[fault.site].hurt
            proxy.on[fault.kind] = proxy.on.get(fault.kind, 0) + 1
            giving_up.wait(fault.seconds)
            proxy.on[fault.kind] -= 1
            return proxy.hurt > before
        if fault.kind == "database locked":
            path = self.federation.folder / "superlink.db"
            with sqlite3.connect(path, timeout=60, isolation_level=None) as database:
                database.execute("BEGIN EXCLUSIVE")
                giving_up.wait(fault.seconds)
                database.execute("ROLLBACK")
            return True
        if fault.kind in DISKS:
            with full(self.folder / ("disk-server" if fault.kind == "server disk full" else f"disk{fault.site}")):
                giving_up.wait(fault.seconds)
            return True
        if fault.kind == "clock":
            self.clocks[fault.site].move(random.Random(fault.seconds).choice([-1, 1]) * 10 ** (fault.seconds / 2))
            giving_up.wait(fault.seconds)
            self.clocks[fault.site].move(0)
            return True
        victims = self._wait_for_victims(fault, giving_up)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                if fault.kind == "site frozen":
                    victim.send_signal(signal.SIGSTOP)
                else:
                    victim.kill()
        if fault.kind == "site frozen":
            giving_up.wait(fault.seconds)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
        return bool(victims)

    def _wait_for_victims(self, fault: Fault, giving_up: threading.Event) -> list[psutil.Process]:
        """The processes that the fault is about, once there are some."""
        name, words = {
            "SuperNode killed": (f"site{fault.site}", "watched supernode --child"),
            "site frozen": (f"site{fault.site}", "watched supernode --child"),
            "site executor killed": (f"site{fault.site}", "flower-superexec"),
            "SuperLink killed": ("superlink", "watched superlink --child"),
            "SuperLink executor killed": ("superlink", "flower-superexec"),
            "ServerApp killed": ("superlink", "flwr-serverapp"),
            "ClientApp killed": (f"site{fault.site}", "fork_server_call"),
        }[fault.kind]
        while not giving_up.is_set():
            if found := self.processes(name, words):
                return found
            giving_up.wait(0.1)
        return []

    # -- one schedule -------------------------------------------------------------------------------------------
    def survive(self, seed: int, data_dir: str) -> dict[str, Any]:
        """Execute a run with the faults of a seed; return the line of the result."""
        quorum, faults = draw(seed)
        possible = [fault for fault in faults if fault.kind not in self.missing]
        happened: list[str] = []
        giving_up = threading.Event()
        began, cpu = time.monotonic(), self._cpu_seconds()

        def act(fault: Fault) -> None:
            if not giving_up.wait(fault.at) and self.do(fault, giving_up):
                happened.append(fault.kind)

        threads = [threading.Thread(target=act, args=[fault], daemon=True) for fault in possible]
        for thread in threads:
            thread.start()
        out = self.folder / "disk-server" / f"run{seed}"
        ends: list[str] = []
        problem = None
        for attempt in range(SUBMISSIONS):
            try:
                self._deployment(out, quorum, attempt > 0, data_dir).execute(self.federation)
                break
            except FedfaError as error:
                ends.append(str(error))
                if "no round in" in str(error):
                    problem = "hang"
                    break
                if not explained(str(error), happened):
                    problem = "ended without a message"
                    break
            for thread in threads:  # an operator frees the disk first
                thread.join(60)
        else:
            problem = f"no result after {SUBMISSIONS} submissions"
        giving_up.set()
        for thread in threads:
            thread.join(60)
        cohorts: list[list[int]] = []
        if problem is None:
            cohorts = [sorted(line["cohort"]) for line in RunDirectory(out).metrics()]
            problem = self._compare(out, cohorts, data_dir)
        if problem is None:
            shutil.rmtree(out, ignore_errors=True)
        else:
            keep = self.folder / f"failed{seed}"
            shutil.copytree(out, keep, dirs_exist_ok=True)
            (keep / "ends.txt").write_text("\n\n".join(ends), encoding="utf-8")
        return {
            "seed": seed,
            "outcome": problem or "the simulator's weights",
            "seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(self._cpu_seconds() - cpu, 1),
            "submissions": len(ends) + (problem is None),
            "quorum": quorum,
            "cohorts": cohorts,
            "faults": [asdict(fault) for fault in faults],
            "happened": happened,
            "missing": [fault.kind for fault in faults if fault.kind in self.missing],
        }

    def _deployment(self, out: Path, quorum: float, resume: bool, data_dir: str) -> LocalDeployment:
        grace = {"grace_seconds": 5.0} if quorum < 1 else {}
        return LocalDeployment(
            app_folder(), out, SITES, resume=resume, run_config=as_run_config(config(data_dir)),
            federation={**RULES, **grace, "quorum": quorum},
        )  # fmt: skip

    def _compare(self, out: Path, cohorts: list[list[int]], data_dir: str) -> str | None:
        """What differs from the simulator's run in which the same updates arrived."""
        if len(cohorts) != ROUNDS:
            return f"{len(cohorts)} rounds are recorded"
        here = self.folder / ("simulated-" + "-".join("".join(map(str, cohort)) for cohort in cohorts))
        if not (here / "summary.json").exists():
            simulate(here, cohorts, data_dir)
        for name in ("model.safetensors", "server.safetensors"):
            one, other = load_tensors(out / name), load_tensors(here / name)
            if one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one):
                return f"{name} differs from the simulator's"
        records = [[line["accuracy"] for line in RunDirectory(path).metrics()] for path in (out, here)]
        return None if records[0] == records[1] else "accuracies differ from the simulator's"

    def _cpu_seconds(self) -> float:
        """CPU time of the federation's processes, ended ones included as far as their parents waited for them."""
        total = 0.0
        for process in [psutil.Process(), *descendants(os.getpid())]:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def explained(error: str, happened: Sequence[str]) -> bool:
    """Whether a run that ended says why: in words of ours, or because a process was killed that cannot say anything."""
    killed = {"ServerApp killed", "SuperLink killed", "SuperLink executor killed"} & set(happened)
    return bool(killed) or any(words in error for words in ("fedfa", "ERROR", "is full"))


def config(data_dir: str) -> Config:
    """Two rounds of SCAFFOLD, whose state at server and sites depends on every update."""
    return Config.resolve(
        {
            "rounds": ROUNDS,
            "device": "cpu",
            "data": {"name": "digits", "clients": SITES, "partition": "shards:4", "dir": data_dir},
            "model": {"name": "mlp", "options": {"hidden": [16]}},
            "cohort": {"clients": SITES},
            "local": {"epochs": 1, "lr": 0.1, "batch_size": 32},
            "algorithm": {"name": "scaffold"},
        }
    )


class _Arrived:
    """The simulator's engine, of whose clients only those take part whose updates arrived."""

    def __init__(self, inner: LocalEngine, cohorts: Sequence[Sequence[int]]) -> None:
        self._inner, self._cohorts = inner, cohorts

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        return self._inner.train(plan, [one for one in clients if one in self._cohorts[plan.round]], client_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def simulate(out: Path, cohorts: Sequence[Sequence[int]], data_dir: str) -> None:
    """The run in the simulator, with these updates."""

    class Arrived(Experiment):
        def engine(self) -> Any:
            return _Arrived(self.local_engine(), cohorts)

    shutil.rmtree(out, ignore_errors=True)
    run(config(data_dir), out, experiment=Arrived.from_config)


# -- the program ------------------------------------------------------------------------------------------------------
def machine() -> dict[str, str]:
    """Where and from what the line was measured."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return {
        "commit": asked + ("+" if changed.stdout.strip() else ""),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> int:
    """Run the schedules; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="FIRST:END, or seeds separated by commas")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no schedule after this time")
    parser.add_argument("--out", type=Path, default=Path("results/fault-schedules/schedules.jsonl"))
    parser.add_argument("--folder", type=Path, help="where to work; failed runs and logs stay there")
    parser.add_argument("--data-dir", default=os.environ.get("FEDFA_DATA", ""))
    chosen = parser.parse_args()
    first, colon, end = chosen.seeds.partition(":")
    seeds = range(int(first), int(end)) if colon else [int(one) for one in chosen.seeds.split(",")]
    done = {line["seed"] for line in read_lines(chosen.out)} if chosen.out.exists() else set()
    stop = time.monotonic() + 60 * chosen.minutes
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="fedfa-faults-"))
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    where = machine()
    data_dir = chosen.data_dir or str(folder / "data")
    with Laboratory(folder) as laboratory:
        laboratory.start(data_dir)
        for seed in seeds:
            if seed in done or time.monotonic() > stop:
                continue
            line = laboratory.survive(seed, data_dir)
            append_line(chosen.out, {**line, **where})
            print(json.dumps(line), flush=True)  # noqa: T201
            if line["outcome"] != "the simulator's weights":
                failed.append(seed)
    if failed:
        print(f"failed seeds: {failed}; see {folder}", file=sys.stderr)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
