"""The channel between server and clients: what the server and the clients send passes through codecs, byte for byte.

What is compressed: float32 tensors of the model that are trained and shared, and float32 tensors that components
broadcast or contribute, unless a component declares them exact (:attr:`~fedfa.learning.component.Traits.exact`). What
is not: weights and counts, statistics (a variance must stay positive), other number formats, the final pass.

Clients contribute weighted sums; what travels is the sum divided by its weight, and the weight. Codecs that lose too
much for values (signs, sparse numbers) act on updates only, which are the tensors that bear the name of a tensor of the
model; others then travel as float32.

The model is encoded once per round, so every client receives the same bits. Rounding draws from streams keyed by round
and client. The simulator encodes and decodes in one place (:meth:`Channel.carry`); in a federation between sites the
server encodes the plan, a site decodes it, encodes its result and keeps its error, and the server decodes that: the
same functions, the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfa.channel.codecs import QUANTISED, Codec, Packed, codec
from fedfa.channel.config import ChannelConfig
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum, flatten_contribution, unflatten_contribution
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import Role
from fedfa.learning.random import stream
from fedfa.learning.round import TrainClients, Training
from fedfa.learning.tensors import ComponentTensors, Tensors, nbytes

CHANNEL = "channel"
"""Name of the client state that holds what was not sent."""


class Coded(NamedTuple):
    """A float32 tensor as it travels."""

    codec: str
    shape: tuple[int, ...]
    data: Packed

    @classmethod
    def of(cls, name: str, chosen: Codec, value: Tensor, rng: np.random.Generator) -> Coded:
        """The tensor, encoded."""
        numbers = value.detach().contiguous().cpu().numpy().ravel()
        return cls(name, tuple(value.shape), chosen.encode(numbers, rng))

    def decoded(self) -> Tensor:
        """The tensor as it arrives.

        Raises:
            ValueError: The bytes are not such a tensor.
        """
        arrived = codec(self.codec).decode(self.data, int(np.prod(self.shape, dtype=np.int64)))
        return torch.from_numpy(np.ascontiguousarray(arrived)).reshape(self.shape)


Wire = Mapping[str, Tensor | Coded]
"""Named tensors as they travel."""


def arrived(wire: Wire) -> Tensors:
    """The tensors that arrive."""
    return {name: value.decoded() if isinstance(value, Coded) else value for name, value in wire.items()}


def wire_nbytes(wire: Wire) -> int:
    """Bytes of named tensors as they travel."""
    return sum(value.data.nbytes if isinstance(value, Coded) else nbytes({name: value}) for name, value in wire.items())


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
            model, broadcast = self.encoded_plan(plan)
            received = {component: arrived(wire) for component, wire in broadcast.items()}
            for result in train(replace(plan, model=arrived(model), broadcast=received), clients, client_state):
                wire, state = self.encoded_result(result, plan, kept.get(result.client, {}))
                yield self.decoded_result(replace(result, client_state=state), arrived(wire), wire_nbytes(wire))

        return carried

    def payload_nbytes(self, plan: RoundPlan) -> int:
        """Bytes that one client receives."""
        model, broadcast = self.encoded_plan(plan)
        travelling = {name: value for name, value in model.items() if self.training.roles[name].travels}
        return wire_nbytes(travelling) + sum(wire_nbytes(wire) for wire in broadcast.values())

    def encoded_plan(self, plan: RoundPlan) -> tuple[Wire, dict[str, Wire]]:
        """The model and the components' broadcast as they travel."""
        if plan.final_pass:
            return plan.model, dict(plan.broadcast)
        rng, down, roles = stream(plan.seed, "channel down", plan.round), self._down, self.training.roles
        name_down = self._name(self.config.down)
        model: dict[str, Tensor | Coded] = dict(plan.model)
        for name, value in sorted(plan.model.items()):  # by name: after a resume they come in another order
            if roles[name] is Role.SHARED and value.dtype is torch.float32:
                model[name] = Coded.of(name_down, down, value, rng)
        broadcast: dict[str, Wire] = {}
        for component, tensors in sorted(plan.broadcast.items()):
            exact = self._exact(component, "*")
            broadcast[component] = {
                name: value if value.dtype is not torch.float32 or exact else Coded.of(name_down, down, value, rng)
                for name, value in sorted(tensors.items())
            }
        return model, broadcast

    def encoded_result(self, result: ClientResult, plan: RoundPlan, kept: Tensors) -> tuple[Wire, ComponentTensors]:
        """A client's contribution as it travels, flat, and the client state with its new error.

        Args:
            result: What the client computed.
            plan: Of the round.
            kept: What the client did not send before.
        """
        if plan.final_pass:
            return flatten_contribution(result.contribution), result.client_state
        rng = stream(plan.seed, "channel up", plan.round, result.client)
        flat = flatten_contribution(result.contribution)
        wire: dict[str, Tensor | Coded] = dict(flat)
        errors: Tensors = {}
        for group, entry in result.contribution.items():
            divisor = torch.where(entry.weight == 0, 1.0, entry.weight)
            for name, value in entry.tensors.items():
                key = f"{group}:{name}"
                chosen = self._codec_of(group, name, value)
                if chosen is None:
                    continue
                mean = value / divisor
                wanted = mean + kept[key].to(mean) if chosen.feedback and key in kept else mean
                wire[key] = coded = Coded.of(self._name(self.config.up), chosen, wanted, rng)
                if chosen.feedback:
                    errors[key] = wanted - coded.decoded()
        return wire, {**result.client_state, CHANNEL: errors} if errors else result.client_state

    def decoded_result(self, result: ClientResult, flat: Tensors, size: int) -> ClientResult:
        """A client's result as the server receives it: means become sums again.

        Args:
            result: Its contribution is replaced.
            flat: What arrived.
            size: Bytes on the wire.
        """
        contribution = {
            group: WeightedSum(
                {
                    name: value if self._codec_of(group, name, value) is None else value * entry.weight
                    for name, value in entry.tensors.items()
                },
                entry.weight,
            )
            for group, entry in unflatten_contribution(flat).items()
        }
        return replace(result, contribution=contribution, wire_nbytes=size)

    @property
    def _up(self) -> Codec:
        return codec(self._name(self.config.up), self.config.share)

    @property
    def _down(self) -> Codec:
        return codec(self._name(self.config.down))

    def _name(self, name: str) -> str:
        return f"{name}+deflate" if self.config.entropy == "deflate" and name in QUANTISED else name

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
