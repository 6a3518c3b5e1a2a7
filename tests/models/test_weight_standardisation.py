"""Weight standardisation as an option of fedfa's networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedfa.data import DataSet
from fedfa.errors import ModelError
from fedfa.experiment.run import run
from fedfa.learning.random import torch_stream
from fedfa.models import MODELS, build_model
from fedfa.models.weight_standardisation import GAIN, standardised
from tests.experiment.run_toys import assert_same_run, small

OPTION = {"weight_standardisation": True}


def test_by_hand() -> None:
    """(1, 2, 3, 6): minus the mean 3 it is (−2, −1, 0, 3), of squared length 14. A constant unit becomes zero."""
    found = standardised(torch.tensor([[1.0, 2, 3, 6], [5, 5, 5, 5]], dtype=torch.float64))
    expected = torch.tensor([[-2.0, -1, 0, 3], [0, 0, 0, 0]], dtype=torch.float64) / 14**0.5
    assert_close(found, GAIN * expected, rtol=1e-8, atol=1e-12)


def test_scale_and_shift_of_a_units_weights_do_not_matter() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    scale, shift = torch.rand(4, 1, 1, 1).double() + 1, torch.randn(4, 1, 1, 1).double()
    assert_close(standardised(scale * weight + shift), standardised(weight), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("logistic", "resnet18-gn")])
def test_every_network_computes_with_standardised_weights_but_in_its_classifier(name: str) -> None:
    """The same names, shapes and initial weights; the output is that of the plain network with other weights."""
    shape = (3, 32, 32) if "cifar" in name else (3, 28, 28)
    with torch_stream(0, "network"):
        plain = build_model(name, shape, 10)
    with torch_stream(0, "network"):
        network = build_model(name, shape, 10, dict(OPTION))
    assert {n: v.shape for n, v in network.state_dict().items()} == {n: v.shape for n, v in plain.state_dict().items()}
    assert all(torch.equal(value, network.state_dict()[n]) for n, value in plain.state_dict().items())
    changed = 0
    for n, layer in plain.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and n != "head":
            layer.weight.data = standardised(layer.weight.data)
            changed += 1
    assert changed >= 2
    x = torch.randn(2, *shape)
    assert_close(network(x), plain(x))
    assert 0.05 < network(x).std().item() < 20, "activations neither vanish nor blow up"


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ModelError, match="no layer before its classifier"):
        build_model("logistic", (4,), 3, dict(OPTION))
    with pytest.raises(ModelError, match="use true or false"):
        build_model("mlp", (4,), 3, {"weight_standardisation": "yes"})


@pytest.mark.parametrize("algorithm", ["fedfa", "fedetf", "scaffold"])
def test_it_trains_with_any_method_and_is_never_stacked_as_if_it_were_plain(
    algorithm: str, blobs: DataSet, tmp_path: Path
) -> None:
    model = {"name": "mlp", "options": {"hidden": [8], **OPTION}}
    for how in ("each", "auto"):
        run(small(algorithm, model=model, engine={"execution": how, "workers": 1}), tmp_path / how, data=blobs)
    assert_same_run(tmp_path / "each", tmp_path / "auto")
    run(small(algorithm, engine={"workers": 1}), tmp_path / "plain", data=blobs)
    records = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("auto", "plain")]
    assert records[0] != records[1]
