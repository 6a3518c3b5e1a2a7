"""Data sets on the Hugging Face hub, through its ``datasets`` package if the user has that."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedfa.data.decoded import Arrays, Decoded
from fedfa.data.known import KnownSet, Parts, Progress, Unavailable


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub, with splits ``train`` and ``test`` of pictures and labels.

    Attributes:
        repository: ``owner/name``.
        configuration: Name of the configuration, if it has several.
        images: Column of the pictures.
        labels: Column of the labels.
        mode: How to read a picture: ``"L"`` is grey.
    """

    repository: str
    configuration: str | None = None
    images: str = "image"
    labels: str = "label"
    mode: str = "L"

    kind: ClassVar[str] = "hub"

    @property
    def label(self) -> str:
        """What to call it in messages."""
        return f"Hugging Face data set {self.repository}"

    def obtain(self, known: KnownSet, workspace: Path, parts: Parts, progress: Progress) -> Decoded:
        """Load both splits; the hub's own cache goes to the workspace, because fedfa keeps its own form."""
        try:
            hub = importlib.import_module("datasets")
        except ImportError:
            raise Unavailable("the package `datasets` is not installed") from None
        progress(self.label, 0, None)
        try:
            splits = {
                part: hub.load_dataset(self.repository, self.configuration, split=part, cache_dir=str(workspace))
                for part in ("train", "test")
            }
            decoded = Decoded(
                self._arrays(splits["train"]),
                self._arrays(splits["test"]),
                files={
                    f"{part}.{array}": f"{self.repository} ({part}, column {column})"
                    for part in splits
                    for array, column in (("inputs", self.images), ("labels", self.labels))
                },
            )
        except Exception as error:  # the hub's client has many ways to fail, none of them ours to list
            raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        progress(self.label, 1, 1)
        return decoded

    def _arrays(self, split: Any) -> Arrays:
        images = np.stack([np.asarray(picture.convert(self.mode)) for picture in split[self.images]])
        return Arrays(images, np.asarray(split[self.labels], dtype=np.int64))
