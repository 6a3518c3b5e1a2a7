"""ResNet-18 for small images, with GroupNorm and a projection head (the paper's network for CIFAR-100).

K. He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016; 3×3 stem and no max-pooling as usual for CIFAR;
projection as in MOON (Li et al. 2021): 512 → 512 → ReLU → 256 features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedfa.errors import ModelError


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        result: Tensor = self.relu(out + self.shortcut(x))
        return result


def resnet18(input_shape: Sequence[int], num_classes: int, groups: int = 2, features: int = 256) -> nn.Module:
    """ResNet-18 with GroupNorm everywhere, projection to ``features`` and a linear classifier called ``head``."""
    if len(input_shape) != 3:
        raise ModelError(f"resnet18 needs images, but the samples have shape {tuple(input_shape)}")
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(input_shape[0], 64, 3, 1, 1, bias=False))
    net.add_module("norm1", nn.GroupNorm(groups, 64))
    net.add_module("relu", nn.ReLU(inplace=True))
    inputs = 64
    for number, outputs in enumerate((64, 128, 256, 512), start=1):
        stride = 1 if number == 1 else 2
        blocks = BasicBlock(inputs, outputs, stride, groups), BasicBlock(outputs, outputs, 1, groups)
        net.add_module(f"stage{number}", nn.Sequential(*blocks))
        inputs = outputs
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc1", nn.Sequential(nn.Linear(512, 512), nn.ReLU()))
    net.add_module("fc2", nn.Linear(512, features))
    net.add_module("head", nn.Linear(features, num_classes))
    return net
