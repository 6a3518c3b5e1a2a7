"""Jobs on a Ray cluster: actors on every node, replaced when they die, and more of them when nodes join.

An actor is used as soon as it reports. So nothing waits for a node that starts slowly or whose cores are in use, and a
node that joins during a round takes part in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fedfa.engines.local import LocalEngine
from fedfa.engines.process_pool import Job, Reply, WorkerPool, pop_longest
from fedfa.engines.ray_actor import pack_message, put_engine, unpack_message
from fedfa.engines.ray_cluster import ClusterError, Connection, Node, actor_class, differences, versions
from fedfa.engines.shared_tensors import Tree
from fedfa.engines.worker_process import Message, decode_error
from fedfa.errors import FedfaError

log = logging.getLogger(__name__)

START_SECONDS = 300
"""Time without a ready actor after which the run ends."""

VERSIONS_SECONDS = 60
"""How long the start of a run waits for all nodes to report their versions."""

REFRESH_SECONDS = 5.0
"""Shortest interval between two checks for nodes that joined."""

FETCH_SECONDS = 120
"""Time limit for the transfer of a reply."""

LOST_NODES = 5
"""How often a client may lose its node before that counts as the client's error."""

FAILED_STARTS = 3
"""Consecutive failed actor starts after which a node is no longer used."""


@dataclass
class _Worker:
    """The main process's side of an actor."""

    actor: Any
    node: Node
    result: Any  # reference to its versions, then to its report, then to the reply to its job
    started: bool = False  # its versions match, so it has received the engine
    ready: bool = False
    job: Job | None = None
    number: int = -1


@dataclass
class _NodeState:
    """State of a node."""

    node: Node
    problem: str | None = None  # how its versions differ
    checked: bool = False  # whether its versions are known
    failed: int = 0  # consecutive failed actor starts


@dataclass
class _Loss:
    """Loss of an actor: its process died, or its node was lost."""

    cause: str
    node_lost: bool = False


