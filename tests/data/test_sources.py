"""What users bring: DataFrames, Hugging Face and torch data sets, tables in files; and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import fedfa
from fedfa.data import dataset_from
from fedfa.errors import ClientError, ConfigError, DataError

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(40, 3)), np.arange(40) % 2


class Items(Dataset[Any]):
    """A torch data set of any items."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        item = self.items[position]
        return item() if callable(item) else item


def test_torch_data_sets_with_names_and_dictionaries() -> None:
    names = ["cat", "dog"]
    pairs = dataset_from(Items([(X[i], names[Y[i]]) for i in range(40)]))
    assert pairs.classes == ("cat", "dog")
    plain = dataset_from((X, Y))
    assert torch.equal(pairs.train.inputs, plain.train.inputs)
    assert torch.equal(pairs.train.labels, plain.train.labels)
    items = [{"x": torch.from_numpy(X[i]), "label": names[Y[i]], "site": f"s{i % 4}"} for i in range(40)]
    named = dataset_from(Items(items), clients="site")
    assert torch.equal(named.train.inputs, plain.train.inputs)
    assert len(named.split("natural")) == 4
    several = dataset_from(Items([{"ids": [1, 2], "mask": [True, False], "label": i % 2} for i in range(10)]))
    assert {name: value.dtype for name, value in several.normalisation.batch(several.train.inputs).items()} == {
        "ids": torch.int64,
        "mask": torch.bool,
    }


def test_a_data_frame_is_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    frame["sex"] = pandas.Categorical(["m", "f"] * 20)
    frame["y"] = ["no", "yes"] * 20
    with pytest.raises(DataError, match="'sex' holds text"):
        dataset_from(frame)
    dataset = dataset_from(frame, inputs=["a", "b", "c"], domains="sex")
    assert torch.equal(dataset.train.inputs, dataset_from((X, Y)).train.inputs)
    assert (dataset.classes, dataset.domains) == (("no", "yes"), ("f", "m"))
    whole = dataset_from(frame[["a", "y"]].assign(b=np.arange(40)), label="y")
    assert whole.train.inputs.dtype == torch.float32, "whole numbers of a table are quantities, not tokens"
    frame.loc[3, "b"] = None
    with pytest.raises(DataError, match=r"NaN or infinite values in 1 of .* \(column 1"):
        dataset_from(frame, inputs=["a", "b"], label="y")
    frame["y"] = pandas.array([1, None] * 20, dtype="Int64")
    with pytest.raises(DataError, match="numbers with missing values"):
        dataset_from(frame, inputs=["a"], label="y")


def test_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"ids": datasets.Sequence(datasets.Value("int64")), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = {"ids": RNG.integers(0, 9, (30, 4)).tolist(), "label": [0, 1] * 15}
    hub = datasets.Dataset.from_dict(rows, features=features)
    dataset = dataset_from(datasets.DatasetDict({"train": hub, "test": hub.select(range(6))}))
    assert dataset.classes == ("bad", "good")
    assert dataset.train.inputs.dtype == torch.int64
    assert dataset.train.inputs.tolist() == rows["ids"]
    assert (len(dataset.train), len(dataset.test)) == (30, 6)
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 4, 3), 8 * number, np.uint8)) for number in range(20)]
    hub = datasets.Dataset.from_dict({"img": pictures, "kind": ["a", "b"] * 10, "hospital": ["x"] * 9 + ["y"] * 11})
    hub = hub.cast_column("img", datasets.Image())
    federation = dataset_from(hub, label="kind", clients="hospital").split("natural")
    assert federation.names == ("x", "y")
    assert federation.dataset.train.inputs.shape[1:] == (4, 4, 3)


def test_parquet_and_csv_hold_the_same_table(tmp_path: Path) -> None:
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    one, other = dataset_from(tmp_path / "t.parquet"), dataset_from(tmp_path / "t.csv")
    assert one.fingerprint == other.fingerprint == dataset_from((X, Y)).fingerprint
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "ragged.csv").write_text("a,label\n1,0\n2\n")
    (tmp_path / "empty.csv").write_text("")
    for name, message in (("bad.parquet", "not a Parquet"), ("ragged.csv", "line 3: 1 values"), ("empty.csv", "table")):
        with pytest.raises(DataError, match=message):
            dataset_from(tmp_path / name)


