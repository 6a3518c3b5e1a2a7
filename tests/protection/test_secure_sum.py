"""Secure sums: exact sums whoever is lost, and nothing else; liars, replays and a greedy server are noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfa.protection.secure.keys import Identity
from fedfa.protection.secure.protocol import (
    MaskedVector,
    SealedShares,
    SecureClient,
    SecureServer,
    SecureSumError,
    Shares,
    neighbours,
    threshold_of,
)
from fedfa.protection.secure.shamir import PRIME, reconstruct, share, value_at

SESSION = b"run 1, round 3, attempt 0"


def vectors(clients: int, length: int = 20, seed: int = 0) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {c: draw.integers(-(2**50), 2**50, length).view(np.uint64) for c in range(clients)}


def added(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The sum modulo 2⁶⁴."""
    return np.add.reduce(np.stack(list(vectors)), axis=0)  # type: ignore[no-any-return]


@dataclass
class Session:
    """A session in memory, in which clients can be lost after any stage."""

    inputs: Mapping[int, np.ndarray]
    degree: int | None = None
    lost: Mapping[int, int] = field(default_factory=dict)
    """Stage (1 to 4) in which a client no longer answers."""
    lie: Callable[[Shares], Shares] = lambda shares: shares
    session: bytes = SESSION
    masked: list[MaskedVector] = field(default_factory=list)
    least: int = 1

    def run(self) -> np.ndarray:
        length = len(next(iter(self.inputs.values())))
        self.clients = {c: SecureClient(c, self.session, least=self.least) for c in self.inputs}
        self.server = SecureServer(self.session, length, self.degree)
        keys = self.server.close_advertisements([self.clients[c].advertise() for c in self.clients if self.there(c, 1)])
        boxes = self.server.close_shares([self.clients[c].share(keys[c]) for c in keys if self.there(c, 2)])
        for c in boxes:
            if self.there(c, 3):
                self.masked.append(self.clients[c].masked(boxes[c], self.inputs[c]))
                self.server.add(self.masked[-1])
        asked = self.server.requests()
        return self.server.total([self.lie(self.clients[c].unmask(*asked[c])) for c in asked if self.there(c, 4)])

    def there(self, client: int, stage: int) -> bool:
        return self.lost.get(client, 5) > stage

    def expected(self) -> np.ndarray:
        arrived = [self.inputs[c] for c in self.inputs if self.there(c, 3)]
        return added(arrived)


# -- secret sharing -----------------------------------------------------------------------------------------------
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4))
def test_any_threshold_shares_give_the_secret_and_fewer_give_anything(secret: bytes, needed: int, more: int) -> None:
    points = list(range(1, needed + more + 1))
    shares = share(secret, points, needed)
    for chosen in itertools.islice(itertools.combinations(points, needed), 10):
        assert reconstruct({x: shares[x] for x in chosen}) == secret
    if needed > 1:
        # With one share less, every other secret is consistent: the polynomial through them and (0, other) exists.
        few = {x: shares[x] for x in points[: needed - 1]}
        other = {0: (123).to_bytes(66, "big"), **few}
        assert value_at(other, 0) == 123
        assert reconstruct(few) != secret
    assert all(int.from_bytes(one, "big") < PRIME for one in shares.values())


def test_shares_at_zero_or_twice_are_refused() -> None:
    for points, needed in (([0, 1], 2), ([1, 1], 2), ([1, 2], 3), ([1], 0)):
        with pytest.raises(ValueError, match=r"point|threshold"):
            share(bytes(32), points, needed)


