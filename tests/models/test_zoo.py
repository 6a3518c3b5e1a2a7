"""Every network against its table, layer by layer, with the numbers of parameters worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedfa.errors import ModelError
from fedfa.learning.random import torch_stream
from fedfa.models import MODELS, SplitModel, build_model

Shapes = dict[str, tuple[int, ...]]


def layer(name: str, *weight: int, bias: bool = True) -> Shapes:
    """A convolution (out, in, k, k) or a fully connected layer (out, in)."""
    return {f"{name}.weight": weight, **({f"{name}.bias": (weight[0],)} if bias else {})}


def norm(name: str, channels: int) -> Shapes:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


FMNIST = {
    **layer("conv1.0", 32, 1, 5, 5),  # 28 → 24 → pool 12
    **layer("conv2.0", 32, 32, 5, 5),  # 12 → 8 → pool 4: 32·4·4 = 512
    **layer("fc1.0", 384, 512),
    **layer("fc2.0", 192, 384),
    **layer("head", 10, 192),
}
CIFAR10 = {
    **layer("conv1.0", 64, 3, 5, 5),  # 32 → 28 → pool 14
    **layer("conv2.0", 64, 64, 5, 5),  # 14 → 10 → pool 5: 64·5·5 = 1600
    **layer("fc1.0", 384, 1600),
    **layer("fc2.0", 192, 384),
    **layer("head", 10, 192),
}
VALIDATION = {
    **layer("conv1.0", 32, 1, 5, 5),
    **layer("conv2.0", 32, 32, 5, 5),
    **layer("fc1.0", 384, 512),
    **layer("fc2.0", 100, 384),
    **layer("head", 10, 100),
}
VALIDATION_DIGITS = {
    **layer("conv1.0", 64, 3, 5, 5),
    **layer("conv2.0", 64, 64, 5, 5),  # 64·4·4 = 1024
    **layer("fc1.0", 384, 1024),
    **layer("fc2.0", 100, 384),
    **layer("head", 10, 100),
}
MIXED_DIGITS = {
    **layer("conv1.0", 64, 3, 5, 5),  # padded: 28 → pool 14
    **layer("conv2.0", 64, 64, 5, 5),  # → pool 7
    **layer("conv3.0", 128, 64, 5, 5),  # no pool: 128·7·7 = 6272
    **layer("fc1.0", 2048, 6272),
    **layer("fc2.0", 512, 2048),
    **layer("head", 10, 512),
}
MIXED_DIGITS_NORMS = {
    **norm("conv1.1", 64), **norm("conv2.1", 64), **norm("conv3.1", 128), **norm("fc1.1", 2048), **norm("fc2.1", 512),
}  # fmt: skip


def block(name: str, inputs: int, outputs: int) -> Shapes:
    shortcut: Shapes = {}
    if inputs != outputs:
        shortcut = {
            **layer(f"{name}.shortcut.0", outputs, inputs, 1, 1, bias=False),
            **norm(f"{name}.shortcut.1", outputs),
        }
    return {
        **layer(f"{name}.conv1", outputs, inputs, 3, 3, bias=False),
        **norm(f"{name}.norm1", outputs),
        **layer(f"{name}.conv2", outputs, outputs, 3, 3, bias=False),
        **norm(f"{name}.norm2", outputs),
        **shortcut,
    }


RESNET18 = {
    **layer("conv1", 64, 3, 3, 3, bias=False),
    **norm("norm1", 64),
    **block("stage1.0", 64, 64),
    **block("stage1.1", 64, 64),
    **block("stage2.0", 64, 128),
    **block("stage2.1", 128, 128),
    **block("stage3.0", 128, 256),
    **block("stage3.1", 256, 256),
    **block("stage4.0", 256, 512),
    **block("stage4.1", 512, 512),
    **layer("fc1.0", 512, 512),
    **layer("fc2", 256, 512),
    **layer("head", 100, 256),
}

# name, options, input, classes, features, shapes, parameters by hand
ZOO: list[tuple[str, dict[str, Any], tuple[int, ...], int, int, Shapes, int]] = [
    ("cnn-fmnist", {}, (1, 28, 28), 10, 192, FMNIST, 832 + 25_632 + 196_992 + 73_920 + 1_930),
    ("cnn-cifar10", {}, (3, 32, 32), 10, 192, CIFAR10, 4_864 + 102_464 + 614_784 + 73_920 + 1_930),
    ("cnn-validation", {}, (1, 28, 28), 10, 100, VALIDATION, 832 + 25_632 + 196_992 + 38_500 + 1_010),
    ("cnn-validation-digits", {}, (3, 28, 28), 10, 100, VALIDATION_DIGITS, 4_864 + 102_464 + 393_600 + 38_500 + 1_010),
    (
        "cnn-mixed-digits", {"norm": "none"}, (3, 28, 28), 10, 512, MIXED_DIGITS,
        4_864 + 102_464 + 204_928 + 12_847_104 + 1_049_088 + 5_130,
    ),
    (
        "cnn-mixed-digits", {}, (3, 28, 28), 10, 512, MIXED_DIGITS | MIXED_DIGITS_NORMS,
        4_864 + 102_464 + 204_928 + 12_847_104 + 1_049_088 + 5_130 + 2 * (64 + 64 + 128 + 2048 + 512),
    ),
    (
        "resnet18-gn", {}, (3, 32, 32), 100, 256, RESNET18,
        # torchvision's ResNet-18 has 11,689,512 with a 7×7 stem (9,408) and a classifier 512→1000 (513,000)
        11_689_512 - 9_408 - 513_000 + 27 * 64 + (512 * 512 + 512) + (512 * 256 + 256) + (256 * 100 + 100),
    ),
    (
        "mlp", {}, (1, 28, 28), 10, 64,
        {**layer("fc1.0", 128, 784), **layer("fc2.0", 64, 128), **layer("head", 10, 64)},
        100_480 + 8_256 + 650,
    ),
    (
        "mlp", {"hidden": [32]}, (1, 8, 8), 10, 32, {**layer("fc1.0", 32, 64), **layer("head", 10, 32)}, 2_080 + 330,
    ),
    ("logistic", {}, (60,), 10, 60, layer("head", 10, 60), 610),
]  # fmt: skip
IDS = [f"{name} {options or ''}".strip() for name, options, *_ in ZOO]


def make(name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int) -> nn.Module:
    with torch_stream(3, "zoo"):
        return build_model(name, shape, classes, options)


@pytest.mark.parametrize(("name", "options", "shape", "classes", "features", "shapes", "count"), ZOO, ids=IDS)
def test_network_of_the_zoo(
    name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int, features: int, shapes: Shapes, count: int
) -> None:
    module = make(name, options, shape, classes)
    assert {n: tuple(p.shape) for n, p in module.state_dict().items()} == shapes
    assert sum(p.numel() for p in module.parameters()) == sum(map(math.prod, shapes.values())) == count
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    split = SplitModel.of(module, example=example)
    assert (split.head_name, split.feature_dim, split.num_classes) == ("head", features, classes)
    h, logits = split(example)
    assert h.shape == (2, features)
    assert logits.shape == (2, classes)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_every_network_of_the_zoo_is_tested_here() -> None:
    assert {name for name, *_ in ZOO} == set(MODELS)


@pytest.mark.parametrize(("name", "options", "shape", "classes"), [row[:4] for row in ZOO], ids=IDS)
def test_channels_last_gives_the_same_output(
    name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int
) -> None:
    module = make(name, options, shape, classes).eval()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(x)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
        last = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        assert torch.allclose(module(last), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("values", ["random", "all negative", "ties"])
def test_pooling_before_relu_equals_relu_before_pooling(values: str) -> None:
    """Output and gradient, bit for bit: the one liberty taken with the paper's networks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 8, 8, generator=generator)
    x = {"random": x, "all negative": -x.abs(), "ties": x.round()}[values]
    pool, relu = nn.MaxPool2d(2), nn.ReLU()
    results = []
    for order in (nn.Sequential(pool, relu), nn.Sequential(relu, pool)):
        leaf = x.clone().requires_grad_()
        out = order(leaf)
        (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        results.append((out, leaf.grad))
    (out_a, grad_a), (out_b, grad_b) = results
    assert torch.equal(out_a, out_b)
    assert grad_a is not None
    assert grad_b is not None
    assert torch.equal(grad_a, grad_b)


def test_relu_on_the_features_of_the_papers_cnn_and_not_on_the_validation_networks() -> None:
    x = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert SplitModel.of(make("cnn-fmnist", {}, (1, 28, 28), 10))(x)[0].min() == 0
        assert SplitModel.of(make("cnn-validation", {}, (1, 28, 28), 10))(x)[0].min() < 0


def test_group_norm_switch() -> None:
    def norms(options: dict[str, Any]) -> list[tuple[int, int]]:
        module = make("cnn-mixed-digits", options, (3, 28, 28), 10)
        return [(m.num_groups, m.num_channels) for m in module.modules() if isinstance(m, nn.GroupNorm)]

    assert norms({}) == norms({"norm": "group"}) == [(2, 64), (2, 64), (2, 128), (2, 2048), (2, 512)]
    assert norms({"norm": "none"}) == []
    with pytest.raises(ModelError, match=r"""model\.options\.norm = 'batch': use "group" or "none\""""):
        make("cnn-mixed-digits", {"norm": "batch"}, (3, 28, 28), 10)


def test_no_network_of_the_zoo_has_buffers() -> None:
    """GroupNorm keeps no statistics, so nothing has to be averaged but weights."""
    for name, options, shape, classes, *_ in ZOO:
        assert list(make(name, options, shape, classes).buffers()) == []


@pytest.mark.parametrize(
    ("name", "shape", "options", "messages"),
    [
        ("cnn-fmist", (1, 28, 28), {}, ["unknown model 'cnn-fmist'", "did you mean 'cnn-fmnist'?", "logistic"]),
        ("cnn-fmnist", (1, 8, 8), {}, ["8×8", "too small"]),
        ("cnn-fmnist", (64,), {}, ["needs images", "(64,)"]),
        ("resnet18-gn", (64,), {}, ["needs images", "(64,)"]),
        ("mlp", (64,), {"hiden": [3]}, ["'mlp'", "hiden"]),
        ("mlp", (64,), {"hidden": [-3]}, ["'mlp'", "options"]),
        ("resnet18-gn", (3, 32, 32), {"groups": 3}, ["'resnet18-gn'", "options", "divisible"]),
    ],
)
def test_errors_of_build_model(name: str, shape: tuple[int, ...], options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(name, shape, 10, options)
    for message in messages:
        assert message in str(caught.value)


def test_initial_weights_follow_torchs_generator() -> None:
    first, second = (make("cnn-fmnist", {}, (1, 28, 28), 10).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
