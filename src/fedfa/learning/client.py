"""The client's round: from what the server sent to what it gets back.

Every engine (this process, workers, Ray, Flower) calls :class:`ClientTrainer`; every method acts through the recipe's
hooks. Neither knows of the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedfa.errors import ClientError, FedfaError
from fedfa.learning.batches import Batches
from fedfa.learning.local_loop import LocalSteps, take_local_steps
from fedfa.learning.optimisers import Sgd
from fedfa.learning.part import ClientContext, LocalTraining, Role
from fedfa.learning.random import stream, torch_stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.stacking import SideBySide, join, part_of, signature
from fedfa.learning.sums import Sums
from fedfa.learning.tensors import PartTensors, Tensors, clone, first_non_finite
from fedfa.models.split import SplitModel
from fedfa.models.stacked import StackedModel

MODEL = "model"
"""Under this name a client keeps the tensors of the model whose role is local."""


STACKS = 8
"""Stacked networks that are kept, for so many different numbers of clients side by side."""


class ClientData(Protocol):
    """What the loop needs of a client's samples."""

    @property
    def size(self) -> int:
        """Number of samples."""

    @property
    def label_counts(self) -> Tensor:
        """Samples per class, ``[C]``."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ready for the network, and labels, at these positions of the client's data."""


@dataclass(frozen=True)
class RoundPlan:
    """What all clients of a round have in common: what is sent to them and how they train."""

    round: int
    """Counted from 0."""
    model: Tensors
    received: PartTensors
    local: LocalTraining
    seed: int
    rounds: int
    """The planned number of rounds."""
    survey: bool = False
    """Not a round of training: the survey after the last one."""


