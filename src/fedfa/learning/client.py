"""The client's round: the one local training loop of the project.

Every engine (this process, workers, Ray, Flower) calls :meth:`ClientTrainer.train`; every method acts through the
recipe's hooks. Neither knows of the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.errors import ClientError, FedfaError
from fedfa.learning.part import Batch, ClientContext, LocalTraining, Role
from fedfa.learning.random import stream, torch_stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.sums import Sums
from fedfa.learning.tensors import PartTensors, Tensors, clone, first_non_finite
from fedfa.models.split import SplitModel

MODEL = "model"
"""Under this name a client keeps the tensors of the model whose role is local."""


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


@dataclass
class ClientTrainer:
    """Trains clients one after the other with one network, one optimiser and a recipe.

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
        parameters = dict(self.model.module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(self.roles[name] is not Role.FROZEN)
        self.shared_parameters = {name: p for name, p in parameters.items() if self.roles[name] is Role.SHARED}
        self.model.watch(self.recipe.watches)
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        # One optimiser for all clients: making one per client costs more than it seems.
        fused = self.device.type in ("cpu", "cuda") and all(p.is_floating_point() for p in trained)
        self._optimiser = torch.optim.SGD(trained, lr=0.0, fused=fused)

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
        work = _ClientRound(self, plan, client, data, kept)
        try:
            with torch_stream(plan.seed, "torch", plan.round, client, device=self.device):
                started = time.process_time()
                result = work.survey() if plan.survey else work.run()
                return replace(result, cpu_seconds=time.process_time() - started)
        except ClientError:
            raise
        except Exception as error:
            problem = str(error) if isinstance(error, FedfaError) else f"{type(error).__name__}: {error}"
            raise ClientError(client, plan.round + 1, work.stage, problem) from error

    def reset_optimiser(self, local: LocalTraining) -> torch.optim.SGD:
        """The optimiser without memory, set to this round's values."""
        self._optimiser.state.clear()
        for group in self._optimiser.param_groups:
            group.update(lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
        return self._optimiser


class _ClientRound:
    """One client, one round."""

    def __init__(
        self, trainer: ClientTrainer, plan: RoundPlan, client: int, data: ClientData, kept: PartTensors
    ) -> None:
        self.trainer, self.plan, self.client, self.data = trainer, plan, client, data
        device = trainer.device
        self.kept: PartTensors = {
            part: {name: value.to(device) for name, value in clone(tensors).items()} for part, tensors in kept.items()
        }
        self.stage = "preparing"
        self.losses: list[Tensor] = []
        self.sample_steps = 0

    def run(self) -> ClientResult:
        model, recipe, device = self.trainer.model, self.trainer.recipe, self.trainer.device
        ctx = self._context()
        model.module.train()
        self._call("begin", ctx)
        self._train(ctx)
        self._call("end", ctx)

        self.stage = "building the update"
        state = model.state()
        roles = self.trainer.roles
        ctx.update = {name: state[name] - ctx.start[name] for name in state if roles[name].travels}
        sums: Sums = {}
        for part in recipe.parts:
            sums.update({f"{part.name}/{group}": entry for group, entry in part.contribute(ctx).items()})
        self._check_finite(sums)
        if local := clone({name: state[name] for name in state if roles[name] is Role.LOCAL}):
            self._refuse_non_finite("its own tensors", local)
            self.kept[MODEL] = local
        loss = float(torch.stack(self.losses).mean()) if self.losses else None
        if device.type != "cpu":
            sums = {group: entry.cpu() for group, entry in sums.items()}
            self.kept = {part: {n: t.cpu() for n, t in tensors.items()} for part, tensors in self.kept.items()}
        return ClientResult(self.client, sums, self.kept, ctx.steps, self.sample_steps, loss)

    def survey(self) -> ClientResult:
        """What the client tells after the last round; nothing is trained, nothing kept anew."""
        ctx = self._context()
        self.stage = "survey"
        sums: Sums = {}
        for part in self.trainer.recipe.parts:
            sums.update({f"{part.name}/{group}": entry.cpu() for group, entry in part.survey(ctx).items()})
        self._check_finite(sums)
        return ClientResult(self.client, sums, {}, 0, 0, None)

    def _context(self) -> ClientContext:
        """Load the round's weights and gather what the hooks may see."""
        model, plan, device = self.trainer.model, self.plan, self.trainer.device
        start = {**plan.model, **self.kept.get(MODEL, {})}
        start = {name: value.to(device) for name, value in start.items()}
        model.load(start)
        size, batch_size = self.data.size, plan.local.batch_size
        batches = size // batch_size if plan.local.drop_last else -(-size // batch_size)
        return ClientContext(
            client=self.client,
            round=plan.round,
            rounds=plan.rounds,
            model=model,
            parameters=self.trainer.shared_parameters,
            start=start,
            # The client's own copy: what it does with it is nobody else's business.
            received={
                p: {n: t.to(device, copy=True) for n, t in tensors.items()} for p, tensors in plan.received.items()
            },
            kept=self.kept,
            local=plan.local,
            size=size,
            label_counts=self.data.label_counts.to(device),
            num_classes=model.num_classes,
            rng=stream(plan.seed, "client", plan.round, self.client),
            batches_per_epoch=batches,
            data=self.data,
        )

    def _train(self, ctx: ClientContext) -> None:
        recipe, device, local = self.trainer.recipe, self.trainer.device, ctx.local
        optimiser = self.trainer.reset_optimiser(local)
        change_logits, change_loss = recipe.hooks("logits"), recipe.hooks("loss")
        change_gradient, after_step = recipe.hooks("gradient"), recipe.hooks("after_step")
        shuffle = stream(self.plan.seed, "shuffle", ctx.round, ctx.client)
        epochs = local.epochs if local.steps is None else -(-local.steps // max(1, ctx.batches_per_epoch))
        for epoch in range(epochs):
            ctx.epoch = epoch
            order = torch.from_numpy(shuffle.permutation(ctx.size))
            for number in range(ctx.batches_per_epoch):
                if ctx.steps == local.steps:
                    break
                self.stage = f"local training (epoch {epoch + 1}, batch {number + 1})"
                index = order[number * local.batch_size : (number + 1) * local.batch_size]
                x, y = self.data.batch(index)
                x, y = x.to(device), y.to(device)
                features, logits = ctx.model(x)
                batch = Batch(x, y, index, features, logits, ctx.model.outputs)
                for hook in change_logits:
                    logits = hook(ctx, batch, logits)
                loss = functional.cross_entropy(logits, y)
                for hook in change_loss:
                    loss = hook(ctx, batch, loss)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                for hook in change_gradient:
                    hook(ctx, batch)
                optimiser.step()
                ctx.steps += 1
                self.losses.append(loss.detach())
                self.sample_steps += len(index)
                for hook in after_step:
                    hook(ctx, batch)
            self._call("after_epoch", ctx)

    def _call(self, hook: str, ctx: ClientContext) -> None:
        self.stage = hook.replace("_", " ")
        for call in self.trainer.recipe.hooks(hook):
            call(ctx)

    def _check_finite(self, sums: Sums) -> None:
        for group, entry in sums.items():
            self._refuse_non_finite(group, entry.tensors)

    def _refuse_non_finite(self, what: str, tensors: Tensors) -> None:
        if (name := first_non_finite(tensors)) is not None:
            raise ClientError(
                self.client,
                self.plan.round + 1,
                "local training",
                f"ended with values that are not finite (in {what}, {name}); the training diverged: lower "
                f"local.lr (now {self.plan.local.lr:g}) or the method's coefficients",
            )
