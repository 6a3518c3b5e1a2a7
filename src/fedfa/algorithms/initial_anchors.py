"""FedFA's anchors before the first round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from fedfa.algorithms.anchor_layers import LAST
from fedfa.error_messages import nearest
from fedfa.errors import AlgorithmError

INITIALISATIONS = ("orthogonal", "random", "etf", "fedavg")


def _check(initial: str) -> str:
    if initial not in INITIALISATIONS and not Path(initial).suffix:
        known = ", ".join(INITIALISATIONS)
        raise ValueError(f"not one of {known}{nearest(initial, INITIALISATIONS)}, nor the path of a file")
    return initial


Initial = Annotated[str, AfterValidator(_check)]
"""A name of :data:`INITIALISATIONS`, or the path of a file."""


def initial_anchors(initial: str, classes: int, dim: int, rng: np.random.Generator, name: str = LAST) -> Tensor:
    """The anchors before training, ``[classes, dim]``, all of length one unless they come from a file.

    Args:
        initial: ``orthogonal`` and ``fedavg``: distinct rows of the identity (random directions if there are more
            classes than dimensions); ``random``: random directions; ``etf``: a simplex equiangular tight frame; else
            the path of a file.
        classes: C.
        dim: d.
        rng: Random stream.
        name: Which anchors to take from a file.

    Example:
        >>> a = initial_anchors("orthogonal", 3, 5, np.random.default_rng(0))
        >>> (a @ a.T).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if initial in ("orthogonal", "fedavg") and classes <= dim:
        rows = rng.choice(dim, classes, replace=False)
        return torch.eye(dim)[torch.from_numpy(rows)]
    if initial in ("orthogonal", "fedavg", "random"):
        return functional.normalize(torch.from_numpy(rng.standard_normal((classes, dim))).float(), dim=1)
    if initial == "etf":
        if not 2 <= classes <= dim:
            raise AlgorithmError(
                f'algorithm.anchors.init = "etf" needs two classes or more and as many features: {classes} and {dim}'
            )
        frame, _ = np.linalg.qr(rng.standard_normal((dim, classes)))
        centred = np.eye(classes) - 1 / classes
        return torch.from_numpy(np.sqrt(classes / (classes - 1)) * centred @ frame.T).float()
    return _anchors_from_file(Path(initial), classes, dim, name)


def _anchors_from_file(path: Path, classes: int, dim: int, name: str) -> Tensor:
    if not path.is_file():
        raise AlgorithmError(
            f'algorithm.anchors.init = "{path}" is neither a file nor one of {", ".join(INITIALISATIONS)}'
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise AlgorithmError(
            f"{path} is not a safetensors file ({error}); give the server.safetensors of a run"
        ) from None
    anchors = tensors.get(f"anchors/{name}", tensors.get(name))
    if anchors is None:
        raise AlgorithmError(f"{path} holds no {name}; give the server.safetensors of a finished FedFA run")
    if anchors.shape != (classes, dim):
        raise AlgorithmError(f"{path} holds anchors of shape {tuple(anchors.shape)}, this task needs {(classes, dim)}")
    return anchors.float()
