"""Samples, normalisation and the samples of a client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfa.data import NORMALISATIONS, DataSet, Federation, Iid, Normalisation, Samples, load
from fedfa.data.resize import resize
from fedfa.errors import DataError


def images(count: int, channels: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 6, 5, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_is_normalised_and_channels_last(channels: int) -> None:
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.4, 0.5, 0.6)[:channels]
    pixels = images(7, channels)
    batch = Normalisation(mean, std).batch(pixels)
    expected = (pixels.permute(0, 3, 1, 2).double() / 255 - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(
        std
    ).view(1, -1, 1, 1)
    assert batch.dtype == torch.float32
    assert batch.shape == (7, channels, 6, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(batch, expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(pixels, images(7, channels))  # the stored pixels are untouched


def test_one_number_serves_all_channels_and_other_counts_are_refused() -> None:
    assert Normalisation((0.5,), (0.5,)).batch(images(2, 3)).shape == (2, 3, 6, 5)
    with pytest.raises(DataError, match="2 channels, but the images have 3"):
        Normalisation((0.5, 0.5), (0.5, 0.5)).batch(images(2, 3))


def test_without_constants_images_are_scaled_and_floats_untouched() -> None:
    pixels, floats = images(2, 1), torch.randn(4, 3)
    assert torch.allclose(Normalisation().batch(pixels), pixels.permute(0, 3, 1, 2) / 255)
    assert Normalisation().batch(floats) is floats
    normalised = Normalisation((1.0, 2.0, 3.0), (1.0, 2.0, 4.0)).batch(floats)
    assert torch.allclose(normalised, (floats - torch.tensor([1.0, 2, 3])) / torch.tensor([1.0, 2, 4]))


def test_normalisation_refuses_wrong_constants() -> None:
    with pytest.raises(DataError, match="positive"):
        Normalisation((0.0,), (0.0,))
    with pytest.raises(DataError, match="1 means but 2"):
        Normalisation((0.0,), (1.0, 1.0))


def test_the_authors_constants(digits: DataSet) -> None:
    assert NORMALISATIONS["authors"]["fashion-mnist"].mean == (0.1307,)
    assert NORMALISATIONS["authors"]["cifar10"].mean == (0.491, 0.482, 0.447)
    assert NORMALISATIONS["authors"]["cifar10"].std == (0.247, 0.243, 0.262)
    assert digits.normalised("authors").normalisation == digits.normalisation
    with pytest.raises(DataError, match="choose one of dataset, authors"):
        digits.normalised("mine")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load("digits", data_dir=tmp_path_factory.mktemp("cache"), offline=True)


def test_own_statistics_make_zero_mean_and_unit_deviation(digits: DataSet) -> None:
    batch = digits.normalisation.batch(digits.train.inputs)
    assert abs(float(batch.mean())) < 1e-4
    assert abs(float(batch.std()) - 1) < 1e-3


def test_a_client_sees_its_own_samples(digits: DataSet) -> None:
    federation = digits.split("shards:2", clients=10, seed=1)
    assert len(federation) == 10
    seen = []
    for number in range(10):
        client = federation.client(number)
        positions = torch.arange(client.size)
        inputs, labels = client.batch(positions)
        assert torch.equal(labels, client.labels)
        assert torch.equal(labels, digits.train.labels[client.positions])
        assert torch.equal(inputs, digits.normalisation.batch(digits.train.inputs[client.positions]))
        assert torch.equal(client.label_counts, torch.bincount(labels, minlength=10))
        assert len(client) == client.size
        seen.append(client.positions)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(digits.train)))
    with pytest.raises(DataError, match="no client 10"):
        federation.client(10)


def test_an_empty_client_is_harmless(digits: DataSet) -> None:
    federation = digits.split("dirichlet:0.001:0", clients=500, seed=1)
    empty = int(np.flatnonzero(federation.partition.sizes == 0)[0])
    client = federation.client(empty)
    inputs, labels = client.batch(torch.arange(0))
    assert client.size == 0
    assert inputs.shape == (0, 1, 8, 8)
    assert labels.shape == (0,)
    assert client.label_counts.tolist() == [0] * 10
    assert federation.summary().empty > 0


def test_summary_of_extremes(digits: DataSet) -> None:
    even = Federation(digits, digits.split(Iid(), 2, 1).partition).summary()
    assert even.label_skew < 0.1
    assert even.assigned == even.samples == len(digits.train)
    skewed = digits.split("classes:1", 10, 1).summary()
    assert skewed.classes_held == 1
    assert skewed.label_skew == pytest.approx(0.9, abs=0.01)


def test_samples_refuse_wrong_shapes() -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DataError, match="N, H, W, C"):
        Samples(torch.zeros(2, 3, dtype=torch.uint8), labels)
    with pytest.raises(DataError, match="uint16 images, int64 integers or float32"):
        Samples(torch.zeros(2, 3, dtype=torch.float64), labels)
    with pytest.raises(DataError, match="labels must be int64"):
        Samples(torch.zeros(3, 3), labels)
    with pytest.raises(DataError, match="writers must be int64"):
        Samples(torch.zeros(2, 3), labels, writers=torch.zeros(2))


def test_resizing_is_exact_where_it_can_be() -> None:
    flat = np.full((2, 16, 16, 3), 137, np.uint8)
    assert (resize(flat, 28, 28) == 137).all()
    ramp = np.tile(np.arange(32, dtype=np.uint8) * 8, (1, 32, 1))[..., None]
    smaller = resize(ramp, 28, 28)[0, 14, :, 0].astype(int)
    assert (np.diff(smaller) > 0).all()  # brightness still rises from left to right
    mirrored = resize(ramp[:, :, ::-1], 28, 28)[0, 14, ::-1, 0]
    assert np.abs(mirrored - smaller).max() <= 1
    assert resize(flat, 16, 16) is flat
