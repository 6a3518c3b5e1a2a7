"""Tables, tokens, 16-bit pictures, dictionaries and tuples of tensors reach the network as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa.data import DataSet, Federation, Preprocessing, dataset_from
from fedfa.errors import ConfigError, DataError, ModelError

RNG = np.random.default_rng(7)
LOCAL = fedfa.LocalTraining(epochs=1, batch_size=16, lr=0.1)


class ReadsTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        logits: Tensor = self.head(self.words(tokens).mean(1))
        return logits


class ReadsMaskedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6)
        self.head = nn.Linear(7, 3)

    def forward(self, tokens: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        assert (tokens.dtype, mask.dtype, age.dtype) == (torch.int64, torch.bool, torch.float32)
        weights = mask.float().unsqueeze(-1)
        mean = (self.words(tokens) * weights).sum(1) / weights.sum(1)
        logits: Tensor = self.head(torch.cat([mean, age], 1))
        return logits


def tokens_of(labels: np.ndarray, length: int = 8) -> np.ndarray:
    shifted: np.ndarray = RNG.integers(0, 10, (len(labels), length)) + 10 * labels[:, None]
    return shifted


def masked(count: int = 240) -> tuple[dict[str, np.ndarray], np.ndarray]:
    labels = np.arange(count) % 3
    mask = RNG.random((count, 8)) < 0.7
    mask[:, 0] = True
    return {"tokens": tokens_of(labels), "mask": mask, "age": RNG.normal(50, 9, (count, 1))}, labels


def weights_after(data: Federation, model: type[nn.Module], **options: Any) -> dict[str, Tensor]:
    experiment = fedfa.Experiment("fedfa", data=data, model=model, cohort=4, local=LOCAL, **options)
    list(experiment.rounds(2, progress=False))
    return experiment.weights()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_tokens_stay_integers_and_an_embedding_learns_them(tmp_path: Path) -> None:
    labels = np.arange(300) % 3
    tokens = tokens_of(labels).astype(np.int32)
    dataset = dataset_from((tokens, labels))
    assert dataset.train.inputs.dtype == torch.int64
    data = dataset.split("shards:2", 8, 0)
    experiment = fedfa.Experiment("fedavg", data=data, model=ReadsTokens, cohort=8, local=LOCAL)
    records = list(experiment.rounds(15, progress=False))
    assert (records[-1].accuracy or 0) > 0.8
    experiment.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run", model=ReadsTokens)
    assert torch.equal(loaded.predict(tokens), experiment.predict(tokens))
    with pytest.raises(DataError, match="trained on integers"):
        loaded.predict(tokens.astype(float))
    with pytest.raises(ModelError, match=r"reads one tensor of numbers, not \(8,\) of int64"):
        fedfa.Experiment("fedavg", data=data, model="mlp")


def test_16_bit_pictures_are_not_cut_to_8_bits(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(("dark", "light")):
        for part, count in (("train", 6), ("val", 2), ("test", 3)):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((4, 5), 1000 + 2000 * label + 10 * number + ord(part[0]), np.uint16)
                image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    dataset = dataset_from(tmp_path)
    assert dataset.train.inputs.dtype == torch.uint16
    assert int(dataset.train.inputs.to(torch.int32).max()) == 3000 + 50 + ord("t")
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    assert dataset.validation is not None
    assert len(dataset.validation) == 4
    batch, _ = dataset.split("iid", 1, 0).client(0).batch(torch.arange(12))
    assert batch.shape == (12, 1, 4, 5)
    assert batch.mean().abs() < 1e-3
    assert (batch.std(correction=0) - 1).abs() < 1e-3
    cached = fedfa.data.load(str(tmp_path), data_dir=tmp_path / "cache")
    assert cached.fingerprint == dataset.fingerprint
    assert cached.validation is not None
    prepared = dataset.preprocessing().apply(dataset.train.inputs.numpy())
    assert torch.equal(prepared, dataset.normalisation.batch(dataset.train.inputs))
    with pytest.raises(DataError, match="trained on uint16 images"):
        dataset.preprocessing().apply(np.zeros((1, 4, 5), np.uint8))
    image.fromarray(np.zeros((4, 5), np.uint8)).save(tmp_path / "train" / "dark" / "9.png")
    with pytest.raises(DataError, match=r"9\.png: 8 bits per pixel"):
        dataset_from(tmp_path)
    image.fromarray(np.zeros((4, 5), np.float32)).save(tmp_path / "train" / "dark" / "9.tif")
    (tmp_path / "train" / "dark" / "9.png").unlink()
    with pytest.raises(DataError, match="reduced to 8 bits"):
        dataset_from(tmp_path)


def test_16_bit_arrays_train_as_pictures() -> None:
    pixels = RNG.integers(0, 4096, (40, 6, 6), dtype=np.uint16)
    data = dataset_from((pixels, np.arange(40) % 2)).split("iid", 4, 0)
    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=2, local=LOCAL)
    assert [record.round for record in experiment.rounds(1, progress=False)] == [1]
    assert experiment.predict(pixels[0]).shape == (1,)


@pytest.mark.parametrize("workers", [1, 2])
def test_dictionaries_of_tensors_give_the_same_bits_for_any_number_of_workers(workers: int) -> None:
    global RNG
    RNG = np.random.default_rng(7)
    inputs, labels = masked()
    data = dataset_from((inputs, labels)).split("shards:2", 8, 0).standardised()
    reference = weights_after(data, ReadsMaskedTokens, workers=1)
    assert equal(weights_after(data, ReadsMaskedTokens, workers=workers), reference)


def test_dictionaries_of_tensors_are_evaluated_stored_and_predicted(tmp_path: Path) -> None:
    inputs, labels = masked()
    dataset = dataset_from((inputs, labels))
    data = dataset.split("iid", 8, 0).standardised()
    experiment = fedfa.Experiment("fedavg", data=data, model=ReadsMaskedTokens, cohort=8, local=LOCAL)
    records = list(experiment.rounds(15, progress=False))
    assert (records[-1].accuracy or 0) > 0.8
    experiment.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run", model=ReadsMaskedTokens)
    scores = loaded.predict(inputs, scores=True)
    assert torch.allclose(scores, experiment.predict(inputs, scores=True))
    with pytest.raises(DataError, match="a dictionary of tokens, mask, age, not tokens"):
        loaded.predict({"tokens": inputs["tokens"]})
    with pytest.raises(DataError, match="different numbers of samples"):
        loaded.predict({**inputs, "age": inputs["age"][:3]})
    for settings, message in (
        ({"engine": {"execution": "stacked"}}, "one float tensor"),
        ({"diagnostics": {"every": 1}}, "inputs of one tensor"),
    ):
        refused = fedfa.Experiment("fedavg", data=data, model=ReadsMaskedTokens, settings=settings)
        with pytest.raises(ConfigError, match=message):
            next(iter(refused.rounds(1, progress=False)))


def test_tuples_become_arguments_in_order() -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            logits: Tensor = self.head(one - other)
            return logits

    one, other = RNG.normal(size=(60, 2)), RNG.normal(size=(60, 2))
    labels = (one > other)[:, 0].astype(int)
    data = dataset_from(((one, other), labels)).split("iid", 3, 0)
    experiment = fedfa.Experiment("fedavg", data=data, model=Difference, cohort=3, local=LOCAL)
    assert (list(experiment.rounds(20, progress=False))[-1].accuracy or 0) > 0.8
    assert experiment.predict((one, other)).shape == (60,)


def test_a_record_survives_the_cache_bit_by_bit(tmp_path: Path) -> None:
    """The layout is written to the manifest and read back; checked through preprocessing's own round trip, too."""
    inputs, labels = masked(30)
    dataset = dataset_from((inputs, labels))
    batch = dataset.normalisation.batch(dataset.train.inputs)
    assert set(batch) == {"tokens", "mask", "age"}
    again = Preprocessing.from_dict(dataset.preprocessing().to_dict())
    assert again == dataset.preprocessing()
    raw = dict(dataset.normalisation.unpack(dataset.train.inputs))  # type: ignore[attr-defined]  # a record
    assert all(torch.equal(batch[name], raw[name]) for name in raw)


