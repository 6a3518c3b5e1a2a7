"""FedFA: feature anchors that align features and classifiers.

T. Zhou, J. Zhang, D. H. K. Tsang, *FedFA: Federated Learning with Feature Anchors to Align Features and Classifiers for
Heterogeneous Data*, IEEE Transactions on Mobile Computing 2023, arXiv:2211.09299. (Not to be confused with the FedFA of
ICLR 2023, which augments features.) Equation numbers below are the paper's.

Two parts. :class:`Anchors` pulls features to the anchor of their class (3, 4), accumulates the class features (6, 7)
and averages them into the next anchors. :class:`Calibration` trains the classifier on the anchors themselves (5). A
third one, :class:`FinalCalibration`, goes beyond the paper and is off unless ``variant = "plus"`` (or you) switch it
on: after the last round it measures the anchors of the final network and calibrates the classifier on these.

Sends per client and round, besides the model: C·d numbers down, C·d up (nothing up with ``anchors.update = false``).
With the last calibration, once at the end: the model down, C·d + C numbers of 8 bytes up.
Server keeps: the anchors. Client keeps: nothing. Extra compute per step: O(batch·C·d + C²·d), small beside the network.
What the server learns: the class features of each client, and which classes a client lacks (``absent = "keep"`` returns
the anchor that was sent, ``"zero"`` a zero); with ``weights = "count"`` and in the last calibration also its samples
per class, and the sum over a class of one sample is that sample's features. Secure sums hide all of it but the totals.

The paper's text and its published code differ; each difference is one option, and two named variants set them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from fedfa.algorithms.class_features import ClassFeatures, class_sums, membership
from fedfa.algorithms.classifier import classifier_names, remember_classifier
from fedfa.algorithms.method import AUTHORS_TRAINING, Method
from fedfa.errors import RecipeError
from fedfa.learning.optimisers import EVEN, Adam
from fedfa.learning.part import Batch, ClientContext, Options, Part, Role, ServerStep, Task
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import Tensors, first_non_finite
from fedfa.messages import nearest
from fedfa.models.products import product
from fedfa.models.split import SplitModel

INITIALISATIONS = ("orthogonal", "random", "etf", "fedavg")
LAST = "anchors"
"""Name of the anchors of what enters the classifier."""
UNUSED = "unused"
"""Sent beside anchors that are not to be used yet."""


class AnchorsOptions(Options):
    """Options of the anchors."""

    mu: float = Field(0.1, ge=0)
    """Weight μ of the anchor loss (eq. 4)."""
    loss: Literal["sample", "class"] = "class"
    """``sample``: mean over the batch of ‖h − a_y‖² (eq. 3). ``class``: mean per class, summed, divided by all C."""
    update: bool = True
    """Renew the anchors each round; without it rounds send nothing about features (``final`` still would, once)."""
    momentum: float = Field(0.5, ge=0, le=1)
    """λ of eq. 7."""
    class_mean: Literal["batch", "exact"] = "exact"
    """``batch``: eq. 6, batch means divided by the number of batches (classes missing from a batch shrink).
    ``exact``: the true mean of the epoch's features of a class."""
    average: Literal["two-epochs", "running"] = "running"
    """``two-epochs``: eq. 7, λ m^(k−1) + (1−λ) m^(k). ``running``: ā ← λ ā + (1−λ) m^(k)."""
    start: Literal["zero", "received"] = "received"
    """What the average over epochs starts from: zero (m^(0) = 0) or the anchor that was received."""
    absent: Literal["keep", "zero"] = "keep"
    """What a client returns for classes it does not hold: the anchor it received, or zero."""
    weights: Literal["size", "count"] = "size"
    """Weights of the server's average: n_i for every class, or the client's samples of that class. With ``size`` and
    ``absent = "keep"`` the clients that lack a class hold its anchor back, which acts as a momentum of the anchors."""
    layers: tuple[str, ...] = ()
    """Names of modules whose outputs are aligned, e.g. ``["fc1", "fc2"]``; convolutions are averaged over the image.
    The last one must be what enters the classifier, and calibrates it. Left out: only what enters the classifier."""
    init: str = "orthogonal"
    """``orthogonal`` (rows of the identity), ``random``, ``etf``, ``fedavg`` (first round without anchors), or the path
    of a file that holds anchors, e.g. the ``server.safetensors`` of a finished run (the paper's "ideal")."""

    @model_validator(mode="after")
    def _gather_what_is_used(self) -> AnchorsOptions:
        if self.init == "fedavg" and not self.update:
            raise ValueError('init = "fedavg" gathers the anchors in the first round, which update = false forbids')
        return self

    @field_validator("init")
    @classmethod
    def _known_or_file(cls, init: str) -> str:
        if init not in INITIALISATIONS and not Path(init).suffix:
            known = ", ".join(INITIALISATIONS)
            raise ValueError(f"not one of {known}{nearest(init, INITIALISATIONS)}, nor the path of a file")
        return init


