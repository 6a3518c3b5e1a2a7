"""Data sets on the Hugging Face hub, through its ``datasets`` package where that is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedfa.data.definition import Progress, ReadFolder, Unavailable
from fedfa.data.raw import RawDataSet, RawSamples


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub with the splits ``train`` and ``test`` of images and labels.

    Attributes:
        repository: ``owner/name``.
        configuration: Name of the configuration, if it has several.
        images: Column of the images.
        labels: Column of the labels.
        mode: PIL mode of the images: ``"L"`` is grey.
    """

    repository: str
    configuration: str | None = None
    images: str = "image"
    labels: str = "label"
    mode: str = "L"

    kind: ClassVar[str] = "hub"

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return f"Hugging Face data set {self.repository}"

    def obtain(self, workspace: Path, read: ReadFolder, progress: Progress) -> RawDataSet:
        """Load both splits; the hub's cache goes to the workspace, because fedfa has its own."""
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
            files = {part: f"{self.repository} ({part})" for part in splits}
            raw = RawDataSet(self._read(splits["train"]), self._read(splits["test"]), files)
        except Exception as error:  # the hub's client can fail in many ways
            raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        progress(self.label, 1, 1)
        return raw

    def _read(self, split: Any) -> RawSamples:
        images = np.stack([np.asarray(image.convert(self.mode)) for image in split[self.images]])
        return RawSamples(images, np.asarray(split[self.labels], dtype=np.int64))
