"""Secure aggregation: the server learns the sum of the vectors of those who stayed, and nothing else of any of them.

K. Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017 (double masks);
with many clients on the sparse graph of J. Bell, K. Bonawitz, A. Gascón, T. Lepoint, M. Raykova, *Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead*, CCS 2020. Four stages, each a message to and from every client:

1. ``advertise``: a client sends two public keys, one for messages to others and one for masks.
2. ``share``: it shares its mask key and a random seed among its neighbours, sealed so that the server cannot read them,
   and commits itself to the seed.
3. ``masked``: it sends its vector plus the mask of its seed plus masks agreed with its neighbours, which cancel in the
   sum.
4. ``unmask``: knowing who arrived, it sends for each one *either* the share of the seed (it arrived) *or* the share
   of the mask key (it did not), never both, and only once.

Clients that are lost after any stage are left out, or, if their vector arrived, stay in the sum; below the threshold
the session fails and the round is repeated with new keys. Reconstructed secrets are checked against public key and
commitment, so a wrong share is noticed and, with enough right ones, its sender named. Both sides are plain state
machines without any transport.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedfa.errors import FedfaError
from fedfa.protection.secure.encoding import SMALLEST
from fedfa.protection.secure.keys import KEY_BYTES, Identity, agreed_key, commitment, mask, opened, public_key, sealed
from fedfa.protection.secure.shamir import SHARE_BYTES, reconstruct, share, value_at

DENSE = 40
"""Number of clients up to which everybody is everybody's neighbour."""
_COMBINATIONS = 500
"""How many choices of shares are tried before a session is given up because of wrong ones."""


class SecureSumError(FedfaError):
    """A session cannot go on; nothing was revealed, and the round can be repeated with a new session."""


@dataclass(frozen=True)
class Advertisement:
    """Stage 1: the public keys of a client, signed where sites have identities."""

    client: int
    message_key: bytes
    mask_key: bytes
    signature: bytes = b""

    def content(self, session: bytes) -> bytes:
        """What is signed."""
        return b"fedfa keys\x00" + session + self.client.to_bytes(8, "big") + self.message_key + self.mask_key


@dataclass(frozen=True)
class SealedShares:
    """Stage 2: for each neighbour a ciphertext that only it can open; and the commitment to the seed."""

    client: int
    commitment: bytes
    ciphertexts: Mapping[int, bytes]


@dataclass(frozen=True)
class MaskedVector:
    """Stage 3."""

    client: int
    session: bytes
    vector: np.ndarray


@dataclass(frozen=True)
class Shares:
    """Stage 4: shares by the client whose secret they are of."""

    client: int
    session: bytes
    seeds: Mapping[int, bytes]
    mask_keys: Mapping[int, bytes]


