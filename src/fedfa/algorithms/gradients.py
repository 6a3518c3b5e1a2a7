"""Terms added to the gradients of the trained and shared parameters, for methods that correct local steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedfa.learning.context import ClientContext


def remember_start(ctx: ClientContext, component: str) -> None:
    """Prepare :func:`pull_to_start` for this client's round."""
    ctx.scratch.setdefault(component, {}).update(start=laid_out_like(ctx.parameters, ctx.start))


def pull_to_start(ctx: ClientContext, component: str, strength: float) -> None:
    """Add ``strength · (w − w_t)`` to the gradients, the gradient of strength/2 ‖w − w_t‖²."""
    with torch.no_grad():  # subtract first: strength·w − strength·w_t would lose the digits in which the two differ
        difference = torch._foreach_sub(list(ctx.parameters.values()), ctx.scratch[component]["start"])
    add_to_gradients(ctx.parameters.values(), difference, strength)


def laid_out_like(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> list[Tensor]:
    """Copies of the values in the parameters' own memory order, in which arithmetic between the two is fastest."""
    return [torch.empty_like(parameter.detach()).copy_(values[name]) for name, parameter in parameters.items()]


def add_to_gradients(parameters: Iterable[nn.Parameter], terms: Sequence[Tensor], factor: float = 1.0) -> None:
    """Add ``factor · term`` to each gradient; a parameter that the batch did not use has none and is not moved."""
    pairs = [(p.grad, term) for p, term in zip(parameters, terms, strict=True) if p.grad is not None]
    if pairs:
        torch._foreach_add_([gradient for gradient, _ in pairs], [term for _, term in pairs], alpha=factor)