class CalibrationOptions(Options):
    """Options of the classifier calibration."""

    when: Literal["step", "epoch", "before", "after", "never"] = "step"
    """After each mini-batch (the paper), at the end of each epoch, once before or after local training, or never."""
    optimiser: Literal["sgd", "adam"] = "adam"
    """``sgd``: a step with the local learning rate. ``adam``: a fresh Adam in each client's round."""
    lr: float | None = Field(None, gt=0)
    """Learning rate; left out, the local one for ``sgd`` and 0.001 for ``adam``."""
    steps: int = Field(1, ge=1)
    """Steps each time."""


class Anchors(Part[AnchorsOptions]):
    """One feature anchor per class: alignment (3, 4), accumulation (6, 7), averaging."""

    name = "anchors"
    options_type = AnchorsOptions

    def stacks(self) -> bool:
        """With the features that enter the classifier; outputs of inner layers come in other forms."""
        return not self.options.layers

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """The anchors before the first round, ``[C, d]``."""
        widths = {LAST: task.feature_dim, **self._inner_widths(task.model)}
        dtype = task.model.head.weight.dtype
        return {
            name: initial_anchors(self.options.init, task.num_classes, width, rng, name).to(dtype)
            for name, width in widths.items()
        }

    def watches(self) -> tuple[str, ...]:
        """The layers whose outputs are aligned."""
        return self.options.layers

    def _inner_widths(self, model: SplitModel) -> dict[str, int]:
        """Width of each aligned layer but the last, by the name of its anchors."""
        if not self.options.layers:
            return {}
        model.watch(self.options.layers)
        tried = model.try_out()
        if tried is None:
            raise RecipeError("algorithm.anchors.layers needs an example input to find the layers' widths")
        if model.outputs[self.options.layers[-1]] is not tried[0]:
            raise RecipeError(
                f"algorithm.anchors.layers: the last one, {self.options.layers[-1]!r}, must be the module whose output "
                f"enters the classifier {model.head_name!r}, because its anchors calibrate the classifier"
            )
        return {inner_name(layer): pooled(model.outputs[layer]).shape[-1] for layer in self.options.layers[:-1]}

    def _aligned(self, batch: Batch) -> Tensors:
        """The features to align, by the name of their anchors."""
        inner = {inner_name(layer): pooled(batch.outputs[layer]) for layer in self.options.layers[:-1]}
        return {LAST: batch.features, **inner}

    def broadcast(self, state: Tensors, round: int) -> Tensors:
        """The anchors; in the round that only gathers them, marked as not to be used."""
        if self.options.init == "fedavg" and round == 0:
            return {**state, UNUSED: torch.tensor(1.0)}
        return state

    def begin(self, ctx: ClientContext) -> None:
        """m^(0), or the received anchors."""
        options, received = self.options, ctx.received[self.name]
        ctx.scratch[self.name] = {
            name: ClassFeatures(
                anchors if options.start == "received" else torch.zeros_like(anchors),
                options.momentum, options.class_mean, options.average,
            )
            for name, anchors in received.items() if name != UNUSED
        }  # fmt: skip

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Supervised loss + μ · anchor loss (eq. 4)."""
        if anchors_in_use(ctx) is None or self.options.mu == 0:
            return loss
        # Without a graph: the gradient of w ‖h − a_y‖² is 2w (h − a_y), with w = μ / B, or by class μ / (C n_y).
        for name, features in self._aligned(batch).items():
            difference = features.detach() - functional.embedding(batch.y, ctx.received[self.name][name])
            if self.options.loss == "sample":
                gradient = difference * (2 * self.options.mu / batch.y.shape[-1])
            else:
                gradient = difference * batch.class_weights(2 * self.options.mu / ctx.num_classes)
            batch.add_gradient(features, gradient)
            loss = torch.add(loss, (gradient * difference).sum((-2, -1)), alpha=0.5)  # w ‖h − a_y‖² of all samples
        return loss

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Accumulate the class features of the forward pass (eq. 6)."""
        if self.options.update:
            for name, features in self._aligned(batch).items():
                ctx.scratch[self.name][name].add(features, batch)

    def after_epoch(self, ctx: ClientContext) -> None:
        """The average over epochs (eq. 7)."""
        if self.options.update:  # without anchors in use there is nothing to remember yet
            for features in ctx.scratch[self.name].values():
                features.end_epoch(remember=anchors_in_use(ctx) is not None)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The client's class features ā, and their weight; a client that made no step has seen none."""
        if not self.options.update or ctx.batches_per_epoch == 0:
            return {}
        counts = ctx.label_counts.unsqueeze(-1)
        averages = {}
        for name, features in ctx.scratch[self.name].items():
            received = ctx.received[self.name][name]
            absent = received if self.options.absent == "keep" else torch.zeros_like(received)
            averages[name] = torch.where(counts > 0, features.averaged, absent)
        by_size = self.options.weights == "size" and anchors_in_use(ctx) is not None
        weight: float | Tensor = float(ctx.size) if by_size else counts.to(averages[LAST].dtype)
        return {"anchors": WeightedSum.of(averages, weight)}

    def step(self, server: ServerStep) -> None:
        """The next anchors: the weighted mean over the cohort; a class without any weight keeps its anchor."""
        group = f"{self.name}/anchors"
        if group not in server.total:
            return
        seen = server.total[group].weight > 0
        for name, mean in server.total.mean(group).items():
            old = server.state[self.name][name]
            server.state[self.name][name] = torch.where(seen, mean.to(old.dtype), old)


