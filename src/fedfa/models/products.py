"""Products of stacked matrices, with the bits of the products one by one."""

from __future__ import annotations

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
    if left.dim() == 2 and right.dim() == 2:
        return left @ right if bias is None else torch.addmm(bias, left, right)
    clients = len(left if left.dim() == 3 else right)
    left, right = (side if side.dim() == 3 else side.expand(clients, *side.shape) for side in (left, right))
    if left.shape[-2] * left.shape[-1] * right.shape[-1] >= _SMALL or left.device.type != "cpu":
        return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.unsqueeze(1), left, right)
    pairs = zip(left.unbind(0), right.unbind(0), strict=True)
    if bias is None:
        return torch.stack([torch.mm(one, other) for one, other in pairs])
    return torch.stack([torch.addmm(b, one, other) for (one, other), b in zip(pairs, bias.unbind(0), strict=True)])
