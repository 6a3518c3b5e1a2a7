"""A t-SNE embedding shared by all clients of a round, so that their positions are comparable.

L. van der Maaten, G. Hinton, *Visualizing Data using t-SNE*, JMLR 2008. As in the paper's figures, a client contributes
samples of its own classes (and domains), and features are scaled to unit length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.diagnostics.probe import balanced_order
from fedfa.diagnostics.records import DiagnosticsRecords
from fedfa.errors import FedfaError
from fedfa.experiment.files import load_tensors, save_tensors
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors


@dataclass(frozen=True)
class Embedding:
    """m points; each is one client's feature of one sample."""

    xy: NDArray[np.float32]
    """``[m, 2]``"""
    client: NDArray[np.int64]
    """``[m]``, client indices."""
    label: NDArray[np.int64]
    sample: NDArray[np.int64]
    """``[m]``, indices into the probe."""
    domain: NDArray[np.int64] | None
    anchors: NDArray[np.float32] | None
    """``[C, 2]``, if the algorithm has anchors."""


def shared_embedding(run_directory: Path | str, round: int, points: int = 2000) -> Embedding:
    """Embed the stored features of a round in the plane. The result is cached beside the features.

    Args:
        run_directory: The run.
        round: A round of ``diagnostics.features``.
        points: Maximum number of points. All clients use the same samples, balanced over classes.

    Raises:
        RunError: Neither the features of that round nor such an embedding are stored.
        FedfaError: scikit-learn is missing, or there are too few features.
    """
    records = DiagnosticsRecords(Path(run_directory))
    file = records.embedding(round)
    stored = load_tensors(file) if file.exists() else {}
    if "client" not in stored or int(stored["points"]) != points:
        stored = {**embed(records.features(round), points), "points": torch.tensor(points)}
        save_tensors(file, stored)
    return Embedding(
        *(stored[name].numpy() for name in ("xy", "client", "label", "sample")),
        *(stored[name].numpy() if name in stored else None for name in ("domain", "anchors")),
    )


def embed(stored: Tensors, points: int, seed: int = 1) -> Tensors:
    """Return positions in the plane (``xy``), the client, sample, label and domain of each, and the anchors."""
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # comes with scikit-learn
    except ImportError:
        raise FedfaError("t-SNE requires scikit-learn: pip install 'fedfa[data]'") from None
    row, sample = chosen_points(stored, points, seed)
    if len(row) < 4:
        raise FedfaError(f"only {len(row)} features to embed; increase diagnostics.samples")
    vectors = stored["features"][row, sample]
    anchors = stored.get("anchors")
    vectors_and_anchors = torch.cat([vectors, anchors.to(vectors)]) if anchors is not None else vectors
    directions = torch.nn.functional.normalize(vectors_and_anchors, dim=-1).numpy()
    state = int(stream(seed, "t-SNE").integers(2**31))
    tsne = TSNE(n_components=2, init="pca", perplexity=min(30.0, (len(row) - 1) / 3), random_state=state)
    with threadpool_limits(limits=1):  # the result must not depend on the number of cores
        xy = torch.from_numpy(np.asarray(tsne.fit_transform(directions), dtype=np.float32))
    embedded = {
        "xy": xy[: len(row)], "client": stored["clients"][row], "sample": sample, "label": stored["labels"][sample],
    }  # fmt: skip
    if "domains" in stored:
        embedded["domain"] = stored["domains"][sample]
    return embedded if anchors is None else {**embedded, "anchors": xy[len(row) :]}


def chosen_points(stored: Tensors, points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select as many samples as fit, each with all clients that have its class; return rows and samples."""
    own = stored["own"].bool()
    domains = stored["domains"].numpy() if "domains" in stored else None
    order = torch.from_numpy(balanced_order(stored["labels"].numpy(), domains, seed))
    fits = order[own[:, order].sum(0).cumsum(0) <= points]
    wanted = torch.zeros(own.shape[1], dtype=torch.bool)
    wanted[fits] = True
    row, sample = torch.nonzero(own & wanted, as_tuple=True)
    return row, sample
