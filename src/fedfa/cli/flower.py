"""`fedfa flower`: real federations on Flower."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedfa.errors import FedfaError

if TYPE_CHECKING:
    from fedfa.experiment.config import Config

LOCAL_FEDERATION = {"wait_seconds": 180.0, "round_seconds": 1800.0, "grace_seconds": 60.0}
"""Federation config of local deployments: shorter deadlines than between real sites."""

app = typer.Typer(no_args_is_help=True)
console = Console()


@app.command()
def up(
    config: Annotated[Path | None, typer.Argument(help="A TOML config file.")] = None,
    preset: Annotated[str | None, typer.Option(help="Name of a preset; `fedfa presets` lists them.")] = None,
    own_app: Annotated[
        Path | None, typer.Option("--app", help="Directory of a custom app (`fedfa flower new` writes one).")
    ] = None,
    sites: Annotated[int | None, typer.Option(min=1, help="Number of sites; default 3.")] = None,
    tls: Annotated[bool, typer.Option("--tls/--no-tls", help="Certificates and a registered key per site.")] = True,
    secure: Annotated[
        bool, typer.Option("--secure", help="Secure sums: the server sees masked contributions and their sum only.")
    ] = False,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Algorithm expression: methods joined by '+', with an optional '@variant'."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a config key, e.g. local.lr=0.05, federation.quorum=0.7."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the data sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default below runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the run directory.")] = False,
) -> None:
    """Run a local deployment: a federation of real processes on this machine, all of which are stopped at the end."""
    from fedfa.cli.app import default_name
    from fedfa.cli.common import result_text
    from fedfa.cli.progress import RoundsProgress
    from fedfa.experiment.build import load_dataset
    from fedfa.experiment.run_directory import RunDirectory
    from fedfa.flower import app_folder
    from fedfa.flower.operate.local_deployment import LocalDeployment, as_run_config

    if resume and sites is None and out is not None and (out / "config.toml").exists():
        sites = RunDirectory(out).config().data.clients
    sites = sites or 3
    assignments = [*(assignments or []), *(["privacy.masks=true"] if secure else [])]
    assignments, federation = _split_assignments(assignments)
    if own_app is not None:
        if config is not None or preset is not None:
            raise typer.BadParameter("a custom app is configured in its pyproject.toml: drop CONFIG and --preset")
        title, run_config = own_app.absolute().name, _overrides(algorithm, assignments, rounds, seed)
        folder = out or Path("runs") / f"flower-{title}"
        app_path = own_app
    else:
        settings = _config(config, preset, algorithm, assignments, rounds, seed, data_dir, sites, resume, out)
        name = default_name(preset or (config.stem if config else "run"), settings, assignments)
        folder = out or Path("runs") / f"flower{sites}-{name}"
        title, run_config, app_path = settings.algorithm.name, as_run_config(settings), app_folder()
        with console.status(f"loading {escape(settings.data.name)}"):
            load_dataset(settings)  # once, before every site needs it
    node_config: dict[str, Any] = {} if data_dir is None else {"data-dir": str(data_dir.absolute())}
    node_config |= {"require-masks": True} if secure else {}
    federation = federation if own_app is not None else {**LOCAL_FEDERATION, **federation}
    with RoundsProgress(console) as progress:
        watchers: list[Any] = []
        deployment = LocalDeployment(
            app_path, folder, sites, tls, resume, run_config, node_config, federation,
            on_step=lambda text: console.print(escape(text), highlight=False, soft_wrap=True),
            on_start=lambda total: watchers.append(progress.add(title, total)),
            on_round=lambda record: watchers[0](record),
        )  # fmt: skip
        try:
            summary = deployment.run()
        except BaseException as error:
            progress.stop()
            if not isinstance(error, FedfaError) and (folder / "checkpoint.safetensors").exists():
                again = f"fedfa flower up --resume --sites {sites} --out {shlex.quote(str(folder))}"
                again += f" --app {shlex.quote(str(own_app))}" if own_app is not None else ""
                console.print(f"stopped. Resume with: {escape(again)}", soft_wrap=True)
            raise
    console.print(
        f"{result_text(summary)}; "
        f"{summary['seconds']:.0f} s of training; run directory {escape(str(folder))}, logs in "
        f"{escape(str(folder / 'flower' / 'logs'))}",
        soft_wrap=True,
    )


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")]) -> None:
    """Write a template app for your own data and network; it runs as written, with example data."""
    from fedfa.flower.operate.new_app import write_app

    write_app(folder)
    here = shlex.quote(str(folder))
    console.print(
        f"Written to {escape(here)}. Fill in load_data and make_model in site_app.py; as it is, it runs with example "
        f"data:\n  fedfa flower up --app {escape(here)}",
        soft_wrap=True,
        highlight=False,
    )


_PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}
"""A command whose options are Flower's."""


