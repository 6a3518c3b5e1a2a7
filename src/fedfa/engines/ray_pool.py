"""Jobs on a Ray cluster: actors on every node, replaced where they die, and more of them where nodes join.

An actor is used from the moment it reports. So nothing waits for a node that starts slowly or whose cores others use,
and a node that joins in the middle of a round takes part in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fedfa.engines.local import LocalEngine
from fedfa.engines.pool import Answer, Carrier, Job, longest
from fedfa.engines.ray_actor import opened, parcel, place
from fedfa.engines.ray_cluster import ClusterError, Connection, Node, differences, outpost_class, versions
from fedfa.engines.shared_tensors import Tree
from fedfa.engines.worker import Message, error_from
from fedfa.errors import FedfaError

log = logging.getLogger(__name__)

START_SECONDS = 300
"""If no actor can work for that long, none will."""

VERSIONS_SECONDS = 60
"""So long a run's start waits for all nodes to tell their versions; for those that tell them later it does not wait."""

LOOK_SECONDS = 5.0
"""So often, at most, to look for nodes that joined."""

FETCH_SECONDS = 120
"""For an answer that is ready to come over."""

LOST_NODES = 5
"""So many times a client is begun again because a node was lost with it, which is hardly the client's doing."""

FAILED_STARTS = 3
"""So many actors in a row may fail to start on a node before it is left alone."""


@dataclass
class _Worker:
    """The main process's side of an actor.

    Attributes:
        actor: Ray's handle.
        node: Where it is.
        coming: What it will report: its versions, then that it is ready, then the answer to its job.
        begun: Whether its versions were right, so that it was given what to work with.
        ready: Whether it can work.
        job: What it is at.
        number: The job's place.
    """

    actor: Any
    node: Node
    coming: Any
    begun: bool = False
    ready: bool = False
    job: Job | None = None
    number: int = -1


@dataclass
class _Place:
    """What is known of a node.

    Attributes:
        node: The node.
        problem: What is wrong with its versions.
        checked: Whether they are known.
        failed: Actors in a row that did not start there.
    """

    node: Node
    problem: str | None = None
    checked: bool = False
    failed: int = 0


@dataclass
class _Loss:
    """That an actor is lost, in words; and whether its process died of itself, or the connection to its node."""

    words: str
    of_itself: bool = field(default=True)


