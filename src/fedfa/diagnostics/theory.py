"""Check of the paper's Lemmas 1 and 2 on real client updates.

**Lemma 1** states how the classifier updates of two clients differ. For a client with n samples, n_c of them of class
c, and one step with learning rate η on the mean cross-entropy,

    Δφ_c = η/n [ n_c (1 − p̄_c^(c)) h̄_c − Σ_{c'≠c} n_c' p̄_c^(c') h̄_c' ],

where h̄_c' is the mean feature and p̄_c^(c') the mean probability of class c over the samples of class c'. The lemma is
the difference of two clients' Δφ_c. The gradient has the mean of products p·h where the lemma has the product of
means; the paper assumes that they are equal. For one step this is the only assumption. (Clients may differ in n. In the
lemma's proof the index of p should be c, as in its statement.)

**Lemma 2** states the same for features:

    Δh̄_c = η [ (1 − p̄_c^(c)) φ_c − Σ_{c'≠c} p̄_c'^(c) φ_c' ],

which is the gradient step if features were free variables, one sample at a time (a loss that is a mean over n samples
divides it by n). There it is exact, because it is linear in p. But features move through the weights of the extractor:
the actual change is that step multiplied by a matrix of the extractor's gradients, which mixes samples, and the lemma
replaces that matrix by the identity. The report therefore has the cosine and the ratio of lengths.

Local training takes many steps. Both lemmas are summed over the steps of each client. What plain cross-entropy steps do
not explain (weight decay, momentum, FedFA's calibration) is reported separately from the error of the assumption.
The theorems are in :mod:`fedfa.diagnostics.theorems`.
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
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.client import RoundPlan
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, LocalTraining
from fedfa.learning.tensors import ComponentTensors, Tensors

SIDES = "sides"
"""The group of a client's contribution that has both sides."""


class Lemmas(Component):
    """Records the predictions of the lemmas and the actual changes; does not affect training."""

    name = "lemmas"
    traits = Traits(exact=("*",))

    def begin(self, ctx: ClientContext) -> None:
        """Start without predictions."""
        ctx.scratch[self.name] = {}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add the predictions of this step, with the classifier of the forward pass."""
        head = ctx.model.head
        step = predictions(batch.features, batch.y, head.weight, head.bias, ctx.local.lr)
        total = ctx.scratch[self.name]
        for name, value in step.items():
            total[name] = total[name] + value if name in total else value

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """Return the sums over all steps and the actual changes of the classifier and the mean features."""
        if not ctx.steps:
            return {}
        head = ctx.model.head_tensors[0]
        counts = ctx.label_counts.double().unsqueeze(1)
        sides: Tensors = dict(ctx.scratch[self.name])
        for name in ("features lemma", "features free"):
            sides[name] = sides[name] / counts.clamp(min=1)  # from sums over samples to means over a class
        sides["classifier update"] = (ctx.model.state()[head] - ctx.start[head]).double()
        member = functional.one_hot(ctx.labels(), ctx.num_classes).double()
        change = ctx.features().double() - ctx.features(ctx.start).double()
        sides["features update"] = member.mT @ change / counts.clamp(min=1)
        sides["counts"], sides["steps"] = counts.squeeze(1), torch.tensor(float(ctx.steps), dtype=torch.float64)
        linear, trained = ctx.model.head, ctx.features()
        after = class_means(trained, ctx.labels(), linear.weight, linear.bias)
        sides["trained classifier"] = linear.weight.detach().double()
        sides["trained features"], sides["trained probabilities"] = after.features, after.probabilities
        sides["trained gradient"] = predictions(trained, ctx.labels(), linear.weight, linear.bias, 1.0)[
            "classifier gradient"
        ]
        return {SIDES: WeightedSum.of(sides, 1)}


@dataclass(frozen=True)
class ClassMeans:
    """Means over the samples of each class; zero for a class without samples."""

    counts: Tensor
    """n_c, ``[C, 1]``."""
    features: Tensor
    """h̄_c, ``[C, d]``."""
    probabilities: Tensor
    """p̄_c^(c'), ``[c', c]``: of class c on samples of class c'."""


