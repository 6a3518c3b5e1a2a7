"""The optimisers of the local loop against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedfa.learning import optimisers
from fedfa.learning.context import LocalTraining
from fedfa.learning.optimisers import SIMD_WIDTH, Adam, Sgd


def parameters(draw: torch.Generator) -> list[nn.Parameter]:
    shapes = [(3, 2), (5,), (1,), (2, 3, 4)]
    return [nn.Parameter(torch.randn(*shape, generator=draw)) for shape in shapes]


@pytest.fixture(params=["one kernel", "op by op"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "op by op":
        monkeypatch.setattr(optimisers, "_one_kernel", lambda tensors: False)
    return str(request.param)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_torch_s(kernels: str, momentum: float, weight_decay: float) -> None:
    """Seven steps; in some the second parameter has no gradient and stays, its momentum too; then a new round."""
    draw = torch.Generator().manual_seed(1)
    mine, theirs = parameters(draw), parameters(torch.Generator().manual_seed(1))
    sgd = Sgd(mine)
    for lr in (0.1, 0.02):  # a round each
        torch_sgd = torch.optim.SGD(theirs, lr=lr, momentum=momentum, weight_decay=weight_decay)
        sgd.reset(LocalTraining(lr=lr, momentum=momentum, weight_decay=weight_decay))
        for step in range(7):
            sgd.zero_grad()
            assert all(parameter.grad is None for parameter in mine)
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                gradient = torch.randn(one.shape, generator=draw)
                one.grad = other.grad = None if number == 1 and step in (0, 3) else gradient
                if one.grad is not None:
                    one.grad = gradient.clone()
            sgd.step()
            torch_sgd.step()
            for one, other in zip(mine, theirs, strict=True):
                assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_sgd_in_one_kernel_gives_the_bits_of_torch_s_fused_sgd() -> None:
    draw = torch.Generator().manual_seed(1)
    mine, theirs = parameters(draw), parameters(torch.Generator().manual_seed(1))
    sgd = Sgd(mine)
    sgd.reset(LocalTraining(epochs=1, batch_size=1, lr=0.1, momentum=0.0, weight_decay=0.01))
    torch_sgd = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.01, fused=True)
    for _ in range(4):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        sgd.step()
        torch_sgd.step()
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_sgd_without_parameters_or_gradients_does_nothing() -> None:
    for parameter in ([], [nn.Parameter(torch.ones(2))]):
        sgd = Sgd(parameter)
        sgd.reset(LocalTraining(epochs=1, batch_size=1, lr=0.1, momentum=0.9, weight_decay=0.01))
        sgd.zero_grad()
        sgd.step()
        assert all(torch.equal(p, torch.ones(2)) for p in parameter)


@pytest.mark.parametrize("width", [2, SIMD_WIDTH, 3 * SIMD_WIDTH])
@pytest.mark.parametrize("lr", [0.001, 0.1])
def test_adam_is_torch_s(lr: float, width: int) -> None:
    draw = torch.Generator().manual_seed(1)
    mine = torch.randn(3, width, generator=draw, dtype=torch.float64)
    theirs = nn.Parameter(mine.clone())
    torch_adam, adam = torch.optim.Adam([theirs], lr=lr), Adam(lr)
    for step in range(1, 8):
        theirs.grad = torch.randn(3, width, generator=draw, dtype=torch.float64) * 10.0 ** (step - 4)
        torch_adam.step()
        direction, rate = adam.step(theirs.grad)
        mine -= rate * direction
        assert_close(mine, theirs.data, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("width", [3, SIMD_WIDTH, 5 * SIMD_WIDTH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_has_the_same_bits_for_stacked_clients_and_alone(width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    together, alone = Adam(0.01), [Adam(0.01) for _ in range(7)]
    for _ in range(4):
        gradients = torch.randn(7, 3, width, generator=draw, dtype=dtype)
        direction, rate = together.step(gradients)
        steps = [one.step(gradient) for one, gradient in zip(alone, gradients, strict=True)]
        assert [own_rate for _, own_rate in steps] == [rate] * 7
        assert torch.equal(direction, torch.stack([own for own, _ in steps]))