class RayPool(Carrier):
    """Actors with one core and one torch thread each.

    Args:
        local: Does the work, in each of them.
        connection: To the cluster.
        most: So many actors at most.

    Raises:
        ClusterError: No node can work, or one has other versions.
    """

    def __init__(self, local: LocalEngine, connection: Connection, most: int) -> None:
        self._ray, self._connection, self._most = connection.ray, connection, most
        self._workers: list[_Worker] = []
        self._places: dict[str, _Place] = {}
        self._versions = versions()
        self._processor = torch.backends.cpu.get_cpu_capability()
        self._told, self._sent = 0, None
        self._looked, self._since = float("-inf"), time.monotonic()
        self._failure = "their cores may be in use"
        self._open, self._gathered = True, False
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(outpost_class())
        try:
            self._local = place(self._ray, local)
        except Exception as error:  # whatever the network or the method is made of
            raise ClusterError(
                f"the network, the method or the data cannot be sent to a cluster: {type(error).__name__}: {error}"
            ) from error
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many actors can work."""
        return sum(worker.ready for worker in self._workers)

    @property
    def busy(self) -> bool:
        """See :class:`~fedfa.engines.pool.Carrier`."""
        return any(worker.job is not None for worker in self._workers)

    @property
    def nodes(self) -> list[str]:
        """For each actor that can work, the id of its node."""
        return [worker.node.id for worker in self._workers if worker.ready]

    def broadcast(self, values: Message, tensors: Tree) -> None:
        """See :class:`~fedfa.engines.pool.Carrier`."""
        if not self._open:
            raise RuntimeError("the workers have been closed")
        if self.busy:
            raise RuntimeError("the workers are still at a round; take all its results, or close the iterator, first")
        self._sent = self._ray.put(parcel(values, tensors))
        self._told += 1
        self._look()

    def close(self) -> None:
        """See :class:`~fedfa.engines.pool.Carrier`."""
        self._open = False
        workers, self._workers = self._workers, []
        for worker in workers:
            self._kill(worker)
        self._local = self._sent = None

    # -- jobs -------------------------------------------------------------------------------------------------
    def _begin(self, pending: dict[int, Job]) -> None:
        if pending and not self._open:
            raise RuntimeError("the workers have been closed")
        for worker in self._workers:
            if not pending:
                return
            if worker.ready and worker.job is None:
                number = longest(pending)
                job = pending[number]
                own = parcel({}, job.tensors())
                del pending[number]
                worker.number, worker.job = number, job
                worker.coming = worker.actor.work.remote(self._told, self._sent, job.request, own)

    def _finished(self, pending: dict[int, Job], *, block: bool) -> Iterator[tuple[int, Answer | FedfaError]]:
        self._look()
        for worker in self._reported(1.0 if block else 0.0):
            job, number = worker.job, worker.number
            if job is None:
                self._advance(worker)
                continue
            answer = self._answer(worker, job)
            if isinstance(answer, _Loss):
                self._lose(worker)
                if answer.of_itself:
                    job.deaths += 1
                else:
                    job.lost += 1
                if job.deaths < 2 and job.lost < LOST_NODES:
                    pending[number] = job
                    continue
                count = "two" if job.deaths == 2 else str(job.deaths + job.lost)
                answer = job.error(
                    f"ended {count} processes: the last one, on node {worker.node.address}, {answer.words}"
                )
            yield number, answer
        if pending:
            self._check_hope()

    def _drop(self) -> None:
        for worker in [worker for worker in self._workers if worker.job is not None]:
            self._lose(worker)

    def _answer(self, worker: _Worker, job: Job) -> Answer | FedfaError | _Loss:
        errors = self._ray.exceptions
        try:
            problem, content = self._ray.get(worker.coming, timeout=FETCH_SECONDS)
        except errors.OutOfMemoryError:
            return _Loss(
                "was ended by Ray because the node's memory ran out; use fewer workers (--workers) or a smaller "
                "local.batch_size"
            )
        except errors.ActorDiedError as error:
            return self._death(worker, error)
        except (errors.ActorUnavailableError, errors.ObjectLostError, errors.GetTimeoutError, errors.NodeDiedError):
            return _Loss("can no longer be reached; see whether the node runs (`ray status`)", of_itself=False)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return job.error(f"{type(cause).__name__}: {cause}")
        worker.job = None
        if problem is None:
            return opened(content)
        told = error_from(problem)
        return told if type(told) is not FedfaError else job.error(str(told))

    def _death(self, worker: _Worker, error: Exception) -> _Loss:
        alive = {node.id for node in self._connection.nodes()}
        if worker.node.id not in alive or "node has died" in str(error) or "node was terminated" in str(error):
            return _Loss("went with its node", of_itself=False)
        return _Loss(
            "died: its memory ran out, it crashed in compiled code, or something called exit; --engine local "
            "--workers 1 does the same work in one process and may show where"
        )

    # -- actors -----------------------------------------------------------------------------------------------
    def _reported(self, seconds: float) -> list[_Worker]:
        """The workers that have something to say; waits so long for one."""
        waiting = {worker.coming: worker for worker in self._workers if worker.job is not None or not worker.ready}
        if not waiting:
            time.sleep(min(seconds, 0.2))
            return []
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=seconds)
        if ready:  # and whoever else is
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        return [waiting[reference] for reference in ready]

    def _advance(self, worker: _Worker) -> None:
        """An actor has told its versions, or that it is ready; or something went wrong with it."""
        place = self._places.get(worker.node.id) or _Place(worker.node)
        try:
            report = self._ray.get(worker.coming, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            self._lose(worker)
            place.failed += 1
            self._failure = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            log.warning("an actor on node %s did not start: %s", worker.node.address, self._failure)
            return
        if not worker.begun:
            place.checked, place.problem = True, differences(worker.node.address, report, self._versions)
            if place.problem is not None:
                self._lose(worker)
                if self._gathered:
                    log.warning("%s; it is left out", place.problem)
                return
            worker.begun, worker.coming = True, worker.actor.start.remote(self._local)
            return
        worker.ready, place.failed = True, 0
        if report["processor"] != self._processor:
            log.warning(
                "node %s computes with %s, this machine with %s: the last bits of results may differ between them",
                worker.node.address, report["processor"], self._processor,
            )  # fmt: skip

    def _lose(self, worker: _Worker) -> None:
        self._kill(worker)
        worker.job = None
        if worker in self._workers:
            self._workers.remove(worker)
        self._looked = float("-inf")  # a place is free

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # Ray raises many things for what is gone already
            self._ray.kill(worker.actor, no_restart=True)

    # -- nodes ------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Use nodes that joined, forget those that are gone, and fill free places with actors."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            alive = {node.id: node for node in self._connection.nodes()}
            self._places = {id: place for id, place in self._places.items() if id in alive}
            for id, node in alive.items():
                self._places.setdefault(id, _Place(node))
            self._fill()

    def _fill(self) -> None:
        """One actor per core, spread over the nodes, as many as wanted."""
        while len(self._workers) < self._most:
            taken = {id: sum(worker.node.id == id for worker in self._workers) for id in self._places}
            free = [
                place
                for id, place in self._places.items()
                if place.problem is None and place.failed < FAILED_STARTS and taken[id] < place.node.cores
            ]
            if not free:
                return
            node = min(free, key=lambda place: (taken[place.node.id] / place.node.cores, place.node.id)).node
            pinned = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
            actor = self._actor.options(scheduling_strategy=pinned).remote()
            self._workers.append(_Worker(actor, node, actor.versions.remote()))

    def _gather(self) -> None:
        """At the start: every node must have our versions (to leave some out is for the user to decide), one ready."""
        if not self._connection.nodes():
            raise ClusterError("the Ray cluster has no node with cores; see `ray status`")
        patient = time.monotonic() + VERSIONS_SECONDS
        while True:
            self._look()
            used = [self._places[worker.node.id] for worker in self._workers if worker.node.id in self._places]
            told = time.monotonic() > patient or all(place.checked for place in used)
            if told and any(place.problem for place in self._places.values()):
                raise self._other_versions()
            if told and self.size:
                self._gathered = True
                return
            for worker in self._reported(1.0):
                self._advance(worker)
            self._check_hope()

    def _other_versions(self) -> ClusterError:
        problems = "; ".join(place.problem for place in self._places.values() if place.problem)
        return ClusterError(
            f"{problems}: results could differ. Install the same versions on all nodes; if the source was changed "
            "while a run was on, --resume goes on from its checkpoint"
        )

    def _check_hope(self) -> None:
        """Raise if there has been nobody to work for too long."""
        if self.size:
            self._since = time.monotonic()
            return
        places = [place for place in self._places.values() if place.problem is None]
        if self._places and not places:
            raise self._other_versions()
        if places and all(place.failed >= FAILED_STARTS for place in places):
            raise ClusterError(f"no actor can start on the Ray cluster: {self._failure}")
        if time.monotonic() - self._since > START_SECONDS:
            raise ClusterError(
                f"no actor could work on the Ray cluster for {START_SECONDS} seconds ({self._failure}); see `ray "
                "status`. The run goes on with --resume"
            )
