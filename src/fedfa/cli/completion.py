"""What the shell completes: presets, methods, variants, config keys, data sets.

Reading them takes as long as importing torch, so they are stored in the data directory until fedfa changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fedfa

Words = Mapping[str, str]
"""Completions with their descriptions."""
_SOURCES = ("algorithms", "experiment", "experiment/presets", "learning", "data/sets")


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Presets that begin so."""
    return _beginning(_stored()["presets"], incomplete)


def complete_algorithm(incomplete: str) -> list[tuple[str, str]]:
    """Continuations of an algorithm expression: a method after ``+``, a variant after ``@``."""
    before, plus, last = incomplete.rpartition("+")
    method, at, _ = last.partition("@")
    stored = _stored()
    variants = {f"{method}@{name}": "" for name in stored["variants"].get(method, ())}
    words = variants if at else stored["methods"]
    return [(f"{before}{plus}{word}", text) for word, text in _beginning(words, last)]


def complete_methods_and_all(incomplete: str) -> list[tuple[str, str]]:
    """The same, and ``all``."""
    return [*complete_algorithm(incomplete), *_beginning({"all": "every method that fits"}, incomplete)]


def complete_assignment(incomplete: str) -> list[tuple[str, str]]:
    """Config keys up to their ``=``, then their values where these are few."""
    key, equals, _ = incomplete.partition("=")
    stored = _stored()
    if not equals:
        return [(f"{name}=", text) for name, text in _beginning(stored["keys"], key)]
    return _beginning({f"{key}={value}": "" for value in stored["choices"].get(key, ())}, incomplete)


def complete_section(incomplete: str) -> list[tuple[str, str]]:
    """Sections of a configuration."""
    return _beginning(dict.fromkeys((key.partition(".")[0] for key in _stored()["keys"]), ""), incomplete)


def complete_dataset(incomplete: str) -> list[tuple[str, str]]:
    """Data sets of fedfa."""
    return _beginning(_stored()["datasets"], incomplete)


def _beginning(words: Words, incomplete: str) -> list[tuple[str, str]]:
    return [(word, text) for word, text in words.items() if word.startswith(incomplete)]


def _stored() -> dict[str, Any]:
    """The words of this version, from their file or computed."""
    named = os.environ.get("FEDFA_DATA")  # as data.cache.data_directory, which imports torch
    file = (Path(named).expanduser() if named else Path.home() / ".cache" / "fedfa") / "completion.json"
    version = _version()
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] == version:
            return found
    words = {"version": version, **compute()}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        spare = file.with_suffix(f".{os.getpid()}")
        spare.write_text(json.dumps(words), encoding="utf-8")
        spare.replace(file)
    return words


def _version() -> str:
    """Changes whenever a source file does that words come from."""
    root = Path(__file__).parents[1]
    times = [file.stat().st_mtime_ns for folder in _SOURCES for file in _files(root / folder)]
    return f"{fedfa.__version__} {len(times)} {max(times)}"


def _files(folder: Path) -> Iterable[Path]:
    return (file for file in folder.iterdir() if file.suffix in (".py", ".toml"))


def compute() -> dict[str, Any]:
    """All words, from the code itself."""
    from fedfa.algorithms.registry import methods, option_names
    from fedfa.data import known_names
    from fedfa.experiment.config import presets
    from fedfa.experiment.config_keys import config_keys

    keys = {key.name: key.description for key in config_keys()}
    for method in methods().values():
        for component in method.components:
            fields = component.model_fields.values()
            for name, field in zip(option_names(component), fields, strict=True):
                keys[f"algorithm.{component.name}.{name}"] = " ".join((field.description or "").split())
    choices = {key.name: list(key.choices) for key in config_keys() if key.choices}
    choices |= {key.name: ["true", "false"] for key in config_keys() if key.kind == "true | false"}
    return {
        "presets": presets(),
        "methods": {method.name: method.summary for method in methods().values()},
        "variants": {method.name: list(method.variants) for method in methods().values()},
        "keys": keys,
        "choices": choices,
        "datasets": dict.fromkeys(known_names(), ""),
    }