@app.command(**_PASSED_ON)
def supernode(context: typer.Context) -> None:
    """Run Flower's `flower-supernode` with the options that follow: watched, with a fork server, without telemetry.

    It is started again when it has lost its connection. The fork server has all imports done, so messages are handled
    without seconds of process start.
    """
    import tempfile

    from fedfa.flower.operate.fork_server import can_fork

    command = _flower_command("supernode", context.args)
    if can_fork() and "fedfa.flower.operate.watched" in command:
        directory = tempfile.mkdtemp(prefix="fedfa-")
        command = [sys.executable, "-m", "fedfa.flower.operate.fork_server", directory, *command]
    os.execve(command[0], command, _environment())


@app.command(**_PASSED_ON)
def superlink(context: typer.Context) -> None:
    """Run Flower's `flower-superlink` with the options that follow: watched, without telemetry.

    It is started again when a part of it has ended, and waits longer for its database.
    """
    command = _flower_command("superlink", context.args)
    os.execve(command[0], command, _environment())


def _flower_command(name: str, options: list[str]) -> list[str]:
    """Flower's command, watched unless it is only asked for its options."""
    from fedfa.flower.operate.federation import flower_command
    from fedfa.flower.operate.watched import watched_command

    only_asks = not options or {"--help", "-h", "--version", "-V"} & set(options)
    return [*([flower_command(f"flower-{name}")] if only_asks else watched_command(name)), *options]


def _environment() -> dict[str, str]:
    from fedfa.flower.environment import without_telemetry

    return without_telemetry()


@app.command()
def cost(
    run_folder: Annotated[Path, typer.Argument(help="Run directory of a run over Flower.")],
    simulator: Annotated[Path | None, typer.Option(help="Run directory of the same run in the simulator.")] = None,
) -> None:
    """Print the cost of a round over Flower, by stage."""
    from fedfa.flower.cost import cost_of_rounds

    rows = cost_of_rounds(run_folder, simulator)
    width = max(len(stage) for stage, _ in rows)
    for stage, seconds in rows:
        console.print(f"{stage:<{width}}  {seconds:8.3f} s", highlight=False)


def _config(
    config: Path | None,
    preset: str | None,
    algorithm: str | None,
    assignments: list[str] | None,
    rounds: int | None,
    seed: int | None,
    data_dir: Path | None,
    sites: int,
    resume: bool,
    out: Path | None,
) -> Config:
    """Config as of `fedfa run`, with one client per site; by default all of them take part in every round."""
    from fedfa.cli.app import layers_of
    from fedfa.experiment.config import Config
    from fedfa.experiment.layers import merge

    all_sites: dict[str, Any] = {"data": {"clients": sites}, "cohort": {"clients": sites}}
    if config is None and preset is None and resume and out is not None and (out / "config.toml").exists():
        config, all_sites = out / "config.toml", {}
    base, overrides = layers_of(config, preset, assignments, rounds, data_dir, algorithm=algorithm, seed=seed)
    if "cohort" in overrides:
        all_sites.pop("cohort", None)
    return Config.resolve(base, merge(all_sites, overrides))


def _split_assignments(assignments: list[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Split into assignments for the training and the federation config."""
    from fedfa.experiment.layers import assign

    prefix = "federation."
    federation = assign({}, (text for text in assignments or [] if text.startswith(prefix)))
    return [text for text in assignments or [] if not text.startswith(prefix)], federation.get("federation", {})


def _overrides(
    algorithm: str | None, assignments: list[str] | None, rounds: int | None, seed: int | None
) -> dict[str, str | int | float | bool]:
    """Run config from the command line, for a custom app."""
    values: dict[str, str | int | None] = {"algorithm": algorithm, "rounds": rounds, "seed": seed}
    values["settings"] = shlex.join(assignments) if assignments else None
    return {key: value for key, value in values.items() if value is not None}
