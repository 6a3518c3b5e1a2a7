"""Weight standardisation: layers compute with weights of mean 0 and fixed variance per unit.

S. Qiao, H. Wang, C. Liu, W. Shen, A. Yuille, *Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization*, arXiv:1903.10520, 2019; in federated learning S.-W. Kim et al. (FedWSQ), ICCV 2025, arXiv:2506.23516.

A unit with weights w of fan-in N computes with γ (w − mean w) / √(N · var w + ε); w itself is trained. Clients' updates
can then neither shift nor stretch a unit's weights, which is a part of what drifts apart under label skew. The division
by √N and γ = √(2/(1 − 1/π)), which keeps the variance through ReLUs, are those of A. Brock, S. De, S. L. Smith,
*Characterizing Signal Propagation to Close the Performance Gap in Unnormalized ResNets*, ICLR 2021: without them a
network that has no normalisation layers would blow up its activations. The classifier stays as it is.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

GAIN = math.sqrt(2 / (1 - 1 / math.pi))
"""γ for ReLU."""


def standardised(weight: Tensor) -> Tensor:
    """The weights ``[units, …]`` that a layer computes with."""
    centred = weight.flatten(1) - weight.flatten(1).mean(1, keepdim=True)
    return (GAIN * centred / (centred.square().sum(1, keepdim=True) + 1e-8).sqrt()).view_as(weight)


class StandardisedConv2d(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, input: Tensor) -> Tensor:
        """The output."""
        output: Tensor = self._conv_forward(input, standardised(self.weight), self.bias)
        return output


class StandardisedLinear(nn.Linear):
    """A linear layer with standardised weights."""

    def forward(self, input: Tensor) -> Tensor:
        """The output."""
        return functional.linear(input, standardised(self.weight), self.bias)


def standardise(network: nn.Module, head: nn.Module) -> int:
    """Let every convolution and linear layer but the classifier compute with standardised weights.

    Names, shapes and initial values of the weights stay.

    Returns:
        How many layers there are.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: StandardisedConv2d, nn.Linear: StandardisedLinear}
    layers = [layer for layer in network.modules() if type(layer) in kinds and layer is not head]
    for layer in layers:
        layer.__class__ = kinds[type(layer)]  # it differs in its forward pass alone
    return len(layers)
