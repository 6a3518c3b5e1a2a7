"""Clients of the user's own: lists, dictionaries, columns of any hashable values, from Python, files and a site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedfa
from fedfa.data import dataset_from, federation_from
from fedfa.errors import ConfigError, DataError, FedfaError
from fedfa.flower.site import own_dataset

RNG = np.random.default_rng(3)


def hospital(count: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % 2
    return RNG.normal(shift, 1, (count, 3)) + 2 * labels[:, None], labels


def test_a_list_of_clients_keeps_every_sample_with_its_client() -> None:
    hospitals = [hospital(size, shift) for shift, size in enumerate((40, 10, 30))]
    federation = federation_from(hospitals, test=hospital(20))
    assert federation.sizes.tolist() == [40, 10, 30]
    assert federation.names == ("0", "1", "2")
    for number, (inputs, labels) in enumerate(hospitals):
        x, y = federation.client(number).batch(torch.arange(len(labels)))
        assert torch.equal(x, torch.from_numpy(inputs).float())
        assert torch.equal(y, torch.from_numpy(labels))
    experiment = fedfa.Experiment("fedfa", data=federation, model="mlp", cohort=3)
    assert len(list(experiment.rounds(2, progress=False))) == 2


def test_clients_by_name_with_test_samples_of_their_own() -> None:
    parts = {name: {"train": hospital(20), "test": hospital(size)} for name, size in (("b", 4), ("a", 6))}
    federation = federation_from(parts)
    assert federation.names == ("a", "b")
    assert [len(federation.test_of(number)) for number in range(2)] == [6, 4]
    held_out = federation_from({name: part["train"] for name, part in parts.items()})
    assert held_out.sizes.tolist() == [16, 16], "a fifth of each class of each client"
    assert [len(held_out.test_of(number)) for number in range(2)] == [4, 4]


def test_eleven_unnamed_clients_stay_in_their_order() -> None:
    federation = federation_from([hospital(2 * number + 2) for number in range(11)], test=hospital(4))
    assert federation.sizes.tolist() == [2 * number + 2 for number in range(11)]


@pytest.mark.parametrize(
    "owners", [[("ward", number % 3) for number in range(60)], [f"w{number % 3}" for number in range(60)],
               np.arange(60) % 3, [0.5 + number % 3 for number in range(60)]],
    ids=["tuples", "text", "numbers", "floats"],
)  # fmt: skip
@pytest.mark.parametrize("argument", ["clients", "writers"])
def test_any_hashable_names_a_client(owners: Any, argument: str) -> None:
    x, y = hospital(60)
    dataset = dataset_from((x, y), **{argument: owners})
    federation = dataset.split("natural")
    assert federation.sizes.sum() == len(dataset.train)
    assert len(federation) == 3
    rows = {row.tobytes(): owners[place] for place, row in enumerate(x.astype(np.float32))}
    for client in federation:
        inputs, _ = client.batch(torch.arange(client.size))
        assert len({rows[row.tobytes()] for row in inputs.numpy()}) == 1


def test_domains_of_any_name_give_an_accuracy_each() -> None:
    x, y = hospital(80)
    dataset = dataset_from((x, y), domains=["sonograph", "x-ray"] * 40)
    federation = dataset.split("domains", 4, 0)
    experiment = fedfa.Experiment("fedavg", data=federation, model="logistic", cohort=4)
    (record,) = experiment.rounds(1, progress=False)
    assert set(record["domain_accuracy"]) == {"sonograph", "x-ray"}


def test_a_column_of_a_file_names_the_clients(tmp_path: Path) -> None:
    x, y = hospital(60)
    lines = ["age,weight,height,sick,clinic"]
    lines += [f"{a},{b},{c},{'yes' if label else 'no'},clinic {place % 4}" for place, ((a, b, c), label)
              in enumerate(zip(x.tolist(), y, strict=True))]  # fmt: skip
    (tmp_path / "patients.csv").write_text("\n".join(lines))
    data = {"name": str(tmp_path / "patients.csv"), "dir": str(tmp_path / "cache"), "label": "sick"}
    common = {"model": {"name": "mlp"}, "rounds": 2, "cohort": {"clients": 4}}
    config = fedfa.Config.resolve(common, {"data": {**data, "client_column": "clinic", "partition": "natural"}})
    result = fedfa.run(config, tmp_path / "run")
    assert sorted(result.metrics[0]["cohort"]) == [0, 1, 2, 3]
    loaded = fedfa.load(tmp_path / "run")
    assert loaded.federation.names == tuple(f"clinic {number}" for number in range(4))
    assert loaded.preprocessing.classes == ("no", "yes")
    assert loaded.federation.dataset.input_shape == (3,)
    with pytest.raises(ConfigError, match=r'set data\.partition = "natural"'):
        fedfa.Config.resolve({"data": {**data, "client_column": "clinic"}})
    with pytest.raises(DataError, match=r"no column 'clinik' \(did you mean 'clinic'\?\)"):
        fedfa.data.load(data["name"], data_dir=tmp_path, columns=fedfa.data.Columns(label="sick", clients="clinik"))
    with pytest.raises(DataError, match="no column is named label"):
        fedfa.data.load(data["name"], data_dir=tmp_path)
    with pytest.raises(DataError, match="'clinic' holds text"):
        fedfa.data.load(data["name"], data_dir=tmp_path, columns=fedfa.data.Columns(label="sick"))
    federation = loaded.federation
    assert federation.origin is not None
    assert federation.origin.rebuild().names == federation.names


def test_wrong_clients_are_named() -> None:
    x, y = hospital(20)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: federation_from([]), "no clients"),
        (lambda: federation_from([(x, y), (x[:0], y[:0])]), "client 1 has no training samples"),
        (
            lambda: federation_from([(x, y), (x[:, :2], y)]),
            "client 1 are .2. of numbers, but those of client 0 are .3.",
        ),
        (lambda: federation_from({"a": (x, y), "b": (x, y[:3])}), "client 'b': there are 20 inputs, but 3 labels"),
        (lambda: federation_from([(x, y), (x, y.astype(str))]), "labels of client 1 are of another kind"),
        (lambda: federation_from("ab"), "clients is str"),
        (lambda: federation_from([{"train": (x, y), "test": (x, y)}], test=(x, y)), "give one of them"),
        (lambda: dataset_from((x, y), clients=["a"] * 3), "20 samples, but 3 clients"),
        (lambda: dataset_from((x, y), clients=[["a"]] * 20), "not hashable"),
        (lambda: dataset_from((x, y), clients=[1, "1"] * 10), "two different values are written '1'"),
        (lambda: dataset_from((x, y), clients=["a", None] * 10), "a sample has none"),
        (lambda: dataset_from((x, y), clients=y, writers=y), "give one of them"),
        (lambda: dataset_from((x, y), clients="clinic"), "names a column, but the source is a pair of arrays"),
        (lambda: dataset_from((x, y), clients=3), "one value per sample"),
    ]
    for make, message in calls:
        with pytest.raises(DataError, match=message):
            make()


def test_a_site_numbers_named_labels_by_the_common_list() -> None:
    """Numbered by themselves, 'cold' would be class 0 at one site and 'flu' at another."""
    network = nn.Linear(3, 3)
    x = RNG.normal(size=(6, 3)).astype(np.float32)
    names = ["cold", "flu", "well"]
    site = own_dataset({"train": (x, ["flu", "well"] * 3), "classes": names}, network)
    assert site.train.labels.tolist() == [1, 2] * 3
    assert len(site.test) == 0
    with pytest.raises(DataError, match="return the names of all classes as 'classes'"):
        own_dataset((x, ["flu", "well"] * 3), network)
    with pytest.raises(FedfaError, match="'cough' is not among the classes"):
        own_dataset({"train": (x, ["flu", "cough"] * 3), "classes": names}, network)
    with pytest.raises(DataError, match="2 classes, but the network has 3"):
        own_dataset({"train": (x, ["flu"] * 6), "classes": names[1:]}, network)
    with pytest.raises(DataError, match="NaN"):
        own_dataset((np.full((6, 3), np.nan), [0, 1] * 3), network)


def test_test_samples_of_own_clients_are_standardised_with_their_clients_statistics() -> None:
    """Two clinics measure in different units. The global model reads each one's test samples in its own; an outsider's
    samples are read with the statistics of all."""
    rng = np.random.default_rng(5)

    def clinic(size: int, unit: float) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(size) % 2
        return unit * (rng.normal(size=(size, 2)) + 3 * labels[:, None] + 10), labels

    clients = {
        name: {"train": clinic(60, unit), "test": clinic(count, unit)}
        for name, unit, count in (("north", 1.0, 20), ("south", 1000.0, 30))
    }
    data = fedfa.data.federation_from(clients).standardised("client")
    owners = data.owners_of("test")
    assert owners is not None
    assert owners.bincount().tolist() == [20, 30]
    local = fedfa.LocalTraining(lr=0.3, batch_size=16)
    experiment = fedfa.Experiment("fedavg", data=data, model="logistic", cohort=2, local=local)
    *_, last = experiment.rounds(8, progress=False)
    hits = 0.0
    for number in range(2):
        own = data.test_of(number)
        inputs = data.normalisation_of(number).batch(own.inputs)
        assert isinstance(inputs, torch.Tensor)
        assert inputs.mean().abs() < 0.5, "its own statistics fit"
        hits += float((experiment.model().eval()(inputs).argmax(1) == own.labels).sum())
    assert last.accuracy == pytest.approx(hits / 50)
    assert hits > 45
    foreign = data.normalisation_of(None).batch(data.test_of(0).inputs)
    assert isinstance(foreign, torch.Tensor)
    assert foreign.std() < 0.1, "with the statistics of all, the smaller unit vanishes"
    settings = {"data": {"validation": "clients:0.2"}}
    held = fedfa.Experiment("fedavg", data=data, model="logistic", cohort=2, local=local, settings=settings)
    *_, last = held.rounds(8, progress=False)
    assert last["evaluated"]["on"] == "validation"
    assert last.accuracy is not None
    assert last.accuracy > 0.9, "validation samples of clients, too"
