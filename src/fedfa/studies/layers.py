"""Layers of settings as nested dictionaries: how one goes over another, before anything is typed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import methods, methods_of, part_types, recipe_names
from fedfa.data import parse_partition
from fedfa.errors import DataError, SettingsError
from fedfa.messages import nearest

DEFAULT_RECIPE = "fedfa"
WITH = "with"
"""A table ``[with.PART]`` holds options that count if the recipe has that part: a method's value for one data set."""


def nest(key: str, value: object) -> dict[str, Any]:
    """A dotted key as nested dictionaries.

    Example:
        >>> nest("local.lr", 0.1)
        {'local': {'lr': 0.1}}
    """
    for step in reversed(key.split(".")):
        value = {step: value}
    assert isinstance(value, dict)
    return value


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries by dotted key.

    Example:
        >>> flat({"local": {"lr": 0.1}, "rounds": 3})
        {'local.lr': 0.1, 'rounds': 3}
    """
    result: dict[str, Any] = {}
    for key, value in nested.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, the second over the first.

    A partition of another kind replaces the one below whole, and another model leaves the options of the one below
    behind: they would not fit.

    Example:
        >>> merge({"local": {"lr": 1, "epochs": 5}}, {"local": {"lr": 2}})
        {'local': {'lr': 2, 'epochs': 5}}
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if key == "partition":
            merged[key] = _over_partition(old, value)
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            if key == "model" and "name" in old and value.get("name", old["name"]) != old["name"]:
                old = {name: setting for name, setting in old.items() if name != "options"}
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def recipe_and_variant(method: str) -> dict[str, str]:
    """The settings of a method as it is named on a command line: a recipe, with a variant after ``@`` if wanted.

    Example:
        >>> recipe_and_variant("fedfa@authors"), recipe_and_variant("fedavg+ccvr"), recipe_and_variant("me@home/own.py")
        ({'recipe': 'fedfa', 'variant': 'authors'}, {'recipe': 'fedavg+ccvr'}, {'recipe': 'me@home/own.py'})
    """
    recipe, at, variant = method.rpartition("@")
    if not at or "/" in variant or variant.endswith(".py"):  # an @ in a path
        return {"recipe": method}
    return {"recipe": recipe, "variant": variant} if variant else {"recipe": recipe}


def stack(layers: tuple[Mapping[str, Any], ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All layers, later ones over earlier ones, with what the final recipe's variant implies below them all.

    Where a later layer asks for another recipe or variant than an earlier one names (a complete configuration names
    both), what the earlier layer merely recorded of its own recipe and variant gives way; what it says beyond that
    stays, unless it is about a part that the new recipe does not have. ``defaults`` are those of the settings. Tables
    ``[with.PART]`` apply where the recipe has that part.
    """
    written: dict[str, Any] = {}
    conditional: dict[str, Any] = {}
    for layer in layers:
        table(layer, "algorithm", f"algorithm.recipe = {str(layer.get('algorithm'))!r}")
        conditional = merge(conditional, table(layer, WITH, f"{WITH}.PART.OPTION = VALUE"))
        layer = {key: value for key, value in layer.items() if key != WITH}
        if _switches(written, layer):
            written = _without_what_follows_from(written, layer["algorithm"].get("recipe"), defaults)
        written = merge(written, layer)
    algorithm = written.get("algorithm", {})
    recipe = absolute_files(str(algorithm.get("recipe", DEFAULT_RECIPE)))
    name, implied = variant_settings(recipe, algorithm.get("variant"))
    implied = merge(implied, {"algorithm": _for_parts_of(recipe, conditional)})
    return merge(merge(implied, written), {"algorithm": {"recipe": recipe} | ({"variant": name} if name else {})})


def table(layer: Mapping[str, Any], key: str, instead: str) -> Mapping[str, Any]:
    """A table of a layer that is read before anything is validated; empty if there is none.

    Args:
        layer: Settings as they were written.
        key: Its name.
        instead: What to write where a value stands in its place, which is refused.

    Example:
        >>> table({"data": {"clients": 3}}, "data", "data.KEY = VALUE")
        {'clients': 3}
    """
    found = layer.get(key, {})
    if not isinstance(found, Mapping):
        raise SettingsError(f"{key} = {found!r}: this is a table; write {instead}")
    return found


def _for_parts_of(recipe: str, conditional: Mapping[str, Any]) -> dict[str, Any]:
    """What a table ``[with]`` says about the parts that the recipe has."""
    own = {kind.name: kind for kind in part_types(methods_of(recipe))}
    known = {kind.name: kind for method in methods().values() for kind in method.parts} | own
    for part, options in conditional.items():
        if part not in known:
            raise SettingsError(
                f"unknown part in [{WITH}.{part}]{nearest(part, known)}; known: {', '.join(sorted(known))}"
            )
        fields = known[part].options_type.model_fields
        for key in options if isinstance(options, Mapping) else ():
            if key not in fields:  # told also where this recipe lacks the part: else nobody would
                raise SettingsError(
                    f"unknown key {WITH}.{part}.{key}{nearest(key, fields)}; allowed here: {', '.join(fields)}"
                )
    return {part: options for part, options in conditional.items() if part in own}


