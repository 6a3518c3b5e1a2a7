"""Config layers as nested dictionaries, and how they are merged before validation."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import component_types, current_name, expression_names, methods, methods_of, option_names
from fedfa.data import parse_partition
from fedfa.error_messages import nearest
from fedfa.errors import ConfigError, DataError

DEFAULT_ALGORITHM = "fedfa"
WITH = "with"
"""A table ``[with.COMPONENT]`` holds options that apply only where the algorithm has that component."""


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


def nest_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as nested dictionaries, later ones over earlier ones.

    Example:
        >>> nest_all({"local.lr": 0.1, "rounds": 3, "local.epochs": 2})
        {'local': {'lr': 0.1, 'epochs': 2}, 'rounds': 3}
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        nested = merge(nested, nest(key, value))
    return nested


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

    A partition of another kind replaces the lower one as a whole, and another model drops the options of the lower
    one: they would not fit.

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


def expression_and_variant(method: str) -> dict[str, str]:
    """An algorithm as named on the command line: an expression, with an optional variant after ``@``.

    Example:
        >>> [expression_and_variant(text) for text in ("fedfa@authors", "fedavg+ccvr", "me@home/own.py")]
        [{'name': 'fedfa', 'variant': 'authors'}, {'name': 'fedavg+ccvr'}, {'name': 'me@home/own.py'}]
    """
    expression, at, variant = method.rpartition("@")
    if not at or "/" in variant or variant.endswith(".py"):  # an @ in a path
        return {"name": method}
    return {"name": expression, "variant": variant} if variant else {"name": expression}


def stack(layers: tuple[Mapping[str, Any], ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All layers merged, later ones over earlier ones, with what the final algorithm's variant implies below them.

    Where a later layer names another algorithm or variant than an earlier one (a complete config names both), values
    that the earlier layer only recorded for its own algorithm and variant are dropped; other values stay, unless they
    belong to a component that the new algorithm lacks. ``defaults`` are those of the config. Tables
    ``[with.COMPONENT]`` apply where the algorithm has that component.
    """
    written: dict[str, Any] = {}
    conditional: dict[str, Any] = {}
    for layer in map(current_keys, layers):
        table(layer, "algorithm", f"algorithm.name = {str(layer.get('algorithm'))!r}")
        conditional = merge(conditional, table(layer, WITH, f"{WITH}.COMPONENT.OPTION = VALUE"))
        layer = {key: value for key, value in layer.items() if key != WITH}
        if _switches(written, layer):
            written = _without_what_follows_from(written, layer["algorithm"].get("name"), defaults)
        written = merge(written, layer)
    algorithm = written.get("algorithm", {})
    expression = absolute_files(str(algorithm.get("name", DEFAULT_ALGORITHM)))
    name, implied = variant_config(expression, algorithm.get("variant"))
    implied = merge(implied, {"algorithm": _for_parts_of(expression, conditional)})
    return merge(merge(implied, written), {"algorithm": {"name": expression} | ({"variant": name} if name else {})})


