"""The paper's convolutional networks (its table of models, with the errors corrected).

Pooling comes before ReLU: the two commute, exactly and with equal gradients, and ReLU on the smaller tensor is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedfa.errors import ModelError


def _convolution(inputs: int, outputs: int, padding: int, groups: int, pool: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 5, padding=padding)]
    if groups:
        layers.append(nn.GroupNorm(groups, outputs))
    if pool:
        layers.append(nn.MaxPool2d(2))
    return [*layers, nn.ReLU()]


def convolutional(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int],
    hidden: Sequence[int],
    padding: int = 0,
    pool_last: bool = True,
    norm_groups: int = 0,
    relu_on_features: bool = True,
) -> nn.Module:
    """5×5 convolutions with 2×2 pooling, fully connected layers, a linear classifier called ``head``.

    Args:
        input_shape: Channels, height, width.
        num_classes: Number of outputs.
        channels: Output channels of each convolution.
        hidden: Width of each fully connected layer; the last is the feature dimension.
        padding: Padding of the convolutions.
        pool_last: Also pool after the last convolution.
        norm_groups: Number of GroupNorm groups after each layer but the classifier; 0 for no GroupNorm.
        relu_on_features: Also apply ReLU after the last hidden layer.
    """
    if len(input_shape) != 3:
        raise ModelError(f"a convolutional network needs images, but the samples have shape {tuple(input_shape)}")
    net = nn.Sequential()
    width = input_shape[0]
    for number, outputs in enumerate(channels, start=1):
        pool = pool_last or number < len(channels)
        net.add_module(f"conv{number}", nn.Sequential(*_convolution(width, outputs, padding, norm_groups, pool)))
        width = outputs
    net.add_module("flatten", nn.Flatten())
    try:
        with torch.no_grad():
            width = net(torch.zeros(1, *input_shape)).shape[1]
    except RuntimeError as error:
        raise ModelError(f"images of {input_shape[1]}×{input_shape[2]} are too small for this network") from error
    for number, outputs in enumerate(hidden, start=1):
        layers: list[nn.Module] = [nn.Linear(width, outputs)]
        if norm_groups:
            layers.append(nn.GroupNorm(norm_groups, outputs))
        if relu_on_features or number < len(hidden):
            layers.append(nn.ReLU())
        net.add_module(f"fc{number}", nn.Sequential(*layers))
        width = outputs
    net.add_module("head", nn.Linear(width, num_classes))
    return net
