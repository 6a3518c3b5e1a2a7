"""The settings of a comparison: presets times the values of ``--vary``, each with its own directory."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.errors import ConfigError
from fedfa.experiment.layers import flat, nest, nest_all, parse_value, value_text

_ELSEWHERE = {
    "seed": "repeat --seed instead",
    "algorithm": "repeat --algorithm instead",
    "algorithm.name": "repeat --algorithm instead",
    "algorithm.variant": "repeat --algorithm METHOD@VARIANT instead",
}
"""Keys of the rows and seeds of a comparison, which cannot be varied."""

_LONGEST_NAME = 120


@dataclass(frozen=True)
class Variation:
    """A key with the values that it takes in turn."""

    key: str
    values: tuple[Any, ...]

    def keys(self) -> set[str]:
        """What it sets: its key, or where its values are tables, all of theirs."""
        return {key for value in self.values for key in flat(nest(self.key, value))}


@dataclass(frozen=True)
class Setting:
    """One setting of a comparison."""

    labels: tuple[str, ...]
    """What distinguishes it from the others, e.g. ``("digits-c2", "local.lr=0.5")``."""
    layers: tuple[Mapping[str, Any], ...]
    directory: Path
    """Directory of its run directories."""
    elsewhere: Path
    """Where they are if the comparison had a single setting when they were started; or several, if it has one now."""
    name: str = ""
    """Prefix of the names of its runs in messages; empty where there is a single setting."""

    @property
    def title(self) -> str:
        """The labels in one line."""
        return ", ".join(self.labels)


def parse_variation(text: str) -> Variation:
    """``key=value,value`` from the command line; each value as ``--set`` reads it, or all of them as one TOML list.

    Example:
        >>> parse_variation("local.lr=0.5,0.1").values, parse_variation("local.lr=[0.5, 0.1]").values
        ((0.5, 0.1), (0.5, 0.1))
        >>> parse_variation("data.partition=iid,shards:2").values
        ('iid', 'shards:2')
        >>> parse_variation("model.options.hidden=[8],[8, 4]").values
        ([8], [8, 4])
    """
    key, sign, raw = (component.strip() for component in text.partition("="))
    if not sign or not key:
        raise ConfigError(f"--vary {text!r}: write key=value,value, e.g. --vary local.lr=0.5,0.1")
    variation = Variation(key, tuple(_values(text, raw)))
    if len(variation.values) < 2:
        raise ConfigError(f"--vary {text!r} needs two values or more; a single one is written --set KEY=VALUE")
    for number, value in enumerate(variation.values):
        if value in variation.values[:number]:
            raise ConfigError(f"--vary {text!r} has {value_text(value)} twice; name each value once")
    for one in sorted(variation.keys() & _ELSEWHERE.keys()):
        raise ConfigError(f"--vary {one}: {_ELSEWHERE[one]}")
    return variation


def _values(text: str, raw: str) -> list[Any]:
    try:
        values: list[Any] = tomllib.loads(f"values = [{raw}]")["values"]
    except tomllib.TOMLDecodeError:
        pieces = [piece.strip() for piece in raw.split(",")]
        if "" in pieces:
            raise ConfigError(f"--vary {text!r} has an empty value; write key=value,value") from None
        if any(sign in raw for sign in "[]{}\"'"):  # a comma may be part of a value
            raise ConfigError(
                f"--vary {text!r} is no list of TOML values; beside lists, tables and quotes, put each word in quotes"
            ) from None
        return [parse_value(piece) for piece in pieces]
    # One value would be no variation, so a single list holds the values.
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def plan_configs(
    bases: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], variations: Sequence[Variation], out: Path
) -> list[Setting]:
    """Every base with every combination of the varied values.

    Args:
        bases: The layers of presets or of a file, by name.
        common: A layer for all settings, over the bases.
        variations: Over both.
        out: The comparison's directory. The runs of a single setting go there, those of several to subdirectories named
            after base and values, whatever the order of the variations.

    Raises:
        ConfigError: A key is varied twice, or both varied and set.

    Example:
        >>> lr = parse_variation("local.lr=0.5,0.1")
        >>> [(s.title, s.directory.as_posix()) for s in plan_configs({"digits-c2": {}}, {}, [lr], Path("x"))]
        [('local.lr=0.5', 'x/digits-c2,local.lr=0.5'), ('local.lr=0.1', 'x/digits-c2,local.lr=0.1')]
        >>> [(s.title, s.directory.as_posix()) for s in plan_configs({"digits-c2": {}}, {}, [], Path("x"))]
        [('digits-c2', 'x')]
    """
    _refuse_keys_given_twice(common, variations)
    alone = len(bases) == 1 and not variations
    config = []
    for base, layer in bases.items():
        for values in itertools.product(*(variation.values for variation in variations)):
            chosen = {variation.key: value for variation, value in zip(variations, values, strict=True)}
            labels = [f"{key}={value_text(value)}" for key, value in chosen.items()]
            name = directory_name(base, chosen)
            shown = (base, *labels) if len(bases) > 1 or not labels else tuple(labels)
            layers = (layer, common, nest_all(chosen))
            if alone:
                config.append(Setting(shown, layers, out, out / name))
            else:
                config.append(Setting(shown, layers, out / name, out, name))
    return config


def directory_name(base: str, chosen: Mapping[str, Any]) -> str:
    """A unique name for a directory, also on case-insensitive file systems.

    Example:
        >>> directory_name("digits-c2", {"local.lr": 0.5, "data.partition": "shards:2"})
        'digits-c2,data.partition=shards_2,local.lr=0.5'
        >>> directory_name("digits-c2", {"model.options.hidden": [8, 4]})
        'digits-c2,model.options.hidden=8_4-f51407'
    """
    values = (f"{key}={_safe(value_text(value))}" for key, value in sorted(chosen.items()))
    name = ",".join([re.sub(r"[^\w.+-]+", "_", base), *values])
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 7]}-{_mark(name)}"


def _safe(text: str) -> str:
    """A value for a file name; a digest distinguishes what a file name cannot express."""
    if re.fullmatch(r"[a-z0-9.+:-]+", text):
        return text.replace(":", "_")
    return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', text).strip('_')}-{_mark(text)}"


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _refuse_keys_given_twice(common: Mapping[str, Any], variations: Sequence[Variation]) -> None:
    seen = dict.fromkeys(flat(common), "set for all settings")
    for variation in variations:
        keys = variation.keys()
        if twice := sorted(seen.keys() & keys):
            raise ConfigError(f"--vary {twice[0]}, but it is {seen[twice[0]]} already; leave one of them out")
        seen |= dict.fromkeys(keys, "varied")
