"""Processes that carry jobs: started, fed, watched, replaced, ended.

The pool knows nothing of clients or models. A :class:`Job` is a request with tensors, its answer values with tensors.
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
from fedfa.engines.worker import Message, error_from, receive, send, serve
from fedfa.errors import FedfaError

Answer: TypeAlias = tuple[Message, dict[str, Any]]
"""Values and tensors; the tensors are the receiver's own."""

StartMethod: TypeAlias = Literal["fork", "spawn"]

WINDOW = 4
"""Jobs per worker that may be begun before the first of them has been handed on."""

START_SECONDS = 300
"""A process that has not reported after that long never will."""


class CannotStartError(FedfaError):
    """Worker processes cannot be had here; says why."""


@dataclass
class Job:
    """One request.

    Attributes:
        request: Plain values.
        tensors: Gives the tensors that go with it; asked for when the job is begun.
        length: How long it will take, in any unit; the longest are begun first.
        error: Makes an error from words, for what a worker cannot report itself.
        deaths: How many processes ended while they had it.
        lost: How many times the machine was lost that had it; on a cluster.
    """

    request: Message
    tensors: Callable[[], Tree]
    length: int
    error: Callable[[str], FedfaError]
    deaths: int = 0
    lost: int = 0


class Carrier(ABC):
    """Workers of some kind that carry jobs, and the order in which they do: here, or on a cluster."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there are."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether jobs are under way: the iteration over their answers is not at its end."""

    @abstractmethod
    def broadcast(self, values: Message, tensors: Tree) -> None:
        """Give something to all workers; counts for the jobs that begin from now on."""

    @abstractmethod
    def close(self) -> None:
        """End all workers at once; they hold nothing that would be lost."""

    @abstractmethod
    def _begin(self, pending: dict[int, Job]) -> None:
        """Give the longest pending jobs to idle workers; see :func:`longest`."""

    @abstractmethod
    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Answer | FedfaError]]:
        """What has come in; waits a moment for something if asked to. Jobs of lost workers go back to the pending."""

    @abstractmethod
    def _drop(self) -> None:
        """Give up the jobs that are under way."""

    def carry(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Do jobs; the answers come in the order of the jobs.

        Within a window of :data:`WINDOW` jobs per worker, counted from the first one whose answer has not been handed
        on, the longest are begun first: so no worker is left with a long job at the end, and no more answers than that
        wait in memory. An error counts where its job stands: answers before it come first, jobs behind it are dropped.

        A worker that ends on its own is replaced, and its job is begun again. The second time it is the job's error.
        """
        coming: Iterator[tuple[int, Job]] = enumerate(jobs)
        pending: dict[int, Job] = {}
        answers: dict[int, Answer | FedfaError] = {}
        turn, seen = 0, 0
        try:
            while True:
                for number, job in islice(coming, max(0, turn + WINDOW * max(1, self.size) - seen)):
                    pending[number] = job
                    seen += 1
                self._begin(pending)
                if turn not in answers and not pending and not self.busy:
                    return
                for number, answer in self._finished(pending, block=turn not in answers):
                    answers[number] = answer
                    if isinstance(answer, FedfaError):
                        coming = iter(())
                        for later in [later for later in pending if later > number]:
                            del pending[later]
                self._begin(pending)  # before the receiver has its turn: nobody shall wait for him
                if turn in answers:
                    answer = answers.pop(turn)
                    turn += 1
                    if isinstance(answer, FedfaError):
                        raise answer
                    yield answer
        finally:
            self._drop()  # nobody will ask for these answers any more


def longest(pending: dict[int, Job]) -> int:
    """The number of the pending job to begin next."""
    return max(pending, key=lambda number: (pending[number].length, -number))


class Pool(Carrier):
    """Worker processes with one torch thread each.

    Args:
        local: Does the work, in each of them.
        workers: How many.
        method: ``"fork"`` gives a worker all that the main process has, as it is: networks, methods and data that were
            made on the spot too. ``"spawn"`` starts a new interpreter, to which they are sent once.

    Raises:
        CannotStartError: A process does not start, or cannot train.
    """

    def __init__(self, local: LocalEngine, workers: int, method: StartMethod) -> None:
        self._local, self._context = local, multiprocessing.get_context(method)
        self._forks = method == "fork"
        self._broadcast = Block()
        self._sent: Message = {}
        self._workers: list[_Process] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start())
            for worker in self._workers:
                worker.check_in()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self._workers)

    @property
    def busy(self) -> bool:
        """Whether jobs are under way: the iteration over their answers is not at its end."""
        return any(worker.job is not None for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [worker.pid for worker in self._workers]

    def broadcast(self, values: Message, tensors: Tree) -> None:
        """Give something to all workers; counts for the jobs that begin from now on."""
        if not self._workers:
            raise RuntimeError("the workers have been closed")
        if self.busy:
            raise RuntimeError("the workers are still at a round; take all its results, or close the iterator, first")
        self._sent = {"values": values, "tensors": self._broadcast.write(tensors)}
        for worker in self._workers:
            worker.told = False

    def close(self) -> None:
        """End all processes at once; they hold nothing that would be lost."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()
        self._broadcast.close()

    # -- inside -----------------------------------------------------------------------------------------------
    def _drop(self) -> None:
        unwanted = [worker for worker in self._workers if worker.job is not None]
        for worker in unwanted:  # they are replaced when needed
            worker.job = None
            worker.kill()
        for worker in unwanted:
            worker.join()

    def _begin(self, pending: dict[int, Job]) -> None:
        """Give the longest pending jobs to idle workers."""
        if pending and not self._workers:
            raise RuntimeError("the workers have been closed")
        for place, worker in enumerate(self._workers):
            if not pending:
                return
            if worker.job is None:
                if not worker.alive:
                    worker = self._replace(place)
                number = longest(pending)
                worker.begin(number, pending.pop(number), self._sent)

    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Answer | FedfaError]]:
        """What has come in; waits for something if asked to. Jobs of workers that ended go back to the pending ones."""
        busy = {worker.connection: place for place, worker in enumerate(self._workers) if worker.job is not None}
        # A process that is gone shows as the end of its pipe. Should anybody else hold a copy of that end, asking now
        # and then finds out too.
        ready = wait(list(busy), timeout=1.0 if block else 0)
        if block and not ready:
            ready = [connection for connection, place in busy.items() if not self._workers[place].alive]
        for connection in ready:
            place = busy[connection]
            worker = self._workers[place]
            assert worker.job is not None
            number, job = worker.number, worker.job
            try:
                answer = worker.finish()
            except (EOFError, OSError):
                words = worker.how_it_ended()
                self._replace(place)
                job.deaths += 1
                if job.deaths < 2:
                    pending[number] = job
                    continue
                answer = job.error(f"ended two processes: the last one {words}")
            yield number, answer

    def _start(self) -> _Process:
        return _Process(self._context, self._local, self._broadcast, self._workers if self._forks else None)

    def _replace(self, place: int) -> _Process:
        self._workers[place].kill()
        self._workers[place].close()
        try:
            self._workers[place] = self._start()
            self._workers[place].check_in()
        except CannotStartError as error:
            raise FedfaError(
                f"a worker process ended and none can be started in its place ({error}); go on with fewer --workers"
            ) from error
        return self._workers[place]


