"""Official file formats, on small files made here."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfa.data import load
from fedfa.data.formats.arrays import parse_idx
from fedfa.data.formats.cifar import parse_binary, parse_python
from fedfa.data.formats.pictures import read_mosaic
from fedfa.data.sets import DEFINITIONS
from fedfa.errors import DataError
from tests.data.data_files import idx_bytes, write_idx, write_mnist

Array = np.ndarray[Any, Any]


def open_small(name: str, folder: Path) -> Any:
    """Load small files of an official format: they are not the known content, which is noted."""
    dataset = load(name, source=folder, data_dir=folder / "cache", unverified=True)
    assert dataset.manifest["edition"] == "unverified" or DEFINITIONS[name].editions[-1].train == 0
    return dataset


def pictures(count: int, shape: tuple[int, ...], seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@given(
    st.sampled_from(["uint8", "int8", "int16", "int32", "float32", "float64"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_idx_comes_back(dtype: str, shape: list[int]) -> None:
    values = (np.arange(int(np.prod(shape))) % 100).astype(dtype).reshape(shape)
    read = parse_idx(idx_bytes(values), "x")
    assert read.dtype == values.dtype
    assert np.array_equal(read, values)


@given(st.binary(max_size=40))
def test_idx_of_garbage_is_refused(data: bytes) -> None:
    with suppress(DataError):  # or it is IDX by chance, but nothing else may happen
        parse_idx(data, "garbage.idx")


def test_idx_files_gzipped_or_not(tmp_path: Path) -> None:
    write_mnist(tmp_path / "a", ending="")
    write_mnist(tmp_path / "b", ending=".gz")
    plain, packed = (open_small("mnist", tmp_path / place) for place in "ab")
    assert plain.fingerprint == packed.fingerprint


def cifar_records(images: Array, *label_columns: Array) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([*(labels[:, None] for labels in label_columns), planes], axis=1).astype(np.uint8).tobytes()


def test_cifar10_binary_in_a_folder_and_in_its_archive(tmp_path: Path) -> None:
    images, labels = pictures(60, (32, 32, 3)), (np.arange(60) % 10).astype(np.uint8)
    files = {f"data_batch_{number + 1}.bin": slice(10 * number, 10 * number + 10) for number in range(5)}
    files["test_batch.bin"] = slice(50, 60)
    folder = tmp_path / "loose" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, part in files.items():
            (folder / name).write_bytes(cifar_records(images[part], labels[part]))
            archive.add(folder / name, f"cifar-10-batches-bin/{name}")
    loose, packed = (open_small("cifar10", tmp_path / place) for place in ("loose", "packed"))
    assert loose.fingerprint == packed.fingerprint
    assert np.array_equal(loose.train.inputs.numpy(), images[:50])
    assert np.array_equal(loose.test.labels.numpy(), labels[50:])
    with pytest.raises(DataError, match=r"50 training \+ 10 test"):
        load("cifar10", source=tmp_path / "packed", data_dir=tmp_path / "other")


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    images, fine = pictures(30, (32, 32, 3)), np.arange(30, dtype=np.uint8)
    coarse = np.full(30, 7, np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(cifar_records(images[:20], coarse[:20], fine[:20]))
    (folder / "test.bin").write_bytes(cifar_records(images[20:], coarse[20:], fine[20:]))
    dataset = open_small("cifar100", tmp_path)
    assert dataset.num_classes == 100
    assert dataset.classes[:2] == ("apple", "aquarium_fish")
    assert dataset.classes[-1] == "worm"
    assert np.array_equal(dataset.train.labels.numpy(), fine[:20])
    assert np.array_equal(dataset.test.inputs.numpy(), images[20:])


def test_cifar_python_batches_are_read_without_running_anything(tmp_path: Path) -> None:
    images, fine = pictures(12, (32, 32, 3)), list(range(12))
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, part in (("train", slice(0, 8)), ("test", slice(8, 12))):
        planes = np.ascontiguousarray(images[part].transpose(0, 3, 1, 2).reshape(-1, 3072))
        batch = {b"data": planes, b"fine_labels": fine[part], b"batch_label": b"part 1", b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    dataset = open_small("cifar100", tmp_path)
    assert np.array_equal(dataset.train.inputs.numpy(), images[:8])
    assert dataset.test.labels.tolist() == fine[8:]


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must never be printed",))


def test_a_pickle_that_wants_more_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for thing in (Harmful(), np.random.default_rng(1), Path("x")):
        with pytest.raises(DataError, match="bad_batch: refused"):
            parse_python(pickle.dumps({b"data": thing, b"labels": [1]}, protocol=2), "bad_batch", b"labels")
    for data in (b"", b"garbage", pickle.dumps([1, 2])):
        with pytest.raises(DataError, match="bad_batch"):
            parse_python(data, "bad_batch", b"labels")
    assert capsys.readouterr().out == ""


def test_a_truncated_binary_is_named() -> None:
    with pytest.raises(DataError, match=r"data_batch_1\.bin: truncated"):
        parse_binary(bytes(3072), "data_batch_1.bin", 1)


def test_cifar10_sheets(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    images, labels = pictures(12, (32, 32, 3)), [number % 10 for number in range(12)]
    for number in range(5):
        image.fromarray(images[2 * number : 2 * number + 2].reshape(2, 1024, 3)).save(
            tmp_path / f"data_batch_{number + 1}.png"
        )
    image.fromarray(images[10:].reshape(2, 1024, 3)).save(tmp_path / "test_batch.png")
    (tmp_path / "train_lables.json").write_text(json.dumps(labels[:10]))
    (tmp_path / "test_lables.json").write_text(json.dumps(labels[10:]))
    assert np.array_equal(open_small("cifar10", tmp_path).train.inputs.numpy(), images[:10])
    whole = (tmp_path / "test_batch.png").read_bytes()
    (tmp_path / "test_batch.png").write_bytes(whole[:-500])
    with pytest.raises(DataError, match=r"test_batch\.png"):
        load("cifar10", source=tmp_path, data_dir=tmp_path / "again", unverified=True)


def test_svhn_mat_files(tmp_path: Path) -> None:
    io_ = pytest.importorskip("scipy.io")
    images = pictures(14, (32, 32, 3))
    stored = (np.arange(14) % 10) + 1  # 1…10, and 10 means the digit 0
    for name, part in (("train", slice(0, 10)), ("test", slice(10, 14))):
        content = {"X": images[part].transpose(1, 2, 3, 0), "y": stored[part][:, None].astype(np.uint8)}
        io_.savemat(tmp_path / f"{name}_32x32.mat", content)
    dataset = open_small("svhn", tmp_path)
    assert np.array_equal(dataset.train.inputs.numpy(), images[:10])
    assert dataset.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    with pytest.raises(DataError, match=r"known: 73,257 \+ 26,032 \(complete\)"):
        load("svhn", source=tmp_path, data_dir=tmp_path / "checked")
    whole = (tmp_path / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"test_32x32\.mat"):
        load("svhn", source=tmp_path, data_dir=tmp_path / "again", unverified=True)


def test_published_md5_decides_where_nothing_else_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the right count is still refused when its published MD5 differs."""
    from dataclasses import replace

    from fedfa.data.definition import Edition

    io_ = pytest.importorskip("scipy.io")
    for name in ("train", "test"):
        io_.savemat(
            tmp_path / f"{name}_32x32.mat",
            {"X": pictures(10, (32, 32, 3)).transpose(1, 2, 3, 0), "y": np.arange(1, 11)[:, None]},
        )
    monkeypatch.setitem(DEFINITIONS, "svhn", replace(DEFINITIONS["svhn"], editions=(Edition("complete", 10, 10),)))
    with pytest.raises(DataError, match=r"train_32x32\.mat: its MD5 is"):
        load("svhn", source=tmp_path, data_dir=tmp_path / "cache")