@dataclass(frozen=True)
class ClientResult:
    """What one client hands back. Only ``sums`` leaves it in a real federation, with the counts."""

    client: int
    sums: Sums
    kept: PartTensors
    steps: int
    sample_steps: int
    """Samples seen, counted once per epoch."""
    loss: float | None
    """Mean of the local loss over all steps; None if there was no step."""
    cpu_seconds: float = 0.0
    """Processor time it took."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class ClientWork:
    """A client that is to train: its number, its samples, and what it kept from earlier rounds (not changed)."""

    client: int
    data: ClientData
    kept: PartTensors


@dataclass
class ClientTrainer:
    """Trains clients with one network, one optimiser and a recipe.

    Args:
        model: The network; its weights are overwritten for each client.
        recipe: The method.
        roles: Role of each tensor of the model (see :meth:`Recipe.roles`).
        device: Where to compute.
    """

    model: SplitModel
    recipe: Recipe
    roles: Mapping[str, Role]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for name, parameter in self.model.module.named_parameters():
            parameter.requires_grad_(self.roles[name] is not Role.FROZEN)
        self.model.watch(self.recipe.watches)
        self._alone = self._bench(self.model)
        self._travelling = [name for name in self.model.state() if self.roles[name].travels]
        self._stacks: dict[int, _Bench] = {}

    def train(self, plan: RoundPlan, client: int, data: ClientData, kept: PartTensors) -> ClientResult:
        """One client's part of a round.

        Args:
            plan: What the server sent.
            client: Number of the client.
            data: Its samples.
            kept: What it kept from earlier rounds (empty at first); not changed.

        Raises:
            ClientError: Anything that goes wrong, with client, round and stage.
        """
        work = _ClientRound(self, plan, ClientWork(client, data, kept))
        with torch_stream(plan.seed, "torch", plan.round, client, device=self.device):
            if plan.survey:
                return work.guarded(work.survey)
            work.guarded(work.begin)
            work.guarded(lambda: self._steps(self._alone, work.ctx, data, [work], work.way))
            result = work.guarded(work.finish)
        _refuse_non_finite([work], {client: result})
        return result

    def train_stacked(self, plan: RoundPlan, clients: Sequence[ClientWork]) -> list[ClientResult]:
        """The part of several clients in a round, side by side where they can be; results in the order given.

        Side by side go clients of equal size whose methods prepared the same kinds of things; the others train alone.

        Raises:
            ClientError: As :meth:`train`. After a fault in common steps each of the clients is trained alone to see
                whose it is.
        """
        works = [_ClientRound(self, plan, client) for client in clients]
        with torch_stream(plan.seed, "torch", plan.round, clients[0].client, device=self.device):
            groups: dict[object, list[_ClientRound]] = {}
            for work in works:
                work.guarded(partial(work.begin, side_by_side=True))
                groups.setdefault((work.data.size, signature(work.ctx.scratch)), []).append(work)
            results: dict[int, ClientResult] = {}
            for group in groups.values():
                try:
                    states = self._steps_side_by_side(group)
                except Exception as error:
                    self._say_whose(error, group)
                differences = None if self.recipe.sees_trained_model else self._differences(group, states)
                for k, (work, state) in enumerate(zip(group, states, strict=True)):
                    if differences is None:
                        self.model.load(state)
                        results[work.client] = work.guarded(work.finish)
                    else:
                        results[work.client] = work.guarded(partial(work.finish, (state, differences[k])))
                _refuse_non_finite(group, results)
        return [results[work.client] for work in works]

    def _differences(self, group: list[_ClientRound], states: list[Tensors]) -> list[Tensors]:
        """Trained minus received weights of each client, for the tensors that travel; all in one operation."""
        names = self._travelling
        ends = [state[name] for state in states for name in names]
        starts = [work.ctx.start[name] for work in group for name in names]
        differences = iter(torch._foreach_sub(ends, starts) if ends else ())
        return [{name: next(differences) for name in names} for _ in group]

    def _say_whose(self, fault: Exception, group: list[_ClientRound]) -> NoReturn:
        """Raise the client's error that is behind a fault in common steps."""
        for work in group:
            self.train(work.plan, work.client, work.data, work.given)  # raises it, if it is this client's
        first, others = group[0], ", ".join(str(work.client) for work in group[1:])
        hint = f' (side by side with {others}; alone they train: set engine.execution = "each")' if others else ""
        problem = f"{_in_words(fault)}{hint}"
        raise ClientError(first.client, first.plan.round + 1, first.way.stage, problem) from fault

    def _steps_side_by_side(self, group: list[_ClientRound]) -> list[Tensors]:
        """The local steps of clients that can go together; the weights they end with."""
        first = group[0]
        if len(group) == 1:
            self.model.load(first.began)
            self._steps(self._alone, first.ctx, first.data, group, first.way)
            return [clone(self.model.state())]
        bench = self._stacks.pop(len(group), None) or self._bench(StackedModel(self.model, len(group)))
        self._stacks[len(group)] = bench  # last, as the one used last
        if len(self._stacks) > STACKS:
            del self._stacks[next(iter(self._stacks))]
        model = bench.model
        assert isinstance(model, StackedModel)
        model.load_each([work.began for work in group])
        # What belongs to one client alone is left out: a hook that wants it fails, instead of taking another's.
        together = replace(
            first.ctx,
            client=-1,
            model=model,
            parameters=bench.shared,
            start={},
            kept={},
            draws=_no_common_draws,
            data=None,
            count_labels=lambda: torch.stack([work.ctx.label_counts for work in group]),
            scratch=join([work.ctx.scratch for work in group]),
        )
        way = LocalSteps()
        try:
            self._steps(bench, together, SideBySide([work.data for work in group]), group, way)
        finally:
            first.way.stage = way.stage
        for k, (work, own_way) in enumerate(zip(group, way.of_each(len(group)), strict=True)):
            work.way = own_way
            work.ctx.scratch = part_of(together.scratch, k)
            work.ctx.steps, work.ctx.epoch = together.steps, together.epoch
        return model.states()

    def _steps(
        self,
        bench: _Bench,
        ctx: ClientContext,
        data: Batches | SideBySide,
        works: Sequence[_ClientRound],
        way: LocalSteps,
    ) -> None:
        started = time.process_time()
        shuffles = [stream(work.plan.seed, "shuffle", ctx.round, work.client) for work in works]
        take_local_steps(ctx, self.recipe, bench.optimiser, data, shuffles, way)
        seconds = time.process_time() - started
        for work in works:
            work.cpu_seconds += seconds / len(works)

    def _bench(self, model: SplitModel) -> _Bench:
        parameters = dict(model.module.named_parameters())
        return _Bench(
            model,
            {name: p for name, p in parameters.items() if self.roles[name] is Role.SHARED},
            Sgd([parameter for parameter in parameters.values() if parameter.requires_grad]),
        )


def _no_common_draws() -> NoReturn:
    raise RuntimeError("ctx.rng belongs to one client; a part whose hooks of batches or epochs draw does not stack")


@dataclass(frozen=True)
class _Bench:
    """A network with what it is trained with."""

    model: SplitModel
    shared: dict[str, nn.Parameter]
    optimiser: Sgd


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, FedfaError) else f"{type(error).__name__}: {error}"


