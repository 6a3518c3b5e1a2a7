"""SGD, Adam and AdamW as the local loop needs them: over all tensors in one operation, without the framework around it.

``torch.optim`` walks through its groups, states and hooks at every step, which for small networks takes longer than
the arithmetic. These call the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedfa.learning.context import LocalTraining


def _one_kernel(tensors: Sequence[Tensor]) -> bool:
    """Whether torch has an operation that updates all these at once."""
    return all(t.device.type in ("cpu", "cuda") and t.is_floating_point() for t in tensors)


class Sgd:
    """Plain SGD, with momentum and weight decay; one for all clients and rounds.

    Args:
        parameters: What is trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._one_kernel = _one_kernel(self._parameters)
        self._momenta: dict[Tensor, Tensor] = {}
        self._lr = self._momentum = self._weight_decay = 0.0

    def reset(self, local: LocalTraining) -> None:
        """Forget what was, and take this round's values."""
        self._momenta = {}
        self._lr, self._momentum, self._weight_decay = local.lr, local.momentum, local.weight_decay

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Move every parameter that has a gradient: v ← m v + (g + λ w), w ← w − lr v; v is g + λ w at first."""
        gradients = {parameter: gradient for parameter in self._parameters if (gradient := parameter.grad) is not None}
        if not gradients:
            return
        with torch.no_grad():  # (not as a decorator: that takes a while longer, which for small networks counts)
            if not self._momentum:
                self._move(gradients, [])
                return
            moving = {parameter: g for parameter, g in gradients.items() if parameter in self._momenta}
            if moving:
                self._move(moving, [self._momenta[parameter] for parameter in moving])
            if starting := {parameter: g for parameter, g in gradients.items() if parameter not in self._momenta}:
                self._momenta |= {parameter: torch.empty_like(parameter) for parameter in starting}
                self._move(starting, [self._momenta[parameter] for parameter in starting], first=True)

    def _move(self, of_each: dict[Tensor, Tensor], momenta: list[Tensor], *, first: bool = False) -> None:
        parameters, gradients = list(of_each), list(of_each.values())
        if self._one_kernel and not momenta:  # with momentum it rounds as Adam's does, see there
            torch._fused_sgd_(
                parameters, gradients, [], weight_decay=self._weight_decay, momentum=0.0, lr=self._lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return
        steps = gradients
        if self._weight_decay:
            steps = list(torch._foreach_add(gradients, parameters, alpha=self._weight_decay))
        if momenta and first:
            torch._foreach_copy_(momenta, steps)
        elif momenta:
            torch._foreach_mul_(momenta, self._momentum)
            torch._foreach_add_(momenta, steps)
        torch._foreach_add_(parameters, momenta or steps, alpha=-self._lr)


class Moments:
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) with its decoupled weight decay.

    A parameter that has no gradient stays as it is, and so do its moments.

    Args:
        parameters: What is trained.
        local: The values of a round.
    """

    betas = (0.9, 0.999)
    eps = 1e-8

    def __init__(self, parameters: Sequence[Tensor], local: LocalTraining) -> None:
        self._parameters, self._local = list(parameters), local
        self._steps: dict[Tensor, int] = {}
        self._first: dict[Tensor, Tensor] = {}
        self._second: dict[Tensor, Tensor] = {}

    def step(self) -> None:
        """Move every parameter with a gradient: m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², w ← w − lr m̂/(√v̂ + ε)."""
        (beta1, beta2), local = self.betas, self._local
        by_count: dict[int, list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._steps[parameter] = self._steps.get(parameter, 0) + 1
                by_count.setdefault(self._steps[parameter], []).append(parameter)
        with torch.no_grad():
            for count, moving in by_count.items():
                for parameter in moving if count == 1 else ():
                    self._first[parameter], self._second[parameter] = (torch.zeros_like(parameter) for _ in range(2))
                gradients = [gradient for parameter in moving if (gradient := parameter.grad) is not None]
                first, second = ([each[parameter] for parameter in moving] for each in (self._first, self._second))
                if local.weight_decay and local.optimiser == "adamw":
                    torch._foreach_mul_(moving, 1 - local.lr * local.weight_decay)
                elif local.weight_decay:
                    gradients = list(torch._foreach_add(gradients, moving, alpha=local.weight_decay))
                torch._foreach_lerp_(first, gradients, 1 - beta1)
                torch._foreach_mul_(second, beta2)
                torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
                widths = torch._foreach_sqrt(second)
                torch._foreach_div_(widths, (1 - beta2**count) ** 0.5)
                torch._foreach_add_(widths, self.eps)
                torch._foreach_addcdiv_(moving, first, widths, -local.lr / (1 - beta1**count))


class LocalOptimiser:
    """The optimiser that the settings of a round name; one for all clients and rounds.

    Args:
        parameters: What is trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sgd, self._parameters = Sgd(parameters), list(parameters)
        self.zero_grad = self._sgd.zero_grad
        self.step: Callable[[], None] = self._sgd.step

    def reset(self, local: LocalTraining) -> None:
        """Forget what was, and take this round's values."""
        if local.optimiser == "sgd":
            self._sgd.reset(local)
            self.step = self._sgd.step
        else:
            self.step = Moments(self._parameters, local).step


@lru_cache(maxsize=4096)
def _number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor; the kernel for Adam takes its count of steps so, and only reads it."""
    return torch.tensor(value, dtype=dtype, device=device)


SIMD_WIDTH = 16
"""Pad to a multiple of this, so that no element falls into a SIMD kernel's scalar tail."""


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015) for one tensor, with moments that start at zero."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int = 0
    first: Tensor | None = None
    second: Tensor | None = None
    moved: Tensor | None = None
    """Where the kernel leaves its result."""

    def step(self, gradient: Tensor) -> tuple[Tensor, float]:
        """Take in a gradient; a direction and a rate: the parameter moves by minus their product.

        The direction is valid until the next step.
        """
        if self.first is None or self.second is None or self.moved is None:
            self.first, self.second, self.moved = (torch.zeros_like(gradient) for _ in range(3))
        self.steps += 1
        beta1, beta2 = self.betas
        # torch's one kernel for all of it rounds the last few elements of an uneven tensor otherwise than those before,
        # so clients that are stacked would end with other bits than alone.
        if _one_kernel([gradient]) and gradient.shape[-1] % SIMD_WIDTH == 0:
            step = _number(self.steps, gradient.dtype, gradient.device)
            torch._fused_adam_(
                [self.moved.zero_()], [gradient], [self.first], [self.second], [], [step],
                lr=self.lr, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return self.moved, -1.0
        unbiased = (1 - beta2**self.steps) ** 0.5
        self.first.lerp_(gradient, 1 - beta1)
        self.second.lerp_(gradient * gradient, 1 - beta2)
        direction = self.first / self.second.sqrt().add_(self.eps * unbiased)
        return direction, self.lr * unbiased / (1 - beta1**self.steps)
