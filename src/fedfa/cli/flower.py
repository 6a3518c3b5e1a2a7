"""`fedfa flower`: real federations on Flower."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedfa.errors import FedfaError

if TYPE_CHECKING:
    from fedfa.studies.settings import Settings

TRYOUT_RULES = {"wait_seconds": 180.0, "round_seconds": 1800.0, "grace_seconds": 60.0}
"""On one machine nobody has to wait as long as between real sites."""

app = typer.Typer(no_args_is_help=True)
console = Console()


@app.command()
def up(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with settings.")] = None,
    preset: Annotated[str | None, typer.Option(help="A preset's name; `fedfa presets` lists them.")] = None,
    own_app: Annotated[
        Path | None, typer.Option("--app", help="Your own app's folder (`fedfa flower new` writes one).")
    ] = None,
    sites: Annotated[int | None, typer.Option(min=1, help="Number of sites; left out, 3.")] = None,
    tls: Annotated[bool, typer.Option("--tls/--no-tls", help="Certificates and a registered key per site.")] = True,
    algorithm: Annotated[
        str | None, typer.Option(help="A recipe: methods joined by '+'; with a variant after '@' if wanted.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set anything, e.g. local.lr=0.05, federation.quorum=0.7."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; left out, one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    """Try out a federation of real processes on this machine, and leave nothing running."""
    from fedfa.cli.progress import RoundsProgress
    from fedfa.flower import app_folder
    from fedfa.flower.operate.tryout import TryOut, as_run_config

    if resume and sites is None and out is not None:
        sites = _recorded_sites(out)
    sites = sites or 3
    assignments, rules = _apart(assignments)
    if own_app is not None:
        if config is not None or preset is not None:
            raise typer.BadParameter("an own app has its settings in its pyproject.toml: no file, no --preset")
        title, run_config = own_app.absolute().name, _overrides(algorithm, assignments, rounds, seed)
        folder = out or Path("runs") / f"flower-{title}"
        folder_app = own_app
    else:
        settings = _settings(config, preset, algorithm, assignments, rounds, seed, data_dir, sites, resume, out)
        name = _default_name(preset or (config.stem if config else "run"), settings, assignments, sites)
        folder = out or Path("runs") / name
        title, run_config, folder_app = settings.algorithm.recipe, as_run_config(settings), app_folder()
        with console.status(f"getting {escape(settings.data.name)}"):
            from fedfa.studies.setup import load_dataset

            load_dataset(settings)  # once, before every site asks for it
    node_config: dict[str, Any] = {} if data_dir is None else {"data-dir": str(data_dir.absolute())}
    rules = rules if own_app is not None else {**TRYOUT_RULES, **rules}
    work = TryOut(folder_app, folder, sites, tls, resume, run_config, node_config, rules)
    with RoundsProgress(console) as progress:
        watchers: list[Any] = []
        try:
            summary = work.run(
                say=lambda words: console.print(escape(words), highlight=False, soft_wrap=True),
                watch=lambda record: watchers[0](record),
                begun=lambda total: watchers.append(progress.add(title, total)),
            )
        except BaseException as error:
            progress.stop()
            if not isinstance(error, FedfaError) and (folder / "checkpoint.safetensors").exists():
                again = f"fedfa flower up --resume --sites {sites} --out {shlex.quote(str(folder))}"
                again += f" --app {shlex.quote(str(own_app))}" if own_app is not None else ""
                console.print(f"stopped. Go on with: {escape(again)}", soft_wrap=True)
            raise
    console.print(
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/] after {summary['rounds']} rounds "
        f"(best {summary['best_accuracy']:.2%}, mean of the last ten {summary['last10_accuracy']:.2%}); "
        f"{summary['seconds']:.0f} s of training; record in {escape(str(folder))}, logs in "
        f"{escape(str(folder / 'flower' / 'logs'))}",
        soft_wrap=True,
    )


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")]) -> None:
    """Write a small app for your own data and network: ten lines to fill in, and it runs as written."""
    from fedfa.flower.operate.new_app import write_app

    write_app(folder)
    here = shlex.quote(str(folder))
    console.print(
        f"Written to {escape(here)}. Fill in load_data and make_model in site_app.py; as it is, it runs with example "
        f"data:\n  fedfa flower up --app {escape(here)}",
        soft_wrap=True,
        highlight=False,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def supernode(context: typer.Context) -> None:
    """Flower's own `flower-supernode` with the options that follow, made faster and quiet.

    Messages are answered from one process that has everything imported, and nothing calls home.
    """
    import os
    import sys
    import tempfile

    from fedfa.flower.environment import quiet
    from fedfa.flower.operate.federation import flower_command
    from fedfa.flower.operate.warm import can_fork

    command = [flower_command("flower-supernode"), *context.args]
    if not can_fork() or not context.args or {"--help", "-h", "--version", "-V"} & set(context.args):
        os.execve(command[0], command, quiet())
    folder = tempfile.mkdtemp(prefix="fedfa-")
    warm = [sys.executable, "-m", "fedfa.flower.operate.warm", folder, *command]
    os.execve(warm[0], warm, quiet())


@app.command()
def cost(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run over Flower.")],
    simulator: Annotated[Path | None, typer.Option(help="Folder of the same run in the simulator.")] = None,
) -> None:
    """Print what a round over Flower costs, by stage."""
    from fedfa.flower.cost import cost_of_rounds

    rows = cost_of_rounds(run_folder, simulator)
    width = max(len(words) for words, _ in rows)
    for words, seconds in rows:
        console.print(f"{words:<{width}}  {seconds:8.3f} s", highlight=False)


def _settings(
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
) -> Settings:
    """As `fedfa run` makes them, with as many clients as sites, all of which take part unless said otherwise."""
    from fedfa.cli.app import layers_of
    from fedfa.studies.layers import merge
    from fedfa.studies.settings import Settings

    everybody: dict[str, Any] = {"data": {"clients": sites}, "cohort": {"clients": sites}}
    if config is None and preset is None and resume and out is not None and (out / "config.toml").exists():
        config, everybody = out / "config.toml", {}
    base, asked = layers_of(config, preset, assignments, rounds, data_dir, algorithm=algorithm, seed=seed)
    if "cohort" in asked:
        everybody.pop("cohort", None)
    return Settings.resolve(base, merge(everybody, asked))


def _apart(assignments: list[str] | None) -> tuple[list[str], dict[str, Any]]:
    """What is set about the training, and what about the federation."""
    from fedfa.studies.layers import assign

    prefix = "federation."
    rules = assign({}, (text for text in assignments or [] if text.startswith(prefix)))
    return [text for text in assignments or [] if not text.startswith(prefix)], rules.get("federation", {})


def _recorded_sites(out: Path) -> int | None:
    from fedfa.studies.folder import RunFolder

    return RunFolder(out).settings().data.clients if (out / "config.toml").exists() else None


def _default_name(base: str, settings: Settings, assignments: list[str] | None, sites: int) -> str:
    from fedfa.cli.app import default_name

    return f"flower{sites}-{default_name(base, settings, assignments)}"


def _overrides(
    algorithm: str | None, assignments: list[str] | None, rounds: int | None, seed: int | None
) -> dict[str, str | int | float | bool]:
    """What the command line says, for an app that brings its own settings."""
    asked: dict[str, str | int | None] = {"algorithm": algorithm, "rounds": rounds, "seed": seed}
    asked["settings"] = shlex.join(assignments) if assignments else None
    return {key: value for key, value in asked.items() if value is not None}
