"""The model that leaves: predictions for files, and exports that give the same outputs in other programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedfa
from fedfa.cli.app import app
from fedfa.errors import DataError, RunError
from fedfa.experiment.export import export, predictions

RNG = np.random.default_rng(4)
LOCAL = fedfa.LocalTraining(epochs=1, batch_size=16, lr=0.1)


class TokenNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(9, 5)
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.words(x).mean(1))
        return logits


def trained(path: Path, kind: str, algorithm: str = "fedavg") -> np.ndarray:
    """Train briefly on inputs of a kind and save the run; some inputs to predict."""
    labels = np.arange(60) % 2
    kinds: dict[str, np.ndarray] = {
        "table": RNG.normal([5, 900], [1, 200], (60, 2)) + 3 * labels[:, None],
        "uint8": RNG.integers(0, 256, (60, 6, 6, 3), dtype=np.uint8),
        "uint16": RNG.integers(0, 4000, (60, 6, 6, 1), dtype=np.uint16),
        "tokens": RNG.integers(0, 9, (60, 4)),
    }
    inputs = kinds[kind]
    data = fedfa.data.dataset_from((inputs, labels), name=kind).split("iid", 3, 0)
    data = data.standardised() if kind == "table" else data
    model = TokenNet if kind == "tokens" else "mlp"
    experiment = fedfa.Experiment(algorithm, data=data, model=model, cohort=3, local=LOCAL)
    list(experiment.rounds(2, progress=False))
    experiment.save(path)
    return inputs


@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(k, marks=pytest.mark.slow) for k in ("uint8", "uint16", "tokens"))]
)
def test_onnx_and_torchscript_give_the_outputs_of_fedfa_for_raw_inputs(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    inputs = trained(tmp_path / "run", kind)
    expected = fedfa.load(tmp_path / "run").predict(inputs, scores=True).numpy()
    raw = inputs.astype({"table": np.float32, "uint16": np.int32}.get(kind, inputs.dtype))
    (path, card) = export(tmp_path / "run", tmp_path / "onnx", "onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for some in (raw, raw[:1]):  # any number of samples
        (scores,) = session.run(None, {"inputs": some})
        assert np.allclose(scores, expected[: len(some)], atol=1e-4)
    assert "federated training with fedfa" in card.read_text()
    (path, _) = export(tmp_path / "run", tmp_path / "script", "torchscript")
    script = torch.jit.load(str(path))
    assert np.allclose(script(torch.from_numpy(raw)).numpy(), expected, atol=1e-4)


def test_safetensors_come_with_the_preprocessing(tmp_path: Path) -> None:
    trained(tmp_path / "run", "table")
    path, about, card = export(tmp_path / "run", tmp_path / "out", "safetensors")
    weights = fedfa.load(tmp_path / "run").weights()
    assert all(torch.equal(value, weights[name]) for name, value in load_file(path).items())
    assert '"mean"' in about.read_text()
    assert "- **Classes:** 0, 1" in card.read_text()


def test_models_that_the_file_would_not_reproduce_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "proto", "table", "fedproto")
    with pytest.raises(RunError, match=r"name a client|more than the network's output"):
        export(tmp_path / "proto", tmp_path / "out", "torchscript")
    trained(tmp_path / "local", "table", "local")
    with pytest.raises(RunError, match="name a client"):
        export(tmp_path / "local", tmp_path / "out", "safetensors")
    assert export(tmp_path / "local", tmp_path / "out", "torchscript", client=1)[0].exists()


def test_predict_reads_tables_and_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    inputs = trained(tmp_path / "pictures", "uint8")
    image.fromarray(inputs[0]).save(tmp_path / "one.png")
    expected = fedfa.load(tmp_path / "pictures").predict(inputs[0])
    ((file, row, label, share),) = predictions(tmp_path / "pictures", [tmp_path / "one.png"])
    assert (file, row, label) == (str(tmp_path / "one.png"), 0, str(int(expected)))
    assert 0.5 <= float(share) <= 1
    table = trained(tmp_path / "table", "table")
    rows = "\n".join(f"{a},{b}" for a, b in table[:5].tolist())
    (tmp_path / "t.csv").write_text(f"a,b\n{rows}\n")
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "table"), str(tmp_path / "t.csv")])
    assert done.exit_code == 0, done.output
    classes = [line.split(",")[2] for line in done.stdout.splitlines()[1:]]
    assert classes == [str(int(one)) for one in fedfa.load(tmp_path / "table").predict(table[:5])]
    (tmp_path / "wide.csv").write_text("a,b,c\n1,2,3\n")
    for wrong, message in ((tmp_path / "wide.csv", r"wide\.csv: .*shape"), (tmp_path / "no.csv", "no such file"),
                           (tmp_path / "one.png", "not trained on pictures")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            predictions(tmp_path / "table", [wrong])
