"""The shortest command that repeats a run with exactly its configuration."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

from fedfa.errors import FedfaError
from fedfa.experiment.config import OWN, Config, affects_result, preset_layer, presets
from fedfa.experiment.layers import flat, nest_all, value_text
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.experiment.run import same_run

_MAX_ASSIGNMENTS = 8
"""With more than this, a command that reads the recorded file is clearer."""


def command_of(run: RecordedRun) -> str:
    """A command that repeats a run; if no preset is close enough, one that reads the recorded configuration."""
    again = shlex.join(["fedfa", "run", str(run.path / "config.toml"), "--out", f"runs/{run.path.name}"])
    try:
        config = Config.resolve(run.config)
        if OWN in (config.model.name, config.data.name):
            return _from_python(run, config)
        best = _nearest(config)
    except FedfaError:  # a custom method whose file is missing, or a configuration of another version
        return again
    if best is None:
        return again
    preset, different = best
    words = ["fedfa", "run", "--preset", preset, "--algorithm", config.algorithm.name]
    for key, value in different.items():
        if key in ("rounds", "seed"):
            words += [f"--{key}", str(value)]
        else:
            words += ["--set", f"{key}={value_text(value)}"]
    return shlex.join([*words, "--out", f"runs/{run.path.name}"])


def _from_python(run: RecordedRun, config: Config) -> str:
    """For a network or data that were passed in Python."""
    words = [f"fedfa.Config.from_file({str(run.path / 'config.toml')!r})", repr(f"runs/{run.path.name}")]
    words += ["model=…"] if config.model.name == OWN else []
    words += ["data=…"] if config.data.name == OWN else []
    return f"fedfa.run({', '.join(words)})  # in Python"


def watching(report: str) -> str:
    """Add ``--watch`` to the command of a report.

    Example:
        >>> watching("fedfa report runs/a --out a.html")
        'fedfa report --watch runs/a --out a.html'
    """
    words = shlex.split(report)
    return report if "--watch" in words else shlex.join([*words[:2], "--watch", *words[2:]])


def _nearest(config: Config) -> tuple[str, dict[str, Any]] | None:
    """The preset with the fewest differences, and these differences; None if there are too many."""
    wanted = flat(config.to_dict())
    found: list[tuple[int, str, dict[str, Any]]] = []
    for preset, data in _data_of_presets().items():
        if data != config.data.name:
            continue
        base = {"algorithm": {"name": config.algorithm.name}}
        for with_variant in (False, True) if config.algorithm.variant else (False,):
            asked: dict[str, Any] = {"algorithm.variant": config.algorithm.variant} if with_variant else {}
            try:
                there = flat(Config.preset(preset, base, nest_all(asked)).to_dict())
            except FedfaError:
                continue
            compared = {k for k in wanted.keys() | there.keys() if affects_result(k) and k != "algorithm.name"}
            different = {key: wanted[key] for key in wanted if key in compared and there.get(key) != wanted[key]}
            if compared <= wanted.keys() and len(asked | different) <= _MAX_ASSIGNMENTS:
                found.append((len(asked | different), preset, asked | different))
    for _, preset, different in sorted(found, key=lambda one: (one[0], one[1])):
        reached = Config.preset(preset, {"algorithm": {"name": config.algorithm.name}}, nest_all(different))
        if same_run(reached, config):
            return preset, different
    return None


@cache
def _data_of_presets() -> dict[str, str]:
    """The data set of each preset."""
    return {name: Config.resolve(preset_layer(name)).data.name for name in presets()}
