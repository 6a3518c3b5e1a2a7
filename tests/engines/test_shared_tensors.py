from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfa.engines.shared_tensors import Block, dense

DTYPES = [
    torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64,
]  # fmt: skip


def bits(value: Tensor) -> list[int]:
    """Not the numbers: NaNs and signs of zeros count."""
    plain = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))
    return (torch.view_as_real(plain) if value.is_complex() else plain).view(torch.uint8).flatten().tolist()


def assert_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        if isinstance(value, Tensor):
            assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape)
            assert bits(value) == bits(b[name])
            assert b[name].stride() == value.clone().stride(), "a sum over it would be taken in another order"
        else:
            assert_same(value, b[name])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any type and shape, filled with any bits, and seen from any side."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = torch.Size(shape).numel() * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    raw = torch.tensor(list(content), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    value = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    for dim in range(value.dim()):
        if draw(st.booleans()):
            value = value.transpose(dim, draw(st.integers(0, value.dim() - 1)))
        if draw(st.booleans()):
            value = value.narrow(dim, 0, value.shape[dim] // 2)
        if draw(st.booleans()):
            value = value[(slice(None),) * dim + (slice(None, None, 2),)]
    if draw(st.booleans()):
        value = value.expand(draw(st.integers(1, 3)), *value.shape)
    if value.is_complex() and draw(st.booleans()):
        value = value.conj()
    return value


TREES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(st.text(max_size=5), tensors(), max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(TREES, max_size=4))
def test_written_trees_are_read_unchanged(trees: list[dict[str, Any]]) -> None:
    """One block for all, as a worker's is: it grows, and what lay there before does not show."""
    mine = Block()
    other = Block(os.dup(mine._descriptor))
    for tree in trees:
        layout = json.loads(json.dumps(mine.write(tree)))
        assert_same(tree, other.read(layout))
        assert_same(tree, other.read(layout, private=True))
    mine.close()
    other.close()


def test_reading_copies_nothing() -> None:
    block = Block()
    layout = block.write({"x": torch.zeros(3)})
    view = block.read(layout)["x"]
    block.write({"x": torch.ones(3)})
    assert view.tolist() == [1, 1, 1]


def test_changes_in_a_private_view_stay_there() -> None:
    block = Block()
    layout = block.write({"x": torch.zeros(3), "y": torch.ones(3)})
    private = block.read(layout, private=True)
    private["x"].fill_(7)
    assert block.read(layout)["x"].tolist() == [0, 0, 0]
    assert private["x"].tolist() == [7, 7, 7]
    assert private["y"].tolist() == [1, 1, 1]


def test_tensors_are_aligned_like_torchs() -> None:
    layout = Block().write({"a": torch.zeros(3, dtype=torch.bool), "b": torch.zeros(5), "c": torch.zeros(17)})
    assert [entry[-1] % 64 for entry in layout.values()] == [0, 0, 0]


def test_memory_is_freed_by_closing_but_not_under_a_view() -> None:
    block = Block()
    view = block.read(block.write({"x": torch.arange(5)}))["x"]
    block.close()
    block.close()
    assert view.tolist() == [0, 1, 2, 3, 4]


def test_a_block_works_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no memory files, a file that is unlinked at once does."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    block = Block()
    assert os.fstat(block._descriptor).st_nlink == 0
    assert block.read(block.write({"x": torch.arange(3)}))["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, 3), torch.zeros(2, 3).T, torch.zeros(2, 4, 5, 5).to(memory_format=torch.channels_last)],
    ids=["standard", "transposed", "channels last"],
)
def test_a_dense_tensor_is_not_copied(value: Tensor) -> None:
    assert dense(value).data_ptr() == value.data_ptr()


def test_gradients_and_graphs_are_not_shared() -> None:
    value = torch.ones(2, requires_grad=True) * 2
    block = Block()
    assert not block.read(block.write({"x": value}))["x"].requires_grad
