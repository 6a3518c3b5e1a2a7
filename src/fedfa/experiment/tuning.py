"""Tuning: config values that do best on validation samples, found by TPE with successive halving.

Trials come in waves. Optuna's TPE proposes the values of a wave from the results of the waves before it. All trials of
a wave train for a ninth of the rounds (every seed of a trial is a run of its own), the best third goes on to a third,
the best third of those to the end: a promoted trial continues from its checkpoint, so no round is trained twice. What
counts is the mean over seeds of the monitored value on validation samples; no trial is evaluated on the test set.

Everything is decided by the seed: each draw has a generator of its own, and results are handed to Optuna in the order
of the trials at the end of a wave. So tuning gives the same winner for any number of processes, and after a kill. The
study is stored beside the runs in a file that Optuna's own tools read.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.errors import ConfigError, FedfaError, RunError
from fedfa.experiment.choosing import monitored
from fedfa.experiment.config import Config
from fedfa.experiment.files import read_json, write_json
from fedfa.experiment.layers import nest_all, parse_value, value_text
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.run_processes import RunProcesses
from fedfa.experiment.sweep import Cell, CellWatcher, Comparison
from fedfa.learning.metrics import metric
from fedfa.learning.random import stream

if TYPE_CHECKING:
    import optuna

TRIALS = "trials.json"
"""The file of all trials."""
FACTOR = 3
"""Of the trials of a rung one in so many goes on, for so many times the rounds."""
RUNGS = 3
WAVE = FACTOR ** (RUNGS - 1)
"""Trials in a wave: as many as leave one that trains to the end."""
LEAST_TRIALS = 6
"""With fewer trials nothing is said about the importance of parameters."""


@dataclass(frozen=True)
class Parameter:
    """A config key with the values that tuning may give it."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()
    """Any of these, in place of a range."""

    @property
    def whole(self) -> bool:
        """Whether it is a whole number."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, trial: optuna.trial.Trial) -> Any:
        """The value of a trial."""
        if self.choices:  # by text: Optuna stores plain values only
            return parse_value(str(trial.suggest_categorical(self.key, [value_text(one) for one in self.choices])))
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)


def parse_parameter(text: str) -> Parameter:
    """``KEY=log:LOW..HIGH``, ``KEY=LOW..HIGH`` or ``KEY=VALUE,VALUE`` from the command line.

    Example:
        >>> parse_parameter("local.lr=log:0.001..0.3")
        Parameter(key='local.lr', low=0.001, high=0.3, log=True, choices=())
        >>> parse_parameter("local.epochs=1..10").whole, parse_parameter("local.batch_size=16,64").choices
        (True, (16, 64))
    """
    key, sign, raw = (piece.strip() for piece in text.partition("="))
    advice = "write KEY=log:LOW..HIGH, KEY=LOW..HIGH or KEY=VALUE,VALUE, e.g. --param local.lr=log:0.001..0.3"
    if not sign or not key or not raw:
        raise ConfigError(f"--param {text!r}: {advice}")
    log, spread = raw.startswith("log:"), raw.removeprefix("log:")
    if ".." in spread:
        low, high = (parse_value(piece.strip()) for piece in spread.split("..", 1))
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if not numbers or not math.isfinite(low) or not math.isfinite(high) or low >= high or (log and low <= 0):
            raise ConfigError(
                f"--param {text!r}: a range has two numbers, the lower first{', above 0' if log else ''}; {advice}"
            )
        return Parameter(key, low, high, log)
    choices = tuple(parse_value(piece.strip()) for piece in spread.split(","))
    if log or len(choices) < 2 or len(set(map(value_text, choices))) < len(choices):
        raise ConfigError(f"--param {text!r}: {advice}")
    return Parameter(key, choices=choices)


@dataclass(frozen=True)
class TrialCell(Cell):
    """One seed of a trial, trained up to a rung; never tested."""

    until: int = field(default=0, kw_only=True)

    def finished(self) -> bool:
        """Whether the rung is reached."""
        record = RunDirectory(self.directory)
        if not (self.directory / "config.toml").exists():
            return False
        with self._reading():
            if not self.matches(record.config()):
                return False
            state = record.saved()
            records = record.metrics()
        if self.until >= self.config.rounds and self.config.build_algorithm().has_final_pass:
            return any("final_pass" in one for one in records)
        return state is not None and state.round >= self.until

    def command(self) -> list[str]:
        """The arguments of ``fedfa`` that start or continue it."""
        return [*super().command(), "--until", str(self.until)]


@dataclass(frozen=True)
class TrialResult:
    """What a trial came to."""

    number: int
    values: Mapping[str, Any]
    """By config key."""
    rounds: int
    """Of the last rung that it reached."""
    scores: tuple[float, ...]
    """The monitored value of each seed; larger is better (losses are negated)."""
    failed: str = ""
    """Why it has no result."""
    by_rung: Mapping[int, float] = field(default_factory=dict)
    """Mean over seeds at each rung that it reached, by rounds."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.scores) if self.scores else -math.inf

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None


