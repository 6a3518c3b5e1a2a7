"""A named method: its components, its variants, and its description."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from fedfa.algorithms.reference_code import Variants
from fedfa.learning.component import Component


@dataclass(frozen=True)
class Method:
    """A published method, or one of your own, by the name that algorithm expressions use.

    Args:
        name: As used in algorithm expressions.
        summary: One line for listings.
        components: The component classes, in order. Without an aggregating one the method averages as FedAvg does.
        variants: Named sets of config values by dotted key, e.g. ``{"paper": {"algorithm.anchors.mu": 0.1}}``. Values
            that the user sets take precedence.
        default_variant: The variant that applies if none is asked for.
    """

    name: str
    summary: str
    components: tuple[type[Component], ...]
    variants: Variants = field(default_factory=dict)
    default_variant: str | None = None

    def explanation(self) -> str:
        """The docstring of the method's file: reference, what is sent and stored, cost."""
        module = sys.modules[self.components[0].__module__] if self.components else None
        return inspect.cleandoc((module.__doc__ if module else None) or self.summary)

    def describe(self) -> dict[str, Any]:
        """Everything about the method as plain values, for programs."""
        options = {
            f"algorithm.{component.name}.{field.alias or name}": {
                "default": field.default,
                "meaning": " ".join((field.description or "").split()),
            }
            for component in self.components
            for name, field in component.model_fields.items()
        }
        return {
            "name": self.name,
            "summary": self.summary,
            "explanation": self.explanation(),
            "options": options,
            "variants": self.variants,
        }
