"""The optimisers of the local loop against torch's own."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError, RunError
from fedfa.experiment.run import run
from fedfa.learning import optimisers
from fedfa.learning.context import LocalTraining
from fedfa.learning.optimisers import SIMD_WIDTH, Adam, LocalOptimiser, Sgd
from tests.experiment.run_toys import assert_same_run, small


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


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_and_adamw_are_torch_s(name: Literal["adam", "adamw"], weight_decay: float) -> None:
    """Seven steps, in some of which the second parameter has no gradient; then a new round, with moments at zero."""
    draw = torch.Generator().manual_seed(1)
    mine, theirs = parameters(draw), parameters(torch.Generator().manual_seed(1))
    optimiser = LocalOptimiser(mine)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    for lr in (0.1, 0.02):
        expected = kind(theirs, lr=lr, weight_decay=weight_decay)
        optimiser.reset(LocalTraining(lr=lr, optimiser=name, weight_decay=weight_decay))
        for step in range(7):
            optimiser.zero_grad()
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                gradient = torch.randn(one.shape, generator=draw)
                one.grad = other.grad = None
                if not (number == 1 and step in (0, 3)):
                    one.grad, other.grad = gradient.clone(), gradient
            optimiser.step()
            expected.step()
            for one, other in zip(mine, theirs, strict=True):
                assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_schedules_over_rounds() -> None:
    """By hand: constant, a tenth every two rounds, half a cosine to a tenth, and a linear warm-up before each."""

    def rates(rounds: int = 6, **options: Any) -> list[float]:
        return [LocalTraining(lr=0.8, **options).in_round(t, rounds).lr for t in range(rounds)]

    assert rates() == [0.8] * 6
    assert rates(schedule="step:2:0.1") == pytest.approx([0.8, 0.8, 0.08, 0.08, 0.008, 0.008])
    cosine = [0.8 * (0.1 + 0.9 * (1 + math.cos(math.pi * t / 6)) / 2) for t in range(6)]
    assert rates(schedule="cosine:0.1") == pytest.approx(cosine)
    assert rates(warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates(warmup=2, schedule="step:2:0.5") == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.4, 0.4])
    late = [0.8 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert rates(warmup=2, schedule="cosine") == pytest.approx([0.4, 0.8, *late])
    assert rates(lr_decay=0.5, warmup=2)[:3] == pytest.approx([0.4, 0.4, 0.2])
    assert (
        LocalTraining(schedule="cosine").in_round(3, 6).in_round(5).lr
        == LocalTraining(schedule="cosine").in_round(3, 6).lr
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "local.schedule = 'cosin'"),
        ({"schedule": "step:0:0.1"}, "EVERY in rounds"),
        ({"schedule": "step:5:2"}, "FACTOR above 0"),
        ({"schedule": "cosine:nan"}, "END from 0 to 1"),
        ({"optimiser": "adam", "momentum": 0.9}, "momentum belongs to SGD"),
        ({"optimiser": "adagrad"}, "local.optimiser"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LocalTraining(**options)


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_adam_trains_the_same_bits_for_any_number_of_workers_and_is_not_stacked(
    optimiser: str, blobs: DataSet, tmp_path: Path
) -> None:
    local = {"optimiser": optimiser, "lr": 0.01, "schedule": "cosine", "warmup": 1}
    for workers in (1, 2):
        run(small("fedfa", local=local, engine={"workers": workers}), tmp_path / str(workers), data=blobs)
    assert_same_run(tmp_path / "1", tmp_path / "2")
    with pytest.raises(ConfigError, match="trains one client at a time"):
        run(small("fedavg", local=local, engine={"execution": "stacked"}), tmp_path / "stacked", data=blobs)
    with pytest.raises(AlgorithmError, match="takes local steps to be those of SGD"):
        run(small("scaffold", local=local), tmp_path / "scaffold", data=blobs)
    with pytest.raises(RunError, match="cannot be extended"):
        run(small("fedfa", local=local, rounds=6), tmp_path / "1", data=blobs, resume=True)
