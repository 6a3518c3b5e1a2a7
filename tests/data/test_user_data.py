"""The user's own data: arrays, files, folders and torch data sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fedfa.data import DataSet, dataset_from, load
from fedfa.errors import DataError

RNG = np.random.default_rng(1)


def test_arrays_become_a_federation() -> None:
    x, y = RNG.normal(size=(100, 4)), np.arange(100) % 4
    dataset = dataset_from((x, y), name="mine", classes=["a", "b", "c", "d"])
    assert (len(dataset.train), len(dataset.test)) == (80, 20)
    assert dataset.test.labels.bincount().tolist() == [5, 5, 5, 5]  # the same share of every class
    assert dataset.classes == ("a", "b", "c", "d")
    federation = dataset.split("classes:2", 4, 1)
    inputs, _ = federation.client(0).batch(torch.arange(3))
    assert inputs.dtype == torch.float32
    assert dataset_from((x, y)).fingerprint == dataset.fingerprint
    assert dataset_from((x + 1, y)).fingerprint != dataset.fingerprint


@pytest.mark.parametrize("shape", [(20, 8, 9), (20, 8, 9, 1), (20, 8, 9, 3), (20, 3, 8, 9), (20, 1, 8, 9)])
def test_pixels_in_any_usual_order(shape: tuple[int, ...]) -> None:
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    dataset = dataset_from((pixels, np.arange(20) % 2))
    channels = 3 if 3 in shape else 1
    assert dataset.train.inputs.shape[1:] == (8, 9, channels)
    assert dataset.input_shape == (channels, 8, 9)
    assert len(dataset.normalisation.mean) == channels


def test_npz_with_and_without_a_test_part(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (30, 6, 6), dtype=np.uint8)
    names = np.array(["cat", "dog", "emu"])[np.arange(30) % 3]
    np.savez(tmp_path / "one.npz", x=pixels, y=names)
    one = dataset_from(tmp_path / "one.npz")
    assert one.classes == ("cat", "dog", "emu")
    assert len(one.train) + len(one.test) == 30
    np.savez(
        tmp_path / "two.npz", x_train=pixels[:20], y_train=np.arange(20) % 2,
        x_test=pixels[20:], y_test=np.arange(10) % 2, writers_train=np.arange(20) // 5, classes=np.array(["no", "yes"]),
    )  # fmt: skip
    two = dataset_from(tmp_path / "two.npz")
    assert (len(two.train), len(two.test), two.classes) == (20, 10, ("no", "yes"))
    assert len(two.split("natural", None, 1)) == 4


def class_folders(folder: Path, parts: tuple[str, ...], size: int = 7) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in parts:
        for number, name in enumerate(("ant", "bee")):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for picture in range(4):
                pixels = np.full((size, size, 3), (40 * number, 10 * picture, 200), np.uint8)
                image.fromarray(pixels).save(folder / part / name / f"{picture}.png")


def test_class_folders(tmp_path: Path) -> None:
    class_folders(tmp_path / "plain", ("",))
    plain = dataset_from(tmp_path / "plain")
    assert (plain.classes, len(plain.train), len(plain.test)) == (("ant", "bee"), 6, 2)
    class_folders(tmp_path / "parts", ("train", "test"))
    (tmp_path / "parts" / "train" / "ant" / "notes.txt").write_text("not a picture")
    parts = dataset_from(tmp_path / "parts")
    assert (len(parts.train), len(parts.test), parts.input_shape) == (8, 8, (3, 7, 7))


def test_own_paths_load_through_the_cache_and_notice_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=RNG.normal(size=(20, 3)), y=np.arange(20) % 2)
    first = load(str(path), data_dir=tmp_path / "cache")
    assert load(str(path), data_dir=tmp_path / "cache", offline=True).fingerprint == first.fingerprint
    assert first.train.inputs.dtype == torch.float32
    assert first.name == "mine"
    np.savez(path, x=RNG.normal(size=(20, 3)), y=np.arange(20) % 2)
    os.utime(path, ns=(5, 5))
    assert load(str(path), data_dir=tmp_path / "cache").fingerprint != first.fingerprint
    stored = next((tmp_path / "cache" / "sets").glob("own-mine-*/train.inputs.npy"), None)
    assert stored is not None
    stored.write_bytes(b"damaged")
    with pytest.raises(DataError, match="--again"):
        load(str(path), data_dir=tmp_path / "cache")
    assert len(load(str(path), data_dir=tmp_path / "cache", again=True).train) == len(first.train)
    assert len(load(str(path), data_dir=tmp_path / "cache").train) == len(first.train), "mended"
    class_folders(tmp_path / "pictures", ("train", "test"))
    assert load(str(tmp_path / "pictures"), data_dir=tmp_path / "cache").classes == ("ant", "bee")


def test_torch_datasets() -> None:
    class Pictures(Dataset[tuple[object, int]]):
        classes = ("odd", "even")

        def __len__(self) -> int:
            return 10

        def __getitem__(self, position: int) -> tuple[object, int]:
            return np.full((5, 5), position, np.uint8), position % 2

    dataset = dataset_from(Pictures(), Pictures())
    assert dataset.classes == ("odd", "even")
    assert dataset.train.inputs.shape == (10, 5, 5, 1)
    assert dataset.train.inputs.dtype == torch.uint8
    floats = dataset_from(TensorDataset(torch.randn(10, 2), torch.arange(10) % 5))
    assert floats.num_classes == 5
    assert floats.train.inputs.dtype == torch.float32


def test_errors_of_own_data_are_explained(tmp_path: Path) -> None:
    x, y = np.zeros((10, 2)), np.arange(10) % 2
    cases: list[tuple[Callable[[], DataSet], str]] = [
        (lambda: dataset_from((x, y.astype(float))), "whole numbers or names"),
        (lambda: dataset_from((x, y[:5])), "10 inputs, but 5 labels"),
        (lambda: dataset_from((x, y), (np.zeros((4, 3)), y[:4])), "training inputs are .2., but test inputs .3."),
        (lambda: dataset_from((x, y), classes=["only one"]), "labels run from 0 to 1"),
        (lambda: dataset_from((x, y), test_fraction=1.5), "between 0 and 1"),
        (lambda: dataset_from(3), "cannot make a data set of int"),
        (lambda: dataset_from(tmp_path / "x.txt"), r"give an \.npz file or a folder"),
        (lambda: dataset_from(tmp_path), "no class folders"),
        (lambda: dataset_from((np.array(["a"] * 10), y)), "inputs must be numbers"),
    ]
    for make, message in cases:
        with pytest.raises(DataError, match=message):
            make()
    np.savez(tmp_path / "good.npz", x=x, y=y)
    with pytest.raises(DataError, match="read directly, without --from"):
        load(str(tmp_path / "good.npz"), data_dir=tmp_path / "cache", source=tmp_path)
    np.savez(tmp_path / "short.npz", x=x, y=y[:5])
    with pytest.raises(DataError, match=r"short\.npz, x: there are 10 inputs, but 5 labels"):
        dataset_from(tmp_path / "short.npz")
    with pytest.raises(DataError, match=r"cannot store data there .*--data-dir"):
        load(str(tmp_path / "good.npz"), data_dir=tmp_path / "good.npz")
    np.savez(tmp_path / "bad.npz", a=x)
    with pytest.raises(DataError, match=r"bad\.npz: lacks the array x, y"):
        dataset_from(tmp_path / "bad.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}]), y=np.arange(2))
    with pytest.raises(DataError, match=r"objects\.npz: .*Python objects, which are not read") as caught:
        dataset_from(tmp_path / "objects.npz")
    assert "unsafe" not in str(caught.value), "no advice to load it all the same"
    class_folders(tmp_path / "sizes", ("",))
    class_folders(tmp_path / "sizes", ("",), size=7)
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((3, 3), np.uint8)).save(tmp_path / "sizes" / "bee" / "9.png")
    with pytest.raises(DataError, match=r"9\.png: 3×3 pixels, but .* has 7×7"):
        dataset_from(tmp_path / "sizes")
