"""The final pass (CCVR …) for a run that was trained without it: the training is not repeated."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfa.errors import AlgorithmError, RunError
from fedfa.experiment.build import DataSource, ModelSource
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors, save_tensors
from fedfa.experiment.layers import flat, merge
from fedfa.experiment.run import RunResult, run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.learning.component import Component
from fedfa.learning.tensors import contiguous


def finalize(
    source: Path | str,
    method: str | None,
    out: Path | str,
    options: Mapping[str, Any] | None = None,
    *,
    model: ModelSource | None = None,
    data: DataSource | None = None,
) -> RunResult:
    """Make the run of ``algorithm+method`` from the finished run of ``algorithm``.

    Random streams are keyed by purpose, so a method that only acts after the last round leaves the training as it was:
    the result is the same, bit for bit, as that of training again.

    Args:
        source: Run directory of a finished run.
        method: The method to add, e.g. ``"ccvr"``; None to change only options of a component of the final pass.
        out: The new run directory.
        options: A config layer for these components, e.g. ``{"algorithm": {"ccvr": {"samples": 500}}}``.
        model: The run's own network, where it has one.
        data: The run's own data, where it has them.

    Raises:
        AlgorithmError: The method acts in training.
        RunError: The source is not a finished run.
    """
    trained = RunDirectory(Path(source))
    if trained.summary() is None:
        started = (trained.path / "config.toml").exists()
        advice = f"finish it with: fedfa run --resume --out {source}" if started else "there is no config.toml in it"
        raise RunError(f"{source} is not a finished run; {advice}")
    before = trained.config()
    config = finalized_config(before, method, options)
    changed = _changed_components(before, config)
    if not changed or not config.build_algorithm().has_final_pass:
        raise RunError(
            f"nothing would follow the training of {source}: name a method (--algorithm ccvr), or options of a "
            "component of the final pass (--set algorithm.final.steps=1000)"
        )
    if not (trained.path / "checkpoint.safetensors").exists():
        raise RunError(f"{source} has no checkpoint.safetensors, only its record: train it again to add to it")
    directory = RunDirectory(Path(out))
    if directory.holds_run():
        raise RunError(
            f"{out} holds a run already; choose another --out, or continue it: fedfa run --resume --out {out}"
        )
    experiment = Experiment.from_config(config, model=model, data=data)
    origin = experiment.origin()
    if other := [what for what, mark in trained.origin().items() if origin.get(what) != mark]:
        raise RunError(f"{', '.join(other)} changed since {source} was trained; restore what it was trained with")
    directory.create(experiment.config)
    try:
        if (trained.path / "clients").is_dir():  # an empty directory may have got lost
            shutil.copytree(trained.path / "clients", directory.path / "clients", dirs_exist_ok=True)
        for best in trained.path.glob("best.round*.safetensors"):
            shutil.copy2(best, directory.path / best.name)
        for record in trained.metrics():
            if not record.get("final_pass"):
                directory.append_metrics(record)
        directory.diagnostics.copy(trained.diagnostics)
        tensors = load_tensors(trained.path / "checkpoint.safetensors")
        fresh = experiment.training.init().components
        for component in changed:
            own = contiguous(fresh.get(component.name, {}))
            tensors |= {f"{component.name}/{name}": value for name, value in own.items()}
        save_tensors(directory.path / "checkpoint.safetensors", tensors)
    finally:
        directory.close()
    return run(config, out, resume=True, model=model, data=data)


def finalized_config(before: Config, method: str | None, options: Mapping[str, Any] | None = None) -> Config:
    """The config of the run that :func:`finalize` makes from a run with this config.

    Example:
        >>> finalized_config(Config.preset("digits-c2"), "ccvr").algorithm.name
        'fedfa+ccvr'
    """
    expression = f"{before.algorithm.name}+{method}" if method else before.algorithm.name
    return Config.resolve(merge(before.to_dict(), {"algorithm": {"name": expression}}), options or {})


def _changed_components(before: Config, after: Config) -> list[Component]:
    """The components that are new or have other options; all of them must leave the training alone."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    different = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - {"algorithm.name"}
    known = {component.name for component in before.build_algorithm().components}
    components = {component.name: component for component in after.build_algorithm().components}
    for key in sorted(different):
        section, _, rest = key.partition(".")
        if section != "algorithm" or rest.partition(".")[0] not in components:
            raise RunError(f"{key} affects the training: train again with it")
    names = {key.split(".")[1] for key in different} | (components.keys() - known)
    for name in sorted(names):
        if not components[name].traits.final_pass:
            raise AlgorithmError(
                f"component {name!r} acts in training; only a component of the final pass (such as ccvr) can be added "
                "to a finished run: train again with the whole algorithm"
            )
    return [component for component in components.values() if component.name in names]