# -- standardisation ------------------------------------------------------------------------------------------------
def table(count: int = 200) -> DataSet:
    labels = np.arange(count) % 2
    values = RNG.normal([0, 1000, 5], [1, 300, 0], (count, 3)) + labels[:, None] * [2, 900, 0]
    return dataset_from((values, labels), name="table")


def test_federation_statistics_are_those_of_the_training_samples_alone() -> None:
    dataset = table()
    data = dataset.split("iid", 5, 0).standardised()
    values = dataset.train.inputs.double().numpy()
    assert np.allclose(data.dataset.normalisation.mean, values.mean(0), rtol=1e-12)
    assert np.allclose(data.dataset.normalisation.std, [*values.std(0)[:2], 1.0], rtol=1e-12)  # the last is constant
    every = torch.cat([client.batch(torch.arange(client.size))[0] for client in data])
    assert torch.allclose(every.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(every.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)


def test_client_statistics_are_each_clients_own_and_stored_with_the_run(tmp_path: Path) -> None:
    dataset = table()
    data = dataset.split("shards:1", 4, 0).standardised("client")
    for client in data:
        inputs, _ = client.batch(torch.arange(client.size))
        assert torch.allclose(inputs.mean(0), torch.zeros(3), atol=1e-4)
    experiment = fedfa.Experiment("local", data=data, model="logistic", cohort=4, local=LOCAL)
    list(experiment.rounds(1, progress=False))
    assert experiment.config.data.standardise == "client"
    experiment.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run")
    x = dataset.test.inputs.numpy()
    for number in range(4):
        positions = data.partition.client(number)
        own = dataset.train.inputs.double().numpy()[positions]
        expected = (x - own.mean(0)) / np.where(own.std(0) < 1e-6, 1, own.std(0))
        assert np.allclose(loaded.preprocessing.apply(x, number).numpy(), expected, atol=1e-3)
    assert loaded.predict(x, client=2).shape == (len(x),)


def test_standardisation_trains_where_raw_numbers_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Raw columns of a thousand: the old code reported a constant predictor without a word."""
    np.savez(tmp_path / "table.npz", x=table(400).train.inputs.numpy(), y=table(400).train.labels.numpy())
    base = {"data": {"name": str(tmp_path / "table.npz"), "partition": "iid", "clients": 5, "dir": str(tmp_path)}}
    common = {"model": {"name": "mlp"}, "local": {"lr": 0.1}, "rounds": 5, "cohort": {"clients": 5}}
    raw = fedfa.run(fedfa.Config.resolve(base, common, {"local": {"lr": 0.001}}), tmp_path / "raw")
    assert "column 1 of the inputs has values around" in caplog.text
    config = fedfa.Config.resolve(base, common, {"data": {"standardise": "federation"}})
    result = fedfa.run(config, tmp_path / "standardised")
    assert result.final_accuracy > max(0.85, raw.final_accuracy)
    saved = fedfa.load(tmp_path / "standardised")
    test = fedfa.data.load(str(tmp_path / "table.npz"), data_dir=tmp_path).test
    assert (saved.predict(test.inputs.numpy()) == test.labels).double().mean() == pytest.approx(result.final_accuracy)
    resumed = fedfa.run(config, tmp_path / "standardised", resume=True)
    assert resumed.final_accuracy == result.final_accuracy


def test_standardisation_refuses_what_is_no_quantity() -> None:
    pictures = dataset_from((RNG.integers(0, 255, (20, 4, 4), dtype=np.uint8), np.arange(20) % 2))
    tokens = dataset_from((RNG.integers(0, 9, (20, 4)), np.arange(20) % 2))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: pictures.split("iid", 2, 0).standardised(), "images, which are normalised already"),
        (lambda: tokens.split("iid", 2, 0).standardised(), "these are integers"),
        (lambda: table().split("iid", 2, 0).standardised("site"), "choose one of"),  # type: ignore[arg-type]
        (lambda: table().split("iid", 2, 0).standardised().standardised("client"), "already"),
    ]
    for make, message in calls:
        with pytest.raises(DataError, match=message):
            make()
