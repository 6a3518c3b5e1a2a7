"""From a recipe's text to a recipe: ``"fedfa+fedadam"``, or the path of a file with a method of your own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedfa.algorithms.ccvr import CCVR
from fedfa.algorithms.centralised import CENTRALISED
from fedfa.algorithms.fedavg import FEDAVG, Averaging
from fedfa.algorithms.fedbn import FEDBN
from fedfa.algorithms.feddyn import FEDDYN
from fedfa.algorithms.fedetf import FEDETF
from fedfa.algorithms.fedfa import FEDFA
from fedfa.algorithms.fedlc import FEDLC
from fedfa.algorithms.fedma import FEDMA
from fedfa.algorithms.fednova import FEDNOVA
from fedfa.algorithms.fedproc import FEDPROC
from fedfa.algorithms.fedproto import FEDPROTO
from fedfa.algorithms.fedprox import FEDPROX
from fedfa.algorithms.local_only import LOCAL
from fedfa.algorithms.method import Method
from fedfa.algorithms.moon import MOON
from fedfa.algorithms.scaffold import SCAFFOLD
from fedfa.algorithms.server_optimisers import FEDADAGRAD, FEDADAM, FEDAVGM, FEDYOGI
from fedfa.errors import RecipeError, SettingsError
from fedfa.learning.part import Part
from fedfa.learning.recipe import Recipe
from fedfa.messages import nearest, validation_message

ALL = (
    FEDAVG,
    FEDFA,
    FEDPROX,
    FEDDYN,
    SCAFFOLD,
    FEDNOVA,
    FEDMA,
    FEDAVGM,
    FEDADAGRAD,
    FEDADAM,
    FEDYOGI,
    FEDLC,
    FEDBN,
    CCVR,
    LOCAL,
    CENTRALISED,
    MOON,
    FEDPROTO,
    FEDPROC,
    FEDETF,
)
"""The methods that come with fedfa, in the order in which they are listed."""

_METHODS: dict[str, Method] = {method.name: method for method in ALL}


def methods() -> Mapping[str, Method]:
    """Every method that is known, by name."""
    return dict(_METHODS)


def register(method: Method) -> Method:
    """Make a method of your own known, so that recipes can name it."""
    if method.name in _METHODS and _METHODS[method.name] != method:
        raise RecipeError(f"a method named {method.name!r} exists already; choose another name")
    _METHODS[method.name] = method
    return method


def methods_of(recipe: str) -> list[Method]:
    """The methods a recipe's text names, in order.

    Raises:
        RecipeError: An unknown name; says which is nearest.

    Example:
        >>> [method.name for method in methods_of("fedfa")]
        ['fedfa']
    """
    names = recipe_names(recipe)
    return [_from_file(Path(name)) if name.endswith(".py") else _known(name) for name in names]


def recipe_names(recipe: str) -> list[str]:
    """The names and files in a recipe's text; a ``+`` inside a file's path does not separate.

    Example:
        >>> recipe_names("fedfa+code/c++/pull.py")
        ['fedfa', 'code/c++/pull.py']
    """
    names: list[str] = []
    for piece in recipe.split("+"):
        inside_path = bool(names) and any(sign in names[-1] for sign in "/\\") and not names[-1].endswith(".py")
        if inside_path:
            names[-1] += f"+{piece}"
        else:
            names.append(piece.strip())
    if not all(names):
        raise RecipeError(f"recipe {recipe!r} is not a list of methods joined by '+', like 'fedfa' or 'fedfa+fedadam'")
    return names


def build_recipe(recipe: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> Recipe:
    """A recipe from its text and its parts' options.

    Args:
        recipe: Methods joined by ``+``.
        options: For each part by name, its options, e.g. ``{"anchors": {"mu": 0.2}}``.

    Raises:
        RecipeError: The methods are unknown or do not fit together.
        SettingsError: An option is unknown or has a bad value.
    """
    types = part_types(methods_of(recipe))
    typed = validate_options(recipe, options or {})
    return Recipe([kind(typed[kind.name]) for kind in types], title=recipe)


def part_types(chosen: Sequence[Method]) -> list[type[Part[Any]]]:
    """The parts of several methods together; FedAvg's averaging is the base unless a method brings its own."""
    types: list[type[Part[Any]]] = []
    for method in chosen:
        types.extend(kind for kind in method.parts if kind not in types)
    own_bases = [kind for kind in types if kind.base and kind is not Averaging]
    if own_bases:  # `fedavg+scaffold` means scaffold
        return [kind for kind in types if kind is not Averaging]
    return types if Averaging in types else [Averaging, *types]


def validate_options(recipe: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options of every part of the recipe as typed objects, defaults filled in."""
    types = {kind.name: kind for kind in part_types(methods_of(recipe))}
    for name in options:
        if name not in types:
            raise SettingsError(
                f"algorithm.{name}: the recipe {recipe!r} has no part {name!r}{nearest(name, types)}; "
                f"its parts are {', '.join(types)}"
            )
    typed = {}
    for name, kind in types.items():
        try:
            typed[name] = kind.options_type.model_validate(dict(options.get(name, {})))
        except ValidationError as error:
            raise SettingsError(validation_message(error, kind.options_type, f"algorithm.{name}")) from None
    return typed


def _known(name: str) -> Method:
    if name not in _METHODS:
        raise RecipeError(f"unknown method {name!r}{nearest(name, _METHODS)}; known: {', '.join(sorted(_METHODS))}")
    return _METHODS[name]


_FILES: dict[tuple[Path, int], Method] = {}
"""Methods read from files, by path and time of change: an edited file is read again."""


def _from_file(path: Path) -> Method:
    """The method defined in a Python file: its ``Method`` object, or one made of the parts it defines."""
    path = path.resolve()
    if not path.is_file():
        raise RecipeError(f"no file {path} with a method in it")
    key = (path, path.stat().st_mtime_ns)
    if key in _FILES:
        return _FILES[key]
    unique = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"fedfa_method_{path.stem}_{unique}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # pydantic and dataclasses look their module up while it is made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        raise RecipeError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    imported = list(_METHODS.values())
    found = [value for value in vars(module).values() if isinstance(value, Method) and value not in imported]
    if not found:
        parts = tuple(
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Part) and value.__module__ == module.__name__
        )
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        found = [Method(name=path.stem, summary=summary, parts=parts)] if parts else []
    if len(found) != 1:
        raise RecipeError(f"{path} must define one Method, or Part classes; found {len(found)} methods")
    _FILES[key] = found[0]
    return found[0]