# -- sums -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("clients", "degree"), [(3, None), (7, None), (12, 6), pytest.param(60, None, marks=pytest.mark.slow)]
)
def test_the_sum_is_exact(clients: int, degree: int | None) -> None:
    session = Session(vectors(clients), degree)
    assert np.array_equal(session.run(), session.expected())
    assert not session.server.liars


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
@pytest.mark.parametrize("clients", [6, 12])
def test_clients_lost_at_any_stage_do_not_matter_while_enough_are_left(stage: int, clients: int) -> None:
    # Complete graph: 2(n−1)/3 + 1 of a client's n − 1 neighbours must answer.
    spare = clients - 1 - threshold_of(clients - 1)
    session = Session(vectors(clients), lost=dict.fromkeys(range(1, 1 + spare), stage))
    assert np.array_equal(session.run(), session.expected())


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.dictionaries(st.integers(0, 9), st.integers(1, 4), max_size=7))
def test_losses_at_several_stages_end_in_the_exact_sum_or_in_an_error(seed: int, lost: dict[int, int]) -> None:
    session = Session(vectors(10, 5, seed), lost=lost)
    try:
        total = session.run()
    except SecureSumError:
        assert len(lost) > 2  # up to 9 − 7 neighbours of each can be spared
        return
    assert np.array_equal(total, session.expected())


def test_too_few_clients_are_refused() -> None:
    with pytest.raises(SecureSumError, match="needs 3"):
        Session(vectors(2)).run()
    with pytest.raises(SecureSumError, match="are needed"):
        Session(vectors(9), lost=dict.fromkeys(range(5), 3)).run()
    with pytest.raises(SecureSumError, match="are needed"):
        Session(vectors(9), lost=dict.fromkeys(range(5), 4)).run()


def test_the_sparse_graph_is_regular_symmetric_and_connected() -> None:
    graph = neighbours(list(range(500)))
    degrees = {len(others) for others in graph.values()}
    assert len(degrees) == 1
    assert 30 < degrees.pop() < 80  # grows with the logarithm
    assert all(client in graph[other] for client, others in graph.items() for other in others)
    reached: set[int] = set()
    frontier = {0}
    while frontier:
        reached |= frontier
        frontier = {other for client in frontier for other in graph[client]} - reached
    assert len(reached) == 500
    assert neighbours(list(range(500))) != graph


# -- what the server sees -----------------------------------------------------------------------------------------
def test_masked_vectors_are_uniform_and_tell_nothing_of_the_input() -> None:
    zeros = {c: np.zeros(20_000, np.uint64) for c in range(4)}
    first, second = Session(zeros), Session(zeros, session=b"another")
    assert not first.run().any()
    assert not second.run().any()
    for masked in (*first.masked, *second.masked):
        counts = np.bincount(np.frombuffer(masked.vector.tobytes(), np.uint8), minlength=256)
        expected = counts.sum() / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        # 255 degrees of freedom: mean 255, deviation √510; six deviations.
        assert abs(chi_squared - 255) < 6 * 510**0.5
        ones = np.unpackbits(np.frombuffer(masked.vector.tobytes(), np.uint8)).mean()
        assert abs(ones - 0.5) < 6 * 0.5 / (64 * 20_000) ** 0.5
    assert not np.array_equal(first.masked[0].vector, second.masked[0].vector)


def test_without_the_last_stage_every_partial_sum_is_still_masked() -> None:
    session = Session({c: np.full(1000, c, np.uint64) for c in range(4)})
    session.run()
    for size in (1, 2, 3, 4):
        for chosen in itertools.combinations(session.masked, size):
            total = added([one.vector for one in chosen])
            assert len(np.unique(total)) == 1000  # no two of 1,000 equal inputs are equal


# -- attacks --------------------------------------------------------------------------------------------------------
def started(clients: int = 5) -> tuple[Session, dict[int, dict[int, bytes]]]:
    """A session after stage 2."""
    session = Session(vectors(clients))
    session.clients = {c: SecureClient(c, SESSION) for c in session.inputs}
    session.server = SecureServer(SESSION, 20)
    keys = session.server.close_advertisements([one.advertise() for one in session.clients.values()])
    return session, session.server.close_shares([session.clients[c].share(keys[c]) for c in keys])


def test_a_client_answers_once_and_never_with_both_kinds_of_shares() -> None:
    session, boxes = started()
    client = session.clients[0]
    client.masked(boxes[0], session.inputs[0])
    with pytest.raises(SecureSumError, match="both kinds"):
        client.unmask([1, 2, 3, 4], [4])
    with pytest.raises(SecureSumError, match="does not hold"):
        client.unmask([1, 2, 3, 9], [])
    with pytest.raises(SecureSumError, match="are left"):
        client.unmask([1], [2, 3, 4])
    assert set(client.unmask([1, 2, 3], [4]).seeds) == {1, 2, 3}
    with pytest.raises(SecureSumError, match="twice"):
        client.unmask([1, 2, 4], [3])


