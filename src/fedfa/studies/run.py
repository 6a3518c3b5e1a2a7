"""One run: rounds of cohort, training, server step, evaluation, record, checkpoint."""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfa
from fedfa.engines.engine import Engine
from fedfa.errors import RunError
from fedfa.learning.client import MODEL, RoundPlan
from fedfa.learning.evaluate import mean_evaluation
from fedfa.learning.part import Role
from fedfa.learning.server import ServerState, finish_round, finish_survey
from fedfa.learning.sums import Total, sums_nbytes
from fedfa.learning.tensors import Tensors, flatten, nbytes
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import flat
from fedfa.studies.outcome import accuracies, costs
from fedfa.studies.settings import Settings
from fedfa.studies.setup import DataSource, Laboratory, ModelMaker, prepare

Watcher = Callable[[dict[str, Any]], None]
"""Called with each round's record as soon as it is written."""

Finish = Callable[..., ServerState]
"""What the server does with the total: :func:`finish_round` or :func:`finish_survey`."""

FREE_ON_RESUME = {
    "data.dir", "data.offline", "checkpoint.every",
    "engine.kind", "engine.address", "engine.workers", "engine.execution",
}  # fmt: skip
"""Settings that do not change a result: they may differ when a run is resumed. (Stacked clients that are asked for by
name may change last digits, and a warning says by how much.)"""


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    model: Tensors

    @property
    def final_accuracy(self) -> float:
        """Accuracy of the global model on the test set after the last round."""
        return float(self.summary["final_accuracy"])


def run(
    settings: Settings,
    out: Path | str,
    *,
    resume: bool = False,
    model: ModelMaker | None = None,
    data: DataSource | None = None,
    watch: Watcher | None = None,
    laboratory: Callable[[Settings], Laboratory] | None = None,
) -> RunResult:
    """Train, evaluate and record.

    Args:
        settings: What to do.
        out: The run folder.
        resume: Go on with the run in that folder (begin it if there is none), as if it had never been stopped.
        model: Makes your own network (or is one), instead of ``settings.model.name``.
        data: Your own data, instead of ``settings.data.name``: a :class:`~fedfa.data.DataSet`, or whatever
            :func:`~fedfa.data.dataset_from` makes one of.
        watch: Called after each round with its record.
        laboratory: Makes what the run works with, in its own way (another engine); model and data are then its own.

    Raises:
        FedfaError: With what is wrong and what to do.

    Example:
        >>> import tempfile
        >>> settings = Settings.preset("digits-c2", {"rounds": 2, "algorithm": {"recipe": "fedfa"}})
        >>> result = run(settings, tempfile.mkdtemp() + "/run")
        >>> sorted(result.metrics[0])[:3]
        ['accuracy', 'bytes_down', 'bytes_up']
    """
    folder = RunFolder(Path(out))
    settings = settings.with_own(network=model is not None, data=data is not None)
    exists = (folder.path / "config.toml").exists()
    try:
        if resume and exists:
            check_same(folder.settings(), settings, folder.path)
            state = folder.reopen()
            longer = folder.settings().rounds != settings.rounds
            if longer and state is None and folder.summary() is not None:
                raise RunError(f"{folder.path} cannot be made longer: it has no checkpoint, only the record of a run")
        else:
            folder.create(settings)
            state, longer = None, False
        summary = None if longer else folder.summary()
        if summary is None:
            lab = laboratory(settings) if laboratory is not None else prepare(settings, model=model, data=data)
            folder.check_origin(lab.origin())
            if longer:  # only now that nothing speaks against it: the shorter run's result is given up
                folder.extend(settings, 0 if state is None else state.round)
            summary = _Rounds(lab, folder, watch).run(state or lab.initial_state())
        return RunResult(folder.path, summary, folder.metrics(), folder.model())
    finally:
        folder.close()


def same_run(recorded: Settings, asked: Settings) -> bool:
    """Whether two settings give the same result."""
    return not differences(recorded, asked)


def differences(recorded: Settings, asked: Settings) -> dict[str, str]:
    """The settings that have a say in the result and are not the same, each by its key, in words.

    Example:
        >>> differences(Settings.preset("digits-c2"), Settings.preset("digits-c2", {"local": {"lr": 0.5}}))
        {'local.lr': 'local.lr was 0.1, now 0.5'}
    """
    before, now = flat(recorded.to_dict()), flat(asked.to_dict())
    keys = sorted((before.keys() | now.keys()) - FREE_ON_RESUME)
    return {
        key: f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    }


def check_same(recorded: Settings, asked: Settings, path: Path) -> None:
    """Refuse to go on with a run under other settings; only more rounds are allowed."""
    different = differences(recorded, asked)
    if list(different) == ["rounds"] and asked.rounds > recorded.rounds:
        if asked.recipe().uses_horizon:
            raise RunError(
                f"{path} cannot be made longer: {asked.algorithm.recipe!r} follows a schedule over all "
                f"{recorded.rounds} rounds; start anew with --rounds {asked.rounds} and another --out"
            )
        return
    if different:
        lines = "; ".join(different.values())
        raise RunError(f"{path} was started with other settings: {lines}. Resume without them, or choose another --out")


