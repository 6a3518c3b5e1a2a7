"""`fedfa tune`: config values that do best on validation samples."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedfa.cli.common import plain_table, say

if TYPE_CHECKING:
    from fedfa.experiment.tuning import TrialResult, Tuner, TuningPlan

SHOWN = 10
"""Trials in the table."""
NEW_SEEDS = 3
"""Seeds of the command that repeats the winner."""


def run_tune(console: Console, plan: TuningPlan, jobs: int | None, repeat: Sequence[str]) -> None:
    """Run what is missing, print the best trials and the command that repeats the winner on the test set.

    Args:
        console: Where to print.
        plan: What to tune.
        jobs: Runs at a time.
        repeat: The arguments that name the config, for the command.
    """
    from fedfa.experiment.build import load_dataset
    from fedfa.experiment.files import write_atomically
    from fedfa.experiment.tuning import Tuner
    from fedfa.text_tables import markdown_table

    base = plan.base
    with console.status(f"loading {escape(base.data.name)}"):
        load_dataset(base)
    tuner = Tuner(plan, jobs)
    with console.status("tuning") as status:
        tuner.progress = status.update if console.is_terminal else lambda text: console.print(escape(text))
        try:
            winner = tuner.run()
        except BaseException:
            status.stop()
            console.print("stopped. The same command goes on from here.")
            raise
    header, rows = trial_table(tuner)
    command = winner_command(plan, winner, repeat)
    seeds = f"mean ± standard deviation over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    legend = (
        f"The best of {plan.trials} trials by {base.evaluation.monitor} on validation samples "
        f"({base.data.validation}), {seeds}; trials that trained to the end first. None was evaluated on the test set."
    )
    text = (
        f"{markdown_table(header, rows)}\n\n{legend}\n\nThe winner on the test set, with new seeds:\n\n    {command}\n"
    )
    write_atomically(plan.out / "tuning.md", text)
    console.print(plain_table(header, rows))
    for one in tuner.ranked():
        if one.failed:
            console.print(escape(f"trial {one.number + 1} failed: {one.failed}"), style="yellow", soft_wrap=True)
    console.print(escape(legend), style="dim", highlight=False)
    say(
        f"Also in {escape(str(plan.out / 'tuning.md'))}; fedfa report {escape(str(plan.out))} draws it. "
        f"The winner on the test set, with new seeds:\n{escape(command)}"
    )


def trial_table(tuner: Tuner) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the best trials."""
    keys = [one.key for one in tuner.plan.parameters]
    rows = []
    for one in [one for one in tuner.ranked() if one.scores][:SHOWN]:
        sign = -1 if tuner.plan.lower_is_better else 1
        spread = "" if one.deviation is None else f" ± {one.deviation:.4f}"
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in one.values.values()]
        rows.append([str(one.number + 1), *values, str(one.rounds), f"{sign * one.mean:.4f}{spread}"])
    return ["trial", *keys, "rounds", tuner.plan.base.evaluation.monitor], rows


def winner_command(plan: TuningPlan, winner: TrialResult, repeat: Sequence[str]) -> str:
    """The command that trains the winner again with seeds that tuning did not use, and tests it."""
    from fedfa.experiment.layers import value_text

    values = {**winner.values, "data.validation": plan.base.data.validation}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value_text(value)}")]
    first = max(plan.seeds) + 1
    seeds = [part for seed in range(first, first + NEW_SEEDS) for part in ("--seed", str(seed))]
    return shlex.join(["fedfa", "compare", *repeat, *sets, *seeds, "--out", str(plan.out / "winner")])


def tune_arguments(
    file: Path | None,
    preset: str | None,
    algorithm: str,
    rounds: int | None,
    data_dir: Path | None,
    sets: Sequence[str],
) -> list[str]:
    """The arguments of ``fedfa compare`` that name the same config."""
    arguments = [str(file)] if file is not None else ["--preset", str(preset)]
    arguments += ["--algorithm", algorithm]
    arguments += [] if rounds is None else ["--rounds", str(rounds)]
    arguments += [] if data_dir is None else ["--data-dir", str(data_dir)]
    return arguments + [part for text in sets if not text.startswith("data.validation") for part in ("--set", text)]
