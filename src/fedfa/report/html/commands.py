"""The command that gives a run again: the shortest one that leads to exactly its settings."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

from fedfa.errors import FedfaError
from fedfa.report.html.reading import Run
from fedfa.studies.layers import flat, merge, nest, value_text
from fedfa.studies.run import FREE_ON_RESUME, same_run
from fedfa.studies.settings import OWN, Settings, preset_layer, presets

_MOST_ASSIGNMENTS = 8
"""With more than this, the recorded file says it better."""


def command_of(run: Run) -> str:
    """A command that repeats a run; where no preset is near enough, one that reads the recorded settings."""
    again = shlex.join(["fedfa", "run", str(run.folder / "config.toml"), "--out", f"runs/{run.folder.name}"])
    try:
        settings = Settings.resolve(run.config)
        if OWN in (settings.model.name, settings.data.name):
            return _from_python(run, settings)
        best = _nearest(settings)
    except FedfaError:  # an own method whose file is not here, or settings of another version
        return again
    if best is None:
        return again
    preset, different = best
    words = ["fedfa", "run", "--preset", preset, "--algorithm", settings.algorithm.recipe]
    for key, value in different.items():
        if key in ("rounds", "seed"):
            words += [f"--{key}", str(value)]
        else:
            words += ["--set", f"{key}={value_text(value)}"]
    return shlex.join([*words, "--out", f"runs/{run.folder.name}"])


def _from_python(run: Run, settings: Settings) -> str:
    """For a network or data that no settings can name."""
    words = [f"fedfa.Settings.from_file({str(run.folder / 'config.toml')!r})", repr(f"runs/{run.folder.name}")]
    words += ["model=…"] if settings.model.name == OWN else []
    words += ["data=…"] if settings.data.name == OWN else []
    return f"fedfa.run({', '.join(words)})  # in Python"


def watching(report: str) -> str:
    """The command of a report as one that follows the runs.

    Example:
        >>> watching("fedfa report runs/a --out a.html")
        'fedfa report --watch runs/a --out a.html'
    """
    words = shlex.split(report)
    return report if "--watch" in words else shlex.join([*words[:2], "--watch", *words[2:]])


def _nearest(settings: Settings) -> tuple[str, dict[str, Any]] | None:
    """The preset from which the fewest settings differ, and these settings; None if it is not worth it."""
    wanted = flat(settings.to_dict())
    found: list[tuple[int, str, dict[str, Any]]] = []
    for preset, data in _data_of_presets().items():
        if data != settings.data.name:
            continue
        base = {"algorithm": {"recipe": settings.algorithm.recipe}}
        for with_variant in (False, True) if settings.algorithm.variant else (False,):
            asked: dict[str, Any] = {"algorithm.variant": settings.algorithm.variant} if with_variant else {}
            try:
                there = flat(Settings.preset(preset, base, _layer(asked)).to_dict())
            except FedfaError:
                continue
            free = FREE_ON_RESUME | {"algorithm.recipe"}
            missing = {key for key in there if key not in wanted} - free
            different = {key: value for key, value in wanted.items() if key not in free and there.get(key) != value}
            if not missing and len(asked | different) <= _MOST_ASSIGNMENTS:
                found.append((len(asked | different), preset, asked | different))
    for _, preset, different in sorted(found, key=lambda one: (one[0], one[1])):
        reached = Settings.preset(preset, {"algorithm": {"recipe": settings.algorithm.recipe}}, _layer(different))
        if same_run(reached, settings):
            return preset, different
    return None


def _layer(values: dict[str, Any]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for key, value in values.items():
        layer = merge(layer, nest(key, value))
    return layer


@cache
def _data_of_presets() -> dict[str, str]:
    """Each preset's data set."""
    return {name: Settings.resolve(preset_layer(name)).data.name for name in presets()}
