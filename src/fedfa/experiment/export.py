"""The model that leaves: predictions for files, and exports that other programs read, with a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedfa.data import Columns, Normalisation, partition_text
from fedfa.data.formats.arrays import read_npz
from fedfa.data.formats.pictures import PICTURE_ENDINGS, read_picture
from fedfa.data.optional_imports import import_optional
from fedfa.data.preprocessing import PEAKS, Preprocessing
from fedfa.data.sources import read_table
from fedfa.errors import DataError, RunError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import write_atomically
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.saving import load

Format = Literal["onnx", "torchscript", "safetensors"]


def predictions(run: Path, files: Sequence[Path], client: int | None = None) -> list[tuple[str, int, str, str]]:
    """For each picture or row: the file, the row, the predicted class and its probability.

    Raises:
        FedfaError: There is no such run, or a file cannot be read or does not fit the model.
    """
    experiment = load(run)
    found = []
    for file in files:
        try:
            inputs = _inputs(Path(file), experiment.preprocessing, experiment.config.data.columns)
            shares = experiment.predict(inputs, client=client, scores=True).softmax(-1)
        except DataError as error:
            raise DataError(str(error) if str(file) in str(error) else f"{file}: {error}") from None
        for row, (share, label) in enumerate(zip(*shares.max(-1), strict=True)):
            found.append((str(file), row, experiment.preprocessing.classes[int(label)], f"{float(share):.6f}"))
    return found


def _inputs(path: Path, preprocessing: Preprocessing, columns: Columns) -> Any:
    if path.suffix.lower() in PICTURE_ENDINGS:
        if preprocessing.kind not in ("uint8", "uint16"):
            raise DataError("the model was not trained on pictures")
        grey = preprocessing.input_shape[0] == 1
        return read_picture(path, "L" if grey else "RGB")
    if path.suffix == ".npz":
        loaded = read_npz(path)
        if preprocessing.kind == "record":
            return loaded
        if "x" not in loaded:
            raise DataError(f"lacks the array x; it has {', '.join(loaded) or 'none'}")
        return loaded["x"]
    table = read_table(path)
    beside = {columns.label, columns.clients, columns.domains, "label", "labels", "target", "class", "y"}
    chosen = columns.inputs or tuple(name for name in table if name not in beside)
    if missing := [name for name in chosen if name not in table]:
        raise DataError(f"lacks the column {missing[0]!r} of the training data")
    values = [table[name] for name in chosen]
    if text := [name for name, one in zip(chosen, values, strict=True) if one.dtype.kind not in "fiub"]:
        raise DataError(f"the column {text[0]!r} does not hold numbers")
    return np.stack([one.astype(np.float64) for one in values], axis=1) if values else np.zeros((0, 0))


class WithPreprocessing(nn.Module):
    """A network that reads raw inputs and returns the scores on which fedfa decides.

    Pictures are ``[N, H, W, C]`` of 8 bits or, with 16 bits, ``int32``; other inputs are as in training.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, normalisation: Normalisation) -> None:
        super().__init__()
        self.network = network
        self.is_picture = preprocessing.kind in ("uint8", "uint16")
        peak = {"uint8": PEAKS[torch.uint8], "uint16": PEAKS[torch.uint16]}.get(preprocessing.kind, 1)
        dimensions = len(preprocessing.input_shape)
        along = [1, -1, *([1] * (dimensions - 1))] if dimensions else [-1]
        mean, std = torch.tensor(normalisation.mean or (0.0,)), torch.tensor(normalisation.std or (1.0,))
        self.changes = self.is_picture or bool(normalisation.mean)
        self.register_buffer("scale", (1 / (peak * std.double())).float().view(along))
        self.register_buffer("shift", (-mean.double() / std.double()).float().view(along))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores ``[N, classes]``."""
        if self.is_picture:
            inputs = inputs.permute(0, 3, 1, 2).float()
        if self.changes:
            inputs = inputs * self.scale + self.shift
        scores: Tensor = self.network(inputs)
        return scores


def export(run: Path, out: Path, format: Format, client: int | None = None) -> list[Path]:
    """Write the model of a run for other programs, and a model card.

    Args:
        run: The run directory.
        out: Directory of the files.
        format: ``"onnx"`` and ``"torchscript"`` hold the network with its preprocessing; ``"safetensors"`` the weights,
            with the preprocessing as JSON beside them.
        client: Whose model, for methods in which clients keep models of their own.

    Raises:
        FedfaError: There is no such run, the method decides by more than the network's output, or a package is missing.
    """
    experiment = load(run)
    preprocessing = experiment.preprocessing
    network = experiment.model(client)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be made: {error.strerror}") from None
    path = out / {"onnx": "model.onnx", "torchscript": "model.pt", "safetensors": "model.safetensors"}[format]
    own = preprocessing.clients[client] if client is not None and preprocessing.clients else preprocessing.normalisation
    if format == "safetensors":
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in experiment.weights(client).items()}, path)
        about = {**preprocessing.to_dict(), "normalisation": own.to_dict()}
        about.pop("clients", None)
        write_atomically(out / "preprocessing.json", json.dumps(about, indent=1, ensure_ascii=False))
        written = [path, out / "preprocessing.json"]
    else:
        if experiment.algorithm.hooks("predict"):
            raise RunError(
                f"{experiment.config.algorithm.name!r} decides by more than the network's output; export safetensors, "
                "and predict with fedfa.load(RUN).predict"
            )
        if preprocessing.kind == "record":
            raise RunError("the model reads several tensors; export safetensors, and predict with fedfa.load")
        whole = WithPreprocessing(network, preprocessing, own).eval().requires_grad_(False)
        _write_graph(whole, _example(preprocessing), path, format)
        written = [path]
    card = out / "README.md"
    write_atomically(card, model_card(experiment, run, path.name, client))
    return [*written, card]


def _example(preprocessing: Preprocessing) -> Tensor:
    if preprocessing.kind in ("uint8", "uint16"):
        channels, height, width = preprocessing.input_shape
        kind = torch.uint8 if preprocessing.kind == "uint8" else torch.int32
        return torch.zeros(2, height, width, channels, dtype=kind)
    example: Tensor = preprocessing.example()
    return example


def _write_graph(whole: nn.Module, example: Tensor, path: Path, format: Format) -> None:
    with torch.no_grad():
        if format == "torchscript":
            torch.jit.trace(whole, example).save(str(path))
            return
        import_optional("onnx", "exporting to ONNX", "export")
        import_optional("onnxscript", "exporting to ONNX", "export")
        batch = torch.export.Dim("samples", min=1)
        torch.onnx.export(
            whole, (example,), str(path), dynamo=True, input_names=["inputs"], output_names=["scores"],
            dynamic_shapes={"inputs": {0: batch}}, external_data=False, verbose=False,
        )  # fmt: skip


def model_card(experiment: Experiment, run: Path, file: str, client: int | None) -> str:
    """What the model is, in Markdown: data, split, method, figures, versions."""
    config, preprocessing = experiment.config, experiment.preprocessing
    summary = RunDirectory(run).summary() or {}
    figures = {key: value for key, value in summary.items() if key.endswith("_accuracy") and isinstance(value, float)}
    whose = "the global model" if client is None else f"the model of client {client}"
    columns = config.data.columns.given()
    lines = [
        f"# {config.model.name} trained by {config.algorithm.name} on {config.data.name}",
        "",
        f"`{file}`: {whose} after {experiment.state.round} rounds of federated training with fedfa.",
        "",
        f"- **Input:** {preprocessing.kind} {list(preprocessing.input_shape)} as the network reads it; "
        "the preprocessing is part of the export.",
        f"- **Classes:** {', '.join(preprocessing.classes)}",
        f"- **Data:** {config.data.name}" + (f" ({columns})" if columns else ""),
        f"- **Split:** {partition_text(config.data.partition)}, {experiment._number_of_clients} clients, seed "
        f"{config.data.seed}",
        f"- **Method:** {config.algorithm.name}, {config.local.epochs} local epochs, batches of "
        f"{config.local.batch_size}, learning rate {config.local.lr:g}, seed {config.seed}",
        *(f"- **{key.replace('_', ' ')}:** {value:.4f} on the test set" for key, value in figures.items()),
        f"- **Versions:** {summary.get('versions', 'not recorded')}",
        f"- **Commit of fedfa:** {summary.get('commit') or 'not recorded'}",
        "",
    ]
    return "\n".join(lines)