class Calibration(Part[CalibrationOptions]):
    """Train the classifier on the anchors as one batch of C samples with labels 1…C (eq. 5)."""

    name = "calibration"
    options_type = CalibrationOptions
    requires = ("anchors",)

    def stacks(self) -> bool:
        """Yes."""
        return True

    def check(self, task: Task, roles: Mapping[str, Role]) -> None:
        """The classifier must be one that is trained."""
        fixed = [name for name in task.model.head_tensors if roles.get(name) is Role.FROZEN]
        if fixed and self.options.when != "never":
            raise RecipeError(
                f"FedFA calibrates the classifier, but {', '.join(fixed)} of this network may not be trained; let it "
                'be trained, or set algorithm.calibration.when = "never"'
            )

    def begin(self, ctx: ClientContext) -> None:
        """Perhaps calibrate; Adam starts fresh in each client's round."""
        adam = Adam(self.options.lr or 0.001)
        received, biased = ctx.received[Anchors.name][LAST], ctx.model.head.bias is not None
        ctx.scratch[self.name] = {"adam": adam, "batch": AnchorBatch.of(received, biased)}
        self._calibrate_if("before", ctx)

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Perhaps calibrate."""
        self._calibrate_if("step", ctx)

    def after_epoch(self, ctx: ClientContext) -> None:
        """Perhaps calibrate."""
        self._calibrate_if("epoch", ctx)

    def end(self, ctx: ClientContext) -> None:
        """Perhaps calibrate."""
        self._calibrate_if("after", ctx)

    def _calibrate_if(self, moment: str, ctx: ClientContext) -> None:
        if self.options.when != moment or anchors_in_use(ctx) is None:
            return
        mine, head = ctx.scratch[self.name], ctx.model.head
        weight, bias = head.weight.data, None if head.bias is None else head.bias.data
        for _ in range(self.options.steps):
            direction, rate = mine["batch"].gradient(weight, bias), self.options.lr or ctx.local.lr
            if self.options.optimiser == "adam":
                direction, rate = mine["adam"].step(direction)
            if mine.get("direction") is not direction:  # Adam's is the same tensor in every step
                mine["direction"], mine["parts"] = direction, parts_of(direction, weight, bias)
            move(weight, bias, mine["parts"], rate)


class FinalOptions(Options):
    """Options of the last calibration; off unless a variant or you switch it on."""

    steps: int = Field(0, ge=0)
    """Gradient steps of the server after the last round, on anchors measured anew; 0 is none (and no survey)."""
    lr: float = Field(0.1, gt=0)
    """Their learning rate."""


class FinalCalibration(Part[FinalOptions]):
    """Beyond the paper: after the last round, anchors of the final network, and the classifier calibrated on them (5).

    The anchors that training gathers are features of the clients' networks, each of which has drifted towards its own
    classes; their mean is not what the averaged network computes. So every client passes its data once through the
    final network and returns the sums of its class features. Their total makes the exact class means of all data.
    """

    name = "final"
    options_type = FinalOptions
    requires = ("anchors",)

    def check(self, task: Task, roles: Mapping[str, Role]) -> None:
        """There must be one network for all, with a classifier that is trained."""
        personal = Role.LOCAL in roles.values()
        if self.surveys() and (personal or any(roles.get(n) is not Role.SHARED for n in task.model.head_tensors)):
            raise RecipeError(
                "algorithm.final.steps calibrates the classifier of one network for all after the last round, but here "
                "the classifier is fixed or clients keep tensors of their own; set algorithm.final.steps = 0"
            )

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Which tensors are the classifier."""
        return remember_classifier(task) if self.surveys() else {}

    def broadcast(self, state: Tensors, round: int) -> Tensors:
        """Nothing: clients know their network."""
        return {}

    def surveys(self) -> bool:
        """Only if it is switched on."""
        return self.options.steps > 0

    def survey(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The sum of the features of each class under the final network, and the number of them."""
        if not self.surveys():
            return {}
        features = ctx.features().cpu().double()
        sums, counts = class_sums(features, membership(ctx.labels().cpu(), ctx.num_classes, features))
        return {"classes": WeightedSum({"sum": sums}, counts)}

    def conclude(self, server: ServerStep) -> None:
        """The exact anchors; a class that nobody holds keeps the one it had. Then eq. 5 by gradient descent."""
        if not self.surveys():
            return
        held = server.total[f"{self.name}/classes"].weight > 0
        old = server.state[Anchors.name][LAST]
        anchors = torch.where(held, server.total.mean(f"{self.name}/classes")["sum"], old.double())
        server.state[Anchors.name][LAST] = anchors.to(old.dtype)
        names = classifier_names(server, self.name)
        before = [server.model[name].double() for name in names]
        after = [old + server.update.get(name, 0) for name, old in zip(names, before, strict=True)]  # after other parts
        batch, (weight, bias) = (
            AnchorBatch.of(anchors, len(after) > 1),
            (after[0], after[1] if len(after) > 1 else None),
        )
        for _ in range(self.options.steps):
            move(weight, bias, parts_of(batch.gradient(weight, bias), weight, bias), self.options.lr)
        update = {name: new - old for name, new, old in zip(names, after, before, strict=True)}
        if first_non_finite(update) is not None:
            raise RecipeError(f"the last calibration diverged: lower algorithm.final.lr (now {self.options.lr:g})")
        server.update |= update


def anchors_in_use(ctx: ClientContext) -> Tensor | None:
    """The received anchors, or None in a round that only gathers them."""
    received = ctx.received[Anchors.name]
    return None if UNUSED in received else received[LAST]


def inner_name(layer: str) -> str:
    """Under which name the anchors of an inner layer are kept."""
    return f"{LAST}.{layer}"


def pooled(output: Tensor) -> Tensor:
    """A layer's output as one vector per sample: channels of an image are averaged over it."""
    return output.flatten(2).mean(-1) if output.dim() > 2 else output


@dataclass
class AnchorBatch:
    """The anchors as the one batch on which a classifier is calibrated (eq. 5): anchor c is of class c.

    The gradient of the cross-entropy of a linear classifier is written out, so no graph is built: with
    P = softmax(A Wᵀ + b), it is (P − I)ᵀ A / C for the weight and the column mean of P − I for the bias. What is the
    same in every step is made once, because beside a large network the start of an operation is what counts.
    """

    anchors: Tensor
    """A, ``[…, C, d]``."""
    shares: Tensor
    """A / C; for a classifier with bias with one column more, of a feature that is always one; then zeros to an even
    width, for the optimiser."""
    labels: Tensor
    """I"""

    @classmethod
    def of(cls, anchors: Tensor, biased: bool) -> AnchorBatch:
        """Of anchors ``[C, d]``, for a classifier with or without bias."""
        classes, width = anchors.shape[0], anchors.shape[1] + biased
        shares = anchors.new_zeros(classes, -(-width // EVEN) * EVEN)
        shares[:, :width] = 1 / classes
        shares[:, : anchors.shape[1]] = anchors / classes
        return cls(anchors, shares, torch.eye(classes, dtype=anchors.dtype, device=anchors.device))

    def gradient(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """With respect to the weight, ``[…, C, d]``, and as column d the bias, if there is one; then zeros.

        Args:
            weight: ``[…, C, d]``.
            bias: ``[…, C]`` or None.
        """
        error = product(self.anchors, weight.mT, bias).softmax(-1).sub_(self.labels)
        return product(error.mT, self.shares)


def parts_of(direction: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Which columns of an :meth:`AnchorBatch.gradient` are for the weight, and which one for the bias."""
    width = weight.shape[-1]
    return direction.narrow(-1, 0, width), None if bias is None else direction.select(-1, width)


def move(weight: Tensor, bias: Tensor | None, parts: tuple[Tensor, Tensor | None], rate: float) -> None:
    """A step of a classifier against a direction, given in its :func:`parts_of`."""
    of_weight, of_bias = parts
    weight.sub_(of_weight, alpha=rate)
    if bias is not None and of_bias is not None:
        bias.sub_(of_bias, alpha=rate)


def initial_anchors(init: str, classes: int, dim: int, rng: np.random.Generator, name: str = LAST) -> Tensor:
    """The anchors before training, ``[classes, dim]``, all of length one unless they come from a file.

    Args:
        init: ``orthogonal`` and ``fedavg``: distinct rows of the identity (random directions if there are more classes
            than dimensions); ``random``: random directions; ``etf``: a simplex equiangular tight frame; else a file.
        classes: C.
        dim: d.
        rng: Where the draws come from.
        name: Which anchors to take from a file.

    Example:
        >>> a = initial_anchors("orthogonal", 3, 5, np.random.default_rng(0))
        >>> (a @ a.T).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if init in ("orthogonal", "fedavg") and classes <= dim:
        rows = rng.choice(dim, classes, replace=False)
        return torch.eye(dim)[torch.from_numpy(rows)]
    if init in ("orthogonal", "fedavg", "random"):
        return functional.normalize(torch.from_numpy(rng.standard_normal((classes, dim))).float(), dim=1)
    if init == "etf":
        if not 2 <= classes <= dim:
            raise RecipeError(
                f'algorithm.anchors.init = "etf" needs two classes or more and as many features: {classes} and {dim}'
            )
        frame, _ = np.linalg.qr(rng.standard_normal((dim, classes)))
        centred = np.eye(classes) - 1 / classes
        return torch.from_numpy(np.sqrt(classes / (classes - 1)) * centred @ frame.T).float()
    return _anchors_from_file(Path(init), classes, dim, name)


def _anchors_from_file(path: Path, classes: int, dim: int, name: str) -> Tensor:
    if not path.is_file():
        raise RecipeError(
            f'algorithm.anchors.init = "{path}" is neither a file nor one of {", ".join(INITIALISATIONS)}'
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise RecipeError(f"{path} is not a safetensors file ({error}); give the server.safetensors of a run") from None
    anchors = tensors.get(f"{Anchors.name}/{name}", tensors.get(name))
    if anchors is None:
        raise RecipeError(f"{path} holds no {name}; give the server.safetensors of a finished FedFA run")
    if anchors.shape != (classes, dim):
        raise RecipeError(f"{path} holds anchors of shape {tuple(anchors.shape)}, this task needs {(classes, dim)}")
    return anchors.float()


FEDFA = Method(
    name="fedfa",
    summary="Feature anchors align features and calibrate classifiers (Zhou et al. 2023).",
    parts=(Anchors, Calibration, FinalCalibration),
    variants={
        "default": {},
        # Beyond the paper: a last calibration on anchors of the final network itself.
        "plus": {"algorithm.final.steps": 1000},
        "paper": {
            "algorithm.anchors.loss": "sample",
            "algorithm.anchors.class_mean": "batch",
            "algorithm.anchors.average": "two-epochs",
            "algorithm.anchors.start": "zero",
            "algorithm.anchors.absent": "zero",
            "algorithm.anchors.weights": "size",
            "algorithm.calibration.optimiser": "sgd",
        },
        "authors": {
            **AUTHORS_TRAINING,
            "algorithm.anchors.loss": "class",
            "algorithm.anchors.class_mean": "batch",
            "algorithm.anchors.average": "running",
            "algorithm.anchors.start": "received",
            "algorithm.anchors.absent": "keep",
            "algorithm.anchors.weights": "size",
            "algorithm.calibration.optimiser": "adam",
        },
    },
    default_variant="default",
)
