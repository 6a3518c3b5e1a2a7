"""The engine that trains the clients of a round in several processes.

**The result is the same, bit for bit, for every number of workers.** A client's work depends on the plan, its number
and what it kept, on nothing else; random streams are keyed by these. What remains is the order in which the server
adds, for floating-point sums depend on it. Results are therefore handed on in the order of the cohort, whoever is
faster. The other way would be sums that are exact and so the same in any order; it takes several times the memory and
the work of a plain sum, for every weight of every client. Keeping the order takes only that a few results wait, and
their number is bounded.

**Tensors do not go through pipes.** A round's model is written once to memory that all workers map; see
:mod:`fedfa.engines.worker`. The data are in every worker from the start, as pages shared with the main process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fedfa.engines.engine import Engine
from fedfa.engines.local import LocalEngine
from fedfa.engines.pool import CannotStartError, Carrier, Job, Pool, StartMethod, obstacle, start_method
from fedfa.engines.worker import describe_plan, result_from
from fedfa.errors import ClientError, FedfaError
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.tensors import PartTensors, Tensors

log = logging.getLogger(__name__)


def with_workers(local: LocalEngine, workers: int) -> Engine:
    """An engine with so many processes; this process alone, with a warning, where that cannot be."""
    if workers == 1:
        return local
    reason = obstacle(local.device)
    if reason is None:
        try:
            return WorkersEngine(local, workers)
        except CannotStartError as error:
            reason = str(error)
    log.warning("training in one process instead of %d: %s", workers, reason)
    return local


class PooledEngine:
    """Clients and evaluations as jobs of a pool, whatever carries them.

    Args:
        local: Does the same in one process.
        pool: Carries the jobs.
    """

    where: ClassVar[str] = "in a worker process"
    """For messages: where the work is done."""

    def __init__(self, local: LocalEngine, pool: Carrier) -> None:
        self._local, self._pool = local, pool

    def train(
        self, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        if len(set(clients)) < len(clients):  # a client's second turn begins with what it kept from the first
            yield from self._local.train(plan, clients, kept)
            return
        self._pool.broadcast(*describe_plan(plan))
        for values, tensors in self._pool.carry(self._job(plan, client, kept) for client in clients):
            yield result_from(values, tensors)

    def evaluate(self, model: Tensors, received: PartTensors, client: int | None = None) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`.

        Each worker takes a run of whole batches, so every sample is in the company it has in one process.
        """
        batch = self._local.evaluation_batch
        batches = -(-len(self._local.test_samples(client)) // batch)
        pieces = min(self._pool.size, batches)
        if pieces < 2 or self._pool.busy:
            return self._local.evaluate(model, received, client)
        self._pool.broadcast({"client": client}, {"model": model, "received": received})
        ends = [piece * batches // pieces * batch for piece in range(pieces + 1)]
        answers = [tensors for _, tensors in self._pool.carry(map(self._piece, ends[:-1], ends[1:]))]
        return self._local.judge({name: torch.cat([part[name] for part in answers]) for name in answers[0]}, client)

    def evaluate_each(self, models: Mapping[int, Tensors], received: PartTensors) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return {client: self.evaluate(model, received, client) for client, model in models.items()}

    def remarks(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _job(self, plan: RoundPlan, client: int, kept: Callable[[int], PartTensors]) -> Job:
        def error(problem: str) -> ClientError:
            return ClientError(client, plan.round + 1, self.where, problem)

        return Job(
            request={"client": client},
            tensors=lambda: {"kept": kept(client)},
            length=self._local.federation.client(client).size,
            error=error,
        )

    def _piece(self, first: int, last: int) -> Job:
        def error(problem: str) -> FedfaError:
            return FedfaError(f"evaluation {self.where}: {problem}")

        return Job(request={"samples": [first, last]}, tensors=dict, length=last - first, error=error)


class WorkersEngine(PooledEngine):
    """Clients in processes with one torch thread each, which live as long as the engine.

    Args:
        local: Does the same in one process.
        workers: How many processes.
        method: How they are started; left out, what the system is good for.

    Raises:
        CannotStartError: The processes cannot be had.
    """

    def __init__(self, local: LocalEngine, workers: int, method: StartMethod | None = None) -> None:
        self._processes = Pool(local, workers, method or start_method() or "spawn")
        super().__init__(local, self._processes)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return self._processes.pids
