"""A run: an experiment recorded in a run directory, checkpointed and resumable."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfa
from fedfa.arguments import checks_arguments
from fedfa.errors import RunError
from fedfa.experiment.build import DataSource, ModelSource, evaluation_layer, with_own
from fedfa.experiment.config import Config, affects_result
from fedfa.experiment.experiment import Callback, Experiment
from fedfa.experiment.layers import flat
from fedfa.experiment.record import accuracies, costs, whose_accuracy
from fedfa.experiment.recorded_split import record_split
from fedfa.experiment.run_directory import RunDirectory
from fedfa.learning.metrics import Function
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import Tensors

Watcher = Callable[[dict[str, Any]], None]
"""Called with each round's record as soon as it is written."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run."""

    directory: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    model: Tensors

    @property
    def final_accuracy(self) -> float:
        """Accuracy of the final model on the test set.

        Raises:
            RunError: The run was paused before its end.
        """
        if not self.summary:
            raise RunError(f"{self.directory} is paused after {len(self.metrics)} records; run it to its end first")
        return float(self.summary["final_accuracy"])

    def __repr__(self) -> str:
        result = f"final accuracy {self.final_accuracy:.2%}" if self.summary else "paused"
        return f"<RunResult {self.directory}: {len(self.metrics)} records, {result}>"


@checks_arguments("run")
def run(
    config: Config,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    model: ModelSource | None = None,
    data: DataSource | None = None,
    callbacks: Sequence[Callback] = (),
    watch: Watcher | None = None,
    experiment: Callable[[Config], Experiment] | None = None,
    checkpoints: int = 1,
    metrics: Sequence[str | Function] = (),
    validation: Any = None,
    until: int | None = None,
) -> RunResult:
    """Train, evaluate and record everything in a run directory.

    Args:
        config: What to do.
        out: The run directory.
        resume: Continue the run in that directory (start it if there is none), as if it had never been stopped.
        overwrite: Replace a run that is in that directory.
        model: Your own network, instead of ``config.model.name``.
        data: Your own data, instead of ``config.data.name``: a federation, a data set, or whatever
            :func:`~fedfa.data.dataset_from` accepts.
        callbacks: Called after each round with the experiment and the record, before the record is written.
        watch: Called after each round with its record, once it is written.
        experiment: Builds the experiment in another way (another engine); model and data are then its own.
        checkpoints: How many checkpoints to keep.
        metrics: What evaluations compute besides accuracy and loss, in place of ``config.evaluation.metrics``.
        validation: Your own validation samples, or ``"clients:0.1"``, in place of ``config.data.validation``.
        until: Pause after this round; a later call with ``resume`` goes on from there. The result has no summary then,
            and the model is not tested: so too after the last round.

    Raises:
        FedfaError: With what is wrong and what to do.

    Example:
        >>> import tempfile
        >>> config = Config.preset("digits-c2", {"rounds": 2, "algorithm": {"name": "fedfa"}})
        >>> result = run(config, tempfile.mkdtemp() + "/run")
        >>> sorted(result.metrics[0])[:3]
        ['accuracy', 'bytes_down', 'bytes_up']
    """
    directory = RunDirectory(Path(out), checkpoints)
    config = with_own(config, model, data)
    if layer := evaluation_layer(metrics, validation):
        config = Config.resolve(config.to_dict(), layer)
    exists = (directory.path / "config.toml").exists()
    try:
        if resume and exists:
            recorded = directory.config()
            config = _as_recorded(config, recorded, model is not None, data is not None)
            check_same(recorded, config, directory.path)
            state = directory.reopen()
            longer = directory.config().rounds != config.rounds
            if longer and state is None and directory.summary() is not None:
                raise RunError(f"{directory.path} cannot be extended: it has no checkpoint, only the record of a run")
        else:
            directory.create(config, overwrite=overwrite)
            state, longer = None, False
        if longer or directory.summary() is None:
            if experiment is not None:
                trained = experiment(config)
                trained.callbacks += callbacks
            else:
                own = None if isinstance(validation, str) else validation
                trained = Experiment.from_config(
                    config, model=model, data=data, callbacks=callbacks, metrics=metrics, validation=own
                )
            directory.check_origin(trained.origin())
            if longer:  # the result of the shorter run is given up only now that nothing stands against it
                directory.extend(config, 0 if state is None else state.round)
            if not _record_rounds(trained, directory, state, watch, until):
                return RunResult(directory.path, {}, directory.metrics(), trained.state.model)
        summary = directory.summary()
        assert summary is not None
        return RunResult(directory.path, summary, directory.metrics(), directory.model())
    finally:
        directory.close()


