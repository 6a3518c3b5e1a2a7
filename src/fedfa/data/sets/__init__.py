"""The data sets that are known by name."""

from __future__ import annotations

from collections.abc import Mapping

from fedfa.data.known import KnownSet
from fedfa.data.sets.cifar import CIFAR10, CIFAR100
from fedfa.data.sets.digits import DIGITS
from fedfa.data.sets.mixed_digits import MIXED_DIGITS
from fedfa.data.sets.mnist import FASHION_MNIST, MNIST
from fedfa.data.sets.small_digits import CHARS74K, USPS
from fedfa.data.sets.street import MNIST_M, SVHN
from fedfa.data.sets.synth_digits import SYNTH_DIGITS
from fedfa.data.sets.writers import EMNIST_DIGITS, FEMNIST, FEMNIST_DIGITS, MNIST_WRITERS

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

#: Every known set by its name, in the order in which they are listed.
KNOWN: Mapping[str, KnownSet] = {known.name: known for known in _ALL}
