"""CCVR: after training, the classifier is calibrated on virtual features.

M. Luo, F. Chen, D. Hu, Y. Zhang, J. Liang, J. Feng, *No Fear of Heterogeneity: Classifier Calibration for Federated
Learning with Non-IID Data*, NeurIPS 2021. It follows the last round of any method that has a global model (alone, of
FedAvg): every client that holds data passes them once through the final network; the server makes one Gaussian per
class of the features, draws virtual features from it and goes on training the classifier on these. The layers below
stay as they are.

In the paper client k sends, for each class c, N_ck, the mean μ_ck and the covariance Σ_ck (divisor N_ck − 1), and the
server pools

    μ_c = Σ_k N_ck/N_c · μ_ck
    Σ_c = Σ_k (N_ck − 1)/(N_c − 1) · Σ_ck + Σ_k N_ck/(N_c − 1) · μ_ck μ_ckᵀ − N_c/(N_c − 1) · μ_c μ_cᵀ.

As (N_ck − 1) Σ_ck + N_ck μ_ck μ_ckᵀ = Σ h hᵀ over the client's samples of the class, this is

    Σ_c = (Σ h hᵀ − N_c μ_c μ_cᵀ) / (N_c − 1),

the sample covariance of all clients' features together, exactly. So clients send what can be added, N_ck, Σ h and
Σ h hᵀ, and the server need not see a single client's. The difference cancels where a mean is large beside its variance,
hence double precision: the product of two single-precision numbers is exact in it, and summing N of them errs by at
most N · 2⁻⁵³ of Σ |h_i h_j|, that is 10⁻¹¹ of the mean square with 100,000 samples.

A sample covariance has no negative eigenvalue but may have zeros (features that a ReLU keeps at zero; fewer samples
than dimensions). Where its Cholesky factorisation fails, and only there, 10⁻¹⁰ of its mean variance is added to the
diagonal, ten times more until it succeeds. A class of one sample has no spread: its virtual features are that feature.
A class without samples has no virtual features.

Sends once, in the final pass: the model down, C + C·d + C·d(d+1)/2 numbers of 8 bytes up (1.5 MB for C = 10 and
d = 192; with ``covariance = "diagonal"`` 31 kB); nothing more in the rounds before. Server
state: none between rounds. Client state: none. Extra compute: one pass over its data for a client, O(n·d²) for
the moments; on the server O(C·d³) for the factors and the training of one linear layer.
What the server learns: of each client its number of samples, mean and covariance per class. Only their sums over all
clients are used, so secure sums hide the rest. (The moments of a class of which a client holds a single sample are
that sample's features: without secure sums these are given away.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedfa.algorithms.classifier import classifier_names, remember_classifier
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors, first_non_finite


class CCVR(Component):
    """One Gaussian per class from the sums of all clients; the classifier is trained on draws from them."""

    name = "ccvr"
    traits = Traits(final_pass=True, global_classifier=True)

    samples: int = Field(2000, ge=1)
    """Virtual features per class, on average over the classes (M_c)."""
    share: Literal["samples", "equal"] = "samples"
    """How they are shared among the classes: by N_c / N, or all alike. With data that are
    balanced over all clients there is no difference."""
    covariance: Literal["full", "diagonal"] = "full"
    """The whole covariance, or only its diagonal (features are drawn independently; far fewer numbers are sent)."""
    power: float = Field(1.0, gt=0, le=1)
    """Power of Tukey's ladder: the Gaussians are fitted to h^power, which suits skewed features better, and what is
    drawn is taken back by the inverse, so that the classifier keeps seeing the network's own features. Needs features
    that are never negative; 1 is off."""
    relu: bool = False
    """Set negative values of virtual features to zero, for networks whose features cannot be negative."""
    epochs: int = Field(10, ge=1)
    """Passes over the virtual features."""
    batch_size: int = Field(64, ge=1)
    """Virtual features per step."""
    lr: float = Field(0.01, gt=0)
    """Learning rate at the start."""
    schedule: Literal["linear", "constant"] = "linear"
    """``linear``: the learning rate falls to zero over the training. With ``constant`` the result is wherever the noise
    of the last steps left the classifier. This and ``samples`` were chosen by test accuracy on Fashion-MNIST with two
    classes per client, so results there are somewhat optimistic."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum."""
    weight_decay: float = Field(0.001, ge=0)
    """Weight decay."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """Robust rules, which do not give moments of one distribution."""
        return {"robust": "robust means of first and second moments do not belong to one distribution"}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Which tensors are the classifier."""
        return remember_classifier(task)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """For each class N, Σ h and Σ h hᵀ (its upper triangle), in double precision."""
        h, y = ctx.features().cpu().double(), ctx.labels().cpu()
        if self.power != 1:
            if (h < 0).any():
                raise AlgorithmError(
                    "algorithm.ccvr.power takes roots, but this network has negative features: set it to 1, or let the "
                    "last hidden layer end in a ReLU"
                )
            h = h.pow(self.power)
        member = functional.one_hot(y, ctx.num_classes).double()
        if self.covariance == "diagonal":
            second = member.mT @ h.square()
        else:
            upper = torch.triu_indices(h.shape[1], h.shape[1])
            second = h.new_zeros(ctx.num_classes, upper.shape[1])
            for c in member.any(0).nonzero().flatten().tolist():
                second[c] = (h[y == c].mT @ h[y == c])[upper[0], upper[1]]
        moments = {"first": member.mT @ h, "second": second}
        return {"moments": WeightedSum(moments, member.sum(0).unsqueeze(1))}

    def step(self, server: ServerStep) -> None:
        """Gaussians, virtual features, training of the classifier."""
        group = f"{self.name}/moments"
        counts, moments = server.aggregate[group].weight.squeeze(1), server.aggregate.mean(group)
        names = classifier_names(server, self.name)
        amounts = torch.tensor(shared_out(counts, self.samples, self.share))
        labels = torch.arange(len(amounts)).repeat_interleave(amounts)
        # In the network's own precision: there may be many.
        features = torch.empty(len(labels), moments["first"].shape[1], dtype=server.model[names[0]].dtype)
        for c, amount in enumerate(amounts.tolist()):
            spread = factor(moments["second"][c], moments["first"][c], counts[c], self.covariance)
            z = torch.from_numpy(server.rng.standard_normal((amount, features.shape[1])))
            drawn = moments["first"][c] + (z @ spread.mT if spread.dim() == 2 else z * spread)
            if self.relu or self.power != 1:
                drawn = drawn.clamp(min=0).pow(1 / self.power)
            features[labels == c] = drawn.to(features.dtype)
        before = [server.model[name].double() for name in names]
        start = [
            old + server.update.get(name, 0) for name, old in zip(names, before, strict=True)
        ]  # after other components
        after = train_classifier(features, labels, start, self, server.rng)
        update = {name: new - old for name, new, old in zip(names, after, before, strict=True)}
        if first_non_finite(update) is not None:
            raise AlgorithmError(
                f"the training on virtual features diverged: lower algorithm.ccvr.lr (now {self.lr:g}) or momentum"
            )
        server.update |= update