def _record_rounds(
    experiment: Experiment,
    directory: RunDirectory,
    state: ServerState | None,
    watch: Watcher | None,
    until: int | None,
) -> bool:
    """Train the rounds that are missing; write records, checkpoints and the result. False if it paused before."""
    commit = source_commit()  # now: when the run ends, the files may no longer be those that were loaded
    config = experiment.config
    experiment.restore(state, directory.metrics(), directory.client_states)
    if (best := experiment.choice.best_record()) is not None:
        experiment.choice.restore(directory.best_state(best["round"]))
    directory.write_preprocessing(experiment.preprocessing)
    record_split(experiment, directory)
    if until is not None and until <= experiment.state.round < config.rounds:
        return False
    for record in experiment.rounds(progress=False):
        if experiment.choice.best_record() is record and (best_state := experiment.choice.state) is not None:
            directory.save_best(record.round, best_state)
        directory.append_metrics(record.to_dict())
        if experiment.observation is not None and not record.final_pass:
            directory.diagnostics.add(experiment.observation)
        if watch is not None:
            watch(record.to_dict())
        done = experiment.state.round
        if not record.final_pass and (done % config.checkpoint.every == 0 or done == config.rounds):
            directory.checkpoint(experiment.state)
        if until is not None and until <= done < config.rounds:
            directory.checkpoint(experiment.state)
            return False
    if experiment.state.round < config.rounds:  # a callback stopped the training
        directory.checkpoint(experiment.state)
    if until is not None:
        return False
    directory.finish(experiment.chosen_state, summarise(experiment, directory.metrics(), commit))
    return True


def _as_recorded(config: Config, recorded: Config, own_model: bool, own_data: bool) -> Config:
    """The config with the recorded names of a network or data set given again in Python.

    A script may have moved since, and earlier releases did not record where a network comes from. That it is the same
    network and the same data is checked by their fingerprints.
    """
    changed: dict[str, Any] = {}
    if own_model:
        changed["model"] = config.model.model_copy(update={"name": recorded.model.name})
    if own_data:
        changed["data"] = config.data.model_copy(update={"name": recorded.data.name})
    return config.model_copy(update=changed)


def same_run(recorded: Config, asked: Config) -> bool:
    """Whether two configs give the same result."""
    return not differences(recorded, asked)


def differences(recorded: Config, asked: Config) -> dict[str, str]:
    """The keys that affect the result and differ, each with its two values.

    Example:
        >>> differences(Config.preset("digits-c2"), Config.preset("digits-c2", {"local": {"lr": 0.5}}))
        {'local.lr': 'local.lr was 0.1, now 0.5'}
    """
    before, now = flat(recorded.to_dict()), flat(asked.to_dict())
    keys = sorted(key for key in before.keys() | now.keys() if affects_result(key))
    return {
        key: f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    }


def check_same(recorded: Config, asked: Config, path: Path) -> None:
    """Refuse to continue a run with another config; only more rounds are allowed.

    Raises:
        RunError: A key that affects the result differs.
    """
    different = differences(recorded, asked)
    if list(different) == ["rounds"] and asked.rounds > recorded.rounds:
        if asked.privacy.on:
            raise RunError(
                f"{path} cannot be extended: its privacy budget was planned for {recorded.rounds} rounds; start a new "
                f"run with --rounds {asked.rounds} and another --out"
            )
        if asked.uses_horizon:
            raise RunError(
                f"{path} cannot be extended: {asked.algorithm.name!r} follows a schedule over all {recorded.rounds} "
                f"rounds; start a new run with --rounds {asked.rounds} and another --out"
            )
        return
    if different:
        lines = "; ".join(different.values())
        raise RunError(f"{path} was started with another config: {lines}. Resume without them, or choose another --out")


def summarise(experiment: Experiment, metrics: Sequence[Mapping[str, Any]], commit: str | None) -> dict[str, Any]:
    """The result of an experiment, what it was made with and where."""
    config, dataset = experiment.config, experiment.federation.dataset
    tested = experiment.test() if experiment.evaluated_on == "validation" else None
    last: Mapping[str, Any] = next((one for one in reversed(metrics) if one.get("accuracy") is not None), {})
    values = last if tested is None else tested
    return {
        **accuracies(metrics, tested),
        "evaluated": {**whose_accuracy(metrics), "final": "test"},
        **{name: values[name] for name in ("metrics", "own_data", "chosen") if name in values},
        **({} if tested is None else {"test": {name: tested[name] for name in tested if name != "chosen"}}),
        "rounds": experiment.state.round,
        **({"planned_rounds": config.rounds} if experiment.state.round < config.rounds else {}),
        **costs(metrics),
        "algorithm": config.algorithm.name,
        "variant": config.algorithm.variant,
        "seeds": {"training": config.seed, "data": config.data.seed},
        "data": {"name": dataset.name, "fingerprint": dataset.fingerprint},
        "versions": {
            "fedfa": fedfa.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": processor_name(), "device": str(experiment.device), "system": platform.system()},
        "commit": commit,
    }


def processor_name() -> str:
    """The processor's own name for itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def source_commit() -> str | None:
    """The commit of fedfa's own source tree, marked where it has changes; None if it is not a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = git("rev-parse", "HEAD") if tracked else None
    return f"{commit} with changes" if commit and git("status", "--porcelain", "--", str(here.parent)) else commit
