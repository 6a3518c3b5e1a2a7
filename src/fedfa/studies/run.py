"""One run: rounds of cohort, training, server step, evaluation, record, checkpoint."""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfa
from fedfa.data import DataSet
from fedfa.engines.engine import Engine
from fedfa.errors import RunError
from fedfa.learning.client import MODEL, RoundPlan
from fedfa.learning.cohort import choose_cohort
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.part import Role
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total, sums_nbytes
from fedfa.learning.tensors import Tensors, flatten, nbytes
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import flat
from fedfa.studies.settings import Settings
from fedfa.studies.setup import Laboratory, ModelMaker, prepare

Watcher = Callable[[dict[str, Any]], None]
"""Called with each round's record as soon as it is written."""


FREE_ON_RESUME = {"data.dir", "data.offline", "checkpoint.every"}
"""Settings that cannot change a result: they may differ when a run is resumed."""


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
    data: DataSet | None = None,
    watch: Watcher | None = None,
) -> RunResult:
    """Train, evaluate and record.

    Args:
        settings: What to do.
        out: The run folder.
        resume: Go on with the run in that folder (begin it if there is none), as if it had never been stopped.
        model: Makes your own network (or is one), instead of ``settings.model.name``.
        data: Your own data set, instead of ``settings.data.name``.
        watch: Called after each round with its record.

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
    exists = (folder.path / "config.toml").exists()
    try:
        if resume and exists:
            check_same(folder.settings(), settings, folder.path)
            state = folder.reopen()
            if folder.settings().rounds != settings.rounds:
                folder.extend(settings)
        else:
            folder.create(settings)
            state = None
        summary = folder.summary()
        if summary is None:
            laboratory = prepare(settings, model=model, data=data)
            folder.check_origin(laboratory.origin())
            summary = _Rounds(laboratory, folder, watch).run(state or laboratory.initial_state())
        return RunResult(folder.path, summary, folder.metrics(), folder.model())
    finally:
        folder.close()


def same_run(recorded: Settings, asked: Settings) -> bool:
    """Whether two settings give the same result."""
    return not _differences(flat(recorded.to_dict()), flat(asked.to_dict()))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    keys = sorted((before.keys() | now.keys()) - FREE_ON_RESUME)
    return [key for key in keys if before.get(key) != now.get(key)]


def check_same(recorded: Settings, asked: Settings, path: Path) -> None:
    """Refuse to go on with a run under other settings; only more rounds are allowed."""
    before, now = flat(recorded.to_dict()), flat(asked.to_dict())
    different = _differences(before, now)
    if different == ["rounds"] and asked.rounds > recorded.rounds:
        return
    if different:
        lines = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in different)
        raise RunError(f"{path} was started with other settings: {lines}. Resume without them, or choose another --out")


class _Rounds:
    """The loop over rounds."""

    def __init__(self, laboratory: Laboratory, folder: RunFolder, watch: Watcher | None) -> None:
        self.lab, self.settings, self.folder, self.watch = laboratory, laboratory.settings, folder, watch
        self.sizes: np.ndarray = laboratory.federation.partition.sizes
        self.has_local = Role.LOCAL in laboratory.roles.values()

    def run(self, state: ServerState) -> dict[str, Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the result must not depend on how many cores there are
        engine = self.lab.engine()
        try:
            while state.round < self.settings.rounds:
                state = self._round(engine, state)
                if state.round % self.settings.checkpoint.every == 0 or state.round == self.settings.rounds:
                    self.folder.checkpoint(state)
        finally:
            engine.close()
            torch.set_num_threads(threads)
        summary = summarise(self.settings, self.folder.metrics(), self.lab)
        self.folder.finish(state, summary)
        return summary

    def _round(self, engine: Engine, state: ServerState) -> ServerState:
        settings, lab = self.settings, self.lab
        cohort = choose_cohort(
            self.sizes, settings.cohort.count(len(self.sizes)), settings.cohort.selection, settings.seed, state.round
        )
        plan = RoundPlan(
            round=state.round,
            model=state.model,
            received=lab.recipe.broadcast(state.parts, state.round),
            local=settings.local.in_round(state.round),
            seed=settings.seed,
        )
        started = time.perf_counter()
        total = Total(keep_each=lab.recipe.needs_each)
        samples, bytes_up, losses = 0, 0, []
        for result in engine.train(plan, cohort, self.folder.load_kept):
            total.add(result.sums)
            self.folder.save_kept(result.client, state.round + 1, result.kept)
            samples += result.sample_steps
            bytes_up += sums_nbytes(result.sums)
            losses += [] if result.loss is None or not math.isfinite(result.loss) else [result.loss]
        state = finish_round(lab.recipe, lab.roles, state, total, len(self.sizes))
        seconds = time.perf_counter() - started
        sent = nbytes({n: t for n, t in plan.model.items() if lab.roles[n] is Role.SHARED})
        record: dict[str, Any] = {
            "round": state.round,
            **self._evaluate(engine, state, cohort),
            "train_loss": sum(losses) / len(losses) if losses else None,
            "cohort": cohort,
            "train_seconds": round(seconds, 4),
            "samples_per_second": round(samples / seconds, 1),
            "bytes_up": bytes_up,
            "bytes_down": (sent + nbytes(flatten(plan.received))) * len(cohort),
            "learning_rate": plan.local.lr,
        }
        self.folder.append_metrics(record)
        if self.watch is not None:
            self.watch(record)
        return state

    def _evaluate(self, engine: Engine, state: ServerState, cohort: list[int]) -> dict[str, Any]:
        due = state.round % self.settings.evaluation.every == 0 or state.round == self.settings.rounds
        if not due:
            return {"accuracy": None, "loss": None, "class_accuracy": None, "domain_accuracy": None}
        if self.has_local:  # no global model exists: the mean over this round's clients, each with its own tensors
            each = [engine.evaluate({**state.model, **self.folder.load_kept(c).get(MODEL, {})}) for c in cohort]
            evaluation = mean_evaluation(each)
        else:
            evaluation = engine.evaluate(state.model)
        return {
            "accuracy": evaluation.accuracy,
            "loss": evaluation.loss if math.isfinite(evaluation.loss) else None,  # JSON has no infinity
            "class_accuracy": evaluation.class_accuracy,
            "domain_accuracy": evaluation.domain_accuracy,
        }


def mean_evaluation(each: list[Evaluation]) -> Evaluation:
    """The mean of several evaluations on one test set."""
    by_class = [
        None if any(value is None for value in values) else sum(v for v in values if v is not None) / len(each)
        for values in zip(*(one.class_accuracy for one in each), strict=True)
    ]
    domains = {name: sum(one.domain_accuracy[name] for one in each) / len(each) for name in each[0].domain_accuracy}
    return Evaluation(
        sum(one.accuracy for one in each) / len(each), sum(one.loss for one in each) / len(each), by_class, domains
    )


def summarise(settings: Settings, metrics: list[dict[str, Any]], lab: Laboratory) -> dict[str, Any]:
    """The result of a run: always final, best and the mean of the last ten evaluations, named as such."""
    evaluated = [record["accuracy"] for record in metrics if record["accuracy"] is not None]
    return {
        "final_accuracy": evaluated[-1],
        "best_accuracy": max(evaluated),
        "last10_accuracy": sum(evaluated[-10:]) / len(evaluated[-10:]),
        "rounds": settings.rounds,
        "seconds": round(sum(record["train_seconds"] for record in metrics), 2),
        "bytes_up": sum(record["bytes_up"] for record in metrics),
        "bytes_down": sum(record["bytes_down"] for record in metrics),
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
        "commit": source_commit(),
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
