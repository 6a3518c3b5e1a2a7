"""Both sides of the paper's Lemmas 1 and 2, on the updates of real clients.

**Lemma 1** says how the classifier of one client changes otherwise than that of another. For a client with n samples,
n_c of them of class c, and one step with learning rate η on the mean cross-entropy,

    Δφ_c = η/n [ n_c (1 − p̄_c^(c)) h̄_c − Σ_{c'≠c} n_c' p̄_c^(c') h̄_c' ],

where h̄_c' is the mean feature and p̄_c^(c') the mean probability of class c over the samples of class c'. The lemma is
the difference of two clients' Δφ_c. The gradient has the mean of products p·h where the lemma has the product of
means; the paper assumes that they are equal. Nothing else is assumed for one step. (The clients need not have equally
many samples: each has its own n. In the lemma's proof the index of p should be c, as in its statement.)

**Lemma 2** does the same for features:

    Δh̄_c = η [ (1 − p̄_c^(c)) φ_c − Σ_{c'≠c} p̄_c'^(c) φ_c' ],

which is the gradient step if features were free variables, one sample at a time (a loss that is a mean over n samples
divides it by n). For those it is exact, since it is linear in p. But features move through the weights of the
extractor: what really happens is that step multiplied by a matrix of the extractor's gradients, which mixes samples,
and the lemma takes that matrix for the identity. So its direction is compared with the truth, and the ratio of lengths
is told beside it.

Local training is many steps. Both lemmas are summed along the way each client really takes, step by step; what plain
cross-entropy steps do not explain (weight decay, momentum, FedFA's calibration) is told apart from what the lemma's
assumption loses. The theorem that follows them, on classifier and feature deviation, puts both together for equal p;
from Lemma 2 it comes out with the opposite sign, and with η before both terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.engines.engine import Engine
from fedfa.errors import FedfaError
from fedfa.learning.client import RoundPlan
from fedfa.learning.part import Batch, ClientContext, NoOptions, Part
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import PartTensors, Tensors

SIDES = "sides"
"""The group in which a client tells both sides."""


class Lemmas(Part[NoOptions]):
    """Writes down, while a client trains, what the lemmas predict and what happens; changes nothing."""

    name = "lemmas"

    def begin(self, ctx: ClientContext) -> None:
        """Nothing predicted yet."""
        ctx.scratch[self.name] = {}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add this step's predictions; the classifier is still that of the forward pass."""
        head = ctx.model.head
        step = predictions(batch.features, batch.y, head.weight, head.bias, ctx.local.lr)
        so_far = ctx.scratch[self.name]
        for name, value in step.items():
            so_far[name] = so_far[name] + value if name in so_far else value

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The sums over all steps, and what really happened to the classifier and to the mean features."""
        if not ctx.steps:
            return {}
        head = ctx.model.head_tensors[0]
        counts = ctx.label_counts.double().unsqueeze(1)
        told: Tensors = dict(ctx.scratch[self.name])
        for name in ("features lemma", "features free"):
            told[name] = told[name] / counts.clamp(min=1)  # from sums over samples to means over a class
        told["classifier update"] = (ctx.model.state()[head] - ctx.start[head]).double()
        member = functional.one_hot(ctx.labels(), ctx.num_classes).double()
        moved = ctx.features().double() - ctx.features(ctx.start).double()
        told["features update"] = member.mT @ moved / counts.clamp(min=1)
        told["counts"], told["steps"] = counts.squeeze(1), torch.tensor(float(ctx.steps), dtype=torch.float64)
        return {SIDES: WeightedSum.of(told, 1)}


def predictions(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, lr: float) -> Tensors:
    """What one step on the mean cross-entropy of a batch does, by the lemmas and exactly.

    Args:
        features: ``[n, d]``.
        labels: ``[n]``.
        weight: The classifier before the step, ``[C, d]``.
        bias: ``[C]`` or None.
        lr: η.

    Returns:
        ``classifier positive`` and ``classifier negative``: the two terms of Lemma 1, ``[C, d]``, so that Δφ is their
        difference; ``classifier gradient``: the exact step. ``features lemma``: Lemma 2 for a step on the batch's mean
        loss, summed over the samples of a class, ``[C, d]``; ``features free``: the same from the gradient of the loss
        with respect to the features.
    """
    weight, classes, size = weight.detach().double(), len(weight), len(labels)
    free = features.detach().double().requires_grad_()
    with torch.enable_grad():
        logits = free @ weight.mT if bias is None else free @ weight.mT + bias.detach().double()
        (pull,) = torch.autograd.grad(functional.cross_entropy(logits, labels), free)
    known, given = free.detach(), logits.detach().softmax(-1)
    member = functional.one_hot(labels, classes).double()  # [n, C]
    counts = member.sum(0).unsqueeze(1)  # n_c
    mean_feature = member.mT @ known / counts.clamp(min=1)  # h̄_c
    mean_given = member.mT @ given / counts.clamp(min=1)  # [c', c]: p̄_c^(c')
    own = mean_given.diagonal().unsqueeze(1)
    others = mean_given - torch.diag(mean_given.diagonal())
    return {
        "classifier positive": lr / size * counts * (1 - own) * mean_feature,
        "classifier negative": lr / size * others.mT @ (counts * mean_feature),
        "classifier gradient": lr / size * (member - given).mT @ known,
        "features lemma": lr / size * counts * ((1 - own) * weight - others @ weight),
        "features free": -lr * member.mT @ pull,
    }


# -- comparing --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Agreement:
    """How well predicted vectors agree with the true ones; both ``[m, d]``."""

    true: Tensor
    predicted: Tensor

    @property
    def count(self) -> int:
        """How many vectors were compared."""
        return len(self.true)

    @property
    def deviation(self) -> Tensor:
        """‖predicted − true‖ / ‖true‖ of each."""
        return _length(self.predicted - self.true) / _length(self.true)

    @property
    def cosine(self) -> Tensor:
        """Cosine between the two, of each."""
        return (self.predicted * self.true).sum(-1) / (_length(self.predicted) * _length(self.true))

    @property
    def ratio(self) -> Tensor:
        """‖true‖ / ‖predicted‖ of each."""
        return _length(self.true) / _length(self.predicted)


def _length(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return lengths


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    lemma: int
    training: str
    """What the clients did."""
    true: str
    predicted: str
    classes: str
    """Which classes of a pair of clients: ``all``, or those that ``both``, ``one`` or ``none`` of them hold."""
    agreement: Agreement


@dataclass(frozen=True)
class Sides:
    """What the clients of one training told."""

    told: Sequence[Tensors]

    def classifier(self, name: str, who: str = "all", scale: Sequence[float] | None = None) -> Tensor:
        """Differences between two clients, over all pairs and the classes that ``who`` (both, one, none) hold."""
        values = [self._classifier(told, name) for told in self.told]
        if scale is not None:
            values = [value * factor for value, factor in zip(values, scale, strict=True)]
        return self._differences(values, who)

    def features(self, name: str) -> Tensor:
        """Differences of mean features between two clients, for the classes that both hold."""
        return self._differences([told[f"features {name}"] for told in self.told], "both")

    @property
    def steps(self) -> list[float]:
        """Optimiser steps of each client."""
        return [float(told["steps"]) for told in self.told]

    @staticmethod
    def _classifier(told: Tensors, name: str) -> Tensor:
        if name == "lemma":
            return told["classifier positive"] - told["classifier negative"]
        return told[f"classifier {name}"]

    def _differences(self, values: Sequence[Tensor], who: str) -> Tensor:
        chosen = [
            values[a][classes] - values[b][classes]
            for a, b in combinations(range(len(values)), 2)
            if (classes := self._classes(a, b, who)) is not None
        ]
        return torch.cat(chosen) if chosen else values[0][:0]

    def _classes(self, a: int, b: int, who: str) -> Tensor | None:
        holders = (self.told[a]["counts"] > 0).long() + (self.told[b]["counts"] > 0).long()
        wanted = {"all": (0, 1, 2), "both": (2,), "one": (1,), "none": (0,)}[who]
        classes = torch.isin(holders, torch.tensor(wanted))
        return classes if classes.any() else None


def check_lemmas(
    engine: Engine, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
) -> list[Finding]:
    """Train clients, once with a single step and once as planned, and compare both sides of the lemmas.

    Args:
        engine: Its recipe must have the part :class:`Lemmas`.
        plan: A round.
        clients: At least two.
        kept: What they kept from earlier rounds.

    Raises:
        FedfaError: There are no pairs of clients that made a step.
    """
    everything = 1 << 30  # a batch that holds all samples of any client
    single = replace(
        plan.local, epochs=1, batch_size=everything, momentum=0.0, weight_decay=0.0, drop_last=False, steps=1
    )
    one = _sides(engine, replace(plan, local=single), clients, kept)
    whole = _sides(engine, plan, clients, kept)
    return list(_findings(one, whole))


def _sides(engine: Engine, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]) -> Sides:
    told = [
        result.sums[f"{Lemmas.name}/{SIDES}"].tensors for result in engine.train(plan, clients, kept) if result.steps
    ]
    if len(told) < 2:
        raise FedfaError(f"the lemmas compare two clients, but only {len(told)} of this round trained")
    return Sides(told)


def _findings(one: Sides, whole: Sides) -> Iterator[Finding]:
    trainings = (("one full-batch step", one), ("local training", whole))
    for title, sides in trainings:
        for who in ("all", "both", "one", "none"):
            update, lemma = sides.classifier("update", who), sides.classifier("lemma", who)
            if len(update):
                yield Finding(1, title, "update", "lemma", who, Agreement(update, lemma))
        update, exact, lemma = (sides.classifier(name) for name in ("update", "gradient", "lemma"))
        yield Finding(1, title, "update", "exact steps", "all", Agreement(update, exact))
        yield Finding(1, title, "exact steps", "lemma", "all", Agreement(exact, lemma))
        if sides is whole:  # the lemma as a statement on the round: said once, before the first step
            ahead = one.classifier("lemma", scale=whole.steps)
            yield Finding(1, title, "update", "lemma at start", "all", Agreement(update, ahead))
    for title, sides in trainings:
        free, lemma, moved = (sides.features(name) for name in ("free", "lemma", "update"))
        if len(lemma):
            yield Finding(2, title, "free features", "lemma", "both", Agreement(free, lemma))
            yield Finding(2, title, "features", "lemma", "both", Agreement(moved, lemma))
