"""What follows the last round (CCVR …), for a run that was trained without it: the training is not repeated."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfa.errors import RecipeError, RunError
from fedfa.learning.part import Part, overridden
from fedfa.learning.tensors import contiguous
from fedfa.studies.files import load_tensors, save_tensors
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import flat, merge
from fedfa.studies.run import RunResult, Watcher, run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import DataSource, ModelMaker, prepare

_IN_TRAINING = (
    "adapt", "roles", "watches", "step", "begin", "logits", "loss", "gradient", "after_step", "after_epoch", "end",
    "contribute", "predict",
)  # fmt: skip


def conclude(
    source: Path | str,
    method: str | None,
    out: Path | str,
    options: Mapping[str, Any] | None = None,
    *,
    model: ModelMaker | None = None,
    data: DataSource | None = None,
    watch: Watcher | None = None,
) -> RunResult:
    """Make the run that ``recipe+method`` would have been, from the finished run of ``recipe``.

    Streams are keyed by purpose, so a method that only acts after the last round leaves the training as it was: the
    result is the same, bit for bit, as that of training again.

    Args:
        source: Folder of a finished run.
        method: The method to add, e.g. ``"ccvr"``; None to change only options of a part that follows the training.
        out: The new run folder.
        options: A layer of settings for these parts, e.g. ``{"algorithm": {"ccvr": {"samples": 500}}}``.
        model: The run's own network, where it has one.
        data: The run's own data, where it has them.
        watch: Called with the new record.

    Raises:
        RecipeError: The method has a say in training.
        RunError: The source is not a finished run.
    """
    trained = RunFolder(Path(source))
    if trained.summary() is None:
        begun = (trained.path / "config.toml").exists()
        advice = f"finish it with: fedfa run --resume --out {source}" if begun else "there is no config.toml in it"
        raise RunError(f"{source} is not a finished run; {advice}")
    before = trained.settings()
    settings = concluded_settings(before, method, options)
    changed = _changed_parts(before, settings)
    if not changed or not settings.recipe().surveys:
        raise RunError(
            f"nothing would follow the training of {source}: name a method (--algorithm ccvr), or options of what "
            "follows it (--set algorithm.final.steps=1000)"
        )
    if not (trained.path / "checkpoint.safetensors").exists():
        raise RunError(f"{source} has no checkpoint.safetensors, only its record: train it again to add to it")
    folder = RunFolder(Path(out))
    if folder.holds_run():
        raise RunError(
            f"{out} holds a run already; choose another --out, or go on with it: fedfa run --resume --out {out}"
        )
    laboratory = prepare(settings, model=model, data=data)
    origin = laboratory.origin()
    if other := [what for what, mark in trained.origin().items() if origin.get(what) != mark]:
        raise RunError(f"{', '.join(other)} changed since {source} was trained; put back what it was trained with")
    folder.create(settings)
    try:
        if (trained.path / "clients").is_dir():  # an empty folder may have got lost
            shutil.copytree(trained.path / "clients", folder.path / "clients", dirs_exist_ok=True)
        for record in trained.metrics():
            if "survey" not in record:
                folder.append_metrics(record)
        folder.insight.copy(trained.insight)
        tensors = load_tensors(trained.path / "checkpoint.safetensors")
        fresh = laboratory.initial_state().parts
        for part in changed:
            tensors |= {f"{part.name}/{name}": value for name, value in contiguous(fresh[part.name]).items()}
        save_tensors(folder.path / "checkpoint.safetensors", tensors)
    finally:
        folder.close()
    return run(settings, out, resume=True, model=model, data=data, watch=watch)


def concluded_settings(before: Settings, method: str | None, options: Mapping[str, Any] | None = None) -> Settings:
    """The settings of the run that :func:`conclude` makes from a run with these settings.

    Example:
        >>> concluded_settings(Settings.preset("digits-c2"), "ccvr").algorithm.recipe
        'fedfa+ccvr'
    """
    recipe = f"{before.algorithm.recipe}+{method}" if method else before.algorithm.recipe
    return Settings.resolve(merge(before.to_dict(), {"algorithm": {"recipe": recipe}}), options or {})


def _changed_parts(before: Settings, after: Settings) -> list[Part[Any]]:
    """The parts that are new or have other options; all of them must leave the training alone."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    different = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - {"algorithm.recipe"}
    known = {part.name for part in before.recipe().parts}
    parts = {part.name: part for part in after.recipe().parts}
    for key in sorted(different):
        section, _, rest = key.partition(".")
        if section != "algorithm" or rest.partition(".")[0] not in parts:
            raise RunError(f"{key} has a say in the training: train anew with it")
    names = {key.split(".")[1] for key in different} | (parts.keys() - known)
    for name in names:
        part = parts[name]
        acts = part.base or part.pools_data or part.needs_each or any(overridden(part, hook) for hook in _IN_TRAINING)
        if acts:
            raise RecipeError(
                f"part {name!r} has a say in the training; only what follows it (such as ccvr) can be added to a "
                "finished run: train anew with the whole recipe"
            )
    return [part for part in parts.values() if part.name in names]
