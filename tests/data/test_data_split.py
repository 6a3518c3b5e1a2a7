"""From a name to a federation: ``load(name).split(partition)``, its origin, and what is printed of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfa.data import (
    DataSet,
    Federation,
    FederationOrigin,
    Normalisation,
    Partition,
    Samples,
    Shards,
    dataset_from,
    load,
    number_of_clients,
    parse_partition,
    partition,
)
from fedfa.errors import DataError


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load("digits", data_dir=tmp_path_factory.mktemp("cache"), offline=True)


def own(**arrays: object) -> DataSet:
    return dataset_from((np.zeros((40, 2)), np.arange(40) % 4), **arrays)  # type: ignore[arg-type]  # options of any kind


@pytest.mark.parametrize("text", ["iid", "shards:2", "classes:2", "dirichlet:0.1", "quantity:0.5"])
def test_split_takes_text_or_specification_and_gives_the_partition_of_its_seed(digits: DataSet, text: str) -> None:
    spec = parse_partition(text)
    expected = partition(digits.train, spec, 20, 10, 7)
    for federation in (digits.split(text, 20, 7), digits.split(spec, clients=20, seed=7)):
        assert np.array_equal(federation.partition.order, expected.order)
        assert np.array_equal(federation.partition.offsets, expected.offsets)


def test_clients_left_out_are_100_or_as_many_as_the_writers(digits: DataSet) -> None:
    assert digits.split("iid").num_clients == 100
    assert digits.split("iid").origin == digits.split("iid", 100, 1).origin
    train = Samples(torch.zeros(12, 1), torch.zeros(12, dtype=torch.int64), writers=torch.arange(12) % 4)
    written = DataSet("w", train, train, ("0",), (), Normalisation(), "", {})
    assert written.split("natural").num_clients == 4
    assert written.split("natural:2").num_clients == 2
    assert [number_of_clients(parse_partition(text), None) for text in ("iid", "natural", "natural:2")] == [
        100, None, None,
    ]  # fmt: skip
    with pytest.raises(DataError, match="at least one client, not 0"):
        digits.split("iid", clients=0)


def test_a_federation_remembers_its_origin_and_can_be_rebuilt(digits: DataSet) -> None:
    federation = digits.normalised("authors").split("dirichlet:0.1", clients=30, seed=5)
    origin = federation.origin
    assert digits.origin is not None
    assert origin == FederationOrigin(
        name="digits", normalisation="authors", data_dir=digits.origin.data_dir,
        partition=parse_partition("dirichlet:0.1"), clients=30, seed=5,
    )  # fmt: skip
    again = origin.rebuild(offline=True)
    assert again.origin == origin
    assert again.dataset.fingerprint == digits.fingerprint
    assert np.array_equal(again.partition.order, federation.partition.order)
    assert np.array_equal(again.partition.offsets, federation.partition.offsets)


def test_own_paths_are_loaded_again_by_their_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(1).normal(size=(20, 3)), y=np.arange(20) % 2)
    monkeypatch.chdir(tmp_path)
    federation = load("mine.npz", data_dir=Path("cache")).split("iid", 4)
    assert federation.dataset.name == "mine"
    assert federation.origin is not None
    assert federation.origin.name == str(tmp_path / "mine.npz")
    monkeypatch.chdir("/")
    assert np.array_equal(federation.origin.rebuild().partition.order, federation.partition.order)


def test_data_and_partitions_given_in_python_have_no_origin(digits: DataSet) -> None:
    assert digits.reloadable
    assert not own().reloadable
    assert own().split("iid", 4).origin is None
    assert Federation(digits, Partition.from_owners(np.zeros(1442, np.int64), 1)).origin is None
    assert digits.split("iid", 4).pooled().origin is None
    changed = replace(digits, train=digits.train.subset(torch.arange(100)))
    assert not changed.reloadable, "the name would load other samples"


def test_normalisations_can_be_switched_back() -> None:
    images = np.arange(8 * 4, dtype=np.uint8).reshape(8, 2, 2)
    fashion = dataset_from((images, np.arange(8) % 2), name="fashion-mnist")
    authors = fashion.normalised("authors")
    assert authors.normalisation == Normalisation((0.1307,), (0.3081,))
    assert authors.normalised("dataset").normalisation == fashion.normalisation


def test_clients_by_index_and_in_a_loop(digits: DataSet) -> None:
    federation = digits.split("dirichlet:0.3", clients=12)
    assert len(federation) == federation.num_clients == 12
    assert federation.sizes.tolist() == [client.size for client in federation]
    assert torch.equal(federation[3].positions, federation.client(3).positions)
    for number in (12, -1):
        with pytest.raises(DataError, match=f"no client {number}"):
            federation[number]


def test_representations_are_one_short_line(digits: DataSet) -> None:
    assert repr(digits) == "<DataSet digits: 1,442 training + 355 test images of 8×8×1, 10 classes>"
    assert repr(digits.test) == "<Samples: 355 images of 8×8×1>"
    assert repr(own()) == "<DataSet own: 32 training + 8 test inputs of shape (2,), 4 classes>"
    written = Samples(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), writers=torch.arange(3))
    assert repr(written) == "<Samples: 3 inputs of shape (2,), with writers>"
    federation = digits.split(Shards(classes_per_client=2), clients=10, seed=3)
    assert repr(federation) == (
        "<Federation digits: 10 clients, shards:2, seed 3; 1,442 samples, 144 to 146 per client>"
    )
    assert repr(own().split("iid", 4)) == "<Federation own: 4 clients; 32 samples, 8 to 8 per client>"
    assert repr(own().split("classes:2", 4)[0]) == "<ClientSamples: 8 samples of 2 classes>"


def test_the_summary_is_one_line_in_closed_form() -> None:
    """Four classes, one each for four clients: the distance to the uniform distribution is 1 − 1/4."""
    text = str(own().split("classes:1", clients=4).summary())
    assert text == (
        "4 clients hold 32 of 32 samples; per client 8 to 8, median 8. Classes per client: 1.0 on average. "
        "Label skew 0.75 (0: all clients alike; 1: nothing in common)."
    )
