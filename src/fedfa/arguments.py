"""Calls with a misspelt argument: the nearest right name, or where the value belongs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from fedfa.error_messages import nearest
from fedfa.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def _names(function: Callable[..., object]) -> list[str]:
    """Names under which a function takes arguments."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.kind in kinds and one.name not in ("self", "cls")]


def checks_arguments(
    what: str, elsewhere: Mapping[str, str] | None = None, passes_to: Callable[..., object] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a misspelt argument is refused with the nearest right one.

    Args:
        what: Its name in messages.
        elsewhere: Where values belong that users look for here.
        passes_to: The function that gets its further arguments.

    Example:
        >>> @checks_arguments("paint", {"size": "the canvas has a size"})
        ... def paint(colour): ...
        >>> paint(color="red")
        Traceback (most recent call last):
        fedfa.errors.ArgumentError: paint has no argument 'color' (did you mean 'colour'?); its arguments are colour
        >>> paint(size=3)
        Traceback (most recent call last):
        fedfa.errors.ArgumentError: paint has no argument 'size': the canvas has a size
    """
    places = elsewhere or {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = _names(function)
        known = own + [name for name in (_names(passes_to) if passes_to else []) if name not in (*own, *places)]

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            for name in named:
                if name not in known:
                    if name in places:
                        raise ArgumentError(f"{what} has no argument {name!r}: {places[name]}")
                    meant = nearest(name, [*known, *places])
                    raise ArgumentError(f"{what} has no argument {name!r}{meant}; its arguments are {', '.join(known)}")
            return function(*arguments, **named)

        return call

    return decorate
