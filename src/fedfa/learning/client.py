"""A client's round: from what the server sent to what it gets back.

Every engine (this process, workers, Ray, Flower) calls :class:`ClientTrainer`; every method acts through its hooks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedfa.errors import ClientError, describe
from fedfa.learning.aggregate import Contribution, WeightedSum, contribution_nbytes
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.batches import Fetching, augmented
from fedfa.learning.context import ClientContext, LocalTraining, Role
from fedfa.learning.local_loop import LocalProgress, LossGradients, batches_of_each_epoch, local_training
from fedfa.learning.optimisers import LocalOptimiser
from fedfa.learning.random import stream, torch_stream
from fedfa.learning.tensors import ComponentTensors, Tensors, clone, first_non_finite
from fedfa.models.split import SplitModel
from fedfa.trees import NetworkInput

MODEL = "model"
"""The client state holds the model's tensors of role ``LOCAL`` under this name."""


class ClientData(Protocol):
    """What local training needs of a client's samples."""

    @property
    def size(self) -> int:
        """Number of samples."""

    @property
    def label_counts(self) -> Tensor:
        """Samples per class, ``[C]``."""

    def batch(self, positions: Tensor) -> tuple[NetworkInput, Tensor]:
        """Inputs ready for the network, and labels, at these positions of the client's data."""


@dataclass(frozen=True)
class RoundPlan:
    """What all clients of a round have in common: what is sent to them and how they train."""

    round: int
    """Counted from 0."""
    model: Tensors
    broadcast: ComponentTensors
    local: LocalTraining
    seed: int
    rounds: int
    """The planned number of rounds."""
    final_pass: bool = False
    """Not a round of training: the final pass after the last one."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Local steps of clients that make another number of them than ``local`` says."""

    def local_of(self, client: int) -> LocalTraining:
        """How a client trains."""
        steps = self.steps.get(client)
        return self.local if steps is None else self.local.model_copy(update={"steps": steps})


@dataclass
class ClientResult:
    """What one client returns. In a real federation only ``contribution`` and the counts leave the client."""

    client: int
    contribution: Contribution
    client_state: ComponentTensors
    steps: int
    sample_steps: int
    """Samples processed, counted once per epoch."""
    loss: float | None
    """Mean of the local loss over all steps; None if there was no step."""
    cpu_seconds: float = 0.0
    """Processor time of the client's work."""
    wire_nbytes: int | None = None
    """Bytes of the contribution on the wire, where a channel compresses it."""

    @property
    def nbytes(self) -> int:
        """Bytes that the client sends."""
        return contribution_nbytes(self.contribution) if self.wire_nbytes is None else self.wire_nbytes