@dataclass(frozen=True)
class TuningPlan:
    """What to tune, and how much."""

    layers: tuple[Mapping[str, Any], ...]
    """Config layers of all trials."""
    parameters: tuple[Parameter, ...]
    trials: int
    seeds: tuple[int, ...]
    out: Path
    seed: int = 1
    """Of the proposals."""

    def __post_init__(self) -> None:
        keys = [one.key for one in self.parameters]
        if not keys:
            raise ConfigError("nothing to tune; name a parameter, e.g. --param local.lr=log:0.001..0.3")
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"--param {twice[0]} is given twice; give it once")
        if wrong := [key for key in keys if key in ("seed", "rounds", "data.validation", "data.seed")]:
            raise ConfigError(f"--param {wrong[0]}: tuning compares trials with the same {wrong[0]}; leave it out")
        if self.base.data.validation is None:
            raise ConfigError('tuning goes by validation samples: set data.validation, e.g. to "clients:0.1"')
        if self.base.evaluation.patience is not None:
            raise ConfigError("tuning stops poor trials by itself; leave evaluation.patience out")
        for one in self.parameters:  # what no trial can have is found now
            for value in one.choices or (one.low, one.high):
                self.config({one.key: value}, self.seeds[0])

    @property
    def base(self) -> Config:
        """The config without any tuned value."""
        return Config.resolve(*self.layers)

    @property
    def lower_is_better(self) -> bool:
        """Whether scores are negated values."""
        return _lower_is_better(self.base)

    @property
    def rungs(self) -> list[int]:
        """Rounds after which trials are compared; the last is the end."""
        found = [self.base.rounds]
        while len(found) < RUNGS and found[0] // FACTOR >= 1:
            found.insert(0, found[0] // FACTOR)
        return found

    def config(self, values: Mapping[str, Any], seed: int) -> Config:
        """The config of a trial's run."""
        return Config.resolve(*self.layers, nest_all(values), {"seed": seed})

    def to_dict(self) -> dict[str, Any]:
        """What a stored study must agree with."""
        return {
            "config": self.base.to_dict(),
            "parameters": [{**vars(one), "choices": list(one.choices)} for one in self.parameters],
            "trials": self.trials,
            "seeds": list(self.seeds),
            "seed": self.seed,
        }


@dataclass
class Tuner:
    """Runs what is missing of a tuning plan; call it again to continue."""

    plan: TuningPlan
    jobs: int | None = None
    watch: CellWatcher = lambda cell, record: None
    progress: Callable[[str], None] = lambda text: None
    """Called with what is being done."""
    processes: RunProcesses | None = None
    """Where runs are trained; left out, processes of its own."""
    results: dict[int, TrialResult] = field(default_factory=dict)

    def run(self) -> TrialResult:
        """Run all waves; return the winner.

        Raises:
            RunError: Another tuning is in the directory, or no trial came to an end.
        """
        plan = self.plan
        self._check_stored()
        study = _study(plan)
        with self.processes or RunProcesses() as processes:
            for first in range(0, plan.trials, WAVE):
                self._wave(study, list(range(first, min(first + WAVE, plan.trials))), processes)
        if not (whole := [one for one in self.results.values() if one.scores and one.rounds == plan.rungs[-1]]):
            reasons = "; ".join(dict.fromkeys(one.failed for one in self.results.values() if one.failed))
            raise RunError(f"no trial came to an end: {reasons}")
        self._write(study)
        return max(whole, key=lambda one: (one.mean, -one.number))

    def ranked(self) -> list[TrialResult]:
        """All trials, those that trained longest first, then by their mean."""
        return sorted(self.results.values(), key=lambda one: (-one.rounds, -one.mean, one.number))

    def _check_stored(self) -> None:
        path, asked = self.plan.out / "tune.json", json.loads(json.dumps(self.plan.to_dict()))
        self.plan.out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, asked)
            return
        stored = read_json(path)
        if different := [key for key in asked if stored.get(key) != asked[key]]:
            raise RunError(
                f"{self.plan.out} holds a tuning with other {', '.join(different)}; repeat its command to continue it, "
                "or choose another --out"
            )

    def _wave(self, study: optuna.study.Study, numbers: list[int], processes: RunProcesses) -> None:
        plan = self.plan
        values = {number: self._values(study, number) for number in numbers}
        alive = list(numbers)
        for place, rung in enumerate(plan.rungs):
            cells = {
                number: [self._cell(number, values[number], seed, rung) for seed in plan.seeds] for number in alive
            }
            self.progress(
                f"trials {numbers[0] + 1} to {numbers[-1] + 1} of {plan.trials}: {len(alive)} of them to round {rung}"
            )
            work = Comparison(
                [cell for each in cells.values() for cell in each], self.jobs, self.watch, processes=processes,
                keep_processes=True,
            )  # fmt: skip
            work.run()
            if work.busy:
                raise RunError(f"another process is working on {', '.join(work.busy)}; wait for it or stop it")
            for number in alive:
                self.results[number] = self._result(number, values[number], cells[number], rung, work.failed)
            alive = [number for number in alive if not self.results[number].failed]
            if place + 1 < len(plan.rungs):
                alive.sort(key=lambda number: (-self.results[number].mean, number))
                alive = sorted(alive[: math.ceil(len(alive) / FACTOR)])
        for number in numbers:
            _tell(study, self.results[number], plan.rungs)

    def _values(self, study: optuna.study.Study, number: int) -> dict[str, Any]:
        """The config values of a trial, proposed once and stored."""
        import optuna

        while len(study.trials) <= number:
            study.ask()
        trial = optuna.trial.Trial(study, study.trials[number]._trial_id)
        found = {}
        for one in self.plan.parameters:
            # A sampler per draw: a tuning that was killed anywhere proposes what it would have proposed.
            seed = int(stream(self.plan.seed, f"tune {one.key}", number).integers(2**32))
            study.sampler = trial.study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=WAVE, multivariate=False, constant_liar=True, seed=seed
            )
            found[one.key] = one.draw(trial)
        return found

    def _cell(self, number: int, values: Mapping[str, Any], seed: int, rung: int) -> TrialCell:
        config = self.plan.config(values, seed)
        directory = self.plan.out / "trials" / f"{number + 1:04d}-s{seed}"
        return TrialCell(f"trial {number + 1}", config, directory, until=rung)

    def _result(
        self, number: int, values: Mapping[str, Any], cells: Sequence[TrialCell], rung: int, failed: Mapping[str, str]
    ) -> TrialResult:
        before = self.results[number].by_rung if number in self.results else {}
        if reasons := [failed[cell.name] for cell in cells if cell.name in failed]:
            return TrialResult(number, values, rung, (), reasons[0], before)
        scores = [score(cell.config, RunDirectory(cell.directory).metrics(), rung) for cell in cells]
        if missing := [cell.name for cell, one in zip(cells, scores, strict=True) if one is None]:
            reason = f"{missing[0]} has no evaluation up to round {rung}"
            return TrialResult(number, values, rung, (), reason, before)
        found = tuple(one for one in scores if one is not None)
        return TrialResult(number, values, rung, found, by_rung={**before, rung: statistics.fmean(found)})

    def _write(self, study: optuna.study.Study) -> None:
        plan, config = self.plan, self.plan.base
        results = [
            {"trial": one.number + 1, "values": dict(one.values), "rounds": one.rounds, "scores": list(one.scores),
             "by_rung": {str(rung): mean for rung, mean in one.by_rung.items()},
             **({"failed": one.failed} if one.failed else {})}
            for one in self.ranked()
        ]  # fmt: skip
        record = {
            "algorithm": config.algorithm.name,
            "monitor": config.evaluation.monitor,
            "lower_is_better": plan.lower_is_better,
            "validation": config.data.validation,
            "seeds": list(plan.seeds),
            "rungs": plan.rungs,
            "parameters": [{**vars(one), "choices": list(one.choices)} for one in plan.parameters],
            "importance": importance(study, list(self.results.values()), plan.rungs[0]),
            "trials": results,
        }
        write_json(plan.out / TRIALS, record)


