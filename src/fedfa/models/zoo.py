"""Networks by name: the paper's, a multi-layer perceptron, logistic regression, and the user's own by reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fedfa.error_messages import nearest
from fedfa.errors import ModelError
from fedfa.models.cnn import convolutional
from fedfa.models.reference import build_network
from fedfa.models.resnet import resnet18
from fedfa.models.weight_standardisation import standardise

WEIGHT_STANDARDISATION = "weight_standardisation"
"""Option of every network here: all layers but the classifier compute with standardised weights."""

Builder = Callable[..., nn.Module]


def cnn_fmnist(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Fashion-MNIST and EMNIST: two convolutions of 32, FC 512→384→192 features."""
    return convolutional(input_shape, num_classes, channels=(32, 32), hidden=(384, 192))


def cnn_cifar10(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """CIFAR-10: two convolutions of 64, FC 1600→384→192 features."""
    return convolutional(input_shape, num_classes, channels=(64, 64), hidden=(384, 192))


def cnn_validation(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The paper's validation experiments on Fashion-MNIST: FC 512→384→100 features (no ReLU on the features)."""
    return convolutional(input_shape, num_classes, channels=(32, 32), hidden=(384, 100), relu_on_features=False)


def cnn_validation_digits(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The paper's validation experiments on Mixed Digits: two convolutions of 64, FC 1024→384→100 features."""
    return convolutional(input_shape, num_classes, channels=(64, 64), hidden=(384, 100), relu_on_features=False)


def cnn_mixed_digits(input_shape: Sequence[int], num_classes: int, norm: str = "group") -> nn.Module:
    """Mixed Digits: three padded convolutions (64, 64, 128), FC 6272→2048→512 features.

    ``norm``: ``"group"`` adds GroupNorm (2 groups) after each of the five layers, as in the paper;
    ``"none"`` omits it, as in the reference code.
    """
    if norm not in ("group", "none"):
        raise ModelError(f'model.options.norm = {norm!r}: use "group" or "none"')
    return convolutional(
        input_shape, num_classes, channels=(64, 64, 128), hidden=(2048, 512), padding=2, pool_last=False,
        norm_groups=2 if norm == "group" else 0,
    )  # fmt: skip


def mlp(input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (128, 64)) -> nn.Module:
    """Fully connected layers with ReLU; the features are the output of the last hidden layer."""
    if any(width < 1 for width in hidden):
        raise ModelError(f"model 'mlp': model.options.hidden = {list(hidden)}; every layer needs at least one unit")
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    width = math.prod(input_shape)
    for number, outputs in enumerate(hidden, start=1):
        net.add_module(f"fc{number}", nn.Sequential(nn.Linear(width, outputs), nn.ReLU()))
        width = outputs
    net.add_module("head", nn.Linear(width, num_classes))
    return net


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Logistic regression; the features are the input."""
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    net.add_module("head", nn.Linear(math.prod(input_shape), num_classes))
    return net


MODELS: dict[str, Builder] = {
    "cnn-fmnist": cnn_fmnist,
    "cnn-cifar10": cnn_cifar10,
    "cnn-validation": cnn_validation,
    "cnn-validation-digits": cnn_validation_digits,
    "cnn-mixed-digits": cnn_mixed_digits,
    "resnet18-gn": resnet18,
    "mlp": mlp,
    "logistic": logistic,
}


def build_model(
    name: str, input_shape: Sequence[int], num_classes: int, options: dict[str, Any] | None = None
) -> nn.Module:
    """Build a network; its initial weights are drawn from torch's global generator.

    Args:
        name: One of :data:`MODELS`, or the reference of your own network, such as ``net.py:Net``
            (see :func:`fedfa.models.load_network`).
        input_shape: Shape of one input, e.g. ``(1, 28, 28)``; not passed to your own network.
        num_classes: Number of outputs; not passed to your own network.
        options: Further arguments of the network, e.g. ``{"hidden": [32]}`` for the MLP; ``weight_standardisation``
            for all of :data:`MODELS`.

    Raises:
        ModelError: Unknown name or option, or the network does not accept such inputs.

    Example:
        >>> net = build_model("cnn-fmnist", (1, 28, 28), 10)
        >>> sum(p.numel() for p in net.parameters())
        299306
    """
    if ":" in name:
        return build_network(name, options or {})
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}{nearest(name, MODELS)}; known: {', '.join(MODELS)}, or FILE.py:NAME")
    chosen = dict(options or {})
    standardised = chosen.pop(WEIGHT_STANDARDISATION, False)
    if not isinstance(standardised, bool):
        raise ModelError(f"model.options.{WEIGHT_STANDARDISATION} = {standardised!r}: use true or false")
    try:
        network = MODELS[name](tuple(input_shape), num_classes, **chosen)
    except (TypeError, ValueError, RuntimeError) as error:  # from Python or torch
        raise ModelError(f"model {name!r} does not accept these options: {error}") from error
    if standardised and not standardise(network, network.get_submodule("head")):
        raise ModelError(
            f"model.options.{WEIGHT_STANDARDISATION}: {name!r} has no layer before its classifier; leave the option out"
        )
    return network
