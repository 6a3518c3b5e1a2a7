"""The server's side of a round with secure sums: four stages over Flower, repeated with new keys if too few are left.

The result of the round is one sum. The round loop expects a result per client, so the sum is handed over as that of the
first client and zeros as those of the others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fedfa.errors import FederationError
from fedfa.flower.checks import ContributionSpec
from fedfa.flower.environment import disable_telemetry
from fedfa.flower.messages import BadMessageError
from fedfa.flower.secure_messages import (
    KEYS,
    RECORD,
    SHARES,
    TRAIN,
    UNMASK,
    ask_keys,
    ask_shares,
    ask_unmasking,
    ask_vector,
    decode_keys,
    decode_shares,
    decode_unmasking,
    decode_vector,
)
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.protection.secure.encoding import Layout
from fedfa.protection.secure.protocol import SecureServer, SecureSumError, threshold_of

disable_telemetry()
from flwr.app import ArrayRecord, ConfigRecord, RecordDict  # noqa: E402  (Flower reads the environment when it is imported)

log = logging.getLogger("fedfa")

ReplyT = TypeVar("ReplyT")

Ask = Callable[[Mapping[int, RecordDict], str, Callable[[int], bool]], Iterator[tuple[int, RecordDict | str]]]
"""Sends messages of a type to clients; yields replies (or problems) by client until all answered, time is up, or the
grace period has passed since as many as are enough answered."""


def layout_of(spec: ContributionSpec) -> Layout:
    """The layout of the vector, from what the server expects of a client."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group, entry in spec.items():
        shapes[f"{group}#weight"] = tuple(entry.weight)
        shapes |= {f"{group}:{name}": tuple(shape) for name, (shape, _) in entry.tensors.items()}
    return Layout({name: shapes[name] for name in sorted(shapes)})


@dataclass
class SecureRound:
    """One attempt at the sum of a round.

    Args:
        layout: Of the vector.
        needed: Vectors that the round needs.
        label: Run and round, which the session is named after.
        ask: See :data:`Ask`.
    """

    layout: Layout
    needed: int
    label: str
    ask: Ask
    problems: dict[str, dict[int, str]] = field(default_factory=dict)
    """By stage, in order, and client."""
    keeps: set[int] = field(default_factory=set)
    """Clients that keep client state."""
    lost_state: set[int] = field(default_factory=set)
    """Clients that had lost it."""

    def run(
        self, clients: Sequence[int], plans: Callable[[int], dict[str, ArrayRecord | ConfigRecord]]
    ) -> tuple[list[int], Contribution]:
        """The four stages.

        Args:
            clients: The cohort.
            plans: Gives the records of the plan for a client.

        Returns:
            The clients that are in the sum, and the sum.

        Raises:
            SecureSumError: It failed; nothing was revealed.
        """
        session = f"{self.label} {secrets.token_hex(16)}".encode()
        server = SecureServer(session, self.layout.length)
        keys = self._stage(KEYS, {c: ask_keys(session, c) for c in clients}, decode_keys)
        neighbours = server.close_advertisements([keys[c] for c in clients if c in keys])
        requests = {c: ask_shares(session, others) for c, others in neighbours.items()}
        shares = self._stage(SHARES, requests, decode_shares)
        boxes = server.close_shares([shares[c] for c in clients if c in shares])
        vectors = {
            c: RecordDict({**plans(c), RECORD: ask_vector(session, self.layout, box)}) for c, box in boxes.items()
        }
        for client, (masked, keeps, lost) in self._stage(TRAIN, vectors, decode_vector).items():
            try:
                server.add(masked)
            except SecureSumError as error:
                self._fail(TRAIN, client, str(error))
                continue
            self.keeps |= {client} if keeps else set()
            self.lost_state |= {client} if lost else set()
        if len(server.arrived) < self.needed:
            raise SecureSumError(f"{len(server.arrived)} masked vectors arrived, {self.needed} are needed")
        asked = {c: ask_unmasking(session, *both) for c, both in server.requests().items()}
        answers = self._stage(UNMASK, asked, decode_unmasking)
        total = server.total(list(answers.values()))
        for liar in sorted(server.liars):
            log.warning("%s: site %d sent wrong shares of other sites' secrets", self.label, liar)
        return [c for c in clients if c in server.arrived], self.layout.to_contribution(total)

    def _stage(
        self, kind: str, requests: Mapping[int, RecordDict], decode: Callable[[RecordDict], ReplyT]
    ) -> dict[int, ReplyT]:
        """One message to each client; the replies that can be read and are of the client that was asked."""
        found: dict[int, ReplyT] = {}
        # For everything but training every answer counts: a missing one makes the rest of the round weaker.
        enough = max(self.needed, threshold_of(max(1, len(requests) - 1)) + 1)
        for client, reply in self.ask(requests, kind, lambda answered: answered >= enough):
            try:
                if isinstance(reply, str):
                    raise BadMessageError(reply)
                decoded = decode(reply)
                sender = decoded[0].client if isinstance(decoded, tuple) else decoded.client  # type: ignore[attr-defined]  # all have it
                if sender != client:
                    raise BadMessageError(f"it is from client {sender}")
                found[client] = decoded
            except BadMessageError as error:
                self._fail(kind, client, str(error))
        return found

    def _fail(self, kind: str, client: int, problem: str) -> None:
        self.problems.setdefault(kind, {})[client] = problem

    @property
    def culprits(self) -> set[int]:
        """The clients that failed first; others may have failed because of them."""
        return set(next(iter(self.problems.values()), {}))


def zeros_like(contribution: Contribution) -> Contribution:
    """A contribution of nothing."""
    return {
        group: WeightedSum(
            {name: torch.zeros_like(value) for name, value in entry.tensors.items()}, torch.zeros_like(entry.weight)
        )
        for group, entry in contribution.items()
    }


def repeated(
    attempts: int, attempt: Callable[[], tuple[SecureRound, list[int], Contribution]], label: str
) -> tuple[SecureRound, list[int], Contribution]:
    """The first attempt that succeeds.

    Raises:
        FederationError: None did.
    """
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except SecureSumError as error:
            log.warning("%s: attempt %d of %d at the secure sum failed: %s", label, number, attempts, error)
            problem = str(error)
    raise FederationError(
        f"{label}: no secure sum in {attempts} attempts ({problem}). Nothing of a single site was revealed. Start the "
        "run again to continue from its last checkpoint"
    )
