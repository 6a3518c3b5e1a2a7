"""`fedfa theory`: check the paper's lemmas on real client updates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.errors import FedfaError, RunError

if TYPE_CHECKING:
    from fedfa.diagnostics.theory import Finding
    from fedfa.experiment.config import Config
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
    """Evaluate both sides of the lemmas and print how closely they agree.

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
    with console.status("training the clients of one round, twice"):
        if run_directory is not None:
            found, where = _of_run(run_directory, clients)
        else:
            found, where = _of_config(Config.resolve(*layers), after, clients)
    for paragraph in STATEMENT:
        console.print(f"{paragraph}\n", highlight=False)
    console.print(f"{escape(where)}\n", highlight=False, soft_wrap=True)
    rows = [figures(finding) for finding in found]
    for (lemma, training), group in groupby(rows, key=lambda row: (row["lemma"], row["training"])):
        title = f"Lemma {lemma}, {'classifier updates' if lemma == 1 else 'mean features'}: {training}"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        for name, width in (("truth", 13), ("prediction", 14), ("classes", 10)):
            table.add_column(name, min_width=width, no_wrap=True)
        for name in ("number", "deviation", "90 %", "cosine", "length"):
            table.add_column(name, min_width=6, justify="right", no_wrap=True)
        for row in group:
            values = (_format(row[key]) for key in ("deviation", "deviation_90", "cosine", "length"))
            table.add_row(row["true"], row["predicted"], CLASSES[row["classes"]], str(row["number"]), *values)
        console.print(table)
        console.print()
    if all(row["lemma"] == 1 for row in rows):
        console.print("Lemma 2: no two of these clients have a class in common; increase --clients.\n")
    console.print(
        "deviation: |prediction - truth| / |truth|, the median and the 90 % quantile;\n"
        "cosine, and length |truth| / |prediction|: medians.",
        highlight=False,
    )
    if out is not None:
        write_atomically(out, json.dumps({"where": where, "rows": rows}, indent=2) + "\n")


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


def _of_run(path: Path, clients: int) -> tuple[list[Finding], str]:
    """Check the lemmas at the last checkpoint of a run."""
    from fedfa.experiment.run_directory import RunDirectory

    directory = RunDirectory(path)
    config, state = directory.config(), directory.saved()
    if state is None:
        raise RunError(
            f"{path} has no checkpoint.safetensors; name a run directory with a checkpoint, or use --preset NAME"
        )
    return _check(config, state, directory.load_client_state, clients)


def _of_config(config: Config, after: int, clients: int) -> tuple[list[Finding], str]:
    """Check the lemmas at the initial model, or after some rounds."""
    from fedfa.experiment.run import run

    if after == 0:
        return _check(config, None, lambda _: {}, clients)
    with tempfile.TemporaryDirectory() as temporary:
        trained = config.model_copy(update={"rounds": after})
        return _of_run(run(trained, Path(temporary) / "run").directory, clients)


def _check(
    config: Config, state: ServerState | None, client_state: Callable[[int], ComponentTensors], clients: int
) -> tuple[list[Finding], str]:
    from fedfa.diagnostics.theory import Lemmas, check_lemmas
    from fedfa.experiment.build import single_thread
    from fedfa.experiment.experiment import Experiment

    experiment = Experiment.from_config(config, extra=[Lemmas()])
    if experiment.algorithm.pools_data:
        raise FedfaError(f"{config.algorithm.name!r} has no clients to compare; choose another algorithm")
    state = state or experiment.state
    cohort = experiment.cohort(state.round)[:clients]
    plan = experiment.training.plan(state, config.local.in_round(state.round))
    with single_thread():
        engine = experiment.engine()
        try:
            found = check_lemmas(engine, plan, cohort, client_state)
        finally:
            engine.close()
    return found, (
        f"{config.algorithm.name} on {experiment.federation.dataset.name}, {len(cohort)} clients of round "
        f"{state.round + 1}: {plan.local.epochs} epochs, batch size {plan.local.batch_size}, "
        f"learning rate {plan.local.lr:g}."
    )
