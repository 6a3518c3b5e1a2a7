"""Named tensors in memory that several processes see.

A :class:`Block` is a file without a name (``memfd_create``; where the system has none, a temporary file that is
unlinked as soon as it is open). Processes that hold its descriptor map it. The kernel frees it when the last of them is
gone, however that happened, so nothing can be left behind in ``/dev/shm`` and nobody has to track it. It does not count
against the size of ``/dev/shm`` either, which containers keep at 64 MB.

What lies where goes beside it, over a pipe, as plain JSON: a :class:`Layout` mirrors the nesting of the dictionaries,
with one line per tensor. Tensors themselves are never serialised.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Mapping[str, Any]
"""Tensors by name, nested at will: ``{"part": {"name": tensor}}``. Empty dictionaries count."""

Layout: TypeAlias = dict[str, Any]
"""The same nesting; a tensor is ``[dtype, shape, strides, offset]``."""

_ALIGNMENT = 64
"""Bytes; as torch's own allocations. Kernels may take other paths on less."""


def dense(value: Tensor) -> Tensor:
    """The tensor itself if its elements fill one piece of memory, in whatever order; else a copy that does.

    The copy has the strides torch gives to every copy of such a tensor.

    Example:
        >>> dense(torch.zeros(4, 6).T).stride(), dense(torch.zeros(4, 6)[:, ::2]).stride()
        ((1, 6), (3, 1))
    """
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_contiguous():
        return value
    filled = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n != 1):
        if stride != filled:
            return value.clone()
        filled *= size
    return value


class Block:
    """Memory for a tree of tensors; grows as needed, is used again and again, goes with the last process.

    One side writes and tells the layout, the other reads; that they take turns is theirs to see to.

    Example:
        >>> block = Block()
        >>> layout = block.write({"a": {"x": torch.arange(3)}, "b": {}})
        >>> block.read(layout)
        {'a': {'x': tensor([0, 1, 2])}, 'b': {}}
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _nameless_file() if descriptor is None else descriptor
        self._bytes: Tensor | None = None

    def write(self, tree: Tree) -> Layout:
        """Copy tensors in; what was there before is gone."""
        place = _Placement()
        layout = place.lay_out(tree)
        if place.end > os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, -(-place.end // mmap.PAGESIZE) * mmap.PAGESIZE)
        place.fill(self._mapping())
        return layout

    def read(self, layout: Layout, *, private: bool = False) -> dict[str, Any]:
        """The tensors as views of the memory: they show what is written there later.

        Args:
            layout: What :meth:`write` returned, perhaps in another process.
            private: Map the memory anew, so that whoever changes these tensors changes them for himself alone.
        """
        memory = _map(self._descriptor, mmap.ACCESS_COPY) if private else self._mapping()
        return _views(memory, layout)

    def close(self) -> None:
        """Let go of the memory; views that are still in use keep what they show."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._bytes = -1, None

    def _mapping(self) -> Tensor:
        size = os.fstat(self._descriptor).st_size
        if self._bytes is None or len(self._bytes) != size:  # first use, or somebody let it grow
            self._bytes = _map(self._descriptor, mmap.ACCESS_WRITE)
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to a process that is just being started: the descriptor is handed over, not the content."""
        from multiprocessing.reduction import DupFd  # not every system has it

        return _attach, (DupFd(self._descriptor),)


def pack(tree: Tree) -> tuple[Tensor, Layout]:
    """A tree of tensors as one piece of memory, and what lies where.

    Example:
        >>> memory, layout = pack({"a": {"x": torch.arange(3)}, "b": {}})
        >>> unpack(memory, layout)
        {'a': {'x': tensor([0, 1, 2])}, 'b': {}}
    """
    place = _Placement()
    layout = place.lay_out(tree)
    memory = torch.empty(place.end, dtype=torch.uint8)
    place.fill(memory)
    return memory, layout


def unpack(memory: Tensor, layout: Layout) -> dict[str, Any]:
    """The inverse of :func:`pack`: the tensors as views of the memory."""
    return _views(memory, layout)


def _attach(descriptor: Any) -> Block:
    return Block(descriptor.detach())


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedfa", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(descriptor: int, access: int) -> Tensor:
    size = os.fstat(descriptor).st_size
    if size == 0:  # cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    # The tensor holds the mapping, and the views hold the tensor's storage: it goes with the last of them.
    return torch.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=torch.uint8)


class _Placement:
    """Finds a place for each tensor of a tree."""

    def __init__(self) -> None:
        self.end = 0
        self.tensors: list[tuple[Tensor, list[Any]]] = []

    def lay_out(self, tree: Tree) -> Layout:
        return {
            name: self._place(value) if isinstance(value, Tensor) else self.lay_out(value)
            for name, value in tree.items()
        }

    def fill(self, memory: Tensor) -> None:
        for value, entry in self.tensors:
            if value.numel():
                _view(memory, entry).copy_(value)

    def _place(self, value: Tensor) -> list[Any]:
        value = dense(value)
        entry = [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()), self.end]
        self.tensors.append((value, entry))
        self.end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return entry


def _view(memory: Tensor, entry: list[Any]) -> Tensor:
    name, shape, strides, offset = entry
    dtype: torch.dtype = getattr(torch, name)
    elements = torch.Size(shape).numel()
    if elements == 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return memory[offset : offset + elements * dtype.itemsize].view(dtype).as_strided(shape, strides)


def _views(memory: Tensor, layout: Layout) -> dict[str, Any]:
    return {
        name: _view(memory, entry) if isinstance(entry, list) else _views(memory, entry)
        for name, entry in layout.items()
    }
