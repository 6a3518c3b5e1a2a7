"""`fedfa theory`: both sides of the paper's lemmas and theorems, on real client updates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.errors import FedfaError, RunError

if TYPE_CHECKING:
    from fedfa.diagnostics.descent import OneRound
    from fedfa.diagnostics.theorems import Divergence, Operations, Smoothness
    from fedfa.diagnostics.theory import Agreement, Finding
    from fedfa.engines.engine import Engine
    from fedfa.experiment.config import Config
    from fedfa.experiment.experiment import Experiment
    from fedfa.learning.client import RoundPlan
    from fedfa.learning.context import LocalTraining
    from fedfa.learning.round import ServerState
    from fedfa.learning.tensors import ComponentTensors

STATEMENT = (
    "The tables compare differences between two clients of one round, for every pair and class.",
    "Lemma 1 (classifier updates) assumes that within a class of one client the mean of p·h is the product of the "
    "means of p and h. Each client's own n replaces the lemma's equal n. The lemma is summed over the client's steps. "
    '"Exact steps" follow the gradient of the cross-entropy: they differ from the update by weight decay, momentum or '
    "calibration, and from the lemma by its assumption.",
    "Lemma 2 (change of the mean features of a class that both clients have) is exact if features are free variables. "
    "It ignores that they move through the weights of the extractor: compare the cosine and the length.",
)

CLASSES = {"all": "all", "both": "in both", "one": "in one", "none": "in neither"}


def run_theory(
    console: Console,
    run_directory: Path | None,
    layers: tuple[Mapping[str, Any], ...],
    after: int,
    clients: int,
    out: Path | None,
) -> None:
    """Measure both sides of the lemmas and theorems, and print them.

    Args:
        console: Where to print.
        run_directory: A run; clients start from its last checkpoint.
        layers: The configuration, if there is no run.
        after: Rounds to train first, without a run.
        clients: Number of clients to compare.
        out: A JSON file for the numbers of the tables.
    """
    from fedfa.experiment.config import Config
    from fedfa.experiment.files import write_atomically

    if out is not None:  # fail before training, not after it
        _check_writable(out)
    with console.status("training the clients of one round, several times"):
        if run_directory is not None:
            found = _of_run(run_directory, clients)
        else:
            found = _of_config(Config.resolve(*layers), after, clients)
    for paragraph in STATEMENT:
        console.print(f"{paragraph}\n", highlight=False)
    console.print(f"{escape(found.where)}\n", highlight=False, soft_wrap=True)
    rows = [figures(finding) for finding in found.lemmas]
    _print_lemmas(console, rows)
    theorems = theorem_figures(found)
    _print_theorems(console, theorems)
    if out is not None:
        write_atomically(out, json.dumps({"where": found.where, "rows": rows, **theorems}, indent=2) + "\n")


@dataclass(frozen=True)
class Report:
    """What was measured."""

    where: str
    lemmas: list[Finding]
    divergences: list[Divergence]
    feature_deviations: dict[str, Agreement]
    round: OneRound | None
    """None for methods that share no weights."""
    smoothness: Smoothness | None
    """None for methods without anchors and calibration."""
    operations: Operations
    batch_size: int
    cpu_ratio: float | None
    """Processor time of FedFA's clients over FedAvg's, measured in turn; None for other methods."""


def _print_lemmas(console: Console, rows: list[dict[str, Any]]) -> None:
    for (lemma, training), group in groupby(rows, key=lambda row: (row["lemma"], row["training"])):
        title = f"Lemma {lemma}, {'classifier updates' if lemma == 1 else 'mean features'}: {training}"
        table = _table(title, ("truth", "prediction", "classes"), ("number", "deviation", "90 %", "cosine", "length"))
        for row in group:
            values = (_format(row[key]) for key in ("deviation", "deviation_90", "cosine", "length"))
            table.add_row(row["true"], row["predicted"], CLASSES[row["classes"]], str(row["number"]), *values)
        console.print(table)
        console.print()
    if all(row["lemma"] == 1 for row in rows):
        console.print("Lemma 2: no two of these clients have a class in common; increase --clients.\n")
    console.print(
        "deviation: |prediction - truth| / |truth|, the median and the 90 % quantile;\n"
        "cosine, and length |truth| / |prediction|: medians.\n",
        highlight=False,
    )


def theorem_figures(found: Report) -> dict[str, Any]:
    """Return the numbers of the theorems, as in the JSON file."""
    one, counts, smooth = found.round, found.operations, found.smoothness
    figures: dict[str, Any] = {
        "theorem 1": [
            {
                "classes": each.classes, "number": len(each.deviation), "least": float(each.deviation.min()),
                **{
                    name: float(values.median())
                    for name, values in (
                        ("deviation", each.deviation), ("positive", each.positive), ("negative", each.negative),
                    )
                },
            }
            for each in found.divergences
        ],
        "theorem 2": [
            {"form": name, "number": each.count, "deviation": _median(each.deviation), "cosine": _median(each.cosine)}
            for name, each in found.feature_deviations.items()
        ],
        "overhead": {
            "G1": counts.network, "G2": counts.anchor_loss, "G3": counts.calibration, "G4": counts.averaging,
            "as printed": counts.as_printed, "per batch": counts.per_batch(found.batch_size),
            "measured": found.cpu_ratio,
        },
    }  # fmt: skip
    if one is not None:
        figures["lemma 3"] = {
            "change": one.change, "bound": one.bound, "mended bound": one.mended_bound, "steps": one.steps,
            "L1": one.smoothness, "L2": one.lipschitz, "sigma squared": one.variance, "G squared": one.square,
            "gradient squared": one.gradient, "step condition": one.step_condition,
        }  # fmt: skip
        figures["theorem 3"] = {"least epsilon": one.least_epsilon, "largest mu": one.largest_mu}
    if smooth is not None:
        figures["theorem 4"] = {
            "classes": len(smooth.measured),
            "measured below zero": float((smooth.measured < 0).double().mean()),
            "predicted below zero": float((smooth.predicted < 0).double().mean()),
            "same sign": float((smooth.measured.sign() == smooth.predicted.sign()).double().mean()),
            "smaller A": float(smooth.smaller_a.double().mean()),
            "smaller B": float(smooth.smaller_b.double().mean()),
            "measured": float(smooth.measured.sum()), "predicted": float(smooth.predicted.sum()),
            "cosine of class means": smooth.cosine,
        }  # fmt: skip
    return figures


def _print_theorems(console: Console, figures: Mapping[str, Any]) -> None:
    table = _table(
        "Theorem 1, one full-batch step", ("classes",), ("number", "deviation", "least", "positive", "negative")
    )
    for row in figures["theorem 1"]:
        values = (_format(row[key]) for key in ("deviation", "least", "positive", "negative"))
        table.add_row(CLASSES[row["classes"]], str(row["number"]), *values)
    console.print(table)
    console.print(
        "Lengths of the deviation of a classifier row between two clients (median, least), and of its parts by\n"
        "positive and negative features. The theorem: positive is 0 in both and in neither, deviation is never 0.\n",
        highlight=False,
    )
    table = _table("Theorem 2, trained classifiers", ("truth, prediction",), ("number", "deviation", "cosine"))
    for row in figures["theorem 2"]:
        table.add_row(row["form"], str(row["number"]), _format(row["deviation"]), _format(row["cosine"]))
    console.print(table)
    console.print()
    for name in ("lemma 3", "theorem 3", "theorem 4", "overhead"):
        if name in figures:
            table = _table(name.capitalize(), ("quantity",), ("value",))
            for key, value in figures[name].items():
                table.add_row(key, _format(value))
            console.print(table)
            console.print()
    if "theorem 4" not in figures:
        console.print("Theorem 4 and the measured overhead compare FedFA with FedAvg; choose --algorithm fedfa.\n")
    console.print("docs/theory.md explains every line.", highlight=False)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in texts:
        table.add_column(name, min_width=13, no_wrap=True)
    for name in numbers:
        table.add_column(name, min_width=6, justify="right", no_wrap=True)
    return table


def _median(values: torch.Tensor) -> float | None:
    known = values[values.isfinite()]
    return float(known.median()) if len(known) else None


def _check_writable(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedfaError(f"cannot write {file}: {error.strerror}; choose another --out") from None
    if file.is_dir():
        raise FedfaError(f"cannot write {file}: it is a directory; name a file, e.g. --out {file / 'theory.json'}")


def figures(finding: Finding) -> dict[str, Any]:
    """Return the numbers of one table row."""
    agreement = finding.agreement

    def quantile(values: torch.Tensor, share: float) -> float | None:
        known = values[values.isfinite()]
        return float(known.quantile(share)) if len(known) else None

    return {
        "lemma": finding.lemma,
        "training": finding.training,
        "true": finding.true,
        "predicted": finding.predicted,
        "classes": finding.classes,
        "number": agreement.count,
        "deviation": quantile(agreement.deviation, 0.5),
        "deviation_90": quantile(agreement.deviation, 0.9),
        "cosine": quantile(agreement.cosine, 0.5),
        "length": quantile(agreement.ratio, 0.5),
    }


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < abs(value) < 5e-4:
        return f"{value:.0e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _of_run(path: Path, clients: int) -> Report:
    """Measure at the last checkpoint of a run."""
    from fedfa.experiment.run_directory import RunDirectory

    directory = RunDirectory(path)
    config, state = directory.config(), directory.saved()
    if state is None:
        raise RunError(
            f"{path} has no checkpoint.safetensors; name a run directory with a checkpoint, or use --preset NAME"
        )
    return _measure(config, state, directory.load_client_state, clients)


def _of_config(config: Config, after: int, clients: int) -> Report:
    """Measure at the initial model, or after some rounds."""
    from fedfa.experiment.run import run

    if after == 0:
        return _measure(config, None, lambda _: {}, clients)
    with tempfile.TemporaryDirectory() as temporary:
        trained = config.model_copy(update={"rounds": after})
        return _of_run(run(trained, Path(temporary) / "run").directory, clients)


def _measure(
    config: Config, state: ServerState | None, client_state: Callable[[int], ComponentTensors], clients: int
) -> Report:
    from fedfa.diagnostics.descent import Descent, one_round
    from fedfa.diagnostics.theorems import divergences, feature_deviations, operations, smoothness
    from fedfa.diagnostics.theory import Lemmas, both_trainings, compare_lemmas
    from fedfa.experiment.build import single_thread
    from fedfa.experiment.config import Config
    from fedfa.experiment.experiment import Experiment
    from fedfa.learning.context import Role

    experiment = Experiment.from_config(config, extra=[Lemmas()])
    if experiment.algorithm.pools_data:
        raise FedfaError(f"{config.algorithm.name!r} has no clients to compare; choose another algorithm")
    state = state or experiment.state
    cohort = experiment.cohort(state.round)[:clients]
    local = config.local.in_round(state.round, config.rounds)
    options = config.algorithm.options
    # The proof of Lemma 3 has no calibration; Theorem 4 compares with FedAvg.
    plain = Config.resolve(
        config.to_dict(), {"algorithm": {"calibration": {"when": "never"}}} if "calibration" in options else {}
    )
    descent = Experiment.from_config(plain, extra=[Descent()])
    is_fedfa = {"anchors", "calibration"} <= options.keys()
    with single_thread(), ExitStack() as open_engines:

        def engine_of(one: Experiment) -> Engine:
            engine = one.engine()
            open_engines.callback(engine.close)
            return engine

        one, whole = both_trainings(engine_of(experiment), experiment.training.plan(state, local), cohort, client_state)
        mu = float(options.get("anchors", {}).get("mu", 0.0))
        of_round = None
        if Role.SHARED in experiment.roles.values():
            of_round = one_round(descent.training, engine_of(descent), state, local, cohort, client_state, mu)
        smooth = cpu_ratio = None
        if is_fedfa:
            averaging = Config.resolve(config.to_dict(), {"algorithm": {"name": "fedavg"}})
            average = Experiment.from_config(averaging, extra=[Lemmas()])
            plan = average.training.plan(replace(state, components={}), local)
            _, by_average = both_trainings(engine_of(average), plan, cohort, lambda _: {})
            smooth = smoothness(whole, by_average, state.components["anchors"]["anchors"])
            cpu_ratio = _cpu_ratio(config, state, local, cohort, engine_of)
    dataset = experiment.federation.dataset
    return Report(
        where=(
            f"{config.algorithm.name} on {dataset.name}, {len(cohort)} clients of round {state.round + 1}: "
            f"{local.epochs} epochs, batch size {local.batch_size}, learning rate {local.lr:g}."
        ),
        lemmas=compare_lemmas(one, whole),
        divergences=divergences(one),
        feature_deviations=feature_deviations(whole, local.lr),
        round=of_round,
        smoothness=smooth,
        operations=operations(experiment.task.model, dataset.normalisation.batch(dataset.train.inputs[:2])),
        batch_size=local.batch_size,
        cpu_ratio=cpu_ratio,
    )


def _cpu_ratio(
    config: Config,
    state: ServerState,
    local: LocalTraining,
    cohort: Sequence[int],
    engine_of: Callable[[Experiment], Engine],
) -> float:
    """Processor time of FedFA's local training over FedAvg's: the median of three rounds, in turn."""
    from fedfa.experiment.config import Config
    from fedfa.experiment.experiment import Experiment

    each: list[tuple[Engine, RoundPlan]] = []
    for layer in ({}, {"algorithm": {"name": "fedavg"}}):
        experiment = Experiment.from_config(Config.resolve(config.to_dict(), layer))
        components = {} if layer else state.components
        each.append((engine_of(experiment), experiment.training.plan(replace(state, components=components), local)))
    ratios = []
    for _ in range(3):
        fedfa, fedavg = (sum(r.cpu_seconds for r in engine.train(plan, cohort, lambda _: {})) for engine, plan in each)
        ratios.append(fedfa / fedavg)
    return sorted(ratios)[1]
