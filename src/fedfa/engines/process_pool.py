"""Pools of workers that execute jobs, and the pool of processes: started, fed, watched, replaced, ended.

A pool knows nothing of clients or models. A :class:`Job` is a request with tensors; its reply is values with tensors.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedfa.engines.local import LocalEngine
from fedfa.engines.shared_tensors import Block, Tree
from fedfa.engines.worker_process import Message, decode_error, receive, send, serve
from fedfa.errors import FedfaError

Reply: TypeAlias = tuple[Message, dict[str, Any]]
"""Values and tensors; the receiver owns the tensors."""

StartMethod: TypeAlias = Literal["fork", "spawn"]

WINDOW = 4
"""Jobs per worker that may be started before the first of them has been yielded."""

START_SECONDS = 300
"""Deadline for a new process to report."""


class WorkerStartError(FedfaError):
    """Worker processes cannot be started."""


@dataclass
class Job:
    """One request.

    Attributes:
        request: Plain values.
        tensors: Returns the tensors of the request; called when the job starts.
        length: Expected duration in any unit; the longest jobs start first.
        error: Makes an error from a message, for problems that a worker cannot report itself.
        deaths: Number of processes that died while executing it.
        lost: Number of cluster nodes that were lost while executing it.
    """

    request: Message
    tensors: Callable[[], Tree]
    length: int
    error: Callable[[str], FedfaError]
    deaths: int = 0
    lost: int = 0


class WorkerPool(ABC):
    """Workers that execute jobs, on this machine or on a cluster, and the order in which they do."""

    busy = False
    """Whether the iteration over the replies of :meth:`run` has begun and not ended."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of workers."""

    @property
    @abstractmethod
    def _working(self) -> bool:
        """Whether any worker has a job."""

    @abstractmethod
    def _broadcast(self, values: Message, tensors: Tree) -> None:
        """Give something to all workers, for the jobs that start from now on."""

    @abstractmethod
    def close(self) -> None:
        """End all workers at once; they hold nothing that would be lost."""

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether the pool has been closed."""

    @abstractmethod
    def _start_jobs(self, pending: dict[int, Job]) -> None:
        """Give the longest pending jobs to idle workers; see :func:`pop_longest`."""

    @abstractmethod
    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Reply | FedfaError]]:
        """Yield replies that have arrived, after a short wait if asked to; put jobs of lost workers back."""

    @abstractmethod
    def _abandon(self) -> None:
        """Give up the jobs in progress."""

    def broadcast(self, values: Message, tensors: Tree) -> None:
        """Give something to all workers, for the jobs that start from now on."""
        self._check_open()
        if self.busy:
            raise RuntimeError("the workers are still at a round; take all its results, or close the iterator, first")
        self._broadcast(values, tensors)

    def run(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Execute jobs; yield the replies in the order of the jobs.

        Within a window of :data:`WINDOW` jobs per worker, counted from the first one that has not been yielded, the
        longest start first: so no worker is left with a long job at the end, and the number of replies that wait in
        memory is bounded. An error is raised in the place of its job, after earlier replies; later jobs are dropped.

        A worker that dies is replaced, and its job is repeated once.
        """
        remaining: Iterator[tuple[int, Job]] = enumerate(jobs)
        pending: dict[int, Job] = {}
        replies: dict[int, Reply | FedfaError] = {}
        turn, seen = 0, 0
        self.busy = True
        try:
            while True:
                for number, job in islice(remaining, max(0, turn + WINDOW * max(1, self.size) - seen)):
                    pending[number] = job
                    seen += 1
                self._refill(pending)
                if turn not in replies and not pending and not self._working:
                    return
                for number, reply in self._finished(pending, block=turn not in replies):
                    replies[number] = reply
                    if isinstance(reply, FedfaError):
                        remaining = iter(())
                        for later in [later for later in pending if later > number]:
                            del pending[later]
                self._refill(pending)  # refill idle workers before yielding
                if turn in replies:
                    reply = replies.pop(turn)
                    turn += 1
                    if isinstance(reply, FedfaError):
                        raise reply
                    yield reply
        finally:
            self._abandon()
            self.busy = False

    def _refill(self, pending: dict[int, Job]) -> None:
        if pending:
            self._check_open()
            self._start_jobs(pending)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the workers have been closed")