def variant_settings(recipe: str, variant: object) -> tuple[str | None, dict[str, Any]]:
    """The variant that applies to a recipe, and the settings it implies.

    Without a name each method of the recipe has its own default variant; the first one's name stands for all.
    """
    chosen = methods_of(recipe)
    if len(chosen) > 1:  # fedavg is the base of all others; what a variant says of it alone is not meant for them
        chosen = [method for method in chosen if method.name != "fedavg"]
    known = list(dict.fromkeys(name for method in chosen for name in method.variants))
    if variant is not None and variant not in known:
        raise SettingsError(
            f"algorithm.variant = {variant!r}{nearest(str(variant), known)}: the recipe {recipe!r} has the variants "
            f"{', '.join(known) or 'none'}"
        )
    implied: dict[str, Any] = {}
    for method in reversed(chosen):  # the first method of the recipe has the last word
        name = method.default_variant if variant is None else str(variant)
        for key, value in method.variants.get(name or "", {}).items():
            implied = merge(implied, nest(key, value))
    defaults = (method.default_variant for method in chosen if method.default_variant)
    return (next(defaults, None) if variant is None else str(variant)), implied


def absolute_files(recipe: str) -> str:
    """The recipe with the files of own methods by absolute path, so that a run can be resumed from anywhere."""
    names = recipe_names(recipe)
    return "+".join(str(Path(name).resolve()) if name.endswith(".py") else name for name in names)


def parse_assignment(text: str) -> dict[str, Any]:
    """``key=value`` from the command line; the value is TOML, or else a plain string.

    Example:
        >>> parse_assignment("local.lr=0.1"), parse_assignment("algorithm.variant=authors")
        ({'local': {'lr': 0.1}}, {'algorithm': {'variant': 'authors'}})
    """
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise SettingsError(f"--set {text!r}: write key=value, e.g. --set local.lr=0.05")
    return nest(key.strip(), parse_value(raw))


def parse_value(text: str) -> Any:
    """A value from the command line: TOML, or else a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def value_text(value: object) -> str:
    """A value as the command line reads it: TOML, plain for words.

    Example:
        >>> value_text(0.5), value_text(True), value_text("shards:2"), value_text([8, 4])
        ('0.5', 'true', 'shards:2', '[8, 4]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)  # TOML has dates


def assign(below: Mapping[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """A layer with what ``--set`` says over it, each key once.

    Raises:
        SettingsError: Something is no assignment, or a key is set twice: one of the values would be lost.

    Example:
        >>> assign({"rounds": 3}, ["local.lr=0.1", "local.epochs=2"])
        {'rounds': 3, 'local': {'lr': 0.1, 'epochs': 2}}
    """
    layer = dict(below)
    seen: set[str] = set()
    for text in texts:
        one = parse_assignment(text)
        keys = flat(one).keys()
        if twice := sorted(seen & keys):
            raise SettingsError(f"--set {twice[0]} is given twice; give it once")
        seen |= keys
        layer = merge(layer, one)
    return layer


def _over_partition(below: Any, above: Any) -> Any:
    if not isinstance(above, Mapping) or below is None:
        return above
    if isinstance(below, str):
        try:
            below = parse_partition(below).model_dump(exclude_none=True)
        except DataError as error:
            raise SettingsError(f"data.partition: {error}") from None
    same_kind = isinstance(below, Mapping) and above.get("kind", below.get("kind")) == below.get("kind")
    return {**below, **above} if same_kind else above


def _switches(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether the layer above names another recipe or variant than the one below does."""
    old, new = below.get("algorithm", {}), above.get("algorithm", {})
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    return any(key in old and key in new and old[key] != new[key] for key in ("recipe", "variant"))


def _without_what_follows_from(
    written: dict[str, Any], new_recipe: str | None, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings without recipe, variant and every value that only repeats what these two say by themselves."""
    algorithm = written["algorithm"]
    recipe = absolute_files(str(algorithm.get("recipe", DEFAULT_RECIPE)))
    _, implied = variant_settings(recipe, algorithm.get("variant"))
    by_itself = flat(defaults)
    for kind in part_types(methods_of(recipe)):
        options = kind.options_type().model_dump(exclude_none=True)
        by_itself |= {f"algorithm.{kind.name}.{option}": value for option, value in options.items()}
    by_itself |= flat(implied)
    still_there = {kind.name for kind in part_types(methods_of(absolute_files(new_recipe or recipe)))}
    rest: dict[str, Any] = {} if new_recipe else {"algorithm": {"recipe": recipe}}
    for key, value in flat(written).items():
        section, _, tail = key.partition(".")
        follows = key in ("algorithm.recipe", "algorithm.variant") or (key in by_itself and by_itself[key] == value)
        gone = section == "algorithm" and tail.partition(".")[0] not in still_there
        if not follows and not gone:
            rest = merge(rest, nest(key, value))
    return rest