class _Rounds:
    """The loop over rounds."""

    def __init__(self, laboratory: Laboratory, folder: RunFolder, watch: Watcher | None) -> None:
        self.lab, self.settings, self.folder, self.watch = laboratory, laboratory.settings, folder, watch
        self.sizes = laboratory.sizes
        self.has_local = Role.LOCAL in laboratory.roles.values()
        self.observer = laboratory.observer()
        self.commit = source_commit()  # now: when the run ends, the files may no longer be those that were loaded

    def run(self, state: ServerState) -> dict[str, Any]:
        """All rounds that are missing, and what follows the last one."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the result must not depend on how many cores there are
        engine: Engine | None = None
        try:
            engine = self.lab.engine(state)
            while state.round < self.settings.rounds:
                state = self._round(engine, state)
                if state.round % self.settings.checkpoint.every == 0 or state.round == self.settings.rounds:
                    self.folder.checkpoint(state)
            if self.lab.recipe.surveys:
                state = self._survey(engine, state)
        finally:
            if engine is not None:
                engine.close()
            torch.set_num_threads(threads)
        summary = summarise(self.settings, self.folder.metrics(), self.lab, self.commit)
        self.folder.finish(state, summary)
        return summary

    def _round(self, engine: Engine, state: ServerState) -> ServerState:
        lab, cohort = self.lab, self.lab.cohort(state.round)
        local = self.settings.local.in_round(state.round)
        if lab.recipe.pools_data:  # one site with everybody's data does the work of this round's cohort
            local = replace(local, steps=sum(local.steps_on(int(self.sizes[client])) for client in cohort))
            cohort = [0]
        return self._exchange(engine, state, lab.plan(state, local), cohort, finish_round)

    def _survey(self, engine: Engine, state: ServerState) -> ServerState:
        """After the last round: every client that holds data tells what the parts ask of it.

        Not checkpointed: it follows from the last checkpoint, so a run that is killed here repeats it, and a run that
        is made longer goes on from the model before it.
        """
        plan = replace(self.lab.plan(state, self.settings.local.in_round(state.round)), survey=True)
        clients = [0] if self.lab.recipe.pools_data else [int(c) for c in np.flatnonzero(self.sizes)]
        return self._exchange(engine, state, plan, clients, finish_survey)

    def _exchange(
        self, engine: Engine, state: ServerState, plan: RoundPlan, clients: list[int], finish: Finish
    ) -> ServerState:
        """Send the plan to the clients, add up what they return, let the server finish, evaluate, record."""
        lab, before, observer = self.lab, state, self.observer
        started = time.perf_counter()
        total = Total(keep_each=lab.recipe.needs_each)
        samples, bytes_up, cpu_seconds, losses = 0, 0, 0.0, []
        took_part: list[int] = []  # all of them, unless the engine goes on without some
        asked = plan if observer is None else observer.ask(plan, clients)
        for result in engine.train(asked, clients, self.folder.load_kept):
            if observer is not None:
                result = observer.take(result)
            total.add(result.sums)
            took_part.append(result.client)
            if not plan.survey:
                self.folder.save_kept(result.client, state.round + 1, result.kept)
            samples += result.sample_steps
            bytes_up += sums_nbytes(result.sums)
            cpu_seconds += result.cpu_seconds
            losses += [] if result.loss is None or not math.isfinite(result.loss) else [result.loss]
        state = finish(lab.recipe, lab.roles, state, total, lab.task.num_clients, self.settings.seed)
        seconds = time.perf_counter() - started
        sent = nbytes({n: t for n, t in plan.model.items() if lab.roles[n].travels})
        record: dict[str, Any] = {
            "round": state.round + plan.survey,
            **self._evaluate(engine, state, took_part),
            "train_loss": sum(losses) / len(losses) if losses else None,
            "cohort": took_part,
            "train_seconds": round(seconds, 4),
            "cpu_seconds": round(cpu_seconds, 4),
            "samples_per_second": round(samples / seconds, 1),
            "bytes_up": bytes_up,
            "bytes_down": (sent + nbytes(flatten(plan.received))) * len(clients),
            "learning_rate": plan.local.lr,
            **({"survey": True} if plan.survey else {}),
            **engine.remarks(),
        }
        self.folder.append_metrics(record)
        if observer is not None and (seen := observer.observe(before, state)) is not None:
            self.folder.insight.add(seen)
        if self.watch is not None:
            self.watch(record)
        return state

    def _evaluate(self, engine: Engine, state: ServerState, cohort: list[int]) -> dict[str, Any]:
        due = state.round % self.settings.evaluation.every == 0 or state.round == self.settings.rounds
        if not due:
            return {"accuracy": None, "loss": None, "class_accuracy": None, "domain_accuracy": None}
        received = self.lab.recipe.broadcast(state.parts, state.round)
        by_client: dict[str, Any] = {}
        if self.has_local:  # no global model exists: this round's clients, each with its own tensors on its own domains
            own = {client: {**state.model, **self.folder.load_kept(client).get(MODEL, {})} for client in cohort}
            each = engine.evaluate_each(own, received)
            evaluation = mean_evaluation(list(each.values()))
            by_client = {"client_accuracy": {str(client): one.accuracy for client, one in each.items()}}
        else:
            evaluation = engine.evaluate(state.model, received)
        return {
            "accuracy": evaluation.accuracy,
            "loss": evaluation.loss if math.isfinite(evaluation.loss) else None,  # JSON has no infinity
            "class_accuracy": evaluation.class_accuracy,
            "domain_accuracy": evaluation.domain_accuracy,
            **by_client,
        }


def summarise(settings: Settings, metrics: list[dict[str, Any]], lab: Laboratory, commit: str | None) -> dict[str, Any]:
    """The result of a run, what it was made with and where."""
    return {
        **accuracies(metrics),
        "rounds": settings.rounds,
        **costs(metrics),
        "algorithm": settings.algorithm.recipe,
        "variant": settings.algorithm.variant,
        "seeds": {"training": settings.seed, "data": settings.data.seed},
        "data": {"name": lab.federation.dataset.name, "fingerprint": lab.federation.dataset.fingerprint},
        "versions": {
            "fedfa": fedfa.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": processor_name(), "device": str(lab.device), "system": platform.system()},
        "commit": commit,
    }


def processor_name() -> str:
    """What the processor calls itself."""
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
