"""The paper's Theorems 1, 2 and 4 and its count of operations, with both sides measured on real client updates.

**Theorem 1** (classifier divergence). By Lemma 1 the deviation of two clients' updates of a classifier row is Δ⁺ − Δ⁻,
the parts of positive and of negative features. The theorem has Δ⁺ = 0 and a deviation that is not zero for classes that
both clients hold or neither holds, and one that is not zero for classes of one client and under feature skew.

**Theorem 2** (classifier and feature deviation). For equal probabilities p on class c, Lemma 2 gives
Δh_c = η (Δφ_c − Σ_ĉ p_ĉ Δφ_ĉ). The theorem is printed as −η Δφ_c + Σ_ĉ p_ĉ Δφ_ĉ: the other sign, and no η at the sum.

**Theorem 4** (smoothness). If features were the orthogonal anchors a_c, the squared gradient of classifier row c would
be (1/n²)(A_c² ‖a_c‖² + Σ_c̄ B_c̄² ‖a_c̄‖²) with A_c = Σ_i n_ic (1 − p̄_ic^(c)) and B_c̄ = Σ_i n_ic̄ p̄_ic^(c̄), and FedFA
would have smaller A and B than FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from fedfa.diagnostics.theory import Agreement, Sides
from fedfa.models.split import SplitModel

SHARED = ("both", "one", "none")
"""Which of two clients hold a class."""


# -- Theorem 1 --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Divergence:
    """Classifier deviation over all pairs of clients, for the classes that both, one or none of them hold."""

    classes: str
    deviation: Tensor
    """‖Δφ_c‖ of each pair and class."""
    positive: Tensor
    """‖η/n Δ⁺‖."""
    negative: Tensor
    """‖η/n Δ⁻‖."""


def divergences(sides: Sides) -> list[Divergence]:
    """Theorem 1 for one full-batch step of each client."""
    found = []
    for shared in SHARED:
        update, plus, minus = (
            sides.classifier(name, shared).norm(dim=-1) for name in ("update", "positive", "negative")
        )
        if len(update):
            found.append(Divergence(shared, update, plus, minus))
    return found


# -- Theorem 2 --------------------------------------------------------------------------------------------------------
def feature_deviations(sides: Sides, lr: float) -> dict[str, Agreement]:
    """Theorem 2 for the clients' trained classifiers, on the classes that two clients hold.

    The truth is Lemma 2 for features that are free variables, first with one client's probabilities for both, as the
    theorem assumes, then with each client's own.
    """
    truth: list[Tensor] = []
    own_truth: list[Tensor] = []
    derived: list[Tensor] = []
    printed: list[Tensor] = []
    for a, b in combinations(sides.clients, 2):
        both = (a["counts"] > 0) & (b["counts"] > 0)
        if not both.any():
            continue
        phi_a, phi_b = a["trained classifier"], b["trained classifier"]
        p_a, p_b = a["trained probabilities"], b["trained probabilities"]
        delta = phi_a - phi_b
        truth.append((_free_step(p_b, phi_a, lr) - _free_step(p_b, phi_b, lr))[both])
        own_truth.append((_free_step(p_a, phi_a, lr) - _free_step(p_b, phi_b, lr))[both])
        derived.append(lr * (delta - p_b @ delta)[both])
        printed.append((-lr * delta + p_b @ delta)[both])
    if not truth:
        return {}
    equal, own, right, wrong = (torch.cat(each) for each in (truth, own_truth, derived, printed))
    return {
        "equal p, derived": Agreement(equal, right),
        "equal p, as printed": Agreement(equal, wrong),
        "own p, derived": Agreement(own, right),
    }


def _free_step(p: Tensor, phi: Tensor, lr: float) -> Tensor:
    """Lemma 2: η [(1 − p_c) φ_c − Σ_{c̄≠c} p_c̄ φ_c̄] for each class c, ``[C, d]``."""
    own = p.diagonal().unsqueeze(1)
    return lr * ((1 - own) * phi - (p - torch.diag(p.diagonal())) @ phi)


# -- Theorem 4 --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Smoothness:
    """FedFA minus FedAvg, by class: squared norms of the gradient of the classifier at the clients' trained models."""

    measured: Tensor
    """‖∇φ_c L̂‖² − ‖∇φ_c L‖², ``[C]``."""
    predicted: Tensor
    """The theorem's sum of A and B."""
    smaller_a: Tensor
    """Whether Â_c < A_c, ``[C]``."""
    smaller_b: Tensor
    """Whether B̂_c̄ < B_c̄, for every pair of classes that somebody holds."""
    cosine: float
    """Mean absolute cosine between the class means of features, which the theorem takes to be 0."""


