"""Linear layers and ReLUs in a row: the gradient of the cross-entropy without a graph.

For small networks, a step costs what starting its operations costs, and autograd starts many: to build the graph, to
transpose, to widen, to add up. Written out, the backward pass of such a chain is two products and a sum per layer. They
are the products that torch makes itself, so the gradient has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fedfa.stacking.products import product_calls

Layer: TypeAlias = tuple[Tensor, Tensor | None, bool]
"""Weight, bias, and whether a ReLU follows."""

_ROOM = 4 * 2**20
"""Maximum bytes cached between steps: mostly for two shapes of batches, a whole batch and the rest of an
epoch. A step that takes more than half of it is prepared anew each time: then its arithmetic is the cost."""

_after_relu = torch.ops.aten.threshold_backward.grad_input
"""The gradient before a ReLU, from the one after it and the ReLU's values."""


@dataclass(frozen=True)
class Chain:
    """The linear layers of a network that is nothing else."""

    layers: list[Layer]
    _workspaces: dict[tuple[object, ...], _Workspace] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[type[Chain], tuple[list[Layer]]]:
        """Copied, or sent elsewhere, without what was prepared: that belongs to these weights."""
        return Chain, (self.layers,)

    @classmethod
    def find(cls, module: nn.Module, head: nn.Linear, flatten: type[nn.Module] = nn.Flatten) -> Chain | None:
        """The chain that a network is; None if it is anything else, or not all of it is trained.

        The classifier must be the last layer. ``flatten`` may come first; the chain makes vectors of its inputs itself.
        """
        layers: list[tuple[nn.Linear, bool]] = []
        for leaf in _leaves(module):
            if isinstance(leaf, nn.Linear):
                layers.append((leaf, False))
            elif type(leaf) is nn.ReLU and layers and not layers[-1][1]:
                layers[-1] = (layers[-1][0], True)
            elif type(leaf) is not flatten or layers:
                return None
        trained = all(parameter.requires_grad for parameter in module.parameters())
        if not (trained and layers and layers[-1] == (head, False)):
            return None
        return cls([(layer.weight, layer.bias, relu) for layer, relu in layers])

    def set_gradients(self, x: Tensor, targets: Tensor, *, seen: bool = True) -> Pass:
        """Set the gradient of the batch's mean cross-entropy.

        Args:
            x: Inputs ``[K, B, …]``.
            targets: The gradient with respect to the log-softmax, ``[K, B, C]``: −1/B at a sample's class, else 0.
            seen: Whether anything but the optimiser reads the results. If not, the next call may overwrite all but the
                log-softmax.
        """
        # Moving a network to a device leaves the parameters and exchanges what they hold.
        held = [tensor.data_ptr() for weight, bias, _ in self.layers for tensor in (weight, bias) if tensor is not None]
        key = (x.shape, x.dtype, *held)
        with torch.no_grad():  # (not as a decorator: that takes a while longer, which here counts)
            workspace = self._workspaces.get(key)
            if workspace is None:
                workspace = self._prepare(key, x)
            return workspace.set_gradients(x, targets, seen)

    def _prepare(self, key: tuple[object, ...], x: Tensor) -> _Workspace:
        """A workspace for batches like this one; cached if it is small."""
        # As much comes back as went forth; and each weight has a gradient.
        width = sum(weight.shape[-2] for weight, _, _ in self.layers)
        nbytes = 2 * (x.numel() + x.shape[:2].numel() * width) * x.element_size()
        nbytes += sum(weight.nbytes for weight, _, _ in self.layers)
        if nbytes > _ROOM // 2:
            return _Workspace(self.layers, x, nbytes)
        if sum(other.nbytes for other in self._workspaces.values()) + nbytes > _ROOM:
            self._workspaces.clear()
        inputs = torch.empty_like(x, memory_format=torch.contiguous_format)
        workspace = self._workspaces[key] = _Workspace(self.layers, inputs, nbytes)
        return workspace


class Pass(NamedTuple):
    """What a pass through the layers leaves."""

    features: Tensor
    logits: Tensor
    log_shares: Tensor


class _Workspace:
    """A step with batches of one shape, prepared: what is called one after the other, and where the results go.

    It reads the batches from ``inputs``: memory of its own, or the one batch that it serves.
    """

    def __init__(self, layers: list[Layer], inputs: Tensor, nbytes: int) -> None:
        self._inputs, self.nbytes = inputs, nbytes
        self._forward: list[Callable[[], object]] = []
        values = [inputs.flatten(2)]
        for weight, bias, relu in layers:
            value = inputs.new_empty(*inputs.shape[:2], weight.shape[-2])
            self._forward += product_calls(values[-1], weight.detach().mT, value, bias)
            if relu:
                self._forward.append(value.relu_)
            values.append(value)
        *_, self._features, self._logits = values
        self._gradient = gradient = torch.empty_like(self._logits)
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._backward: list[Callable[[], object]] = []
        for number in reversed(range(len(layers))):
            weight, bias, _ = layers[number]
            of_weight = torch.empty_like(weight)
            self._backward += product_calls(gradient.mT, values[number], of_weight)
            self._gradients.append((weight, of_weight))
            if bias is not None:
                of_bias = torch.empty_like(bias)
                self._backward.append(partial(torch.sum, gradient, -2, out=of_bias))
                self._gradients.append((bias, of_bias))
            if number:
                before = torch.empty_like(values[number])
                self._backward += product_calls(gradient, weight.detach(), before)
                if layers[number - 1][2]:
                    self._backward.append(partial(_after_relu, before, values[number], 0, grad_input=before))
                gradient = before

    def set_gradients(self, x: Tensor, targets: Tensor, seen: bool) -> Pass:
        """See :meth:`Chain.set_gradients`."""
        used_again = x is not self._inputs
        if used_again:
            self._inputs.copy_(x)
        for call in self._forward:
            call()
        log_shares = self._logits.log_softmax(-1)
        torch._log_softmax_backward_data(targets, log_shares, -1, log_shares.dtype, out=self._gradient)
        for call in self._backward:
            call()
        copies = seen and used_again
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone() if copies else gradient
        if copies:
            return Pass(self._features.clone(), self._logits.clone(), log_shares)
        return Pass(self._features, self._logits, log_shares)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in the order in which they are called; a module that is no sequence counts as one."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module
