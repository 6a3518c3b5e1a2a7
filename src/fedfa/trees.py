"""Network inputs that are one tensor, or a dictionary or tuple of tensors with a common first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

NetworkInput: TypeAlias = Any
"""A tensor, a dictionary of tensors (keyword arguments of the network) or a tuple of tensors (its arguments)."""


def each_tensor(inputs: NetworkInput, change: Callable[[Tensor], Any]) -> NetworkInput:
    """The same structure with every tensor changed.

    Example:
        >>> each_tensor({"a": torch.ones(1), "b": torch.zeros(1)}, lambda tensor: tensor + 1)
        {'a': tensor([2.]), 'b': tensor([1.])}
    """
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs) if isinstance(inputs, tuple) else change(inputs)


def tensors_of(inputs: NetworkInput) -> list[Tensor]:
    """All tensors of an input."""
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def samples_in(inputs: NetworkInput) -> int:
    """Number of samples of a batch."""
    return len(tensors_of(inputs)[0])


def nbytes_of(inputs: NetworkInput) -> int:
    """Size of all tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(inputs))


def to_device(inputs: NetworkInput, device: torch.device) -> NetworkInput:
    """The input on a device."""
    return each_tensor(inputs, lambda tensor: tensor.to(device))


def pieces_of(inputs: NetworkInput, split: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[NetworkInput]:
    """An input in pieces, each of the same structure; ``split`` cuts one tensor."""
    if isinstance(inputs, Tensor):
        return split(inputs)
    parts = zip(*(split(tensor) for tensor in tensors_of(inputs)), strict=True)
    return [dict(zip(inputs, part, strict=True)) if isinstance(inputs, dict) else part for part in parts]


def join(batches: Sequence[NetworkInput]) -> NetworkInput:
    """Batches of one structure as one batch."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    return torch.cat(list(batches))


def call(module: nn.Module, inputs: NetworkInput) -> Any:
    """The network's output: a dictionary gives its keyword arguments, a tuple its arguments."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def form_of(inputs: Any) -> str:
    """Structure, numbers of samples and types, for comparison and messages: ``torch.float32[64]``."""
    if isinstance(inputs, dict):
        return "{" + ", ".join(f"{name}: {form_of(value)}" for name, value in inputs.items()) + "}"
    if isinstance(inputs, tuple):
        return "(" + ", ".join(map(form_of, inputs)) + ")"
    return f"{inputs.dtype}[{len(inputs)}]" if isinstance(inputs, Tensor) and inputs.dim() else type(inputs).__name__


def describe(inputs: NetworkInput) -> str:
    """The shapes of one sample, for messages: ``(1, 28, 28)`` or ``tokens (64,), mask (64,)``."""

    def one(tensor: Tensor) -> str:
        kind = "" if tensor.dtype == torch.float32 else f" of {str(tensor.dtype).removeprefix('torch.')}"
        return f"{tuple(tensor.shape[1:])}{kind}"

    if isinstance(inputs, dict):
        return ", ".join(f"{name} {one(tensor)}" for name, tensor in inputs.items())
    return ", ".join(map(one, tensors_of(inputs)))