class _Process:
    """The main process's side of one worker.

    Args:
        context: Starts processes.
        local: What the worker works with.
        broadcast: The block that all workers read.
        siblings: The other workers, where a new process has copies of all that this one holds; else None.
    """

    def __init__(self, context: Any, local: LocalEngine, broadcast: Block, siblings: list[_Process] | None) -> None:
        self.job: Job | None = None
        self.number = -1
        self.told = False
        self._inbox, self._outbox = Block(), Block()
        self.connection, theirs = context.Pipe()
        copies: list[Connection | Block] = []
        if siblings is not None:
            copies.append(self.connection)
            for sibling in siblings:
                copies += [sibling.connection, sibling._inbox, sibling._outbox]
        arguments = (local, theirs, broadcast, self._inbox, self._outbox, copies)
        self._process = context.Process(target=serve, args=arguments, name="fedfa worker", daemon=True)
        try:
            with _signals_held_back(), warnings.catch_warnings():
                # From Python 3.12 on: that other threads' locks stay locked in a forked process. A worker takes none
                # but those of the memory allocator, which sees to that itself.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except Exception as error:  # the system has no room, or something cannot be sent to a new interpreter
            self.connection.close()
            self._inbox.close()
            self._outbox.close()
            raise CannotStartError(f"{type(error).__name__}: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def check_in(self) -> None:
        """Wait for the process to report that it can work."""
        try:
            if not self.connection.poll(START_SECONDS):
                raise CannotStartError(f"a process did not report within {START_SECONDS} seconds")
            reply = receive(self.connection)
        except (EOFError, OSError):
            self.join()
            raise CannotStartError(f"a process ended at its start, with exit code {self._process.exitcode}") from None
        if "error" in reply:
            raise CannotStartError(str(error_from(reply["error"])))

    def begin(self, number: int, job: Job, broadcast: Message) -> None:
        request = {**job.request, "tensors": self._inbox.write(job.tensors())}
        if not self.told:
            request["broadcast"] = broadcast
        self.number, self.job, self.told = number, job, True
        with suppress(OSError):  # just ended: shows when its answer is asked for
            send(self.connection, request)

    def finish(self) -> Answer | FedfaError:
        """The answer to the job; the worker is free then.

        Raises:
            EOFError: The process has ended.
            OSError: Likewise.
        """
        assert self.job is not None
        if not self.connection.poll():
            raise EOFError
        reply = receive(self.connection)
        if "error" in reply:
            error = error_from(reply["error"])
            answer: Answer | FedfaError = error if type(error) is not FedfaError else self.job.error(str(error))
        else:
            # One copy out: an answer may wait for its turn while the worker writes the next one to the same place,
            # and whoever receives it may keep it.
            answer = reply["values"], _own(self._outbox.read(reply["tensors"]))
        self.job = None
        return answer

    def how_it_ended(self) -> str:
        """In words, with what to do."""
        self.join()
        code = self._process.exitcode
        if code is None:
            return "no longer answers"
        if code >= 0:
            return f"ended by itself with exit code {code}; look for a call of exit in the network or the method"
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
        """Wait until it is gone; it is on its way."""
        self._process.join(5)

    def close(self) -> None:
        self.join()
        self.connection.close()
        self._inbox.close()
        self._outbox.close()


def _own(tree: Tree) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else _own(value) for name, value in tree.items()}


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """No interruption between the start of a process and the moment it has set what it does about interruptions."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method() -> StartMethod | None:
    """How workers are started on this system; None where they cannot be.

    Forking is safe where the libraries allow it: on Linux torch does (with one thread), on macOS the system's own
    libraries do not.
    """
    if sys.platform == "linux":
        return "fork"
    return "spawn" if sys.platform == "darwin" else None


def obstacle(device: torch.device) -> str | None:
    """Why there can be no workers here; None if nothing speaks against them."""
    if device.type != "cpu":
        return f"the work is done by one {device.type} device, which processes would only have to share"
    if start_method() is None:
        return "this system has neither fork nor a way to hand over memory"
    if multiprocessing.current_process().daemon:
        return "this process is itself a worker of another pool and may not start processes"
    return None