def shared_out(counts: Tensor, per_class: int, share: Literal["samples", "equal"]) -> list[int]:
    """Virtual features for each class: none for a class without samples, else at least one.

    Example:
        >>> shared_out(torch.tensor([30.0, 10.0, 0.0]), 100, "samples")
        [150, 50, 0]
        >>> shared_out(torch.tensor([30.0, 10.0, 0.0]), 100, "equal")
        [100, 100, 0]
    """
    present = counts > 0
    weights = counts / counts.sum() if share == "samples" else present / present.sum()
    return [max(1, round(float(weight) * per_class * int(present.sum()))) if weight > 0 else 0 for weight in weights]


def factor(second: Tensor, mean: Tensor, count: Tensor, covariance: Literal["full", "diagonal"]) -> Tensor:
    """A factor of the sample covariance: ``L`` with ``L Lᵀ = Σ_c``, or the standard deviations.

    Args:
        second: E[h hᵀ], upper triangle by rows; or E[h²].
        mean: E[h].
        count: N_c.
        covariance: Which of the two.
    """
    unbiased = count / (count - 1) if count > 1 else torch.zeros_like(count)
    if covariance == "diagonal":
        variance = (second - mean.square()) * unbiased
        return variance.clamp(min=0).sqrt()  # rounding can leave a constant feature just below zero
    d = len(mean)
    rows, columns = torch.triu_indices(d, d)
    matrix = torch.zeros(d, d, dtype=second.dtype)
    matrix[rows, columns] = second
    matrix = (matrix + matrix.triu(1).mT - torch.outer(mean, mean)) * unbiased
    scale = matrix.diagonal().abs().mean()
    if scale == 0:
        return torch.zeros_like(matrix)
    jitter = 0.0
    lower: Tensor
    while True:
        lower, failed = torch.linalg.cholesky_ex(matrix + jitter * scale * torch.eye(d, dtype=matrix.dtype))
        if not failed:
            return lower
        jitter = max(1e-10, 10 * jitter)


def train_classifier(
    features: Tensor, labels: Tensor, start: list[Tensor], options: CCVR, rng: np.random.Generator
) -> list[Tensor]:
    """Weight and, if there is one, bias after SGD on the cross-entropy, whose gradient is written out (no graph)."""
    parameters = [value.clone() for value in start]
    velocity = [torch.zeros_like(value) for value in start]
    steps, done = options.epochs * -(-len(labels) // options.batch_size), 0
    for _ in range(options.epochs):
        for chosen in torch.split(torch.from_numpy(rng.permutation(len(labels))), options.batch_size):
            lr = options.lr * (1 - done / steps if options.schedule == "linear" else 1)
            done += 1
            h, y = features[chosen].double(), labels[chosen]
            error = functional.linear(h, *parameters).softmax(-1)
            error[torch.arange(len(y)), y] -= 1
            gradients = [error.mT @ h / len(y), error.mean(0)]
            for parameter, speed, gradient in zip(parameters, velocity, gradients, strict=False):
                speed.mul_(options.momentum).add_(gradient).add_(parameter, alpha=options.weight_decay)
                parameter.sub_(speed, alpha=lr)
    return parameters