def current_keys(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with the keys of today in place of those of earlier releases; old run directories stay readable.

    Example:
        >>> current_keys({"algorithm": {"recipe": "fedfa"}, "insight": {"every": 5}})
        {'algorithm': {'name': 'fedfa'}, 'diagnostics': {'every': 5}}
        >>> current_keys({"algorithm": "fedfa@plus"})
        {'algorithm': {'name': 'fedfa', 'variant': 'plus'}}
        >>> current_keys({"algorithm": {"fedma": {"weighting": "uniform"}}})
        {'algorithm': {'matching': {'weighting': 'uniform'}}}
    """
    layer = {"diagnostics" if key == "insight" else key: value for key, value in layer.items()}
    algorithm = layer.get("algorithm")
    if isinstance(algorithm, str):
        layer["algorithm"] = expression_and_variant(algorithm)
    for section in ("algorithm", WITH):
        if isinstance(found := layer.get(section), Mapping):
            renamed = {"recipe": "name"} if section == "algorithm" else {}
            layer[section] = {renamed.get(key) or current_name(key): value for key, value in found.items()}
    return layer


def table(layer: Mapping[str, Any], key: str, instead: str) -> Mapping[str, Any]:
    """A table of a layer that is read before anything is validated; empty if there is none.

    A value in its place is refused with what to write instead.

    Example:
        >>> table({"data": {"clients": 3}}, "data", "data.KEY = VALUE")
        {'clients': 3}
    """
    found = layer.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} = {found!r}: this is a table; write {instead}")
    return found


def _for_parts_of(expression: str, conditional: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table ``[with]`` for the components of the algorithm."""
    own = {kind.name: kind for kind in component_types(methods_of(expression))}
    known = {kind.name: kind for method in methods().values() for kind in method.components} | own
    for component, options in conditional.items():
        if component not in known:
            raise ConfigError(
                f"unknown component in [{WITH}.{component}]{nearest(component, known)}; known: "
                f"{', '.join(sorted(known))}"
            )
        fields = option_names(known[component])
        for key in options if isinstance(options, Mapping) else ():
            if key not in fields:  # also where this algorithm lacks the component
                raise ConfigError(
                    f"unknown key {WITH}.{component}.{key}{nearest(key, fields)}; allowed here: {', '.join(fields)}"
                )
    return {component: options for component, options in conditional.items() if component in own}


def variant_config(expression: str, variant: object) -> tuple[str | None, dict[str, Any]]:
    """The variant that applies to an algorithm, and the config values it implies.

    Without a name each method has its own default variant; the first one's name is recorded.
    """
    chosen = methods_of(expression)
    if len(chosen) > 1:  # fedavg is the base of all others; its own variants do not apply to them
        chosen = [method for method in chosen if method.name != "fedavg"]
    known = list(dict.fromkeys(name for method in chosen for name in method.variants))
    if variant is not None and variant not in known:
        raise ConfigError(
            f"algorithm.variant = {variant!r}{nearest(str(variant), known)}: the variants of {expression!r} are "
            f"{', '.join(known) or 'none'}"
        )
    implied: dict[str, Any] = {}
    for method in reversed(chosen):  # the first method takes precedence
        name = method.default_variant if variant is None else str(variant)
        implied = merge(implied, nest_all(method.variants.get(name or "", {})))
    defaults = (method.default_variant for method in chosen if method.default_variant)
    return (next(defaults, None) if variant is None else str(variant)), implied


def absolute_files(expression: str) -> str:
    """The expression with the files of own methods by absolute path, so that a run can be resumed from anywhere."""
    names = expression_names(expression)
    return "+".join(str(Path(name).resolve()) if name.endswith(".py") else name for name in names)


def parse_assignment(text: str) -> dict[str, Any]:
    """``key=value`` from the command line; the value is TOML, or else a plain string.

    Example:
        >>> parse_assignment("local.lr=0.1"), parse_assignment("algorithm.variant=authors")
        ({'local': {'lr': 0.1}}, {'algorithm': {'variant': 'authors'}})
    """
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text!r}: write key=value, e.g. --set local.lr=0.05")
    return nest(key.strip(), parse_value(raw))


def parse_value(text: str) -> Any:
    """A value from the command line: TOML, or else a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def value_text(value: object) -> str:
    """A value as the command line reads it: TOML, or a plain string.

    Example:
        >>> value_text(0.5), value_text(True), value_text("shards:2"), value_text([8, 4])
        ('0.5', 'true', 'shards:2', '[8, 4]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)  # TOML has dates


def assign(below: Mapping[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """A layer with the assignments of ``--set`` over it, each key once.

    Raises:
        ConfigError: Something is no assignment, or a key is set twice: one of the values would be lost.

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
            raise ConfigError(f"--set {twice[0]} is given twice; give it once")
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
            raise ConfigError(f"data.partition: {error}") from None
    same_kind = isinstance(below, Mapping) and above.get("kind", below.get("kind")) == below.get("kind")
    return {**below, **above} if same_kind else above


def _switches(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether the upper layer names another algorithm or variant than the lower one."""
    old, new = below.get("algorithm", {}), above.get("algorithm", {})
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    return any(key in old and key in new and old[key] != new[key] for key in ("name", "variant"))


def _without_what_follows_from(
    written: dict[str, Any], new_expression: str | None, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The values without algorithm, variant and everything that only repeats what these two imply."""
    algorithm = written["algorithm"]
    expression = absolute_files(str(algorithm.get("name", DEFAULT_ALGORITHM)))
    _, implied = variant_config(expression, algorithm.get("variant"))
    by_itself = flat(defaults)
    for kind in component_types(methods_of(expression)):
        options = kind().model_dump(mode="json", by_alias=True, exclude_none=True)
        by_itself |= {f"algorithm.{kind.name}.{option}": value for option, value in options.items()}
    by_itself |= flat(implied)
    still_there = {kind.name for kind in component_types(methods_of(absolute_files(new_expression or expression)))}
    rest: dict[str, Any] = {} if new_expression else {"algorithm.name": expression}
    for key, value in flat(written).items():
        section, _, tail = key.partition(".")
        follows = key in ("algorithm.name", "algorithm.variant") or (key in by_itself and by_itself[key] == value)
        gone = section == "algorithm" and tail.partition(".")[0] not in still_there
        if not follows and not gone:
            rest[key] = value
    return nest_all(rest)
