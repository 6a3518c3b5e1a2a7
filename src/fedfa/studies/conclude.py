"""What follows the last round (CCVR …), for a run that was trained without it: the training is not repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfa.data import DataSet
from fedfa.errors import RecipeError, RunError
from fedfa.learning.part import Part, overridden
from fedfa.learning.tensors import contiguous
from fedfa.studies.files import load_tensors, save_tensors
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import merge
from fedfa.studies.run import RunResult, Watcher, run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import ModelMaker, prepare

_IN_TRAINING = (
    "adapt", "roles", "watches", "step", "begin", "logits", "loss", "gradient", "after_step", "after_epoch", "end",
    "contribute", "predict",
)  # fmt: skip


def conclude(
    source: Path | str,
    method: str,
    out: Path | str,
    options: Mapping[str, Any] | None = None,
    *,
    model: ModelMaker | None = None,
    data: DataSet | None = None,
    watch: Watcher | None = None,
) -> RunResult:
    """Make the run that ``recipe+method`` would have been, from the finished run of ``recipe``.

    Streams are keyed by purpose, so a method that only acts after the last round leaves the training as it was: the
    result is the same, bit for bit, as that of training again.

    Args:
        source: Folder of a finished run.
        method: The method to add, e.g. ``"ccvr"``.
        out: The new run folder.
        options: A layer of settings for the new parts, e.g. ``{"algorithm": {"ccvr": {"samples": 500}}}``.
        model: The run's own network, where it has one.
        data: The run's own data, where it has them.
        watch: Called with the new record.

    Raises:
        RecipeError: The method has a say in training.
        RunError: The source is not a finished run.
    """
    trained = RunFolder(Path(source))
    if trained.summary() is None:
        raise RunError(f"{source} is not a finished run; finish it with: fedfa run --resume --out {source}")
    before = trained.settings()
    recipe = f"{before.algorithm.recipe}+{method}"
    settings = Settings.resolve(merge(before.to_dict(), {"algorithm": {"recipe": recipe}}), options or {})
    old = {part.name for part in before.recipe().parts}
    added = [part for part in settings.recipe().parts if part.name not in old]
    for part in added:
        _check_acts_only_afterwards(part)
    folder = RunFolder(Path(out))
    laboratory = prepare(settings, model=model, data=data)
    folder.create(settings)
    try:
        shutil.copytree(trained.path / "clients", folder.path / "clients", dirs_exist_ok=True)
        for record in trained.metrics():
            if "survey" not in record:
                folder.append_metrics(record)
        tensors = load_tensors(trained.path / "checkpoint.safetensors")
        fresh = laboratory.initial_state().parts
        for part in added:
            tensors |= {f"{part.name}/{name}": value for name, value in contiguous(fresh[part.name]).items()}
        save_tensors(folder.path / "checkpoint.safetensors", tensors)
    finally:
        folder.close()
    return run(settings, out, resume=True, model=model, data=data, watch=watch)


def _check_acts_only_afterwards(part: Part[Any]) -> None:
    hooks: list[Callable[..., Any] | None] = [overridden(part, hook) for hook in _IN_TRAINING]
    if any(hooks) or part.base:
        raise RecipeError(
            f"part {part.name!r} has a say in the training; only methods that follow it (such as ccvr) can be added to "
            " a finished run: train anew with the whole recipe"
        )
