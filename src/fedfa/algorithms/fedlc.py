"""FedLC: logits calibrated by how often each class occurs on the client.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, *Federated Learning with Label Distribution Skew via Logits
Calibration*, ICML 2022, arXiv:2209.00189. ``form = "log"`` is the logit adjustment of A. K. Menon et al., *Long-Tail
Learning via Logit Adjustment*, ICLR 2021, with the client's own label frequencies.

In local training the logit of class c becomes f_c − τ·n_c^(−1/4), n_c being the client's samples of c: rare classes get
the larger handicap, so the network has to push their logits further up. Evaluation uses the plain logits.

The paper's calibrated cross-entropy sums its denominator over the *other* classes. Here the own class is part of it, as
in every cross-entropy: without it the loss has no lower bound, a sample that is already right keeps pulling as hard as
one that is wrong, and a client with one class divides by nothing. As n_c → 0 the margin grows without bound, so a class
the client does not hold leaves the denominator altogether (``absent = "mask"``): its row of the classifier gets no
gradient there. It follows that a client that holds a single class has loss zero and moves by weight decay alone.

Sends per client and round: what FedAvg sends. Server and client state: nothing. Extra compute per step: one addition to
the logits. What the server learns: what it learns with FedAvg; label counts stay on the client.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext


class FedLC(Component):
    """Shift the logits by the client's label counts."""

    name = "fedlc"
    traits = Traits(slot="logit calibration")

    tau: float = Field(1.0, ge=0)
    """Strength τ of the calibration; 0 is FedAvg, absent classes included."""
    form: Literal["margin", "log"] = "margin"
    """``margin``: f_c − τ·n_c^(−1/4) (FedLC). ``log``: f_c + τ·log(n_c / n) (logit adjustment)."""
    absent: Literal["mask", "floor"] = "mask"
    """Classes the client does not hold: left out of the softmax, or counted as if it held ``floor`` samples of them."""
    floor: float = Field(1.0, gt=0)
    """With ``absent = "floor"``: the smallest count there is."""

    @property
    def enabled(self) -> bool:
        """Without τ this is FedAvg."""
        return self.tau > 0

    def begin(self, ctx: ClientContext) -> None:
        """The shift of the round: label counts do not change while a client trains."""
        counts = ctx.label_counts.to(torch.promote_types(ctx.model.head.weight.dtype, torch.float32))
        ctx.scratch[self.name] = {"shift": label_shift(counts, self.form, self.tau, self.absent, self.floor)}

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """The calibrated logits; they only enter the local loss."""
        shift: Tensor = ctx.scratch[self.name]["shift"]
        return logits + shift.unsqueeze(-2)


def label_shift(
    counts: Tensor,
    form: Literal["margin", "log"] = "margin",
    tau: float = 1.0,
    absent: Literal["mask", "floor"] = "mask",
    floor: float = 1.0,
) -> Tensor:
    """What is added to the logits of a client with these label counts.

    Args:
        counts: Samples per class, ``[…, C]``.
        form: ``margin``: −τ·n_c^(−1/4). ``log``: τ·log(n_c / n).
        tau: τ; with 0 the shift is zero for every class, also for those that are absent.
        absent: ``mask``: classes without samples get −∞ and so leave the softmax. ``floor``: see there.
        floor: With ``absent = "floor"``, counts below it (such as 0) are taken to be it.

    Returns:
        The shift, ``[…, C]``.

    Example:
        >>> label_shift(torch.tensor([16, 1, 0])).tolist()
        [-0.5, -1.0, -inf]
    """
    counts = counts if counts.is_floating_point() else counts.float()
    if tau == 0:
        return torch.zeros_like(counts)
    if absent == "floor":
        counts = counts.clamp(min=floor)
    if form == "margin":
        return -label_margins(counts, tau)  # 0^(−1/4) is ∞, which is what a mask needs
    total = counts.sum(-1, keepdim=True)
    return tau * (counts / torch.where(total > 0, total, 1.0)).log()


def label_margins(counts: Tensor, tau: float = 1.0) -> Tensor:
    """The margins τ·n_c^(−1/4) of FedLC, ``[…, C]``; ∞ for a class without samples."""
    counts = counts if counts.is_floating_point() else counts.float()
    return tau * counts.pow(-0.25) if tau > 0 else torch.zeros_like(counts)
