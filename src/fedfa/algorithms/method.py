"""What the registry knows of a method: its parts, its named variants, where it is explained."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedfa.learning.part import Part

AUTHORS_TRAINING: Mapping[str, object] = {
    "local.lr_decay": 0.99,
    "data.normalise": "authors",
    "cohort.selection": "authors",
}
"""How the paper's published code trains every method, where that differs from the paper's text."""


@dataclass(frozen=True)
class Method:
    """A published method (or yours) as a list of parts.

    Args:
        name: As used in recipes.
        summary: One line for listings.
        parts: The parts' types, in order. Without a base part the method averages as FedAvg does.
        variants: Named sets of settings by dotted key, e.g. ``{"paper": {"algorithm.anchors.mu": 0.1}}``. Whatever the
            user writes wins over them.
        default_variant: The variant that applies if none is asked for.
    """

    name: str
    summary: str
    parts: tuple[type[Part[Any]], ...]
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    default_variant: str | None = None

    def explanation(self) -> str:
        """The text of the file the method is written in: reference, what is sent and kept, cost."""
        module = sys.modules[self.parts[0].__module__] if self.parts else None
        return inspect.cleandoc((module.__doc__ if module else None) or self.summary)
