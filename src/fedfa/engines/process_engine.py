"""The engine that trains the clients of a round in several processes.

**The result is the same, bit for bit, for every number of workers.** A client's result depends only on the plan, its
number and its client state; random streams are keyed by these. Floating-point sums also depend on the order of
addition, so results are yielded in the order of the cohort. Exact sums would not depend on the order, but take several
times the memory and time of a plain sum. Keeping the order only makes a bounded number of results wait.

**Tensors do not go through pipes.** A round's model is written once to memory that all workers map; see
:mod:`fedfa.engines.worker_process`. The data are in every worker from the start, as pages shared with the main process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fedfa.engines.engine import Engine
from fedfa.engines.local import LocalEngine
from fedfa.engines.process_pool import (
    Job,
    ProcessPool,
    StartMethod,
    WorkerPool,
    WorkerStartError,
    obstacle,
    start_method,
)
from fedfa.engines.worker_process import decode_result, encode_plan
from fedfa.errors import ClientError, FedfaError
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.evaluate import EvaluatedOn, Evaluation
from fedfa.learning.tensors import ComponentTensors, Tensors

log = logging.getLogger(__name__)


def with_workers(local: LocalEngine, workers: int) -> Engine:
    """Engine with this number of processes; the local engine, with a warning, where processes cannot be used."""
    if workers == 1:
        return local
    reason = obstacle(local.device)
    if reason is None:
        try:
            return ProcessEngine(local, workers)
        except WorkerStartError as error:
            reason = str(error)
    log.warning("training in one process instead of %d: %s", workers, reason)
    return local


class PooledEngine:
    """Engine that runs clients and evaluations as jobs of a pool."""

    where: ClassVar[str] = "in a worker process"
    """Where jobs run, for messages."""

    def __init__(self, local: LocalEngine, pool: WorkerPool) -> None:
        self._local, self._pool = local, pool

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        if len(set(clients)) < len(clients):  # a client that trains twice needs its state after the first time
            yield from self._local.train(plan, clients, client_state)
            return
        self._pool.broadcast(*encode_plan(plan))
        for values, tensors in self._pool.run(self._job(plan, client, client_state) for client in clients):
            yield decode_result(values, tensors)

    def evaluate(
        self, model: Tensors, broadcast: ComponentTensors, client: int | None = None, on: EvaluatedOn = "test"
    ) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`.

        Each worker takes whole consecutive batches, so batches are the same as in one process.
        """
        batch = self._local.evaluation_batch
        batches = -(-len(self._local.test_samples(client, on)) // batch)
        slices = min(self._pool.size, batches)
        if slices < 2 or self._pool.busy:
            return self._local.evaluate(model, broadcast, client, on)
        self._pool.broadcast({"client": client, "on": on}, {"model": model, "broadcast": broadcast})
        ends = [index * batches // slices * batch for index in range(slices + 1)]
        outputs = [tensors for _, tensors in self._pool.run(map(self._slice, ends[:-1], ends[1:]))]
        return self._local.judge({name: torch.cat([one[name] for one in outputs]) for name in outputs[0]}, client, on)

    def evaluate_each(
        self, models: Mapping[int, Tensors], broadcast: ComponentTensors, on: EvaluatedOn = "test"
    ) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return {
            client: self.evaluate(model, broadcast, client, on)
            for client, model in models.items()
            if len(self._local.test_samples(client, on))
        }

    def remarks(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _job(self, plan: RoundPlan, client: int, client_state: Callable[[int], ComponentTensors]) -> Job:
        return Job(
            request={"client": client},
            tensors=lambda: {"client_state": client_state(client)},
            length=self._local.federation.client(client).size,
            error=lambda problem: ClientError(client, plan.round + 1, self.where, problem),
        )

    def _slice(self, first: int, last: int) -> Job:
        return Job(
            request={"samples": [first, last]},
            tensors=dict,
            length=last - first,
            error=lambda problem: FedfaError(f"evaluation {self.where}: {problem}"),
        )


class ProcessEngine(PooledEngine):
    """Clients in processes with one torch thread each, which live as long as the engine.

    Args:
        local: Does the same in one process.
        workers: Number of processes.
        method: Start method. Defaults to the system's best.

    Raises:
        WorkerStartError: The processes cannot be started.
    """

    def __init__(self, local: LocalEngine, workers: int, method: StartMethod | None = None) -> None:
        self._processes = ProcessPool(local, workers, method or start_method() or "spawn")
        super().__init__(local, self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._processes.pids