def pop_longest(pending: dict[int, Job]) -> tuple[int, Job]:
    """Remove the pending job to start next."""
    number = max(pending, key=lambda number: (pending[number].length, -number))
    return number, pending.pop(number)


class ProcessPool(WorkerPool):
    """Worker processes with one torch thread each.

    Args:
        local: Engine that does the work, in each of them.
        workers: Number of processes.
        method: ``"fork"`` gives a worker everything in the main process, including networks, components and data that
            were defined on the fly. ``"spawn"`` starts a new interpreter, to which they are sent once.

    Raises:
        WorkerStartError: A process does not start, or cannot train.
    """

    def __init__(self, local: LocalEngine, workers: int, method: StartMethod) -> None:
        self._local, self._context = local, multiprocessing.get_context(method)
        self._forks = method == "fork"
        self._block = Block()
        self._sent: Message = {}
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start())
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.pid for worker in self._workers]

    @property
    def _working(self) -> bool:
        return any(worker.job is not None for worker in self._workers)

    @property
    def _closed(self) -> bool:
        return not self._workers

    def _broadcast(self, values: Message, tensors: Tree) -> None:
        self._sent = {"values": values, "tensors": self._block.write(tensors)}
        for worker in self._workers:
            worker.up_to_date = False

    def close(self) -> None:
        """See :class:`WorkerPool`."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()
        self._block.close()

    def _abandon(self) -> None:
        abandoned = [worker for worker in self._workers if worker.job is not None]
        for worker in abandoned:  # they are replaced when needed
            worker.job = None
            worker.kill()
        for worker in abandoned:
            worker.join()

    def _start_jobs(self, pending: dict[int, Job]) -> None:
        for index, worker in enumerate(self._workers):
            if pending and worker.job is None:
                if not worker.alive:
                    worker = self._replace(index)
                worker.start_job(*pop_longest(pending), self._sent)

    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Reply | FedfaError]]:
        busy = {worker.connection: index for index, worker in enumerate(self._workers) if worker.job is not None}
        # The death of a process closes its pipe. If another process holds a copy of that end, polling finds out.
        ready = wait(list(busy), timeout=1.0 if block else 0)
        if block and not ready:
            ready = [connection for connection, index in busy.items() if not self._workers[index].alive]
        for connection in ready:
            index = busy[connection]
            worker = self._workers[index]
            assert worker.job is not None
            number, job = worker.number, worker.job
            try:
                reply = worker.finish_job(job)
            except (EOFError, OSError):
                cause = worker.cause_of_death()
                self._replace(index)
                job.deaths += 1
                if job.deaths < 2:
                    pending[number] = job
                    continue
                reply = job.error(f"ended two processes: the last one {cause}")
            yield number, reply

    def _start(self) -> _Worker:
        return _Worker(self._context, self._local, self._block, self._workers if self._forks else None)

    def _replace(self, index: int) -> _Worker:
        self._workers[index].kill()
        self._workers[index].close()
        try:
            self._workers[index] = self._start()
            self._workers[index].wait_until_ready()
        except WorkerStartError as error:
            raise FedfaError(
                f"a worker process ended and cannot be replaced ({error}); continue with fewer --workers"
            ) from error
        return self._workers[index]


class _Worker:
    """The main process's side of one worker."""

    def __init__(self, context: Any, local: LocalEngine, broadcast: Block, siblings: list[_Worker] | None) -> None:
        self.job: Job | None = None
        self.number = -1
        self.up_to_date = False
        self._inbox, self._outbox = Block(), Block()
        self.connection, theirs = context.Pipe()
        # A forked process inherits what this one holds; with "spawn", siblings is None.
        inherited = [] if siblings is None else [self.connection]
        for sibling in siblings or []:
            inherited += sibling._resources
        arguments = (local, theirs, broadcast, self._inbox, self._outbox, inherited)
        self._process = context.Process(target=serve, args=arguments, name="fedfa worker", daemon=True)
        try:
            with _signals_blocked(), warnings.catch_warnings():
                # Python 3.12 warns that locks of other threads stay locked in a forked process. A worker takes only
                # those of the memory allocator, which handles forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except Exception as error:  # out of resources, or something cannot be pickled for a new interpreter
            self._release()
            raise WorkerStartError(f"{type(error).__name__}: {error}") from error
        finally:
            theirs.close()

    @property
    def _resources(self) -> list[Connection | Block]:
        return [self.connection, self._inbox, self._outbox]

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def wait_until_ready(self) -> None:
        """Wait for the process to report that it can work."""
        try:
            if not self.connection.poll(START_SECONDS):
                raise WorkerStartError(f"a process did not report within {START_SECONDS} seconds")
            reply = receive(self.connection)
        except (EOFError, OSError):
            self.join()
            raise WorkerStartError(f"a process ended at its start, with exit code {self._process.exitcode}") from None
        if "error" in reply:
            raise WorkerStartError(str(decode_error(reply["error"])))

    def start_job(self, number: int, job: Job, broadcast: Message) -> None:
        request = {**job.request, "tensors": self._inbox.write(job.tensors())}
        if not self.up_to_date:
            request["broadcast"] = broadcast
        self.number, self.job, self.up_to_date = number, job, True
        with suppress(OSError):  # it has just died, which shows when its reply is read
            send(self.connection, request)

    def finish_job(self, job: Job) -> Reply | FedfaError:
        """Read the reply to the job; the worker is idle then.

        Raises:
            EOFError: The process has ended.
            OSError: Likewise.
        """
        if not self.connection.poll():
            raise EOFError
        reply = receive(self.connection)
        self.job = None
        if "error" in reply:
            return decode_error(reply["error"], job.error)
        # Copy: the worker writes its next reply to the same memory, and the receiver may keep this one.
        return reply["values"], _copy(self._outbox.read(reply["tensors"]))

    def cause_of_death(self) -> str:
        """Describe how the process ended, with advice."""
        self.join()
        code = self._process.exitcode
        if code is None:
            return "no longer answers"
        if code >= 0:
            return f"ended by itself with exit code {code}; look for a call of exit in the network or the algorithm"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            return (
                "was killed (SIGKILL), as the system does when memory runs out; use fewer workers (--workers) or a "
                "smaller local.batch_size"
            )
        return f"crashed ({name}) in compiled code; --workers 1 does the same work in one process and may show where"

    def kill(self) -> None:
        with suppress(OSError, AttributeError, ValueError):  # never started, or gone
            self._process.kill()

    def join(self) -> None:
        """Wait for the process, which is about to end."""
        self._process.join(5)

    def close(self) -> None:
        self.join()
        self._release()

    def _release(self) -> None:
        for resource in self._resources:
            resource.close()


def _copy(tree: Tree) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else _copy(value) for name, value in tree.items()}


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals between the start of a process and the moment it has set its handlers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method() -> StartMethod | None:
    """Start method of workers on this system; None if there is none.

    Forking is safe where the libraries allow it: on Linux torch does (with one thread), on macOS the system's own
    libraries do not.
    """
    if sys.platform == "linux":
        return "fork"
    return "spawn" if sys.platform == "darwin" else None


def obstacle(device: torch.device) -> str | None:
    """Reason why workers cannot be used; None if they can."""
    if device.type != "cpu":
        return f"the training uses one {device.type} device, which processes would only have to share"
    if start_method() is None:
        return "this system can neither fork nor pass memory to a new process"
    if multiprocessing.current_process().daemon:
        return "this process is itself a worker of another pool and may not start processes"
    return None