class RayPool(WorkerPool):
    """Actors with one core and one torch thread each.

    Args:
        local: Engine that does the work, in each of them.
        connection: Connection to the cluster.
        most: Largest number of actors.

    Raises:
        ClusterError: No node can work, or one has other versions.
    """

    def __init__(self, local: LocalEngine, connection: Connection, most: int) -> None:
        self._ray, self._connection, self._most = connection.ray, connection, most
        self._workers: list[_Worker] = []
        self._nodes: dict[str, _NodeState] = {}
        self._versions = versions()
        self._processor = torch.backends.cpu.get_cpu_capability()
        self._number, self._sent = 0, None
        self._refreshed, self._last_ready = float("-inf"), time.monotonic()
        self._failure = "their cores may be in use"
        self._open, self._initialised = True, False
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(actor_class())
        try:
            self._local = put_engine(self._ray, local)
        except Exception as error:  # depends on the network and the algorithm
            raise ClusterError(
                f"the network, the algorithm or the data cannot be sent to a cluster: {type(error).__name__}: {error}"
            ) from error
        try:
            self._wait_for_actors()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of actors that are ready."""
        return sum(worker.ready for worker in self._workers)

    @property
    def nodes(self) -> list[str]:
        """Node id of each actor that is ready."""
        return [worker.node.id for worker in self._workers if worker.ready]

    @property
    def _working(self) -> bool:
        return any(worker.job is not None for worker in self._workers)

    @property
    def _closed(self) -> bool:
        return not self._open

    def _broadcast(self, values: Message, tensors: Tree) -> None:
        self._sent = self._ray.put(pack_message(values, tensors))
        self._number += 1
        self._refresh()

    def close(self) -> None:
        """See :class:`~fedfa.engines.process_pool.WorkerPool`."""
        self._open = False
        workers, self._workers = self._workers, []
        for worker in workers:
            self._kill(worker)
        self._local = self._sent = None

    # -- jobs -------------------------------------------------------------------------------------------------
    def _start_jobs(self, pending: dict[int, Job]) -> None:
        for worker in self._workers:
            if pending and worker.ready and worker.job is None:
                worker.number, job = pop_longest(pending)
                own = pack_message({}, job.tensors())
                worker.job = job
                worker.result = worker.actor.work.remote(self._number, self._sent, job.request, own)

    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Reply | FedfaError]]:
        self._refresh()
        for worker in self._with_results(1.0 if block else 0.0):
            job, number = worker.job, worker.number
            if job is None:
                self._advance(worker)
                continue
            reply = self._reply(worker, job)
            if isinstance(reply, _Loss):
                self._remove(worker)
                if reply.node_lost:
                    job.lost += 1
                else:
                    job.deaths += 1
                if job.deaths < 2 and job.lost < LOST_NODES:
                    pending[number] = job
                    continue
                count = "two" if job.deaths == 2 else str(job.deaths + job.lost)
                reply = job.error(
                    f"ended {count} processes: the last one, on node {worker.node.address}, {reply.cause}"
                )
            yield number, reply
        if pending:
            self._check_progress()

    def _abandon(self) -> None:
        for worker in [worker for worker in self._workers if worker.job is not None]:
            self._remove(worker)

    def _reply(self, worker: _Worker, job: Job) -> Reply | FedfaError | _Loss:
        errors = self._ray.exceptions
        try:
            problem, content = self._ray.get(worker.result, timeout=FETCH_SECONDS)
        except errors.OutOfMemoryError:
            return _Loss(
                "was ended by Ray because the node's memory ran out; use fewer workers (--workers) or a smaller "
                "local.batch_size"
            )
        except errors.ActorDiedError as error:
            return self._death(worker, error)
        except (errors.ActorUnavailableError, errors.ObjectLostError, errors.GetTimeoutError, errors.NodeDiedError):
            return _Loss("can no longer be reached; check whether the node runs (`ray status`)", node_lost=True)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return job.error(f"{type(cause).__name__}: {cause}")
        worker.job = None
        return unpack_message(content) if problem is None else decode_error(problem, job.error)

    def _death(self, worker: _Worker, error: Exception) -> _Loss:
        alive = {node.id for node in self._connection.nodes()}
        if worker.node.id not in alive or "node has died" in str(error) or "node was terminated" in str(error):
            return _Loss("was lost with its node", node_lost=True)
        return _Loss(
            "died: its memory ran out, it crashed in compiled code, or something called exit; --engine local "
            "--workers 1 does the same work in one process and may show where"
        )

    # -- actors -----------------------------------------------------------------------------------------------
    def _with_results(self, seconds: float) -> list[_Worker]:
        """Workers with a result; waits this long for one."""
        waiting = {worker.result: worker for worker in self._workers if worker.job is not None or not worker.ready}
        if not waiting:
            time.sleep(min(seconds, 0.2))
            return []
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=seconds)
        if ready:  # get all others that are ready, too
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        return [waiting[reference] for reference in ready]

    def _advance(self, worker: _Worker) -> None:
        """Process an actor's versions, its report, or the failure of its start."""
        state = self._nodes.get(worker.node.id) or _NodeState(worker.node)
        try:
            report = self._ray.get(worker.result, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            self._remove(worker)
            state.failed += 1
            self._failure = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            log.warning("an actor on node %s did not start: %s", worker.node.address, self._failure)
            return
        if not worker.started:
            state.checked, state.problem = True, differences(worker.node.address, report, self._versions)
            if state.problem is not None:
                self._remove(worker)
                if self._initialised:
                    log.warning("%s; it is left out", state.problem)
                return
            worker.started, worker.result = True, worker.actor.start.remote(self._local)
            return
        worker.ready, state.failed = True, 0
        if report["processor"] != self._processor:
            log.warning(
                "node %s computes with %s, this machine with %s: the last bits of results may differ between them",
                worker.node.address, report["processor"], self._processor,
            )  # fmt: skip

    def _remove(self, worker: _Worker) -> None:
        self._kill(worker)
        worker.job = None
        if worker in self._workers:
            self._workers.remove(worker)
        self._refreshed = float("-inf")  # so that a core that is free now is used

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # Ray raises various errors for actors that have died
            self._ray.kill(worker.actor, no_restart=True)

    # -- nodes ------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Update the nodes, and start actors on free cores."""
        now = time.monotonic()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            self._nodes = {node.id: self._nodes.get(node.id) or _NodeState(node) for node in self._connection.nodes()}
            self._start_actors()

    def _start_actors(self) -> None:
        """Start one actor per core, spread over the nodes, up to the wanted number."""
        while len(self._workers) < self._most:
            taken = {id: sum(worker.node.id == id for worker in self._workers) for id in self._nodes}
            free = [
                state.node
                for id, state in self._nodes.items()
                if state.problem is None and state.failed < FAILED_STARTS and taken[id] < state.node.cores
            ]
            if not free:
                return
            node = min(free, key=lambda node: (taken[node.id] / node.cores, node.id))
            pinned = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
            actor = self._actor.options(scheduling_strategy=pinned).remote()
            self._workers.append(_Worker(actor, node, actor.versions.remote()))

    def _wait_for_actors(self) -> None:
        """At the start: check that every node has this process's versions, and wait for the first ready actor."""
        if not self._connection.nodes():
            raise ClusterError("the Ray cluster has no node with cores; see `ray status`")
        deadline = time.monotonic() + VERSIONS_SECONDS
        while True:
            self._refresh()
            used = [self._nodes[worker.node.id] for worker in self._workers if worker.node.id in self._nodes]
            if time.monotonic() > deadline or all(state.checked for state in used):
                # Leaving out nodes with other versions is the user's decision.
                if any(state.problem for state in self._nodes.values()):
                    raise self._version_error()
                if self.size:
                    self._initialised = True
                    return
            for worker in self._with_results(1.0):
                self._advance(worker)
            self._check_progress()

    def _version_error(self) -> ClusterError:
        problems = "; ".join(state.problem for state in self._nodes.values() if state.problem)
        return ClusterError(
            f"{problems}: results could differ. Install the same versions on all nodes; if the source was changed "
            "during a run, --resume continues from its checkpoint"
        )

    def _check_progress(self) -> None:
        """Raise if no actor has been ready for too long."""
        if self.size:
            self._last_ready = time.monotonic()
            return
        usable = [state for state in self._nodes.values() if state.problem is None]
        if self._nodes and not usable:
            raise self._version_error()
        if usable and all(state.failed >= FAILED_STARTS for state in usable):
            raise ClusterError(f"no actor can start on the Ray cluster: {self._failure}")
        if time.monotonic() - self._last_ready > START_SECONDS:
            raise ClusterError(
                f"no actor was ready on the Ray cluster for {START_SECONDS} seconds ({self._failure}); see `ray "
                "status`. Continue the run with --resume"
            )
