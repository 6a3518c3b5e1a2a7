"""Experiments saved to run directories, and loaded from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import expression_of, register
from fedfa.arguments import checks_arguments
from fedfa.data import Federation
from fedfa.errors import RunError
from fedfa.experiment.build import DataSource, ModelSource
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.recorded_split import record_split
from fedfa.experiment.run import source_commit, summarise
from fedfa.experiment.run_directory import RunDirectory
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.metrics import Function
from fedfa.learning.round import ClientStatesInMemory
from fedfa.learning.tensors import ComponentTensors


class SavedClientStates(ClientStatesInMemory):
    """Client states of a run directory, which is only read; states of later rounds stay in memory."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__()
        self._directory = directory

    def load(self, client: int) -> ComponentTensors:
        """See :class:`~fedfa.learning.round.ClientStates`."""
        return self[client] if client in self else self._directory.load_client_state(client)

    def load_all(self) -> None:
        """Read the states of all clients into memory."""
        for client in self._directory.saved_clients():
            self.setdefault(client, self._directory.load_client_state(client))


def save(experiment: Experiment, path: Path, *, overwrite: bool = False) -> Path:
    """See :meth:`Experiment.save`."""
    states = experiment.client_states
    assert isinstance(states, ClientStatesInMemory)
    if isinstance(states, SavedClientStates):
        states.load_all()  # before anything is replaced: the directory may be the one they are in
    state, records = experiment.state, [one.to_dict() for one in experiment.records]
    origin, preprocessing = experiment.origin(), experiment.preprocessing
    # Only a finished experiment has a result: with validation samples, this is where its model meets the test set.
    finished = bool(records) and state.round == experiment.config.rounds
    summary = summarise(experiment, records, source_commit()) if finished else None
    best, chosen = experiment.choice.best_record(), experiment.chosen_state
    target = RunDirectory(path)
    target.check_writable(overwrite=overwrite)
    if path.is_dir() and any(path.iterdir()) and not (path / "config.toml").exists():
        raise RunError(f"{path} holds files that are no run; choose a new directory")
    # Written beside its place first: a failure leaves the run that is there as it was.
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    directory = RunDirectory(beside)
    try:
        directory.create(experiment.config)
        directory.check_origin(origin)
        directory.write_preprocessing(preprocessing)
        record_split(experiment, directory)
        for record in records:
            directory.append_metrics(record)
        for client, own in sorted(states.items()):
            directory.save_client_state(client, state.round, own)
        if best is not None:
            directory.save_best(best["round"], chosen)
        directory.checkpoint(state)
        directory.write_model(chosen)
        if summary is not None and "final_accuracy" in summary:
            directory.finish(chosen, summary)
        directory.close()
        target.take_over(beside, overwrite=overwrite)
    finally:
        directory.close()
        shutil.rmtree(beside, ignore_errors=True)
    return path


@checks_arguments("load")
def load(
    path: Path | str,
    *,
    algorithm: Algorithm | Component | type[Component] | None = None,
    model: ModelSource | None = None,
    data: DataSource | None = None,
    metrics: Sequence[str | Function] = (),
    validation: Any = None,
) -> Experiment:
    """Load an experiment from a run directory: to predict, to inspect, or to continue with the same bits.

    The directory is only read. Data are loaded when they are needed, not for predictions.

    Args:
        path: A directory that :meth:`Experiment.save`, :func:`fedfa.run` or ``fedfa run`` wrote.
        algorithm: A component class of your own that is defined in Python (its options are recorded), or the algorithm
            as it was given.
        model: The network, where it was given in Python and cannot be found by its name.
        data: The data, where they were given in Python.
        metrics: Functions of ``evaluation.metrics`` that were given in Python.
        validation: Validation samples that were given in Python.

    Raises:
        RunError: There is no run, it is damaged, or it was trained with another algorithm or other data.
    """
    directory = RunDirectory(Path(path))
    if isinstance(algorithm, type):
        register(algorithm)
    elif algorithm is not None:
        expression_of(algorithm)  # makes its components known
    config = directory.config()
    if algorithm is not None and not isinstance(algorithm, type):
        _check_algorithm(directory, config, algorithm)
    experiment = Experiment.__new__(Experiment)
    experiment._setup(config, model, data, (), metrics, validation)
    if isinstance(data, Federation):
        _check_data(directory, config, experiment.config, data)
    experiment.config = config  # as recorded: given again, a network or data set has the same meaning
    state, final = directory.saved(), directory.final_state()
    if state is None and final is None:
        raise RunError(f"{path} has neither a checkpoint nor a final model yet; continue it with fedfa run --resume")
    experiment._known_preprocessing = directory.preprocessing()
    experiment.restore(state or final, directory.metrics(), SavedClientStates(directory))
    if (best := experiment.choice.best_record()) is not None:
        experiment.choice.restore(directory.best_state(best["round"]))
    elif state is not None and final is not None and final.round == state.round:
        experiment._final_state = final
    return experiment


def _check_algorithm(directory: RunDirectory, config: Config, algorithm: Algorithm | Component) -> None:
    """Refuse another algorithm than the recorded one: given options would have no effect."""
    name, recorded = expression_of(algorithm)[0], config.algorithm.name
    given = algorithm.components if isinstance(algorithm, Algorithm) else [algorithm]
    built = {component.name: component for component in config.build_algorithm().components}
    if name != recorded or any(component.name not in built for component in given):
        raise RunError(f"{directory.path} was trained with {recorded!r}, not with {name!r}; {_LEAVE_OUT}")
    for component in given:
        if component != (other := built[component.name]):
            raise RunError(f"{directory.path} was trained with {other!r}, not with {component!r}; {_LEAVE_OUT}")


_LEAVE_OUT = "leave out `algorithm`, or give only the classes of your own components"


def _check_data(directory: RunDirectory, config: Config, given: Config, data: Federation) -> None:
    """Refuse other data than the recorded ones: continuing would not be the same training."""
    changed = [
        f"data.{key} = {getattr(config.data, key)!r}, not {getattr(given.data, key)!r}"
        for key in ("name", "normalise", "partition", "clients", "seed", "standardise", "augment")
        if getattr(config.data, key) != getattr(given.data, key)
    ]
    if not changed and directory.origin().get("data") not in (None, data.dataset.fingerprint):
        changed = ["other samples"]
    if changed:
        raise RunError(f"{directory.path} was trained with {'; '.join(changed)}; give the data it was trained with")
