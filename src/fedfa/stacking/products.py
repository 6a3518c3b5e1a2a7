"""Products of stacked matrices, with the bits of the products one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

_SMALL = 400
"""On a CPU torch multiplies stacks of matrices below this size by a loop of its own, which adds in another order."""


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """The matrix product ``left @ right`` (plus ``bias`` on every row), for two matrices or for stacks of K.

    Each of the K products has the bits that the product of its two matrices has alone. (``@`` would not do: it makes
    one large product where only one side is stacked, and has kernels of its own for small ones.)

    Args:
        left: ``[n, m]`` or ``[K, n, m]``.
        right: ``[m, p]`` or ``[K, m, p]``.
        bias: ``[p]`` or ``[K, p]``.

    Example:
        >>> product(torch.ones(2, 3), torch.ones(4, 3, 1)).shape
        torch.Size([4, 2, 1])
    """
    left, right, path = _prepared(left, right)
    if path == "single":
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    if torch.is_grad_enabled():
        result: Tensor = _Products.apply(left, right, bias, path == "batched")  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result
    if path == "batched":
        return _batched(left, right, bias)
    if path == "outer" and bias is None:  # nothing is added. (But in the gradients it is.)
        return left * right
    return _one_by_one(left, right, bias)


def product_calls(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> list[Callable[[], object]]:
    """The same product as calls, to be made in this order and as often as wanted: each time with the values of then.

    Where a product goes, and the views of its matrices, are found once. For small matrices that takes longer than the
    arithmetic. Where a tensor needs a gradient, gradients must be off when the calls are made.
    """
    left, right, path = _prepared(left, right)
    if path == "single":
        call = partial(torch.mm, left, right) if bias is None else partial(torch.addmm, bias, left, right)
        return [partial(call, out=out)]
    if path == "batched":
        if bias is None:
            return [partial(torch.bmm, left, right, out=out)]
        return [partial(torch.baddbmm, bias.unsqueeze(1), left, right, out=out)]
    if path == "outer" and bias is None:
        return [partial(torch.mul, left, right, out=out)]
    return _calls_one_by_one(left, right, out, bias)


def _prepared(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Literal["single", "batched", "outer", "each"]]:
    """The factors, both stacked if one is, and how to multiply them."""
    if left.dim() == 2:
        if right.dim() == 2:
            return left, right, "single"
        left = left.expand(right.shape[0], *left.shape)
    elif right.dim() == 2:
        right = right.expand(left.shape[0], *right.shape)
    _, rows, inner = left.shape
    columns = right.shape[-1]
    # Libraries multiply single vectors by kernels of their own, which a stack does not get. Whether the bits agree then
    # depends on the processor.
    vectors = 1 in (rows, inner, columns)
    if (rows * inner * columns >= _SMALL and not vectors) or left.device.type != "cpu":
        return left, right, "batched"
    return left, right, "outer" if inner == 1 else "each"


class _Products(torch.autograd.Function):
    """K products with the gradients that torch has for one.

    The right factor's is ``(Gᵀ left)ᵀ``: so it is for a product with a transposed weight, as a linear layer makes it.
    For a stack torch has ``leftᵀ G``, whose last digits may be others.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None, batched: bool) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.batched = batched
        return _batched(left, right, bias) if batched else _one_by_one(left, right, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        for_left, for_right, for_bias, _ = ctx.needs_input_grad
        multiply = product if ctx.batched else _one_by_one
        return (
            multiply(gradient, right.mT) if for_left else None,
            multiply(gradient.mT, left).mT if for_right else None,
            gradient.sum(1) if for_bias else None,
            None,
        )


def _batched(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.unsqueeze(1), left, right)


def _one_by_one(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    result = left.new_empty(len(left), left.shape[-2], right.shape[-1])
    for call in _calls_one_by_one(left, right, result, bias):
        call()
    return result


def _calls_one_by_one(
    left: Tensor, right: Tensor, result: Tensor, bias: Tensor | None = None
) -> list[Callable[[], object]]:
    each = zip(left.unbind(0), right.unbind(0), result.unbind(0), strict=True)
    if bias is None:
        return [partial(torch.mm, one, other, out=out) for one, other, out in each]
    return [partial(torch.addmm, b, *two, out=out) for b, (*two, out) in zip(bias.unbind(0), each, strict=True)]


def rows(values: Tensor, index: Tensor) -> Tensor:
    """The rows ``[…, B, d]`` of ``[…, n, d]`` at positions ``[…, B]``.

    Example:
        >>> rows(torch.tensor([[[1], [2]], [[3], [4]]]), torch.tensor([[1], [0]])).flatten().tolist()
        [2, 3]
    """
    if index.dim() == 1:
        return values[index]
    return values[torch.arange(len(index), device=index.device).unsqueeze(1), index]