def smoothness(fedfa: Sides, fedavg: Sides, anchors: Tensor) -> Smoothness:
    """Theorem 4, from the same clients trained by both methods from one model.

    Args:
        fedfa: Trained with FedFA.
        fedavg: Trained with FedAvg.
        anchors: a_c, ``[C, d]``.
    """
    counts = torch.stack([one["counts"] for one in fedfa.clients])  # [N, C]
    held, total = counts.sum(0) > 0, float(counts.sum())
    (A_hat, B_hat), (A, B) = _coefficients(fedfa), _coefficients(fedavg)
    lengths = anchors.double().square().sum(1)
    predicted = ((A_hat**2 - A**2) * lengths + (B_hat**2 - B**2) @ lengths) / total**2
    gradients = [
        torch.stack([one["counts"].sum() * one["trained gradient"] for one in sides.clients]).sum(0) / total
        for sides in (fedfa, fedavg)
    ]
    measured = gradients[0].square().sum(1) - gradients[1].square().sum(1)
    means = torch.stack([one["trained features"] for one in fedfa.clients])
    weights = counts.unsqueeze(-1)
    mean = nn.functional.normalize(((means * weights).sum(0) / weights.sum(0).clamp(min=1))[held], dim=1)
    apart = (mean @ mean.mT)[~torch.eye(len(mean), dtype=torch.bool)]
    others = (~torch.eye(len(held), dtype=torch.bool)) & held.unsqueeze(0)  # [c, c̄]: samples of c̄, row c
    return Smoothness(
        measured, predicted, (A_hat < A)[held], (B_hat < B)[others], float(apart.abs().mean()) if len(apart) else 0.0
    )


def _coefficients(sides: Sides) -> tuple[Tensor, Tensor]:
    """A ``[C]`` and B ``[C, C]``, B[c, c̄] = Σ_i n_ic̄ p̄_ic^(c̄), zero on the diagonal."""
    counts = torch.stack([one["counts"] for one in sides.clients])
    p = torch.stack([one["trained probabilities"] for one in sides.clients])  # [N, c', c]
    A = (counts * (1 - p.diagonal(dim1=1, dim2=2))).sum(0)
    B = (counts.unsqueeze(2) * p).sum(0).mT
    return A, B - torch.diag(B.diagonal())


# -- operations -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Operations:
    """The paper's counts of operations for one sample (G₁, G₂, G₃), and for the server (G₄)."""

    network: int
    """G₁ = Σ_l (2 I_l − 1) I_{l+1}: a forward pass, convolutions counted as the products they are."""
    anchor_loss: int
    """G₂ = I_{L−1}, the width of the features."""
    calibration: int
    """G₃ = (2 I_{L−1} − 1) I_L: the classifier on one anchor."""
    averaging: int
    """G₄ = Σ_l I_l."""
    classes: int

    @property
    def as_printed(self) -> float:
        """FedFA over FedAvg on a client, (G₁ + G₂ + G₃)/G₁: one calibration for each sample, of one anchor."""
        return 1 + (self.anchor_loss + self.calibration) / self.network

    def per_batch(self, size: int) -> float:
        """The same for a mini-batch, in which there is one calibration on all C anchors."""
        return 1 + (size * self.anchor_loss + self.classes * self.calibration) / (size * self.network)


def operations(model: SplitModel, inputs: Tensor) -> Operations:
    """Count the operations of a network by one forward pass.

    Args:
        model: The network.
        inputs: A batch that it reads.
    """
    counted: list[tuple[int, int]] = []

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        places = output[0].numel() // weight.shape[0]
        counted.append(((2 * weight[0].numel() - 1) * weight.shape[0] * places, output[0].numel()))

    layers = [layer for layer in model.module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    was_training = model.module.training
    model.module.eval()
    with torch.no_grad():
        model.module(inputs)
    model.module.train(was_training)
    for handle in handles:
        handle.remove()
    dim, classes = model.feature_dim, model.num_classes
    return Operations(
        sum(products for products, _ in counted),
        dim,
        (2 * dim - 1) * classes,
        sum(units for _, units in counted),
        classes,
    )