def neighbours(
    clients: Sequence[int], order: Sequence[int] | None = None, degree: int | None = None
) -> dict[int, list[int]]:
    """The graph: complete for few clients; above, each is joined to the nearest ones on a ring of random order.

    Args:
        clients: All clients.
        order: The ring; left out, random.
        degree: Even number of neighbours; left out, everybody up to :data:`DENSE` clients, else about 4 log₂ n + 16,
            which keeps the chance that some client is left without a majority of its neighbours negligible.

    Example:
        >>> neighbours([1, 2, 3])
        {1: [2, 3], 2: [1, 3], 3: [1, 2]}
        >>> neighbours([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2)[1]
        [2, 5]
    """
    n = len(clients)
    if degree is None:
        degree = n - 1 if n <= DENSE else 2 * (2 * n.bit_length() + 8)
    if degree >= n - 1:
        return {client: sorted(other for other in clients if other != client) for client in clients}
    ring = list(order) if order is not None else secrets.SystemRandom().sample(list(clients), n)
    steps = range(1, degree // 2 + 1)
    return {
        client: sorted({ring[(k + sign * step) % n] for step in steps for sign in (-1, 1)})
        for k, client in enumerate(ring)
    }


def threshold_of(degree: int) -> int:
    """Shares that are needed of a client's neighbours: more than two thirds of them.

    With more than half, the server cannot obtain both kinds of shares by telling half of the neighbours that a client
    arrived and the other half that it did not; the rest is reserve against colluding clients.
    """
    return 2 * degree // 3 + 1 if degree > 1 else 1


# -- client -----------------------------------------------------------------------------------------------------------
@dataclass
class SecureClient:
    """One client in one session. Its fields can be stored between messages.

    Args:
        client: Its number.
        session: Run, round and attempt; the same for everybody, never used twice.
        identity: Signs its keys, where sites have identities.
        known: The other sites' public signing keys; empty: keys are believed as the server forwards them.
    """

    client: int
    session: bytes
    identity: Identity | None = None
    known: Mapping[int, Ed25519PublicKey] = field(default_factory=dict)
    message_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    mask_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    threshold: int = 0
    others: dict[int, Advertisement] = field(default_factory=dict)
    """The neighbours' keys."""
    received: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Shares of neighbours' seeds and mask keys."""
    least: int = 1
    """Vectors that a sum must have, this client's included; noise in shares relies on so many."""
    answered: bool = False

    def advertise(self) -> Advertisement:
        """Stage 1."""
        made = Advertisement(self.client, public_key(self.message_key), public_key(self.mask_key))
        if self.identity is None:
            return made
        return replace(made, signature=self.identity.sign(made.content(self.session)))

    def share(self, neighbours: Sequence[Advertisement]) -> SealedShares:
        """Stage 2, from the keys of the neighbours.

        Raises:
            SecureSumError: Keys are missing, used twice or not signed by their owners.
        """
        keys = [key for one in neighbours for key in (one.message_key, one.mask_key)]
        if len(set(keys)) < len(keys) or len({one.client for one in neighbours}) < len(neighbours):
            raise SecureSumError("two clients have the same key")
        if not neighbours or self.client in {one.client for one in neighbours}:
            raise SecureSumError("there is nobody to share with")
        for one in neighbours if self.known else ():
            public = self.known.get(one.client)
            if public is None or not Identity.verify(public, one.signature, one.content(self.session)):
                raise SecureSumError(f"the keys of client {one.client} are not signed by it")
        self.others = {one.client: one for one in neighbours}
        self.threshold = threshold_of(len(self.others))
        points = [_point(client) for client in self.others]
        seeds, mask_keys = (share(secret, points, self.threshold) for secret in (self.seed, self.mask_key))
        return SealedShares(
            self.client,
            commitment(self.seed, self.session, self.client),
            {
                other: sealed(
                    self._message_key(other), self.client, other, seeds[_point(other)] + mask_keys[_point(other)],
                    self.session,
                )
                for other in self.others
            },
        )  # fmt: skip

    def masked(self, ciphertexts: Mapping[int, bytes], vector: np.ndarray) -> MaskedVector:
        """Stage 3, from the neighbours' sealed shares: the vector under all masks.

        Raises:
            SecureSumError: Too few neighbours shared, or a ciphertext is not of this session.
        """
        if len(ciphertexts) < self.threshold:
            raise SecureSumError(f"{len(ciphertexts)} neighbours shared their secrets, {self.threshold} are needed")
        for other, ciphertext in ciphertexts.items():
            if other not in self.others:
                raise SecureSumError(f"client {other} is no neighbour")
            content = opened(self._message_key(other), other, self.client, ciphertext, self.session)
            if content is None or len(content) != 2 * SHARE_BYTES:
                raise SecureSumError(f"the shares of client {other} are not of this session")
            self.received[other] = content[:SHARE_BYTES], content[SHARE_BYTES:]
        total = vector.astype(np.uint64) + mask(self.seed, len(vector))
        for other in self.received:
            key = agreed_key(self.mask_key, self.others[other].mask_key, "mask", self.session, (self.client, other))
            total = total + mask(key, len(vector)) if self.client < other else total - mask(key, len(vector))
        return MaskedVector(self.client, self.session, total)

    def unmask(self, arrived: Sequence[int], lost: Sequence[int]) -> Shares:
        """Stage 4: seeds of those who arrived, mask keys of those who did not.

        Args:
            arrived: Neighbours whose masked vectors the server has.
            lost: Neighbours that shared their secrets but whose vectors it does not have.

        Raises:
            SecureSumError: The server asks twice, for both kinds of shares of one client, or with too few clients.
        """
        if self.answered:
            raise SecureSumError("the server asked for shares twice")
        if set(arrived) & set(lost):
            raise SecureSumError("the server asked for both kinds of shares of one client")
        if not {*arrived, *lost} <= self.received.keys():
            raise SecureSumError("the server asked for shares that this client does not hold")
        if len(set(arrived)) < self.threshold:
            raise SecureSumError(f"{len(set(arrived))} neighbours are left, {self.threshold} are needed")
        everybody = len(self.others) < DENSE  # otherwise it sees a part of the sum only
        if everybody and len(set(arrived)) + 1 < self.least:
            raise SecureSumError(f"the noise of {self.least} clients is needed, {len(set(arrived)) + 1} are in the sum")
        self.answered = True
        return Shares(
            self.client,
            self.session,
            {other: self.received[other][0] for other in arrived},
            {other: self.received[other][1] for other in lost},
        )

    def _message_key(self, other: int) -> bytes:
        key, pair = self.others[other].message_key, (self.client, other)
        return agreed_key(self.message_key, key, "message", self.session, pair)


# -- server -----------------------------------------------------------------------------------------------------------
@dataclass
class SecureServer:
    """The server in one session.

    Args:
        session: Run, round and attempt.
        length: Numbers in a vector.
        degree: See :func:`neighbours`.
    """

    session: bytes
    length: int
    degree: int | None = None
    keys: dict[int, Advertisement] = field(default_factory=dict)
    graph: dict[int, list[int]] = field(default_factory=dict)
    shares: dict[int, SealedShares] = field(default_factory=dict)
    arrived: list[int] = field(default_factory=list)
    liars: set[int] = field(default_factory=set)
    """Clients whose shares were wrong."""
    _total: np.ndarray | None = None

    def close_advertisements(self, sent: Sequence[Advertisement]) -> dict[int, list[Advertisement]]:
        """End stage 1: for each client its neighbours' keys.

        Raises:
            SecureSumError: Fewer than three clients: two would know each other's vector from the sum.
        """
        self.keys = {one.client: one for one in sent}
        if len(self.keys) < SMALLEST:
            raise SecureSumError(f"{len(self.keys)} clients are connected; a secure sum needs {SMALLEST}")
        self.graph = neighbours(sorted(self.keys), degree=self.degree)
        return {client: [self.keys[other] for other in others] for client, others in self.graph.items()}

    def close_shares(self, sent: Sequence[SealedShares]) -> dict[int, dict[int, bytes]]:
        """End stage 2: for each client the ciphertexts that its neighbours made for it.

        A client that left out a neighbour counts as lost: one of the two would add a mask that the other does not.
        """
        whole = (one for one in sent if set(one.ciphertexts) == set(self.graph.get(one.client, ())))
        self.shares = {one.client: one for one in whole}
        return {
            client: {
                other: self.shares[other].ciphertexts[client] for other in self.graph[client] if other in self.shares
            }
            for client in self.shares
        }

    def add(self, masked: MaskedVector) -> None:
        """Stage 3: take in a masked vector.

        Raises:
            SecureSumError: It is of another session, another length, of somebody unknown, or the second one.
        """
        if masked.session != self.session:
            raise SecureSumError(f"the vector of client {masked.client} is of another session")
        if masked.client not in self.shares or masked.client in self.arrived:
            raise SecureSumError(f"no vector of client {masked.client} is expected")
        if masked.vector.shape != (self.length,) or masked.vector.dtype != np.uint64:
            raise SecureSumError(f"the vector of client {masked.client} does not have {self.length} 64-bit integers")
        self._total = masked.vector.copy() if self._total is None else self._total + masked.vector
        self.arrived.append(masked.client)

    def requests(self) -> dict[int, tuple[list[int], list[int]]]:
        """End stage 3: for each client that arrived, the neighbours that did and those that were lost."""
        present = set(self.arrived)
        return {
            client: (
                [other for other in self.graph[client] if other in present],
                [other for other in self.graph[client] if other in self.shares and other not in present],
            )
            for client in self.arrived
        }

    def total(self, sent: Sequence[Shares]) -> np.ndarray:
        """End stage 4: the sum of the vectors of all clients that arrived.

        Raises:
            SecureSumError: Too few right shares of somebody's secret.
        """
        if self._total is None:
            raise SecureSumError("no vector arrived")
        present, asked = set(self.arrived), self.requests()
        seeds: dict[int, dict[int, bytes]] = {}
        mask_keys: dict[int, dict[int, bytes]] = {}
        for one in sent:
            if one.session != self.session or one.client not in asked:
                continue
            # Only what was asked for: nobody can make the server hold both kinds of shares of one client.
            for other in asked[one.client][0]:
                if len(one.seeds.get(other, b"")) == SHARE_BYTES:
                    seeds.setdefault(other, {})[_point(one.client)] = one.seeds[other]
            for other in asked[one.client][1]:
                if len(one.mask_keys.get(other, b"")) == SHARE_BYTES:
                    mask_keys.setdefault(other, {})[_point(one.client)] = one.mask_keys[other]
        total = self._total
        for client in self.arrived:
            promised = self.shares[client].commitment
            seed = self._secret(client, seeds, lambda s, c=client, p=promised: commitment(s, self.session, c) == p)  # type: ignore[misc]  # bound now
            total = total - mask(seed, self.length)
        lost = [client for client in self.shares if client not in present]
        for client in lost:
            joined = [other for other in self.graph[client] if other in present]
            if not joined:
                continue  # its masks are in no vector
            advertised = self.keys[client].mask_key
            key = self._secret(client, mask_keys, lambda s, a=advertised: public_key(s) == a)  # type: ignore[misc]  # bound now
            for other in joined:
                agreed = agreed_key(key, self.keys[other].mask_key, "mask", self.session, (client, other))
                noise = mask(agreed, self.length)
                total = total - noise if other < client else total + noise  # what ``other`` put in is taken out
        return total

    def _secret(self, client: int, shares: Mapping[int, dict[int, bytes]], right: Callable[[bytes], bool]) -> bytes:
        """A secret from shares of which some may be wrong; names those who sent wrong ones."""
        found, needed = shares.get(client, {}), threshold_of(len(self.graph[client]))
        if len(found) < needed:
            raise SecureSumError(f"{len(found)} shares of client {client}'s secret came back, {needed} are needed")
        draw = random.Random(0)  # which shares are tried first is no secret
        for _ in range(_COMBINATIONS if len(found) > needed else 1):
            chosen = draw.sample(sorted(found), needed)
            used = {x: found[x] for x in chosen}
            secret = reconstruct(used)
            if secret is not None and right(secret):
                wrong = [x for x in found if x not in chosen and value_at(used, x) != int.from_bytes(found[x], "big")]
                self.liars |= {x - 1 for x in wrong}
                return secret
        raise SecureSumError(f"the shares of client {client}'s secret do not fit together; some of them are wrong")


def _point(client: int) -> int:
    """Where a client's shares are: x = 0 would be the secret."""
    return client + 1
