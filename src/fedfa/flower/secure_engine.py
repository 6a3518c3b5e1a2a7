"""The engine of federations whose contributions are summed under masks (``privacy.masks = true``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fedfa.experiment.protected import relied_on
from fedfa.flower.engine import RECEIPT, FlowerEngine
from fedfa.flower.environment import disable_telemetry
from fedfa.flower.messages import encode_instruction, encode_tensors
from fedfa.flower.secure_round import SecureRound, layout_of, repeated, zeros_like
from fedfa.learning.aggregate import Contribution
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.tensors import ComponentTensors
from fedfa.protection.secure.encoding import SMALLEST
from fedfa.protection.secure.protocol import SecureSumError

disable_telemetry()
from flwr.app import ArrayRecord, ConfigRecord, RecordDict  # noqa: E402  (Flower reads the environment on import)

log = logging.getLogger("fedfa")


class SecureFlowerEngine(FlowerEngine):
    """Trains on sites of which it sees masked contributions and their sum."""

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`. The sum is the result of the first client, the others have zeros.

        Raises:
            FederationError: No attempt gave a sum.
        """
        started, layout = time.monotonic(), layout_of(self._spec(plan))
        tensors, name = encode_tensors(plan.model, plan.broadcast), f"round {plan.round + 1}"
        self.transport.expect(8 * layout.length)
        for client in clients:
            self._read_versions(client, client_state, plan.round)

        def records(client: int) -> dict[str, ArrayRecord | ConfigRecord]:
            return {**tensors, "plan": encode_instruction(self.instruction(client), plan)}

        left_out: set[int] = set()  # sites that made an attempt fail

        def attempt() -> tuple[SecureRound, list[int], Contribution]:
            self.registry.refresh()
            needed = max(
                self._quorum(len(clients)), relied_on(self.experiment.config, self.experiment.task.num_clients)
            )
            secure = SecureRound(layout, needed, f"{self.run} {name}", self._ask)
            asked = [c for c in clients if c in self.registry.connected and c not in left_out]
            try:
                return secure, *secure.run(asked, records)
            except SecureSumError:
                if len(set(asked) - secure.culprits) >= max(SMALLEST, needed):
                    left_out.update(secure.culprits)
                raise
            finally:
                for stage, problems in secure.problems.items():
                    for client, why in problems.items():
                        log.warning("%s: site %d: %s: %s", name, client, stage, why)

        secure, arrived, total = repeated(self.config.attempts, attempt, name)
        nothing = zeros_like(total)
        for position, client in enumerate(arrived):
            receipt: ComponentTensors = {}
            if client in secure.keeps:
                versions = (*self._versions.get(client, ()), plan.round + 1)
                receipt = {RECEIPT: {"versions": torch.tensor(versions, dtype=torch.int64)}}
            if client in secure.lost_state:
                log.warning("%s: site %d lost its client state and started with empty state", name, client)
            yield ClientResult(client, nothing if position else total, receipt, 0, 0, None)
        absent = [client for client in clients if client not in arrived]
        remarks: dict[str, Any] = {"absent": absent} if absent else {}
        self._remarks = {"federation": {**remarks, "seconds": {"round": round(time.monotonic() - started, 4)}}}

    def _ask(
        self, requests: Mapping[int, RecordDict], kind: str, enough: Callable[[int], bool]
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Send a message to each of some clients and yield what they answer."""
        nodes = {node: c for c in requests if (node := self.registry.connected.get(c)) is not None}
        seconds = self.config.round_seconds
        pending = self.transport.send({n: requests[c] for n, c in nodes.items()}, kind, kind, seconds)
        silent = len(requests) - len(nodes)

        def so_far() -> bool:
            return enough(len(requests) - silent - len(pending.unanswered))

        for reply in self._replies(pending, time.monotonic() + seconds, so_far):
            yield nodes[reply.node], reply.problem if reply.content is None else reply.content
        for node in pending.unanswered:
            yield nodes[node], "no reply in time"