def test_classes_are_looked_up_by_name_and_not_by_order() -> None:
    """The old code numbered 'cat', 'dog' alphabetically and then called them 'dog', 'cat'."""
    dataset = dataset_from((X, np.array(["dog", "cat"] * 20)), (X + 1, np.array(["cat"] * 40)), classes=["dog", "cat"])
    assert dataset.train.labels[:2].tolist() == [0, 1]
    assert dataset.classes == ("dog", "cat")
    assert set(dataset.test.labels.tolist()) == {1}
    with pytest.raises(DataError, match="'emu' is not among the classes cat, dog"):
        dataset_from((X, np.array(["dog", "cat"] * 20)), (X, np.array(["emu"] * 40)))


def test_what_cannot_be_trained_on_is_refused_when_it_is_loaded() -> None:
    nan = X.copy()
    nan[7, 1] = np.nan
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: dataset_from(TensorDataset(torch.randn(9, 2), torch.rand(9))), "targets of a regression"),
        (lambda: dataset_from((X, Y * 0)), "one class, '0'"),
        (lambda: dataset_from((nan, Y), (X, Y)), r"training inputs hold NaN .* 1 of 40 .* position 7 \(column 1,"),
        (lambda: dataset_from((X, Y), (nan, Y)), "test inputs hold NaN or infinite values in 1 of 40"),
        (lambda: dataset_from((X * 1e300, Y)), "infinite values"),
        (lambda: dataset_from((X, Y - 1)), "run from -1 to 0"),
        (lambda: dataset_from((X, Y * 1000)), "2 different labels, but they run up to 1000"),
        (lambda: dataset_from((X, Y), classes=["a", "a"]), "one name of its own"),
        (lambda: dataset_from((X, Y), classes="ab"), "give a list of names"),
        (lambda: dataset_from(Items([(lambda: RNG.normal(size=2), 0)[0]] * 4)), "differs when it is read twice"),
        (lambda: dataset_from(Items([lambda: (RNG.normal(size=2), 1)] * 4)), "random transform"),
        (lambda: dataset_from(Items([(1, 2, 3)] * 4)), r"expected \(input, label\)"),
        (lambda: dataset_from(Items([lambda: 1 / 0])), "sample 0 of the Dataset cannot be read: ZeroDivisionError"),
        (lambda: dataset_from(Items([([1, 2], 0), ([1], 1)])), "different shapes"),
        (lambda: dataset_from(Items([])), "empty"),
        (lambda: dataset_from((X[:, :0], Y)), "a sample has no values"),
        (lambda: dataset_from((X[:0], Y[:0])), "no samples"),
        (lambda: dataset_from({"train": (X, Y), "dev": (X, Y)}), "not train, dev"),
        (lambda: dataset_from(((X, X[:3]), Y)), "40|3 inputs"),
        (lambda: dataset_from(({}, Y)), "empty dictionary"),
        (lambda: dataset_from((X + 1j, Y)), "inputs must be numbers"),
    ]
    for make, message in cases:
        with pytest.raises(DataError, match=message):
            make()


def test_duplicates_between_training_and_test_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    dataset_from((X, Y), (np.concatenate([X[:7], X[:3] + 1]), Y[:10]))
    assert "7 of 10 test samples are among the training samples" in caplog.text
    caplog.clear()
    dataset_from((X, Y), (X + 1, Y))
    assert "are among" not in caplog.text


def test_a_run_that_would_train_nothing_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset_from((X, Y)).split("iid", 4, 0)
    local = fedfa.LocalTraining(batch_size=50, drop_last=True)
    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=2, local=local)
    with pytest.raises(ConfigError, match=r"no client would train: .* largest client has 8 samples"):
        next(iter(experiment.rounds(1, progress=False)))
    unequal = fedfa.data.federation_from([(X[:6], Y[:6]), (X, Y)], test=(X + 1, Y))
    local = fedfa.LocalTraining(epochs=1, batch_size=10, drop_last=True)
    list(fedfa.Experiment("fedavg", data=unequal, model="mlp", cohort=2, local=local).rounds(1, progress=False))
    assert "1 of 2 clients never train" in caplog.text


