"""`fedfa theory`: the paper's lemmas on the updates of real clients."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.errors import FedfaError, RunError

if TYPE_CHECKING:
    from fedfa.insight.theory import Finding
    from fedfa.learning.server import ServerState
    from fedfa.learning.tensors import PartTensors
    from fedfa.studies.settings import Settings

STATEMENT = (
    "Compared are differences between two clients of one round, for every pair and class.",
    "Lemma 1, on the updates of their classifiers, assumes that within a class of one client the mean of p·h is the "
    "product of the means of p and h. Each client's own n stands for the lemma's equal n, and the lemma is summed over "
    'the steps that a client really makes. "Exact steps" are the steps along the gradient of the cross-entropy: what '
    "lies between them and the update is weight decay, momentum or calibration; what lies between them and the lemma "
    "is its assumption.",
    "Lemma 2, on the change of their mean features of a class that both hold, is exact where features are free "
    "variables. That they move through the weights of the extractor is left out: look at the cosine, and at the length "
    "beside it.",
)

CLASSES = {"all": "all", "both": "both hold", "one": "one holds", "none": "none holds"}


def run_theory(
    console: Console,
    folder: Path | None,
    layers: tuple[Mapping[str, Any], ...],
    after: int,
    clients: int,
    out: Path | None,
) -> None:
    """Evaluate both sides of the lemmas and print how closely they agree.

    Args:
        console: Where to print.
        folder: A run; its last checkpoint is where the clients start.
        layers: Settings, if there is no run.
        after: Rounds to train before, from settings.
        clients: How many clients of the round are compared.
        out: A file for the figures behind the table.
    """
    from fedfa.studies.files import write_atomically
    from fedfa.studies.settings import Settings

    if out is not None:  # before the work, not after it
        _make_room(out)
    with console.status("training the clients of one round, twice"):
        if folder is not None:
            found, where = _of_run(folder, clients)
        else:
            settings = Settings.resolve(*layers)
            found, where = _of_settings(settings, after, clients)
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
            values = (_words(row[key]) for key in ("deviation", "deviation_90", "cosine", "length"))
            table.add_row(row["true"], row["predicted"], CLASSES[row["classes"]], str(row["number"]), *values)
        console.print(table)
        console.print()
    if all(row["lemma"] == 1 for row in rows):
        console.print("Lemma 2: no two of these clients hold the same class; take more of them (--clients).\n")
    console.print(
        "deviation: |prediction - truth| / |truth|, the median and the 90 % quantile;\n"
        "cosine, and length |truth| / |prediction|: medians.",
        highlight=False,
    )
    if out is not None:
        write_atomically(out, json.dumps({"where": where, "rows": rows}, indent=2) + "\n")


def _make_room(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedfaError(f"cannot write {file}: {error.strerror}; choose another --out") from None
    if file.is_dir():
        raise FedfaError(f"cannot write {file}: it is a folder; name a file, e.g. --out {file / 'theory.json'}")


def figures(finding: Finding) -> dict[str, Any]:
    """The figures of one line of the table."""
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


def _words(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < abs(value) < 5e-4:
        return f"{value:.0e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _of_run(path: Path, clients: int) -> tuple[list[Finding], str]:
    """From the last checkpoint of a run."""
    from fedfa.studies.folder import RunFolder

    folder = RunFolder(path)
    settings, state = folder.settings(), folder.saved()
    if state is None:
        raise RunError(
            f"{path} has no checkpoint.safetensors, only settings or a record: give a run folder with a saved round, "
            "or --preset NAME"
        )
    return _check(settings, state, folder.load_kept, clients)


def _of_settings(settings: Settings, after: int, clients: int) -> tuple[list[Finding], str]:
    """From the initial model, or after some rounds of training."""
    from fedfa.studies.run import run

    if after == 0:
        return _check(settings, None, lambda _: {}, clients)
    with tempfile.TemporaryDirectory() as place:
        trained = settings.model_copy(update={"rounds": after})
        return _of_run(run(trained, Path(place) / "run").folder, clients)


def _check(
    settings: Settings, state: ServerState | None, kept: Callable[[int], PartTensors], clients: int
) -> tuple[list[Finding], str]:
    from fedfa.insight.theory import Lemmas, check_lemmas
    from fedfa.learning.recipe import Recipe
    from fedfa.studies.setup import prepare

    laboratory = prepare(settings)
    if laboratory.recipe.pools_data:
        raise FedfaError(f"{settings.algorithm.recipe!r} has no clients to compare; choose another method")
    recipe = Recipe([*laboratory.recipe.parts, Lemmas()], laboratory.recipe.title)
    laboratory = replace(laboratory, recipe=recipe)
    state = state or laboratory.initial_state()
    cohort = laboratory.cohort(state.round)[:clients]
    plan = laboratory.plan(state, settings.local.in_round(state.round))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = laboratory.engine(state)
    try:
        found = check_lemmas(engine, plan, cohort, kept)
    finally:
        engine.close()
        torch.set_num_threads(threads)
    return found, (
        f"{settings.algorithm.recipe} on {laboratory.federation.dataset.name}, {len(cohort)} clients of round "
        f"{state.round + 1}, each {plan.local.epochs} epochs of batches of {plan.local.batch_size} at learning rate "
        f"{plan.local.lr:g}."
    )