def score(config: Config, records: Sequence[Mapping[str, Any]], rounds: int) -> float | None:
    """What a run came to on its validation samples up to a round: its best, or where the last is chosen its last."""
    monitor, lower = config.evaluation.monitor, _lower_is_better(config)
    known = [one for one in records if one["round"] <= rounds or "final_pass" in one]
    if wrong := [one for one in known if (one.get("evaluated") or {}).get("on", "validation") != "validation"]:
        raise FedfaError(f"round {wrong[0]['round']} was evaluated on the test set; tuning goes by validation samples")
    values = [value for one in known if (value := monitored(one, monitor, lower=lower)) is not None]
    if not values:
        return None
    own = any("clients" in ((one.get(key) or {}).get("model") for key in ("evaluated", "own_data")) for one in known)
    return values[-1] if own or config.evaluation.choose == "last" else max(values)


def importance(study: optuna.study.Study, results: Sequence[TrialResult], rung: int) -> dict[str, float]:
    """How much of the spread of the scores each parameter explains by itself, as shares of 1.

    Functional ANOVA over a random forest (F. Hutter, H. Hoos, K. Leyton-Brown, ICML 2014; Optuna's). It goes by the
    first rung, which all trials reach with equally many rounds; those that failed have no score. Empty where there is
    one parameter only, or too little to fit.
    """
    import optuna

    scored = [one for one in results if rung in one.by_rung]
    if len(scored) < LEAST_TRIALS or len({one.by_rung[rung] for one in scored}) < 2:
        return {}
    stored = study.trials
    if len(stored[scored[0].number].params) < 2:
        return {}
    seen = optuna.create_study(direction="maximize")
    for one in scored:
        trial = stored[one.number]
        seen.add_trial(
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=one.by_rung[rung]
            )
        )  # fmt: skip
    try:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=1)
        return dict(optuna.importance.get_param_importances(seen, evaluator=evaluator))
    except ImportError:  # the forest is scikit-learn's
        return {}


def _lower_is_better(config: Config) -> bool:
    monitor = config.evaluation.monitor
    return monitor == "loss" or (monitor in config.evaluation.metrics and metric(monitor).lower_is_better)


def _study(plan: TuningPlan) -> optuna.study.Study:
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError("tuning needs Optuna: pip install 'fedfa[tune]'") from None
    optuna.logging.set_verbosity(logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(plan.out / "study.log")))
    return optuna.create_study(storage=storage, study_name="fedfa", direction="maximize", load_if_exists=True)


def _tell(study: optuna.study.Study, result: TrialResult, rungs: Sequence[int]) -> None:
    """Hand a trial's result to Optuna, unless that was done before."""
    import optuna

    stored = study.trials[result.number]
    if stored.state.is_finished():
        return
    if not result.scores:
        study.tell(result.number, state=optuna.trial.TrialState.FAIL)
    elif result.rounds == rungs[-1]:
        study.tell(result.number, result.mean)
    else:
        optuna.trial.Trial(study, stored._trial_id).report(result.mean, step=result.rounds)
        study.tell(result.number, state=optuna.trial.TrialState.PRUNED)
