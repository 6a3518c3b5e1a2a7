"""What all tests share: one thread per process, repeatable hypothesis, small data that needs no download."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedfa.data import DataSet, Normalisation, Samples, load

settings.register_profile("fedfa", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fedfa")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background lets them ignore Ctrl-C, and so all programs that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def make_blobs(train: int = 240, test: int = 60, classes: int = 4, width: int = 6) -> DataSet:
    """Clouds of points around one corner per class: learnt in a few steps, exact on every machine."""
    draw = np.random.default_rng(20260101)

    def samples(count: int) -> Samples:
        labels = np.arange(count) % classes
        points = draw.standard_normal((count, width)) + 3 * np.eye(width)[labels]
        return Samples(torch.from_numpy(points).float(), torch.from_numpy(labels))

    return DataSet(
        name="blobs",
        train=samples(train),
        test=samples(test),
        classes=tuple("abcdefgh"[:classes]),
        domains=(),
        normalisation=Normalisation(),
        fingerprint="blobs",
        manifest={},
    )


@pytest.fixture(scope="session")
def blobs() -> DataSet:
    """240 training and 60 test points of 4 classes."""
    return make_blobs()


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that holds the small digits, ready for runs in other processes."""
    directory = tmp_path_factory.mktemp("data")
    load("digits", data_dir=directory, offline=True)
    return directory


@pytest.fixture(autouse=True)
def registered_methods() -> Iterator[None]:
    """Methods that a test makes known are forgotten after it: other tests list all methods."""
    from fedfa.algorithms import registry

    before = dict(registry._METHODS)
    yield
    registry._METHODS.clear()
    registry._METHODS.update(before)
