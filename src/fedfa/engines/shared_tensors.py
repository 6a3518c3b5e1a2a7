"""Named tensors in memory that several processes share.

A :class:`Block` is an anonymous file (``memfd_create``, or an unlinked temporary file). Processes that hold its
descriptor map it. The kernel frees it with the last of them, however they end, so nothing can be left in ``/dev/shm``.
It does not count against the size of ``/dev/shm`` either, which containers limit to 64 MB.

The :class:`Layout` travels separately, as plain JSON over a pipe: it mirrors the nesting of the dictionaries, with one
entry per tensor. Tensors themselves are never serialised.
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
"""Nested dictionaries of tensors: ``{"component": {"name": tensor}}``. Empty dictionaries are preserved."""

Layout: TypeAlias = dict[str, Any]
"""The same nesting; a tensor is ``[dtype, shape, strides, offset]``."""

_ALIGNMENT = 64
"""Bytes, as in torch's allocator. Kernels may take other paths on less."""


def dense(value: Tensor) -> Tensor:
    """Return the tensor itself if its elements fill contiguous memory in any order, else a copy that does.

    The copy has the strides that torch gives to every copy of such a tensor.

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
    """Reusable shared memory for a tree of tensors; it grows as needed.

    One side writes and sends the layout, the other reads; the caller must keep them from doing so at the same time.

    Example:
        >>> block = Block()
        >>> layout = block.write({"a": {"x": torch.arange(3)}, "b": {}})
        >>> block.read(layout)
        {'a': {'x': tensor([0, 1, 2])}, 'b': {}}
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _anonymous_file() if descriptor is None else descriptor
        self._bytes: Tensor | None = None

    def write(self, tree: Tree) -> Layout:
        """Copy tensors into the block, replacing its content."""
        placement = _Placement(tree)
        if placement.end > os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, -(-placement.end // mmap.PAGESIZE) * mmap.PAGESIZE)
        placement.fill(self._mapping())
        return placement.layout

    def read(self, layout: Layout, *, private: bool = False) -> dict[str, Any]:
        """Return the tensors as views of the memory; later writes show in them.

        Args:
            layout: Result of :meth:`write`, possibly from another process.
            private: Map the memory copy-on-write, so that changes to these tensors stay in this process.
        """
        return unpack(_map(self._descriptor, mmap.ACCESS_COPY) if private else self._mapping(), layout)

    def close(self) -> None:
        """Release the memory; existing views stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._bytes = -1, None

    def _mapping(self) -> Tensor:
        size = os.fstat(self._descriptor).st_size
        if self._bytes is None or len(self._bytes) != size:  # first use, or the block has grown
            self._bytes = _map(self._descriptor, mmap.ACCESS_WRITE)
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a process that is being started: pass the descriptor, not the content."""
        from multiprocessing.reduction import DupFd  # not every system has it

        return _attach, (DupFd(self._descriptor),)


def pack(tree: Tree) -> tuple[Tensor, Layout]:
    """Copy a tree of tensors into one piece of memory; return it with its layout.

    Example:
        >>> memory, layout = pack({"a": {"x": torch.arange(3)}, "b": {}})
        >>> unpack(memory, layout)
        {'a': {'x': tensor([0, 1, 2])}, 'b': {}}
    """
    placement = _Placement(tree)
    memory = torch.empty(placement.end, dtype=torch.uint8)
    placement.fill(memory)
    return memory, placement.layout


def unpack(memory: Tensor, layout: Layout) -> dict[str, Any]:
    """The inverse of :func:`pack`: the tensors as views of the memory."""
    return {
        name: _view(memory, entry) if isinstance(entry, list) else unpack(memory, entry)
        for name, entry in layout.items()
    }


def _attach(descriptor: Any) -> Block:
    return Block(descriptor.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedfa", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(descriptor: int, access: int) -> Tensor:
    size = os.fstat(descriptor).st_size
    if size == 0:  # cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    # The tensor holds the mapping, and views hold the tensor's storage: the mapping lives as long as the last view.
    return torch.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=torch.uint8)


class _Placement:
    """Assigns an offset to each tensor of a tree."""

    def __init__(self, tree: Tree) -> None:
        self.end = 0
        self._tensors: list[tuple[Tensor, list[Any]]] = []
        self.layout = self._lay_out(tree)

    def fill(self, memory: Tensor) -> None:
        for value, entry in self._tensors:
            if value.numel():
                _view(memory, entry).copy_(value)

    def _lay_out(self, tree: Tree) -> Layout:
        return {
            name: self._place(value) if isinstance(value, Tensor) else self._lay_out(value)
            for name, value in tree.items()
        }

    def _place(self, value: Tensor) -> list[Any]:
        value = dense(value)
        entry = [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()), self.end]
        self._tensors.append((value, entry))
        self.end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return entry


def _view(memory: Tensor, entry: list[Any]) -> Tensor:
    name, shape, strides, offset = entry
    dtype: torch.dtype = getattr(torch, name)
    elements = torch.Size(shape).numel()
    if elements == 0:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return memory[offset : offset + elements * dtype.itemsize].view(dtype).as_strided(shape, strides)