def test_usps_as_text_as_libsvm_and_as_npz_are_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = {"train": (rng.uniform(-1, 1, (12, 256)).round(4), np.arange(12) % 10)}
    parts["test"] = (rng.uniform(-1, 1, (11, 256)).round(4), np.arange(11) % 10)
    for place in ("text", "libsvm", "npz"):
        (tmp_path / place).mkdir()
    arrays: dict[str, Array] = {}
    for part, (values, labels) in parts.items():
        text = "".join(
            f"{label:.4f} " + " ".join(f"{value:.4f}" for value in row) + " \n"
            for label, row in zip(labels, values, strict=True)
        )
        (tmp_path / "text" / f"zip.{part}.gz").write_bytes(gzip.compress(text.encode()))
        lines = "".join(
            f"{label + 1} " + " ".join(f"{index + 1}:{value}" for index, value in enumerate(row)) + "\n"
            for label, row in zip(labels, values, strict=True)
        )
        (tmp_path / "libsvm" / ("usps.bz2" if part == "train" else "usps.t.bz2")).write_bytes(
            bz2.compress(lines.encode())
        )
        arrays |= {
            f"x_{part}": np.rint((values + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16),
            f"y_{part}": labels,
        }
    np.savez(tmp_path / "npz" / "usps.npz", allow_pickle=False, **arrays)
    prints = {open_small("usps", tmp_path / place).fingerprint for place in ("text", "libsvm", "npz")}
    assert len(prints) == 1
    short = gzip.decompress((tmp_path / "text" / "zip.test.gz").read_bytes())[:-30]
    (tmp_path / "text" / "zip.test.gz").write_bytes(gzip.compress(short))
    with pytest.raises(DataError, match=r"zip\.test\.gz: (truncated|damaged)"):
        load("usps", source=tmp_path / "text", data_dir=tmp_path / "again", unverified=True)


def test_mnist_m_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    images = pictures(10, (32, 32, 3))
    for part, numbers in (("train", range(6)), ("test", range(6, 10))):
        folder = tmp_path / "mnist_m" / f"mnist_m_{part}"
        folder.mkdir(parents=True)
        for number in numbers:
            image.fromarray(images[number]).save(folder / f"{number:08d}.png")
        (tmp_path / "mnist_m" / f"mnist_m_{part}_labels.txt").write_text(
            "".join(f"{number:08d}.png {number % 10}\n" for number in numbers)
        )
    dataset = open_small("mnist-m", tmp_path)
    assert np.array_equal(dataset.train.inputs.numpy(), images[:6])
    assert dataset.test.labels.tolist() == [6, 7, 8, 9]
    (tmp_path / "mnist_m" / "mnist_m_test_labels.txt").write_text("../../secret.png 1\n")
    with pytest.raises(DataError, match="outside its folder"):
        load("mnist-m", source=tmp_path, data_dir=tmp_path / "again", unverified=True)


def test_chars74k_folders_are_split_by_font(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for digit in range(10):
        folder = tmp_path / "English" / "Fnt" / f"Sample{digit + 1:03d}"
        folder.mkdir(parents=True)
        for style in range(1, 6):
            image.fromarray(np.full((128, 128), 20 * digit, np.uint8)).save(
                folder / f"img{digit + 1:03d}-{style:05d}.png"
            )
    dataset = open_small("chars74k-digits", tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert dataset.test.writers.unique().tolist() == [5]
    assert (dataset.train.inputs[:, 14, 14, 0] == 20 * dataset.train.labels).all()


def test_mosaics(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    images = pictures(200, (32, 32, 3))
    sheet = images.reshape(2, 100, 32, 32, 3).swapaxes(1, 2).reshape(64, 3200, 3)
    image.fromarray(sheet).save(tmp_path / "m.webp", lossless=True)
    assert np.array_equal(read_mosaic(tmp_path / "m.webp"), images)
    image.fromarray(sheet[:, :3000]).save(tmp_path / "narrow.png")
    with pytest.raises(DataError, match=r"narrow\.png"):
        read_mosaic(tmp_path / "narrow.png")


def test_mnist_writers_must_fit_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    for part, count in (("train", 40), ("test", 30)):
        table = np.zeros((count, 8), np.int32)
        table[:, 0], table[:, 2] = np.arange(count) % 10, np.arange(count) // 4
        write_idx(tmp_path / "mnist-writers" / f"qmnist-{part}-labels-idx2-int.gz", table)
    dataset = open_small("mnist-writers", tmp_path)
    assert dataset.train.writers.tolist() == [number // 4 for number in range(40)]
    assert len(dataset.test) == 20
    table = np.zeros((40, 8), np.int32)
    write_idx(tmp_path / "mnist-writers" / "qmnist-train-labels-idx2-int.gz", table)
    with pytest.raises(DataError, match=r"qmnist-train-labels.*not MNIST's"):
        load("mnist-writers", source=tmp_path, data_dir=tmp_path / "again", unverified=True)


def test_emnist_digits_stand_upright(tmp_path: Path) -> None:
    images = pictures(30, (28, 28))
    labels = (np.arange(30) % 10).astype(np.uint8)
    members = {}
    for part, these in (("train", slice(0, 20)), ("test", slice(20, 30))):
        members[f"emnist-digits-{part}-images-idx3-ubyte.gz"] = images[these].transpose(0, 2, 1).copy()
        members[f"emnist-digits-{part}-labels-idx1-ubyte.gz"] = labels[these]
    (tmp_path / "zip").mkdir()
    with zipfile.ZipFile(tmp_path / "zip" / "gzip.zip", "w") as archive:
        for name, values in members.items():
            write_idx(tmp_path / "loose" / name, values)
            archive.write(tmp_path / "loose" / name, f"gzip/{name}")
    loose, packed = (open_small("emnist-digits", tmp_path / place) for place in ("loose", "zip"))
    assert np.array_equal(loose.train.inputs.numpy()[..., 0], images[:20])
    assert loose.fingerprint == packed.fingerprint


def leaf_files(folder: Path) -> None:
    rng = np.random.default_rng(1)
    for part, count in (("train", 6), ("test", 2)):
        for number, users in enumerate((["f0001_41", "f0002_11"], ["f0003_05"])):
            shares = {
                user: {
                    "x": rng.random((count, 784)).round(3).tolist(),
                    "y": [(5 * k + number) % 62 for k in range(count)],
                }
                for user in users
            }
            (folder / "data" / part).mkdir(parents=True, exist_ok=True)
            content = {"users": users, "num_samples": [count] * len(users), "user_data": shares}
            (folder / "data" / part / f"all_data_{number}.json").write_text(json.dumps(content))


def test_leaf_json_keeps_writers_apart(tmp_path: Path) -> None:
    leaf_files(tmp_path)
    dataset = open_small("femnist", tmp_path)
    assert dataset.num_classes == 62
    assert dataset.train.writers.bincount().tolist() == [6, 6, 6]
    assert dataset.test.writers.bincount().tolist() == [2, 2, 2]
    assert dataset.manifest["writer_names"] == ["f0001_41", "f0002_11", "f0003_05"]
    first = json.loads((tmp_path / "data" / "train" / "all_data_0.json").read_text())["user_data"]["f0001_41"]["x"][0][
        0
    ]
    assert int(dataset.train.inputs[0, 0, 0, 0]) == round((1 - first) * 255)
    digits = load("femnist-digits", source=tmp_path, data_dir=tmp_path / "digits")
    assert int(digits.train.labels.max()) < 10
    (tmp_path / "data" / "test" / "all_data_1.json").write_text('{"users": ["x"]')
    with pytest.raises(DataError, match=r"all_data_1\.json"):
        load("femnist", source=tmp_path, data_dir=tmp_path / "again")


def test_tff_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed; only TensorFlow Federated's files need it")
    rng = np.random.default_rng(1)
    stored = {}
    for part, count in (("train", 5), ("test", 2)):
        with h5py.File(tmp_path / f"fed_emnist_digitsonly_{part}.h5", "w") as file:
            for writer in ("f1_1", "f2_2"):
                stored[part, writer] = rng.random((count, 28, 28)).astype(np.float32)
                file[f"examples/{writer}/pixels"] = stored[part, writer]
                file[f"examples/{writer}/label"] = np.arange(count, dtype=np.int32)
    dataset = open_small("femnist-digits", tmp_path)
    assert dataset.train.writers.tolist() == [0] * 5 + [1] * 5
    expected = np.rint((1 - stored["test", "f2_2"].astype(np.float64)) * 255)
    assert np.array_equal(dataset.test.inputs.numpy()[2:, ..., 0], expected)


def test_archives_cannot_write_elsewhere(tmp_path: Path) -> None:
    from fedfa.data.formats.untrusted_files import tar_members

    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name in ("../../escaped", "/absolute", "inside"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    assert tar_members(tmp_path / "evil.tar", {"inside"}) == {"inside": b"abc"}
    assert sorted(path.name for path in tmp_path.parent.rglob("escaped")) == []
    with pytest.raises(DataError, match=r"evil\.tar: the archive lacks missing"):
        tar_members(tmp_path / "evil.tar", {"missing"})
