"""Encoding of the stages of a secure sum (:mod:`fedfa.protection.secure.protocol`) as Flower's records.

=======  ==========================  ======================================================  ========================
stage    message type                to a site                                               from a site
=======  ==========================  ======================================================  ========================
1        ``query.secure_keys``       session, client                                         public keys
2        ``query.secure_shares``     public keys of the neighbours                           sealed shares
3        ``train.secure``            a plan, the layout of the vector, sealed shares         the masked vector
4        ``query.secure_unmask``     which neighbours arrived, which did not                 shares
=======  ==========================  ======================================================  ========================

Decoding raises :class:`~fedfa.flower.messages.BadMessageError` for any malformed input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedfa.flower.environment import disable_telemetry
from fedfa.flower.messages import BadMessageError, pack, unpack
from fedfa.protection.secure.encoding import Layout
from fedfa.protection.secure.protocol import Advertisement, MaskedVector, SealedShares, SecureClient, Shares

disable_telemetry()
from flwr.app import ConfigRecord, RecordDict  # noqa: E402  (Flower reads the environment when it is imported)

KEYS, SHARES, TRAIN, UNMASK = "query.secure_keys", "query.secure_shares", "train.secure", "query.secure_unmask"
RECORD = "secure"
"""Name of the record with a stage's plain values, and of the site's own record between stages."""
_MASKED = "masked"


def record_of(content: RecordDict) -> Mapping[str, Any]:
    """The plain values of a stage."""
    if RECORD not in content.config_records:
        raise BadMessageError("the message has no record of a secure sum")
    return content.config_records[RECORD]


def _get(values: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    if type(values.get(name)) is not kind:
        raise BadMessageError(f"{name} of the secure sum is not of type {kind.__name__}")
    return values[name]


def _lists(values: Mapping[str, Any], names: str, contents: str, prefix: str = "") -> dict[int, bytes]:
    """Two lists, of clients and of bytes, as a mapping."""
    clients, parts = (_get(values, prefix + name, list) for name in (names, contents))
    if len(clients) != len(parts) or len(set(clients)) < len(clients):
        raise BadMessageError("clients and contents of the secure sum do not fit together")
    if not all(type(c) is int and c >= 0 for c in clients) or not all(type(part) is bytes for part in parts):
        raise BadMessageError("clients or contents of the secure sum are of the wrong type")
    return dict(zip(clients, parts, strict=True))


def _pair(found: Mapping[int, bytes], names: str, contents: str, prefix: str = "") -> dict[str, Any]:
    return {prefix + names: list(found), prefix + contents: list(found.values())}


# -- to a site --------------------------------------------------------------------------------------------------------
def ask_keys(session: bytes, client: int) -> RecordDict:
    """Stage 1."""
    return RecordDict({RECORD: ConfigRecord({"session": session, "client": client})})


def ask_shares(session: bytes, neighbours: Sequence[Advertisement]) -> RecordDict:
    """Stage 2."""
    messages = {one.client: one.message_key for one in neighbours}
    masks = {one.client: one.mask_key for one in neighbours}
    lists = {**_pair(messages, "clients", "message_keys"), "mask_keys": list(masks.values())}
    return RecordDict({RECORD: ConfigRecord({"session": session, **lists})})


def ask_vector(session: bytes, layout: Layout, ciphertexts: Mapping[int, bytes]) -> ConfigRecord:
    """Stage 3: the record beside those of a plan."""
    shapes = json.dumps({name: list(shape) for name, shape in layout.shapes.items()})
    return ConfigRecord({"session": session, "layout": shapes, **_pair(ciphertexts, "clients", "ciphertexts")})


def ask_unmasking(session: bytes, arrived: Sequence[int], lost: Sequence[int]) -> RecordDict:
    """Stage 4."""
    return RecordDict({RECORD: ConfigRecord({"session": session, "arrived": list(arrived), "lost": list(lost)})})


def read_session(content: RecordDict) -> bytes:
    """The session of a message."""
    session: bytes = _get(record_of(content), "session", bytes)
    return session


def read_neighbours(content: RecordDict) -> list[Advertisement]:
    """Stage 2, on a site."""
    values = record_of(content)
    messages, masks = (_lists(values, "clients", name) for name in ("message_keys", "mask_keys"))
    return [Advertisement(client, messages[client], masks[client]) for client in messages]


def read_vector_request(content: RecordDict) -> tuple[Layout, dict[int, bytes]]:
    """Stage 3, on a site."""
    values = record_of(content)
    shapes = json.loads(_get(values, "layout", str))
    layout = Layout({name: tuple(int(size) for size in shape) for name, shape in shapes.items()})
    return layout, _lists(values, "clients", "ciphertexts")


def read_unmasking(content: RecordDict) -> tuple[list[int], list[int]]:
    """Stage 4, on a site."""
    values = record_of(content)
    return list(_get(values, "arrived", list)), list(_get(values, "lost", list))


# -- from a site ------------------------------------------------------------------------------------------------------
def encode_keys(sent: Advertisement) -> RecordDict:
    """Stage 1."""
    values: dict[str, Any] = {"client": sent.client, "message_key": sent.message_key, "mask_key": sent.mask_key}
    return RecordDict({RECORD: ConfigRecord(values)})


def decode_keys(content: RecordDict) -> Advertisement:
    """The inverse of :func:`encode_keys`."""
    values = record_of(content)
    keys = [_get(values, name, bytes) for name in ("message_key", "mask_key")]
    if any(len(key) != 32 for key in keys):
        raise BadMessageError("a public key does not have 32 bytes")
    return Advertisement(_get(values, "client", int), *keys)


def encode_shares(sent: SealedShares) -> RecordDict:
    """Stage 2."""
    lists = _pair(sent.ciphertexts, "clients", "ciphertexts")
    return RecordDict({RECORD: ConfigRecord({"client": sent.client, "commitment": sent.commitment, **lists})})


def decode_shares(content: RecordDict) -> SealedShares:
    """The inverse of :func:`encode_shares`."""
    values = record_of(content)
    client, promised = _get(values, "client", int), _get(values, "commitment", bytes)
    return SealedShares(client, promised, _lists(values, "clients", "ciphertexts"))


def encode_vector(sent: MaskedVector, keeps: bool, lost: bool) -> RecordDict:
    """Stage 3; whether the site keeps client state, and whether it had lost it."""
    values: dict[str, Any] = {"client": sent.client, "session": sent.session, "keeps": keeps, "lost": lost}
    vector = torch.from_numpy(sent.vector.view(np.int64))
    return RecordDict({RECORD: ConfigRecord(values), _MASKED: pack({"vector": vector})})


def decode_vector(content: RecordDict) -> tuple[MaskedVector, bool, bool]:
    """The inverse of :func:`encode_vector`."""
    values = record_of(content)
    tensors = unpack(content.array_records[_MASKED]) if _MASKED in content.array_records else {}
    vector = tensors.get("vector")
    if vector is None or vector.dtype is not torch.int64 or vector.dim() != 1:
        raise BadMessageError("there is no vector of 64-bit integers")
    masked = MaskedVector(_get(values, "client", int), _get(values, "session", bytes), vector.numpy().view(np.uint64))
    return masked, _get(values, "keeps", bool), _get(values, "lost", bool)


def encode_unmasking(sent: Shares) -> RecordDict:
    """Stage 4."""
    seeds = _pair(sent.seeds, "clients", "shares", "seed_")
    masks = _pair(sent.mask_keys, "clients", "shares", "mask_")
    return RecordDict({RECORD: ConfigRecord({"client": sent.client, "session": sent.session, **seeds, **masks})})


def decode_unmasking(content: RecordDict) -> Shares:
    """The inverse of :func:`encode_unmasking`."""
    values = record_of(content)
    seeds, masks = (_lists(values, "clients", "shares", prefix) for prefix in ("seed_", "mask_"))
    return Shares(_get(values, "client", int), _get(values, "session", bytes), seeds, masks)


# -- a site's own record between stages -------------------------------------------------------------------------------
def store(client: SecureClient) -> ConfigRecord:
    """A client's side of a session, to be kept by its own SuperNode until the next message."""
    others = {one.client: one.message_key + one.mask_key for one in client.others.values()}
    received = {other: seed + mask_key for other, (seed, mask_key) in client.received.items()}
    return ConfigRecord(
        {
            "client": client.client, "session": client.session, "message_key": client.message_key,
            "mask_key": client.mask_key, "seed": client.seed, "threshold": client.threshold,
            "least": client.least, "answered": client.answered, **_pair(others, "clients", "keys", "other_"),
            **_pair(received, "clients", "shares", "received_"),
        }
    )  # fmt: skip


def restore(values: Mapping[str, Any]) -> SecureClient:
    """The inverse of :func:`store`."""
    others, received = _lists(values, "clients", "keys", "other_"), _lists(values, "clients", "shares", "received_")
    return SecureClient(
        **{
            name: values[name]
            for name in ("client", "session", "message_key", "mask_key", "seed", "threshold", "least")
        },
        others={other: Advertisement(other, keys[:32], keys[32:]) for other, keys in others.items()},
        received={other: (both[: len(both) // 2], both[len(both) // 2 :]) for other, both in received.items()},
        answered=bool(values["answered"]),
    )