def test_two_stories_about_who_arrived_never_give_both_secrets_of_a_client() -> None:
    """A server that tells some neighbours that client 0 arrived and the others that it was lost lacks shares of one."""
    for degree in range(2, 60):
        needed = threshold_of(degree)
        assert all(told < needed or degree - told < needed for told in range(degree + 1))


@pytest.mark.parametrize("kind", ["seeds", "mask_keys"])
def test_a_wrong_share_is_noticed_and_its_sender_named(kind: str) -> None:
    def lie(sent: Shares) -> Shares:
        if sent.client != 3:
            return sent
        wrong = {other: bytes(65) + b"\x07" for other in getattr(sent, kind)}
        return replace(sent, seeds=wrong) if kind == "seeds" else replace(sent, mask_keys=wrong)

    session = Session(vectors(10), lost={7: 3}, lie=lie)
    assert np.array_equal(session.run(), session.expected())
    assert session.server.liars == {3}


def test_too_many_wrong_shares_end_the_session_without_a_sum() -> None:
    def lie(sent: Shares) -> Shares:
        return replace(sent, seeds={other: bytes(66) for other in sent.seeds}) if sent.client < 4 else sent

    with pytest.raises(SecureSumError, match="do not fit together"):
        Session(vectors(6), lie=lie).run()


def test_messages_of_another_session_are_refused() -> None:
    session, boxes = started()
    other, old = started()
    with pytest.raises(SecureSumError, match="not of this session"):  # same clients, other keys
        session.clients[0].masked(old[0], session.inputs[0])
    replayed = MaskedVector(1, b"run 1, round 2, attempt 0", session.inputs[1])
    with pytest.raises(SecureSumError, match="another session"):
        session.server.add(replayed)
    masked = session.clients[1].masked(boxes[1], session.inputs[1])
    session.server.add(masked)
    with pytest.raises(SecureSumError, match="no vector of client 1 is expected"):
        session.server.add(masked)
    with pytest.raises(SecureSumError, match="64-bit integers"):
        session.server.add(MaskedVector(2, SESSION, np.zeros(3, np.uint64)))
    assert other.server.arrived == []


def test_a_ciphertext_for_somebody_else_cannot_be_opened() -> None:
    session, boxes = started()
    swapped = {**boxes[0], 2: boxes[1][2]}  # client 2's shares for client 1
    with pytest.raises(SecureSumError, match="shares of client 2"):
        session.clients[0].masked(swapped, session.inputs[0])
    tampered = {**boxes[0], 2: boxes[0][2][:-1] + bytes([boxes[0][2][-1] ^ 1])}
    with pytest.raises(SecureSumError, match="shares of client 2"):
        session.clients[0].masked(tampered, session.inputs[0])


def test_signed_keys_keep_the_server_from_slipping_in_its_own() -> None:
    private = {c: Ed25519PrivateKey.generate() for c in range(4)}
    known = {c: key.public_key() for c, key in private.items()}
    clients = {c: SecureClient(c, SESSION, Identity(private[c]), known) for c in range(4)}
    sent = [clients[c].advertise() for c in (1, 2, 3)]
    assert isinstance(clients[0].share(sent), SealedShares)
    forged = replace(SecureClient(2, SESSION).advertise(), signature=sent[1].signature)
    other_session = SecureClient(2, b"earlier", Identity(private[2])).advertise()
    for wrong in (forged, other_session, SecureClient(2, SESSION).advertise()):
        with pytest.raises(SecureSumError, match="keys of client 2 are not signed"):
            SecureClient(0, SESSION, Identity(private[0]), known).share([sent[0], wrong, sent[2]])
    with pytest.raises(SecureSumError, match="same key"):
        clients[0].share([sent[0], sent[1], replace(sent[1], client=3)])
