"""The site's side of a secure sum. Its secrets of a session stay in the state of its own SuperNode between messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedfa.errors import FederationError
from fedfa.flower.environment import disable_telemetry
from fedfa.flower.messages import BadMessageError, decode_plan
from fedfa.flower.secure_messages import (
    RECORD,
    encode_keys,
    encode_shares,
    encode_unmasking,
    encode_vector,
    read_neighbours,
    read_session,
    read_unmasking,
    read_vector_request,
    restore,
    store,
)
from fedfa.flower.site import own_number
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.protection.secure.protocol import SecureClient

disable_telemetry()
from flwr.app import Context, Message  # noqa: E402  (Flower reads the environment when it is imported)


@dataclass(frozen=True)
class Trained:
    """What a site has trained for a secure sum."""

    result: ClientResult
    keeps: bool
    """Whether client state was kept."""
    lost: bool
    """Whether it had been lost."""
    least: int
    """Vectors that the sum must have."""


TrainSite = Callable[[Message, Context, RoundPlan], Trained]
"""Trains as a message asks."""


def announce_keys(message: Message, context: Context) -> Message:
    """Stage 1: new keys for a new session."""
    client = SecureClient(own_number(context.node_config), read_session(message.content))
    context.state[RECORD] = store(client)
    return Message(encode_keys(client.advertise()), reply_to=message)


def share_secrets(message: Message, context: Context) -> Message:
    """Stage 2."""
    client = _client(message, context)
    if client.others:
        raise FederationError("this site has shared its secrets in this session already")
    shares = client.share(read_neighbours(message.content))
    context.state[RECORD] = store(client)
    return Message(encode_shares(shares), reply_to=message)


def send_masked(message: Message, context: Context, train: TrainSite) -> Message:
    """Stage 3: train, and send the contribution under masks; number of steps and loss stay here."""
    client = _client(message, context)
    if client.received:  # a second vector under the same masks would tell the difference of the two
        raise FederationError("this site has sent its masked vector in this session already")
    layout, ciphertexts = read_vector_request(message.content)
    trained = train(message, context, decode_plan(message.content))
    client.least = trained.least
    masked = client.masked(ciphertexts, layout.to_vector(trained.result.contribution))
    context.state[RECORD] = store(client)
    return Message(encode_vector(masked, trained.keeps, trained.lost), reply_to=message)


def send_shares(message: Message, context: Context) -> Message:
    """Stage 4."""
    client = _client(message, context)
    shares = client.unmask(*read_unmasking(message.content))
    context.state[RECORD] = store(client)
    return Message(encode_unmasking(shares), reply_to=message)


def _client(message: Message, context: Context) -> SecureClient:
    session = read_session(message.content)
    if RECORD not in context.state.config_records:
        raise FederationError("this site has no keys of that session; it was started again since")
    try:
        client = restore(context.state.config_records[RECORD])
    except (BadMessageError, KeyError) as error:
        raise FederationError(f"this site's record of the secure sum is damaged: {error}") from None
    if client.session != session:
        raise FederationError("that message belongs to another session than this site's keys")
    return client
