"""Definitions of the data sets that are known by name."""

from __future__ import annotations

from collections.abc import Mapping

from fedfa.data.definition import DataSetDefinition
from fedfa.data.sets.cifar import CIFAR10, CIFAR100
from fedfa.data.sets.made_here import DIGITS, MIXED_DIGITS, SYNTH_DIGITS
from fedfa.data.sets.mnist import EMNIST_DIGITS, FASHION_MNIST, FEMNIST, FEMNIST_DIGITS, MNIST, MNIST_WRITERS
from fedfa.data.sets.other_digits import CHARS74K, MNIST_M, SVHN, USPS

_ALL = (
    FASHION_MNIST,
    MNIST,
    CIFAR10,
    CIFAR100,
    DIGITS,
    USPS,
    SVHN,
    MNIST_M,
    CHARS74K,
    SYNTH_DIGITS,
    MIXED_DIGITS,
    MNIST_WRITERS,
    EMNIST_DIGITS,
    FEMNIST,
    FEMNIST_DIGITS,
)

#: Every known data set by name, in the order of listings.
DEFINITIONS: Mapping[str, DataSetDefinition] = {definition.name: definition for definition in _ALL}
