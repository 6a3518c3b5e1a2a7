"""Linear layers and ReLUs in a row: the gradient of the cross-entropy without a graph.

For small networks, a step costs what starting its operations costs, and autograd starts many: to build the graph, to
transpose, to widen, to add up. Written out, the backward pass of such a chain is two products and a sum per layer. They
are the products that torch makes itself, so the gradient has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfa.models.products import product

_after_relu = torch.ops.aten.threshold_backward.default
"""The gradient before a ReLU, from the one after it and the ReLU's values."""


@dataclass(frozen=True)
class Chain:
    """The linear layers of a network that is nothing else: weight, bias, and whether a ReLU follows."""

    layers: list[tuple[Tensor, Tensor | None, bool]]

    @classmethod
    def find(cls, module: nn.Module, head: nn.Linear, flatten: type[nn.Module] = nn.Flatten) -> Chain | None:
        """The chain that a network is; None if it is anything else, or not all of it is trained.

        Args:
            module: The network.
            head: Its classifier, which must be the last layer.
            flatten: A layer that may come first; whoever calls the chain has done its work.
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

    def set_gradients(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Set the gradient of the batch's mean cross-entropy; features, logits, and their log-softmax.

        Args:
            x: Inputs ``[…, B, d]``.
            targets: The gradient with respect to the log-softmax, ``[…, B, C]``: −1/B at a sample's class, else 0.
        """
        with torch.no_grad():  # (not as a decorator: that takes a while longer, which here counts)
            return self._set_gradients(x, targets)

    def _set_gradients(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = [x]
        for weight, bias, relu in self.layers:
            value = product(values[-1], weight.mT, bias)
            values.append(value.relu_() if relu else value)
        logits = values[-1]
        log_shares = logits.log_softmax(-1)
        gradient = torch._log_softmax_backward_data(targets, log_shares, -1, logits.dtype)
        for number in reversed(range(len(self.layers))):
            weight, bias, _ = self.layers[number]
            weight.grad = product(gradient.mT, values[number])
            if bias is not None:
                bias.grad = gradient.sum(-2)
            if number:
                gradient = product(gradient, weight)
                if self.layers[number - 1][2]:
                    gradient = _after_relu(gradient, values[number], 0)
        return values[-2], logits, log_shares


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in the order in which they are called; a module that is no sequence counts as one."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module