class _ClientRound:
    """One client, one round: what comes before and after the local steps."""

    def __init__(self, trainer: ClientTrainer, plan: RoundPlan, work: ClientWork) -> None:
        self.trainer, self.plan, self.client, self.data = trainer, plan, work.client, work.data
        self.given = work.kept
        self.kept: PartTensors = {
            part: {name: value.to(trainer.device) for name, value in clone(tensors).items()}
            for part, tensors in work.kept.items()
        }
        self.way = LocalSteps()
        self.cpu_seconds = 0.0
        self.ctx: ClientContext
        self.began: Tensors
        """The network after ``begin``, where its local steps do not follow at once."""

    def guarded(self, action: Callable[[], ResultT]) -> ResultT:
        """Whatever goes wrong becomes an error that names client, round and stage."""
        try:
            return action()
        except ClientError:
            raise
        except Exception as error:
            raise ClientError(self.client, self.plan.round + 1, self.way.stage, _in_words(error)) from error

    def begin(self, *, side_by_side: bool = False) -> None:
        """Load what was sent, and let the parts prepare."""
        started = time.process_time()
        self.ctx = self._context()
        model, prepares = self.trainer.model, bool(self.trainer.recipe.hooks("begin"))
        if prepares or not side_by_side:
            model.load(self.ctx.start)
            model.module.train()
            self._call("begin")
        if side_by_side:
            self.began = clone(model.state()) if prepares else self.ctx.start
        self.cpu_seconds += time.process_time() - started

    def finish(self, trained: tuple[Tensors, Tensors] | None = None) -> ClientResult:
        """After the local steps: what goes to the server, and what is kept.

        Args:
            trained: The weights they ended with, and what of them is new; left out, the network has them.
        """
        started = time.process_time()
        trainer, recipe, device, ctx = self.trainer, self.trainer.recipe, self.trainer.device, self.ctx
        roles = trainer.roles
        if trained is None:
            self._call("end")
            state = trainer.model.state()
            (ctx.update,) = trainer._differences([self], [state])
        else:
            state, ctx.update = trained
        self.way.stage = "building the update"
        sums: Sums = {}
        for part in recipe.parts:
            sums.update({f"{part.name}/{group}": entry for group, entry in part.contribute(ctx).items()})
        if local := clone({name: state[name] for name in state if roles[name] is Role.LOCAL}):
            self.kept[MODEL] = local
        if device.type != "cpu":
            sums = {group: entry.cpu() for group, entry in sums.items()}
            self.kept = {part: {n: t.cpu() for n, t in tensors.items()} for part, tensors in self.kept.items()}
        losses = [] if self.way.losses is None else self.way.losses.tolist()
        return ClientResult(
            client=self.client,
            sums=sums,
            kept=self.kept,
            steps=ctx.steps,
            sample_steps=self.way.samples,
            loss=math.fsum(losses) / len(losses) if losses else None,
            cpu_seconds=self.cpu_seconds + time.process_time() - started,
        )

    def survey(self) -> ClientResult:
        """What the client tells after the last round; nothing is trained, nothing kept anew."""
        started = time.process_time()
        ctx = self._context()
        self.trainer.model.load(ctx.start)
        self.way.stage = "survey"
        sums: Sums = {}
        for part in self.trainer.recipe.parts:
            sums.update({f"{part.name}/{group}": entry.cpu() for group, entry in part.survey(ctx).items()})
        result = ClientResult(self.client, sums, {}, 0, 0, None, time.process_time() - started)
        _refuse_non_finite([self], {self.client: result})
        return result

    def _context(self) -> ClientContext:
        """What the hooks may see."""
        model, plan, device = self.trainer.model, self.plan, self.trainer.device
        start = {**plan.model, **self.kept.get(MODEL, {})}
        start = {name: value.to(device) for name, value in start.items()}
        return ClientContext(
            client=self.client,
            round=plan.round,
            rounds=plan.rounds,
            model=model,
            parameters=self.trainer._alone.shared,
            start=start,
            # The client's own copy: what it does with it is nobody else's business.
            received={
                p: {n: t.to(device, copy=True) for n, t in tensors.items()} for p, tensors in plan.received.items()
            },
            kept=self.kept,
            local=plan.local,
            size=self.data.size,
            count_labels=lambda: self.data.label_counts.to(device),
            num_classes=model.num_classes,
            draws=partial(stream, plan.seed, "client", plan.round, self.client),
            batches_per_epoch=plan.local.batches_on(self.data.size),
            data=self.data,
        )

    def _call(self, hook: str) -> None:
        self.way.stage = hook
        for call in self.trainer.recipe.hooks(hook):
            call(self.ctx)


def _refuse_non_finite(works: Sequence[_ClientRound], results: Mapping[int, ClientResult]) -> None:
    """Training that diverged ends here, where the client is known: one look at the numbers of all is enough mostly."""
    named: dict[tuple[_ClientRound, str, str], Tensor] = {}
    for work in works:
        result = results[work.client]
        for group, entry in result.sums.items():
            named.update({(work, group, name): value for name, value in entry.tensors.items()})
        local = result.kept.get(MODEL, {}) if not work.plan.survey else {}
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
