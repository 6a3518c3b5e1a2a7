"""Pieces of error messages: what is wrong, what is allowed, the nearest allowed spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` for the nearest allowed spelling, or nothing.

    Example:
        >>> nearest("momentun", ["momentum", "lr"])
        " (did you mean 'momentum'?)"
    """
    close = difflib.get_close_matches(word, list(allowed), n=3, cutoff=0.6)
    close.sort(key=lambda other: sorted(other) != sorted(word))  # two letters swapped is the likeliest slip
    return f" (did you mean {close[0]!r}?)" if close else ""


def validation_message(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Pydantic's findings as one line per problem: the dotted key, what is wrong, what is allowed."""
    lines = []
    for problem in error.errors():
        path = [str(step) for step in problem["loc"]]
        key = ".".join([prefix, *path] if prefix else path)
        if problem["type"] == "extra_forbidden":
            allowed = _fields_at(model, path[:-1])
            lines.append(f"unknown key {key}{nearest(path[-1], allowed)}; allowed here: {', '.join(allowed)}")
        elif problem["type"] == "missing":
            lines.append(f"{key} is missing")
        else:
            allowed = re.findall(r"'([^']*)'", problem.get("ctx", {}).get("expected", ""))
            meant = nearest(str(problem["input"]), allowed)
            lines.append(f"{key} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}{meant}")
    return "\n".join(lines)


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields at a place inside nested models."""
    kinds = [model]
    for step in path:
        inner = [
            leaf for kind in kinds if step in kind.model_fields for leaf in _models(kind.model_fields[step].annotation)
        ]
        kinds = inner + [kind for kind in kinds if step not in kind.model_fields and _kind_tag(kind) == step]
    return list(dict.fromkeys(field.alias or name for kind in kinds for name, field in kind.model_fields.items()))


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models inside unions and ``Annotated``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [leaf for inner in get_args(annotation) for leaf in _models(inner)]


def _kind_tag(kind: type[BaseModel]) -> str | None:
    """The value of the ``kind`` field by which a union tells its members apart."""
    field = kind.model_fields.get("kind")
    return str(field.default) if field is not None else None
