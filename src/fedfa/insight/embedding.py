"""Features in the plane: one t-SNE embedding for all clients of a round, so that places can be compared.

L. van der Maaten, G. Hinton, *Visualizing Data using t-SNE*, JMLR 2008. As in the paper's figures, a client is shown on
samples of the classes (and domains) that it has learnt, and features are scaled to length one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.errors import FedfaError
from fedfa.insight.probe import dealt
from fedfa.insight.records import InsightRecords
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors
from fedfa.studies.files import load_tensors, save_tensors


@dataclass(frozen=True)
class Embedding:
    """m points, each one client's feature of one sample."""

    xy: NDArray[np.float32]
    """``[m, 2]``"""
    client: NDArray[np.int64]
    """``[m]``, the clients' numbers."""
    label: NDArray[np.int64]
    sample: NDArray[np.int64]
    """``[m]``, the sample's place in the probe."""
    domain: NDArray[np.int64] | None
    anchors: NDArray[np.float32] | None
    """``[C, 2]``, where the method has anchors."""


def shared_embedding(run_folder: Path | str, round: int, points: int = 2000) -> Embedding:
    """The embedding of a round's stored features; kept beside them, or without them, as it is small.

    Args:
        run_folder: The run.
        round: A round of ``insight.features``.
        points: At most so many points; every client is shown on the same samples then, even over the classes.

    Raises:
        RunError: The features of that round were not stored, nor such an embedding of them.
        FedfaError: scikit-learn is missing, or there is nothing to embed.
    """
    records = InsightRecords(Path(run_folder))
    file = records.embedding(round)
    placed = load_tensors(file) if file.exists() else {}
    if "client" not in placed or int(placed["points"]) != points:
        placed = {**embed(records.features(round), points), "points": torch.tensor(points)}
        save_tensors(file, placed)
    return Embedding(
        xy=placed["xy"].numpy(),
        client=placed["client"].numpy(),
        label=placed["label"].numpy(),
        sample=placed["sample"].numpy(),
        domain=placed["domain"].numpy() if "domain" in placed else None,
        anchors=placed["anchors"].numpy() if "anchors" in placed else None,
    )


def embed(stored: Tensors, points: int, seed: int = 1) -> Tensors:
    """Positions in the plane (``xy``), whose they are (client, sample, label, domain), and the anchors'."""
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # comes with scikit-learn
    except ImportError:
        raise FedfaError("t-SNE needs scikit-learn: pip install 'fedfa[data]'") from None
    row, sample = chosen_points(stored, points, seed)
    if len(row) < 4:
        raise FedfaError(f"only {len(row)} features to embed; take more probe samples (insight.samples)")
    vectors = stored["features"][row, sample]
    anchors = stored.get("anchors")
    everything = torch.cat([vectors, anchors.to(vectors)]) if anchors is not None else vectors
    directions = torch.nn.functional.normalize(everything, dim=-1).numpy()
    state = int(stream(seed, "t-SNE").integers(2**31))
    tsne = TSNE(n_components=2, init="pca", perplexity=min(30.0, (len(row) - 1) / 3), random_state=state)
    with threadpool_limits(limits=1):  # the picture must not depend on how many cores there are
        placed = torch.from_numpy(np.asarray(tsne.fit_transform(directions), dtype=np.float32))
    found = {
        "xy": placed[: len(row)], "client": stored["clients"][row], "sample": sample, "label": stored["labels"][sample],
    }  # fmt: skip
    if "domains" in stored:
        found["domain"] = stored["domains"][sample]
    return found if anchors is None else {**found, "anchors": placed[len(row) :]}


def chosen_points(stored: Tensors, points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and samples to show: as many samples as fit, all clients that know a sample with it."""
    own = stored["own"].bool()
    domains = stored["domains"].numpy() if "domains" in stored else None
    order = torch.from_numpy(dealt(stored["labels"].numpy(), domains, seed))
    fits = order[own[:, order].sum(0).cumsum(0) <= points]
    wanted = torch.zeros(own.shape[1], dtype=torch.bool)
    wanted[fits] = True
    row, sample = torch.nonzero(own & wanted, as_tuple=True)
    return row, sample