@dataclass(frozen=True)
class ClientWork:
    """A client that is to train: its number, its samples, and its state from earlier rounds (not changed)."""

    client: int
    data: ClientData
    client_state: ComponentTensors


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with the parameters that are shared and the optimiser of all trained ones."""

    model: SplitModel
    shared: dict[str, nn.Parameter]
    optimiser: LocalOptimiser


ResultT = TypeVar("ResultT")


@dataclass
class ClientTrainer:
    """Trains clients, one after the other, with one network, one optimiser and an algorithm.

    Args:
        model: The network; its weights are overwritten for each client.
        algorithm: The method.
        roles: Role of each tensor of the model.
        device: Where to compute.
    """

    model: SplitModel
    algorithm: Algorithm
    roles: Mapping[str, Role]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for name, parameter in self.model.module.named_parameters():
            parameter.requires_grad_(self.roles[name] in (Role.SHARED, Role.LOCAL))
        self.model.watch(self.algorithm.outputs)
        self.network = self.trained_network(self.model)
        self._travelling = [name for name in self.model.state() if self.roles[name].travels]
        self.components = {component.name: component for component in self.algorithm.components}

    def train(self, plan: RoundPlan, client: int, data: ClientData, client_state: ComponentTensors) -> ClientResult:
        """One client's part of a round.

        Args:
            plan: What the server sent.
            client: Number of the client.
            data: Its samples.
            client_state: Its state from earlier rounds (empty at first); not changed.

        Raises:
            ClientError: Anything that goes wrong, with client, round and stage.
        """
        started = time.process_time()
        work = ClientRound(self, plan, ClientWork(client, data, client_state))
        with torch_stream(plan.seed, "torch", plan.round, client, device=self.device):
            if plan.final_pass:
                result = work.guarded(work.final_pass)
            else:
                work.guarded(work.begin)
                work.guarded(work.train)
                result = work.guarded(work.finish)
        refuse_non_finite([work], {client: result})
        result.cpu_seconds = time.process_time() - started
        return result

    def trained_network(self, model: SplitModel) -> TrainedNetwork:
        """The network with its optimiser."""
        parameters = dict(model.module.named_parameters())
        return TrainedNetwork(
            model,
            {name: p for name, p in parameters.items() if self.roles[name] is Role.SHARED},
            LocalOptimiser([parameter for parameter in parameters.values() if parameter.requires_grad]),
        )

    def updates(self, works: Sequence[ClientRound], states: Sequence[Tensors]) -> list[Tensors]:
        """Trained minus received weights of each client, for the tensors that travel, in one operation."""
        names = self._travelling
        ends = [state[name] for state in states for name in names]
        starts = [work.ctx.start[name] for work in works for name in names]
        differences = iter(torch._foreach_sub(ends, starts) if ends else ())
        return [{name: next(differences) for name in names} for _ in works]


class ClientRound:
    """One client in one round."""

    def __init__(self, trainer: ClientTrainer, plan: RoundPlan, work: ClientWork) -> None:
        self.trainer, self.plan, self.client, self.data = trainer, plan, work.client, work.data
        self.given = work.client_state
        self.client_state: ComponentTensors = {
            component: {name: value.to(trainer.device) for name, value in clone(tensors).items()}
            for component, tensors in work.client_state.items()
        }
        self.progress = LocalProgress()
        self.ctx: ClientContext

    def guarded(self, action: Callable[[], ResultT]) -> ResultT:
        """Turn any error into one that names client, round and stage."""
        try:
            return action()
        except ClientError:
            raise
        except Exception as error:
            raise ClientError(self.client, self.plan.round + 1, self.progress.stage, describe(error)) from error

    def begin(self) -> None:
        """Load what was sent, and let the components prepare."""
        self.ctx = self.context()
        self.trainer.model.load(self.ctx.start)
        self.trainer.model.module.train()
        self.call_begin()

    def call_begin(self) -> None:
        """Call the hook ``begin`` of every component."""
        self.progress.stage = "begin"
        for hook in self.trainer.algorithm.hooks("begin"):
            hook(self.ctx)

    def train(self) -> None:
        """The local training."""
        ctx, algorithm, optimiser = self.ctx, self.trainer.algorithm, self.trainer.network.optimiser
        fetching = Fetching(self.data, ctx.local.batch_size, ctx.num_classes, ctx.device)
        shuffle = stream(self.plan.seed, "shuffle", ctx.round, self.client)
        epochs = fetching.epochs(shuffle, ctx.size, batches_of_each_epoch(ctx))
        if (augmentation := getattr(self.data, "augmentation", None)) is not None:
            rng = stream(self.plan.seed, "augment", ctx.round, self.client)
            epochs = (augmented(batches, augmentation, rng) for batches in epochs)
        local_training(ctx, algorithm, optimiser, epochs, LossGradients(ctx, algorithm, optimiser), self.progress)

    def finish(self, trained: tuple[Tensors, Tensors] | None = None) -> ClientResult:
        """After local training: the contribution and the client state.

        Args:
            trained: The trained weights and the update, where they are known; left out, the network has the weights.
        """
        trainer, device, ctx = self.trainer, self.trainer.device, self.ctx
        if trained is None:
            state = trainer.model.state()
            (ctx.update,) = trainer.updates([self], [state])
        else:
            state, ctx.update = trained
        contribution = self._contribution()
        self._check_client_state()
        if local := clone({name: state[name] for name in state if trainer.roles[name] is Role.LOCAL}):
            self.client_state[MODEL] = local
        if device.type != "cpu":
            contribution = {group: entry.cpu() for group, entry in contribution.items()}
            self.client_state = {
                c: {n: t.cpu() for n, t in tensors.items()} for c, tensors in self.client_state.items()
            }
        losses = [] if self.progress.losses is None else self.progress.losses.tolist()
        return ClientResult(
            client=self.client,
            contribution=contribution,
            client_state=self.client_state,
            steps=ctx.steps,
            sample_steps=self.progress.samples,
            loss=math.fsum(losses) / len(losses) if losses else None,
        )

    def final_pass(self) -> ClientResult:
        """The client's contribution to the final pass; nothing is trained, no state is kept."""
        self.ctx = self.context()
        self.trainer.model.load(self.ctx.start)
        contribution = {group: entry.cpu() for group, entry in self._contribution().items()}
        return ClientResult(self.client, contribution, {}, steps=0, sample_steps=0, loss=None)

    def _contribution(self) -> Contribution:
        self.progress.stage = "final pass" if self.plan.final_pass else "building the contribution"
        contribution: Contribution = {}
        for hook in self.trainer.algorithm.hooks("contribute", final_pass=self.plan.final_pass):
            name = hook.__self__.name  # type: ignore[attr-defined]  # a bound method
            groups = hook(self.ctx)
            if not isinstance(groups, Mapping) or not all(isinstance(sums, WeightedSum) for sums in groups.values()):
                raise TypeError(f"component {name!r}: `contribute` returned {groups!r}; return a dict of WeightedSum")
            contribution.update({f"{name}/{group}": entry for group, entry in groups.items()})
        for protect in self.trainer.algorithm.hooks("protect"):
            self.progress.stage = "protecting the contribution"
            contribution = protect(self.ctx, contribution)
        return contribution

    def _check_client_state(self) -> None:
        for component, tensors in self.client_state.items():
            for name, value in tensors.items():
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"component {component!r} keeps {name!r} = {value!r} in ctx.client_state; client state is "
                        "named tensors: wrap it with torch.tensor(…)"
                    )

    def context(self) -> ClientContext:
        """What the hooks receive."""
        model, plan, device = self.trainer.model, self.plan, self.trainer.device
        start = {**plan.model, **self.client_state.get(MODEL, {})}
        return ClientContext(
            client=self.client,
            round=plan.round,
            rounds=plan.rounds,
            model=model,
            parameters=self.trainer.network.shared,
            start={name: value.to(device) for name, value in start.items()},
            # Copied: a component may change what it received without any effect on other clients.
            broadcast={
                c: {n: t.to(device, copy=True) for n, t in tensors.items()} for c, tensors in plan.broadcast.items()
            },
            client_state=self.client_state,
            local=plan.local_of(self.client),
            size=self.data.size,
            num_classes=model.num_classes,
            batches_per_epoch=plan.local.batches_on(self.data.size),
            count_labels=lambda: self.data.label_counts.to(device),
            make_rng=partial(stream, plan.seed, "client", plan.round, self.client),
            data=self.data,
            components=self.trainer.components,
        )


def refuse_non_finite(works: Sequence[ClientRound], results: Mapping[int, ClientResult]) -> None:
    """Stop a training that diverged here, where the client is known.

    Raises:
        ClientError: A contribution or a local tensor holds NaN or infinity.
    """
    named: dict[tuple[ClientRound, str, str], Tensor] = {}
    for work in works:
        result = results[work.client]
        for group, entry in result.contribution.items():
            named.update({(work, group, name): value for name, value in entry.tensors.items()})
        local = result.client_state.get(MODEL, {}) if not work.plan.final_pass else {}
        named.update({(work, "its own tensors", name): value for name, value in local.items()})
    if (bad := first_non_finite(named)) is not None:
        work, group, name = bad
        raise ClientError(
            work.client,
            work.plan.round + 1,
            "local training",
            f"ended with values that are not finite (in {group}, {name}); the training diverged: lower "
            f"local.lr (now {work.plan.local.lr:g}) or the method's coefficients",
        )
