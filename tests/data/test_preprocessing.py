"""Preparing inputs at prediction time: the same bits as in training, or a clear error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data import Normalisation, Preprocessing, dataset_from
from fedfa.errors import DataError

GREY = Preprocessing(Normalisation((0.5,), (0.25,)), (1, 3, 2), "uint8", ("a", "b"))
COLOUR = Preprocessing(Normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), (3, 5, 4), "uint8", ("a", "b"))
NUMBERS = Preprocessing(Normalisation((1.0, 2.0), (1.0, 4.0)), (2,), "float32", ("a", "b"))


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def test_grey_images_in_closed_form() -> None:
    """(x/255 − 0.5) / 0.25: 0 becomes −2 and 255 becomes 2."""
    prepared = GREY.apply(np.array([[[0, 255], [255, 0], [0, 0]]], dtype=np.uint8))
    assert prepared.dtype == torch.float32
    assert prepared.tolist() == [[[[-2, 2], [2, -2], [-2, -2]]]]


def test_grey_images_in_every_usual_shape_give_the_same_bits() -> None:
    images = pixels(7, 3, 2)
    expected = GREY.normalisation.batch(torch.from_numpy(images[..., None]))
    assert expected.shape == (7, 1, 3, 2)
    for given in (images, images[..., None], images[:, None], torch.from_numpy(images)):
        assert torch.equal(GREY.apply(given), expected)
    for single in (images[0], images[0][..., None], images[0][None]):
        assert torch.equal(GREY.apply(single), expected[:1])
    assert GREY.apply(images[:0]).shape == (0, 1, 3, 2)


def test_colour_images_in_every_usual_shape_give_the_same_bits() -> None:
    images = pixels(6, 5, 4, 3)
    expected = COLOUR.normalisation.batch(torch.from_numpy(images))
    for given in (images, images.transpose(0, 3, 1, 2), torch.from_numpy(images).permute(0, 3, 1, 2)):
        assert torch.equal(COLOUR.apply(given), expected)
    assert torch.equal(COLOUR.apply(images[0]), expected[:1])
    assert torch.equal(COLOUR.apply(images[0].transpose(2, 0, 1)), expected[:1])
    assert torch.equal(COLOUR.apply(images[:, ::-1]), COLOUR.apply(images[:, ::-1].copy()))


def test_numbers_in_closed_form() -> None:
    expected = [[0.0, 0.0], [2.0, 0.5]]
    for given in ([[1.0, 2.0], [3.0, 4.0]], np.array([[1, 2], [3, 4]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])):
        assert NUMBERS.apply(given).tolist() == expected
    assert NUMBERS.apply([3, 4]).tolist() == expected[1:]
    assert NUMBERS.apply(np.array([3, 4], dtype=np.uint8)).tolist() == expected[1:]


def test_the_callers_array_is_neither_changed_nor_shared() -> None:
    given = np.ones((4, 2), np.float32)
    given.flags.writeable = False
    prepared = Preprocessing(Normalisation(), (2,), "float32", ()).apply(given)
    prepared.zero_()
    assert given.sum() == 8


@pytest.mark.parametrize(
    ("preprocessing", "given", "message"),
    [
        (GREY, np.zeros((2, 3, 2)), r"float64, but .* uint8 images: pass uint8 values 0\.\.255"),
        (GREY, torch.rand(2, 1, 3, 2), r"pass uint8 values 0\.\.255"),
        (GREY, np.zeros((2, 3, 2), np.int64), r"int64, .*pass uint8 values 0\.\.255"),
        (GREY, pixels(2, 4, 2), r"shape \[2, 4, 2\]; expected \[N, 3, 2, 1\], \[N, 3, 2\] or a single image"),
        (COLOUR, pixels(2, 5, 4), r"shape \[2, 5, 4\]; expected \[N, 5, 4, 3\] or a single image"),
        (COLOUR, pixels(2, 5, 4, 1), r"shape \[2, 5, 4, 1\]; expected \[N, 5, 4, 3\]"),
        (NUMBERS, np.zeros((2, 3)), r"shape \[2, 3\]; expected \[N, 2\] or a single input"),
        (NUMBERS, np.array(["x"]), "trained on float32 numbers"),
        (
            Preprocessing(Normalisation(), (1, 3, 2), "float32", ()), pixels(2, 1, 3, 2),
            "uint8, but the model was trained on float32 numbers",
        ),
    ],
)  # fmt: skip
def test_wrong_types_and_shapes_are_refused_with_advice(preprocessing: Preprocessing, given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        preprocessing.apply(given)


@pytest.mark.parametrize("images", [True, False])
def test_a_data_sets_preprocessing_gives_the_inputs_of_training(images: bool) -> None:
    x = pixels(20, 4, 4, 3) if images else np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    dataset = dataset_from((x, np.arange(20) % 2), classes=["cat", "dog"])
    preprocessing = dataset.preprocessing()
    assert preprocessing.classes == ("cat", "dog")
    assert preprocessing.kind == ("uint8" if images else "float32")
    client = dataset.split("iid", clients=2)[0]
    trained_on, _ = client.batch(torch.arange(client.size))
    assert torch.equal(preprocessing.apply(dataset.train.inputs[client.positions]), trained_on)


@pytest.mark.parametrize("preprocessing", [GREY, COLOUR, NUMBERS])
def test_json_and_back_is_exact(preprocessing: Preprocessing) -> None:
    exact = Preprocessing(
        Normalisation((1 / 3,) * len(preprocessing.normalisation.mean), preprocessing.normalisation.std),
        preprocessing.input_shape, preprocessing.kind, preprocessing.classes,
    )  # fmt: skip
    assert Preprocessing.from_dict(json.loads(json.dumps(exact.to_dict()))) == exact


def test_normalisation_as_plain_values() -> None:
    assert Normalisation((0.1,), (0.3,)).to_dict() == {"mean": [0.1], "std": [0.3]}
    assert Normalisation.from_dict({"mean": [], "std": []}) == Normalisation()


def test_damaged_dictionaries_are_refused() -> None:
    with pytest.raises(DataError, match="'classes' is missing"):
        Preprocessing.from_dict({key: value for key, value in GREY.to_dict().items() if key != "classes"})
    with pytest.raises(DataError, match="unknown kind of input 'int4'"):
        Preprocessing.from_dict({**GREY.to_dict(), "kind": "int4"})
