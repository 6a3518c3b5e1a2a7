"""FedProx: local training is held near the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, *Federated Optimization in Heterogeneous Networks*,
MLSys 2020.

Each client minimises its loss plus μ/2 ‖w − w_t‖² (the paper's eq. 2), w_t being the model it received. The term's
gradient μ (w − w_t) is added to the loss's after the backward pass: no graph is built for it, and the training loss
that is recorded is that of the data alone, comparable between values of μ. Only parameters that are shared are held;
those a client keeps have no global counterpart. The server averages as FedAvg does (the original draws clients in
proportion to their samples and averages evenly, which agrees for equal sizes). That clients may do partial work is a
liberty the paper gives, not a step of the method; clients here do all their epochs.

Sends per client and round: |w| down, |w| up, as FedAvg. Server and client keep: nothing more. Extra compute: two passes
over the parameters per step. What the server learns: what it learns in FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfa.algorithms.method import AUTHORS_TRAINING, Method
from fedfa.learning.part import Batch, ClientContext, Options, Part


class ProximalOptions(Options):
    """Options of the proximal term."""

    mu: float = Field(0.1, ge=0)
    """μ of μ/2 ‖w − w_t‖² (FedFA's paper: μ/2 = 0.05). 0 is FedAvg, bit for bit."""


class Proximal(Part[ProximalOptions]):
    """The proximal term, as its gradient."""

    name = "fedprox"
    options_type = ProximalOptions
    needs_shared_model = True

    def stacks(self) -> bool:
        """Yes."""
        return True

    def begin(self, ctx: ClientContext) -> None:
        """Remember w_t."""
        if self.options.mu:
            remember_start(ctx, self.name)

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add μ (w − w_t)."""
        if self.options.mu:
            pull_to_start(ctx, self.name, self.options.mu)


def remember_start(ctx: ClientContext, part: str) -> None:
    """Prepare :func:`pull_to_start` for this client's round."""
    ctx.scratch.setdefault(part, {}).update(start=laid_out_like(ctx.parameters, ctx.start))


def pull_to_start(ctx: ClientContext, part: str, strength: float) -> None:
    """Add ``strength · (w − w_t)`` to the gradients of the parameters that are trained and shared."""
    with torch.no_grad():  # subtracted first: strength·w − strength·w_t would lose the digits in which the two differ
        difference = torch._foreach_sub(list(ctx.parameters.values()), ctx.scratch[part]["start"])
    add_to_gradients(ctx.parameters.values(), difference, strength)


def laid_out_like(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> list[Tensor]:
    """Copies of the values in the parameters' own memory order, in which arithmetic between the two is fastest."""
    return [torch.empty_like(parameter.detach()).copy_(values[name]) for name, parameter in parameters.items()]


def add_to_gradients(parameters: Iterable[nn.Parameter], terms: Sequence[Tensor], factor: float = 1.0) -> None:
    """Add ``factor · term`` to each gradient; a parameter that the batch did not use has none and is not moved."""
    pairs = [(p.grad, term) for p, term in zip(parameters, terms, strict=True) if p.grad is not None]
    if pairs:
        torch._foreach_add_([gradient for gradient, _ in pairs], [term for _, term in pairs], alpha=factor)


FEDPROX = Method(
    name="fedprox",
    summary="FedProx (Li et al. 2020): a proximal term holds local training near the global model.",
    parts=(Proximal,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