def class_means(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> ClassMeans:
    """The means that lemmas and theorems are about, in double precision."""
    features, weight = features.detach().double(), weight.detach().double()
    logits = features @ weight.mT if bias is None else features @ weight.mT + bias.detach().double()
    member = functional.one_hot(labels, len(weight)).double()  # [n, C]
    counts = member.sum(0).unsqueeze(1)
    return ClassMeans(
        counts, member.mT @ features / counts.clamp(min=1), member.mT @ logits.softmax(-1) / counts.clamp(min=1)
    )


def predictions(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, lr: float) -> Tensors:
    """Compute one step on the mean cross-entropy of a batch, by the lemmas and exactly.

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
        (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, labels), free)
    features, p = free.detach(), logits.detach().softmax(-1)
    member = functional.one_hot(labels, classes).double()  # [n, C]
    means = class_means(features, labels, weight, bias)
    counts, mean_feature, mean_p = means.counts, means.features, means.probabilities
    own = mean_p.diagonal().unsqueeze(1)
    others = mean_p - torch.diag(mean_p.diagonal())
    return {
        "classifier positive": lr / size * counts * (1 - own) * mean_feature,
        "classifier negative": lr / size * others.mT @ (counts * mean_feature),
        "classifier gradient": lr / size * (member - p).mT @ features,
        "features lemma": lr / size * counts * ((1 - own) * weight - others @ weight),
        "features free": -lr * member.mT @ gradient,
    }


# -- comparing --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Agreement:
    """Agreement of predicted with true vectors, both ``[m, d]``."""

    true: Tensor
    predicted: Tensor

    @property
    def count(self) -> int:
        """Number of compared vectors."""
        return len(self.true)

    @property
    def deviation(self) -> Tensor:
        """‖predicted − true‖ / ‖true‖ of each vector."""
        return _length(self.predicted - self.true) / _length(self.true)

    @property
    def cosine(self) -> Tensor:
        """Cosine of each predicted vector with the true one."""
        return (self.predicted * self.true).sum(-1) / (_length(self.predicted) * _length(self.true))

    @property
    def ratio(self) -> Tensor:
        """‖true‖ / ‖predicted‖ of each vector."""
        return _length(self.true) / _length(self.predicted)


def _length(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return lengths


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    lemma: int
    training: str
    """``one full-batch step`` or ``local training``."""
    true: str
    predicted: str
    classes: str
    """Classes of a pair of clients: ``all``, or those of ``both``, ``one`` or ``none`` of them."""
    agreement: Agreement


@dataclass(frozen=True)
class Sides:
    """Both sides of the lemmas for the clients of one training."""

    clients: Sequence[Tensors]

    def classifier(self, name: str, shared_by: str = "all", scale: Sequence[float] | None = None) -> Tensor:
        """Return differences over all pairs of clients, for the classes of ``both``, ``one`` or ``none`` of them."""
        values = [
            sides["classifier positive"] - sides["classifier negative"]
            if name == "lemma"
            else sides[f"classifier {name}"]
            for sides in self.clients
        ]
        if scale is not None:
            values = [value * factor for value, factor in zip(values, scale, strict=True)]
        return self._differences(values, shared_by)

    def features(self, name: str) -> Tensor:
        """Return differences of mean features over all pairs of clients, for the classes of both."""
        return self._differences([sides[f"features {name}"] for sides in self.clients], "both")

    @property
    def steps(self) -> list[float]:
        """Number of optimiser steps of each client."""
        return [float(sides["steps"]) for sides in self.clients]

    def _differences(self, values: Sequence[Tensor], shared_by: str) -> Tensor:
        wanted = torch.tensor({"all": (0, 1, 2), "both": (2,), "one": (1,), "none": (0,)}[shared_by])
        has_class = [(sides["counts"] > 0).long() for sides in self.clients]
        differences = []
        for a, b in combinations(range(len(values)), 2):
            classes = torch.isin(has_class[a] + has_class[b], wanted)
            differences.append(values[a][classes] - values[b][classes])
        return torch.cat(differences)


def both_trainings(
    engine: Engine, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
) -> tuple[Sides, Sides]:
    """Train clients with a single full-batch step, and as planned.

    Args:
        engine: Its algorithm must have the component :class:`Lemmas`.
        plan: A round.
        clients: At least two.
        client_state: Returns a client's state.

    Raises:
        FedfaError: Fewer than two clients trained.
    """
    one = _sides(engine, replace(plan, local=single_step(plan.local)), clients, client_state)
    return one, _sides(engine, plan, clients, client_state)


def single_step(local: LocalTraining) -> LocalTraining:
    """One plain gradient step on all of a client's data."""
    full_batch = 1 << 30  # larger than any client's data
    return local.model_copy(
        update={
            "epochs": 1, "batch_size": full_batch, "momentum": 0.0, "weight_decay": 0.0, "drop_last": False, "steps": 1,
        }
    )  # fmt: skip


def compare_lemmas(one: Sides, whole: Sides) -> list[Finding]:
    """Both sides of the lemmas, for a single step and for a whole local training."""
    return list(_findings(one, whole))


def _sides(
    engine: Engine, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
) -> Sides:
    sides = [
        result.contribution[f"{Lemmas.name}/{SIDES}"].tensors
        for result in engine.train(plan, clients, client_state)
        if result.steps
    ]
    if len(sides) < 2:
        raise FedfaError(f"the lemmas compare two clients, but only {len(sides)} of this round trained")
    return Sides(sides)


def _findings(one: Sides, whole: Sides) -> Iterator[Finding]:
    trainings = (("one full-batch step", one), ("local training", whole))
    for title, sides in trainings:
        for shared_by in ("all", "both", "one", "none"):
            update, lemma = (sides.classifier(name, shared_by) for name in ("update", "lemma"))
            if len(update):
                yield Finding(1, title, "update", "lemma", shared_by, Agreement(update, lemma))
        update, exact, lemma = (sides.classifier(name) for name in ("update", "gradient", "lemma"))
        yield Finding(1, title, "update", "exact steps", "all", Agreement(update, exact))
        yield Finding(1, title, "exact steps", "lemma", "all", Agreement(exact, lemma))
        if sides is whole:  # the lemma as a prediction of the whole round from its start
            ahead = one.classifier("lemma", scale=whole.steps)
            yield Finding(1, title, "update", "lemma at start", "all", Agreement(update, ahead))
    for title, sides in trainings:
        free, lemma, change = (sides.features(name) for name in ("free", "lemma", "update"))
        if len(lemma):
            yield Finding(2, title, "free features", "lemma", "both", Agreement(free, lemma))
            yield Finding(2, title, "features", "lemma", "both", Agreement(change, lemma))
