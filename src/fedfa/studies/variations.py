"""The settings of a comparison: presets times the values of ``--vary``, each with a folder of its own."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.errors import SettingsError
from fedfa.studies.layers import flat, merge, nest, parse_value, value_text

_ELSEWHERE = {
    "seed": "repeat --seed instead",
    "algorithm": "repeat --algorithm instead",
    "algorithm.recipe": "repeat --algorithm instead",
    "algorithm.variant": "repeat --algorithm METHOD@VARIANT instead",
}
"""What makes the rows and the seeds of a comparison, not its columns."""

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

    words: tuple[str, ...]
    """What tells it from the others, e.g. ``("digits-c2", "local.lr=0.5")``."""
    layers: tuple[Mapping[str, Any], ...]
    folder: Path
    """Where its run folders go."""
    elsewhere: Path
    """Where they are if the comparison had one setting only when they were begun; or several, if it has one now."""
    name: str = ""
    """Stands before the names of its runs in messages; empty where there is one setting only."""

    @property
    def title(self) -> str:
        """The words in one line."""
        return ", ".join(self.words)


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
    key, sign, raw = (part.strip() for part in text.partition("="))
    if not sign or not key:
        raise SettingsError(f"--vary {text!r}: write key=value,value, e.g. --vary local.lr=0.5,0.1")
    variation = Variation(key, tuple(_values(text, raw)))
    if len(variation.values) < 2:
        raise SettingsError(f"--vary {text!r} needs two values or more; a single one is written --set KEY=VALUE")
    for number, value in enumerate(variation.values):
        if value in variation.values[:number]:
            raise SettingsError(f"--vary {text!r} has {value_text(value)} twice; name each value once")
    for one in sorted(variation.keys() & _ELSEWHERE.keys()):
        raise SettingsError(f"--vary {one}: {_ELSEWHERE[one]}")
    return variation


def _values(text: str, raw: str) -> list[Any]:
    try:
        values: list[Any] = tomllib.loads(f"values = [{raw}]")["values"]
    except tomllib.TOMLDecodeError:
        pieces = [piece.strip() for piece in raw.split(",")]
        if "" in pieces:
            raise SettingsError(f"--vary {text!r} has an empty value; write key=value,value") from None
        if any(sign in raw for sign in "[]{}\"'"):  # a comma may belong to a value
            raise SettingsError(
                f"--vary {text!r} is no list of TOML values; beside lists, tables and quotes, put each word in quotes"
            ) from None
        return [parse_value(piece) for piece in pieces]
    # One value would be no variation, so a single list holds the values.
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def plan_settings(
    bases: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], variations: Sequence[Variation], out: Path
) -> list[Setting]:
    """Every base with every combination of the varied values.

    Args:
        bases: The layers of presets or of a file, by name.
        common: What all settings have in common; goes over the bases.
        variations: Go over both.
        out: The comparison's folder. The runs of a single setting go there, those of several to folders in it, whose
            names say base and values whatever the order of the variations.

    Raises:
        SettingsError: A key is varied twice, or both varied and set.

    Example:
        >>> lr = parse_variation("local.lr=0.5,0.1")
        >>> [(s.title, s.folder.as_posix()) for s in plan_settings({"digits-c2": {}}, {}, [lr], Path("x"))]
        [('local.lr=0.5', 'x/digits-c2,local.lr=0.5'), ('local.lr=0.1', 'x/digits-c2,local.lr=0.1')]
        >>> [(s.title, s.folder.as_posix()) for s in plan_settings({"digits-c2": {}}, {}, [], Path("x"))]
        [('digits-c2', 'x')]
    """
    _refuse_keys_given_twice(common, variations)
    alone = len(bases) == 1 and not variations
    settings = []
    for base, layer in bases.items():
        for values in itertools.product(*(variation.values for variation in variations)):
            chosen = {variation.key: value for variation, value in zip(variations, values, strict=True)}
            above: dict[str, Any] = {}
            for key, value in chosen.items():
                above = merge(above, nest(key, value))
            words = [f"{key}={value_text(value)}" for key, value in chosen.items()]
            name = folder_name(base, chosen)
            shown = (base, *words) if len(bases) > 1 or not words else tuple(words)
            layers = (layer, common, above)
            if alone:
                settings.append(Setting(shown, layers, out, out / name))
            else:
                settings.append(Setting(shown, layers, out / name, out, name))
    return settings


def folder_name(base: str, chosen: Mapping[str, Any]) -> str:
    """A name for a folder that no other base or values have, on systems that do not tell ``a`` from ``A`` too.

    Example:
        >>> folder_name("digits-c2", {"local.lr": 0.5, "data.partition": "shards:2"})
        'digits-c2,data.partition=shards_2,local.lr=0.5'
        >>> folder_name("digits-c2", {"model.options.hidden": [8, 4]})
        'digits-c2,model.options.hidden=8_4-f51407'
    """
    values = (f"{key}={_safe(value_text(value))}" for key, value in sorted(chosen.items()))
    name = ",".join([re.sub(r"[^\w.+-]+", "_", base), *values])
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 7]}-{_mark(name)}"


def _safe(text: str) -> str:
    """A value for a file's name; what a file's name cannot say is told apart by a mark."""
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
            raise SettingsError(f"--vary {twice[0]}, but it is {seen[twice[0]]} already; leave one of them out")
        seen |= dict.fromkeys(keys, "varied")
