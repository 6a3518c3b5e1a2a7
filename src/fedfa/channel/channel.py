"""The channel of a simulation: what the server sends and what clients send passes through codecs, byte for byte.

What is compressed: float32 tensors of the model that are trained and shared, and float32 tensors that components
broadcast or contribute, unless a component declares them exact (:attr:`~fedfa.learning.component.Traits.exact`). What
is not: weights and counts, statistics (a variance must stay positive), other number formats, the final pass.

Clients contribute weighted sums; what travels is the sum divided by its weight, and the weight. Codecs that lose too
much for values (signs, sparse numbers) act on updates only, which are the tensors that bear the name of a tensor of the
model; others then travel as float32.

The model is encoded once per round, so every client receives the same bits. Rounding draws from streams keyed by round
and client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedfa.channel.codecs import Codec, codec
from fedfa.channel.config import ChannelConfig
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import Role
from fedfa.learning.random import stream
from fedfa.learning.round import TrainClients, Training
from fedfa.learning.tensors import ComponentTensors, Tensors, nbytes

CHANNEL = "channel"
"""Name of the client state that holds what was not sent."""


@dataclass(frozen=True)
class Channel:
    """Compresses in both directions.

    Args:
        config: The codecs.
        training: The algorithm and the roles of the model's tensors.
    """

    config: ChannelConfig
    training: Training

    def __post_init__(self) -> None:
        for component in self.training.algorithm.enabled:
            if self.config.up != "float32" and component.traits.aggregates and "*" in component.traits.exact:
                raise AlgorithmError(
                    f"{component.name!r} cannot be combined with channel.up = {self.config.up!r}: what its clients "
                    "send must arrive exactly, because server and clients account for the same sums; leave channel.up "
                    "out"
                )

    def carry(self, train: TrainClients) -> TrainClients:
        """The same clients behind this channel."""

        def carried(
            plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
        ) -> Iterator[ClientResult]:
            if plan.final_pass:
                yield from train(plan, clients, client_state)
                return
            # What a client keeps for the channel is none of the method's business.
            kept = {client: client_state(client).get(CHANNEL, {}) for client in clients} if self._up.feedback else {}
            for result in train(self.sent(plan)[0], clients, client_state):
                yield self.received(result, plan, kept.get(result.client, {}))

        return carried

    def payload_nbytes(self, plan: RoundPlan) -> int:
        """Bytes that one client receives."""
        return self.sent(plan)[1]

    def sent(self, plan: RoundPlan) -> tuple[RoundPlan, int]:
        """The plan as clients receive it, and its bytes."""
        rng, down, roles = stream(plan.seed, "channel down", plan.round), self._down, self.training.roles
        model, total = dict(plan.model), 0
        for name, value in sorted(plan.model.items()):  # by name: after a resume they come in another order
            if roles[name] is Role.SHARED and value.dtype is torch.float32:
                model[name], size = _through(down, value, rng)
                total += size
            elif roles[name].travels:
                total += nbytes({name: value})
        broadcast: ComponentTensors = {}
        for component, tensors in sorted(plan.broadcast.items()):
            exact = self._exact(component, "*")
            broadcast[component] = own = dict(tensors)
            for name, value in sorted(tensors.items()):
                if value.dtype is torch.float32 and not exact:
                    own[name], size = _through(down, value, rng)
                    total += size
                else:
                    total += nbytes({name: value})
        return replace(plan, model=model, broadcast=broadcast), total

    def received(self, result: ClientResult, plan: RoundPlan, kept: Tensors) -> ClientResult:
        """A client's result as the server receives it, with its bytes and the client's new error."""
        rng = stream(plan.seed, "channel up", plan.round, result.client)
        contribution: Contribution = {}
        errors: Tensors = {}
        total = 0
        for group, entry in result.contribution.items():
            total += nbytes({"weight": entry.weight})
            tensors: Tensors = {}
            divisor = torch.where(entry.weight == 0, 1.0, entry.weight)
            for name, value in entry.tensors.items():
                key = f"{group}:{name}"
                chosen = self._codec_of(group, name, value)
                if chosen is None:
                    tensors[name] = value
                    total += nbytes({name: value})
                    continue
                mean = value / divisor
                wanted = mean + kept[key].to(mean) if chosen.feedback and key in kept else mean
                arrived, size = _through(chosen, wanted, rng)
                total += size
                if chosen.feedback:
                    errors[key] = wanted - arrived
                tensors[name] = arrived * entry.weight
            contribution[group] = WeightedSum(tensors, entry.weight)
        state = {**result.client_state, CHANNEL: errors} if errors else result.client_state
        return replace(result, contribution=contribution, client_state=state, wire_nbytes=total)

    @property
    def _up(self) -> Codec:
        return codec(self.config.up, self.config.share)

    @property
    def _down(self) -> Codec:
        return codec(self.config.down)

    def _codec_of(self, group: str, name: str, value: Tensor) -> Codec | None:
        """The codec of a tensor of a contribution; None: it travels as it is."""
        component, _, own = group.partition("/")
        if value.dtype is not torch.float32 or not value.numel() or self._exact(component, own):
            return None
        role, up = self.training.roles.get(name), self._up
        if role is None:
            return None if up.updates_only else up
        return up if role is Role.SHARED else None

    def _exact(self, component: str, group: str) -> bool:
        traits = {one.name: one.traits for one in self.training.algorithm.components}[component]
        return "*" in traits.exact or group in traits.exact


def _through(codec: Codec, value: Tensor, rng: np.random.Generator) -> tuple[Tensor, int]:
    """A tensor as it arrives, and its bytes on the wire."""
    numbers = value.detach().contiguous().cpu().numpy().ravel()
    packed = codec.encode(numbers, rng)
    arrived = codec.decode(packed, len(numbers))
    return torch.from_numpy(np.ascontiguousarray(arrived)).reshape(value.shape), packed.nbytes