def test_a_training_that_diverges_says_so_in_the_round(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset_from((100 * X, Y)).split("iid", 4, 0)
    local = fedfa.LocalTraining(epochs=1, lr=3.0)
    experiment = fedfa.Experiment("fedavg", data=data, model="logistic", cohort=2, local=local)
    list(experiment.rounds(4, progress=False))
    assert "the training diverges: the mean training loss is" in caplog.text
    assert caplog.text.count("the training diverges") == 1


# -- augmentation ---------------------------------------------------------------------------------------------------
PICTURES = RNG.integers(0, 256, (48, 6, 6), dtype=np.uint8)
LABELS = np.arange(48) % 3


def pictures(augment: Any = "none") -> fedfa.Federation:
    return dataset_from((PICTURES, LABELS), (PICTURES[:9] // 2, LABELS[:9])).split("iid", 4, 0).augmented(augment)


def weights(data: fedfa.Federation, **options: Any) -> torch.Tensor:
    local = fedfa.LocalTraining(epochs=2, batch_size=8, lr=0.1)
    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=4, local=local, **options)
    list(experiment.rounds(2, progress=False))
    return torch.cat([value.flatten() for value in experiment.weights().values()])


def shift(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return x + float(rng.normal())


@pytest.mark.parametrize("augment", ["crop-flip", shift], ids=["crop-flip", "own"])
def test_augmentation_gives_the_same_bits_for_any_number_of_workers(augment: Any) -> None:
    one = weights(pictures(augment), workers=1)
    assert torch.equal(one, weights(pictures(augment), workers=2))
    assert not torch.equal(one, weights(pictures()))


def test_crop_and_flip_shows_parts_of_the_padded_image_and_draws_anew() -> None:
    data = pictures("crop-flip")
    client = data.client(0)
    assert client.augmentation is not None
    batch, _ = client.batch(torch.arange(8))
    plain, _ = pictures().client(0).batch(torch.arange(8))
    assert torch.equal(batch, plain), "evaluations and passes over all samples see the images as they are"
    black = float(data.dataset.normalisation.batch(torch.zeros(1, 1, 1, 1, dtype=torch.uint8)))
    padded = torch.nn.functional.pad(batch, (4, 4, 4, 4), value=black)
    rng = np.random.default_rng(1)
    drawn = set()
    for _ in range(20):
        for place, image in enumerate(client.augmentation(batch, rng)):
            found = [
                (top, left, flipped)
                for top in range(9)
                for left in range(9)
                for flipped, cut in ((False, image), (True, image.flip(2)))
                if torch.equal(padded[place, :, top : top + 6, left : left + 6], cut)
            ]
            assert found
            drawn |= set(found)
    assert {flipped for *_, flipped in drawn} == {False, True}
    assert len({top for top, *_ in drawn}) == 9


def test_an_augmentation_is_a_setting_and_is_recorded(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", x=PICTURES, y=LABELS)
    layer = {"data": {"name": str(tmp_path / "p.npz"), "partition": "iid", "clients": 4, "dir": str(tmp_path)}}
    common = {"model": {"name": "mlp"}, "rounds": 2, "cohort": {"clients": 2}, "local": {"epochs": 1}}
    config = fedfa.Config.resolve(layer, common, {"data": {"augment": "crop-flip"}})
    one = fedfa.run(config, tmp_path / "one")
    plain = fedfa.run(fedfa.Config.resolve(layer, common), tmp_path / "plain")
    assert not all(torch.equal(value, plain.model[name]) for name, value in one.model.items())
    data = fedfa.data.load(str(tmp_path / "p.npz"), data_dir=tmp_path).split("iid", 4, 1).augmented("crop-flip")
    again = fedfa.run(fedfa.Config.resolve(common), tmp_path / "python", data=data)
    assert all(torch.equal(value, again.model[name]) for name, value in one.model.items())
    assert fedfa.load(tmp_path / "python").config.data.augment == "crop-flip"


def test_wrong_augmentations_are_explained() -> None:
    with pytest.raises(DataError, match="choose none or crop-flip"):
        pictures("rotate")
    with pytest.raises(DataError, match="is for images, not for inputs of shape"):
        dataset_from((X, Y)).split("iid", 2, 0).augmented("crop-flip")
    with pytest.raises(ClientError, match=r"returned NoneType for torch.float32\[8\]"):
        weights(pictures(lambda x, rng: None), workers=1)
