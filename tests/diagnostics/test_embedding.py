"""The t-SNE embedding: its samples, neighbourhoods and cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedfa.data import DataSet
from fedfa.diagnostics.embedding import chosen_points, embed, shared_embedding
from fedfa.diagnostics.records import DiagnosticsRecords
from fedfa.errors import FedfaError, RunError
from fedfa.experiment.run import run
from fedfa.learning.tensors import Tensors
from tests.experiment.run_toys import small


def stored(clients: int = 3, per_class: int = 10) -> Tensors:
    """Features in three distant directions, one per class, similar for all clients."""
    labels = torch.arange(3).repeat_interleave(per_class)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((clients, len(labels), 5))).float()
    return {
        "features": 20 * torch.eye(3, 5)[labels] + noise,
        "labels": labels,
        "clients": torch.arange(clients) + 7,
        "own": torch.ones(clients, len(labels), dtype=torch.uint8),
        "anchors": 3 * torch.eye(3, 5),
    }


def test_features_of_one_class_are_embedded_near_each_other_and_near_their_anchor() -> None:
    tensors = stored()
    embedded = embed(tensors, points=1000)
    label = tensors["labels"][embedded["sample"]]
    centres = torch.stack([embedded["xy"][label == c].mean(0) for c in range(3)])
    nearest = torch.cdist(embedded["xy"], centres).argmin(1)
    assert torch.equal(nearest, label)
    assert torch.cdist(embedded["anchors"], centres).argmin(1).tolist() == [0, 1, 2]


def test_a_client_is_embedded_on_its_own_classes() -> None:
    tensors = stored()
    tensors["own"][0, tensors["labels"] != 1] = 0
    row, sample = chosen_points(tensors, 1000, seed=1)
    assert set(tensors["labels"][sample[row == 0]].tolist()) == {1}
    assert len(row) == 10 + 30 + 30


def test_a_limited_embedding_uses_the_same_balanced_samples_for_all_clients() -> None:
    tensors = stored()
    row, sample = chosen_points(tensors, 20, seed=1)
    shown = [sample[row == client].tolist() for client in range(3)]
    assert shown[0] == shown[1] == shown[2]
    assert torch.bincount(tensors["labels"][shown[0]]).tolist() == [2, 2, 2]


def test_the_embedding_of_a_run_is_computed_once(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(small("fedfa", diagnostics={"features": [-1], "samples": 40}), tmp_path / "run", data=blobs)
    first = shared_embedding(tmp_path / "run", 4)
    known = DiagnosticsRecords(tmp_path / "run").features(4)
    assert set(first.client.tolist()) == set(known["clients"].tolist())
    assert len(first.xy) == len(first.client) == len(first.label) == int(known["own"].sum())
    assert first.label.tolist() == known["labels"][first.sample].tolist()
    assert first.anchors is not None
    assert first.anchors.shape == (4, 2)
    monkeypatch.setattr("fedfa.diagnostics.embedding.embed", lambda *_: pytest.fail("computed again"))
    again = shared_embedding(tmp_path / "run", 4)
    assert np.array_equal(first.xy, again.xy)


def test_a_stored_embedding_needs_no_features(tmp_path: Path, blobs: DataSet) -> None:
    """As in committed results: the features are a hundred times larger."""
    run(small("fedfa", diagnostics={"features": [-1], "samples": 40}), tmp_path / "run", data=blobs)
    first = shared_embedding(tmp_path / "run", 4)
    (tmp_path / "run" / "diagnostics" / "round00004.safetensors").unlink()
    assert DiagnosticsRecords(tmp_path / "run").rounds() == []
    assert DiagnosticsRecords(tmp_path / "run").shown_rounds() == [4]
    again = shared_embedding(tmp_path / "run", 4)
    for name in ("xy", "client", "label", "sample", "anchors"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    with pytest.raises(RunError, match="no probe features of round 4"):
        shared_embedding(tmp_path / "run", 4, points=10)


def test_missing_or_too_few_features_are_errors(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedavg", rounds=1, diagnostics={"features": [1], "samples": 1}), tmp_path / "run", data=blobs)
    with pytest.raises(RunError, match="no probe features of round 2"):
        shared_embedding(tmp_path / "run", 2)
    with pytest.raises(FedfaError, match=r"features to embed.*diagnostics\.samples"):
        shared_embedding(tmp_path / "run", 1)
