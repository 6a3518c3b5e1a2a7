"""The commands. Heavy imports happen inside them, so that `fedfa --help` answers at once."""

from __future__ import annotations

import hashlib
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fedfa.cli.bench import bench
from fedfa.cli.data import app as data_app
from fedfa.cli.flower import app as flower_app
from fedfa.cli.paper import app as paper_app
from fedfa.cli.report import report
from fedfa.errors import FedfaError, RunError, SettingsError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(data_app, name="data", help="Find, fetch, check and look at data sets and their splits.")
app.add_typer(flower_app, name="flower", help="Real federations between sites, on Flower.")
app.add_typer(paper_app, name="paper", help="The paper's tables and figures: run what is missing, ours beside them.")
app.command()(bench)
app.command()(report)
console = Console()
errors = Console(stderr=True)


class Stopped(BaseException):
    """The system asked the process to end."""


def main() -> None:
    """Run the command line; a fedfa error is one clear message and exit code 1."""

    def stop(_signal: int, _frame: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        app()
    except FedfaError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except Stopped:
        sys.exit(143)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning on heterogeneous data: FedFA and the methods it is compared with."""


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with settings.")] = None,
    preset: Annotated[str | None, typer.Option(help="A preset's name; `fedfa presets` lists them.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="A recipe: methods joined by '+', or a .py file; with a variant after '@' if wanted."),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set anything, e.g. local.lr=0.05.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the training.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; left out, one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    workers: Annotated[
        str | None,
        typer.Option(metavar="auto|N", help="Processes that train clients; the result is the same for every number."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="local|ray", help="Where clients are trained: here, or on a Ray cluster.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT|auto|local", help="The Ray cluster; local: one of its own on this machine."),
    ] = None,
) -> None:
    """Train with one method on one federation, and record everything in a folder."""
    from fedfa.cli.progress import RoundsProgress
    from fedfa.studies import run as runs
    from fedfa.studies.layers import merge
    from fedfa.studies.settings import Settings
    from fedfa.studies.setup import load_dataset

    if config is None and preset is None and resume:
        if out is None:
            raise typer.BadParameter("--resume goes on with the run in a folder: name it with --out")
        if not (out / "config.toml").exists():
            raise SettingsError(f"{out} holds no run (no config.toml); to begin one, name a TOML file or --preset")
        config = out / "config.toml"
    base, asked = layers_of(config, preset, assignments, rounds, data_dir, algorithm=algorithm, seed=seed)
    if workers is not None:
        asked = merge(asked, {"engine": {"workers": int(workers) if workers.isdecimal() else workers}})
    if engine is not None:
        asked = merge(asked, {"engine": {"kind": engine}})
    if address is not None:
        asked = merge(asked, {"engine": {"address": address}})
    settings = Settings.resolve(base, asked)
    if address is not None and settings.engine.kind != "ray":
        raise typer.BadParameter("--address is that of a Ray cluster; add --engine ray")
    folder = out or Path("runs") / default_name(preset or (config.stem if config else "run"), settings, assignments)
    with console.status(f"getting {escape(settings.data.name)}"):
        load_dataset(settings)  # the first time this downloads; the run then finds it in the cache
    with RoundsProgress(console) as progress:
        watch = progress.add(settings.algorithm.recipe, settings.rounds)
        try:
            result = runs.run(settings, folder, resume=resume, watch=watch)
        except (KeyboardInterrupt, Stopped):
            progress.stop()
            again = f"fedfa run --resume --out {shlex.quote(str(folder))}"
            errors.print(f"stopped. Go on with: {escape(again)}", soft_wrap=True)
            raise
    summary = result.summary
    console.print(
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/] after {summary['rounds']} rounds "
        f"(best {summary['best_accuracy']:.2%}, mean of the last ten {summary['last10_accuracy']:.2%}); "
        f"{summary['seconds']:.0f} s of training; record in {escape(str(folder))}",
        soft_wrap=True,
    )


def layers_of(
    config: Path | None,
    preset: str | None,
    assignments: list[str] | None,
    rounds: int | None,
    data_dir: Path | None,
    *,
    algorithm: str | None = None,
    seed: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layer of the file or preset, and that of what the command line sets; ``--set`` has the last word."""
    from fedfa.studies.layers import assign, recipe_and_variant
    from fedfa.studies.settings import preset_layer, read_toml

    if config is not None and preset is not None:
        raise typer.BadParameter("give a file or --preset, not both")
    if config is None and preset is None:
        raise typer.BadParameter("say what to run: a TOML file, or --preset NAME (`fedfa presets` lists them)")
    base = read_toml(config) if config is not None else preset_layer(preset or "")
    asked: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    if seed is not None:
        asked["seed"] = seed
    if data_dir is not None:
        asked["data"] = {"dir": str(data_dir)}
    if algorithm is not None:
        asked["algorithm"] = recipe_and_variant(algorithm)
    return base, assign(asked, assignments or [])


def default_name(base: str, settings: Any, assignments: list[str] | None) -> str:
    """A run folder's name that tells what is in it; runs that differ by ``--set`` get different ones."""
    recipe = "-".join(Path(name).stem for name in settings.algorithm.recipe.split("+"))
    variant = f"-{settings.algorithm.variant}" if settings.algorithm.variant not in (None, "default") else ""
    named = ("algorithm.variant=", "data.dir=", "engine.")  # said already, or without an effect on the result
    others = sorted(text for text in assignments or [] if not text.startswith(named))
    mark = f"-{hashlib.blake2b(repr(others).encode(), digest_size=3).hexdigest()}" if others else ""
    return f"{base}-{recipe}{variant}{mark}-s{settings.seed}"


@app.command()
def compare(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with settings.")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="A preset's name (`fedfa presets` lists them); repeat it for more.")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="A recipe, with a variant after '@' if wanted (fedfa@authors); repeat it. `all` is each."),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set anything, for all runs.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="A setting for each value, e.g. local.lr=0.5,0.1; repeat it for every combination.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of the training; repeat it for more.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    out: Annotated[Path, typer.Option(help="Where the run folders and the tables go.")] = Path("runs/compare"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; left out, one per core.")] = None,
) -> None:
    """Train with several methods in one setting or more, and print them side by side. Goes on where it was stopped."""
    from fedfa.cli.compare import run_compare
    from fedfa.studies.variations import parse_variation, plan_settings

    bases: dict[str, dict[str, Any]] = {}
    for name in preset or (None,):
        base, asked = layers_of(config, name, assignments, rounds, data_dir)
        title = name or (config.stem if config else "")
        if title in bases:
            raise typer.BadParameter(f"--preset {title} is given twice; name each once")
        bases[title] = base
    settings = plan_settings(bases, asked, [parse_variation(text) for text in vary or []], out)
    run_compare(console, algorithm or ["all"], seed or [], settings, out, jobs)


@app.command()
def conclude(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="The new run folder.")],
    algorithm: Annotated[str | None, typer.Option(help="A method that follows the training, e.g. ccvr.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="E.g. algorithm.final.steps=1000.")
    ] = None,
) -> None:
    """Add what follows the last round (CCVR, FedFA's last calibration) to a finished run, without training again."""
    from fedfa.studies import conclude as conclusions
    from fedfa.studies.layers import assign

    options = assign({}, assignments or [])
    with console.status("asking every client"):
        summary = conclusions.conclude(run_folder, algorithm, out, options).summary
    console.print(
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/], before it {summary['accuracy_before_survey']:.2%}; record "
        f"in {escape(str(out))}",
        soft_wrap=True,
    )


@app.command()
def theory(
    run_folder: Annotated[Path | None, typer.Argument(help="A run folder; its last saved round is looked at.")] = None,
    preset: Annotated[str | None, typer.Option(help="Instead of a run: a preset's name.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="A recipe, with --preset.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set anything, with --preset.")
    ] = None,
    after: Annotated[int, typer.Option(min=0, help="With --preset: train so many rounds first.")] = 0,
    clients: Annotated[int, typer.Option(min=2, help="How many clients are compared, pair by pair.")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
) -> None:
    """Evaluate both sides of the paper's Lemmas 1 and 2 on real client updates, and print how closely they agree."""
    from fedfa.cli.theory import run_theory

    if run_folder is not None:
        if preset is not None or algorithm is not None or assignments or after or data_dir is not None:
            raise typer.BadParameter(
                "a run folder has its own settings; leave out --preset, --algorithm, --set, --after, --data-dir"
            )
        run_theory(console, run_folder, (), 0, clients, out)
        return
    if preset is None:
        raise typer.BadParameter("say where to look: a run folder, or --preset NAME (`fedfa presets` lists them)")
    base, asked = layers_of(None, preset, assignments, None, data_dir, algorithm=algorithm)
    run_theory(console, None, (base, asked), after, clients, out)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the records and the picture go.")] = Path("runs/demo"),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; left out, what fits in about two minutes.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again although a finished demo is there.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
) -> None:
    """FedAvg against FedFA on Fashion-MNIST whose clients hold two classes each."""
    from fedfa.cli.demo import run_demo

    run_demo(console, out, rounds=rounds, fresh=fresh, data_dir=data_dir)


@app.command()
def presets() -> None:
    """List the presets."""
    from fedfa.studies.settings import presets as known

    table = Table("preset", "what it is", box=None)
    for name, words in known().items():
        table.add_row(name, words)
    console.print(table)


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument(help="A method to explain.")] = None) -> None:
    """List the methods, or explain one."""
    from fedfa.algorithms.registry import methods, methods_of

    if name is None:
        table = Table("method", "what it does", box=None)
        for method in methods().values():
            table.add_row(method.name, method.summary)
        console.print(table)
        console.print("\nfedfa algorithms NAME explains one, with its options and variants. Join them with '+'.")
        return
    for method in methods_of(name):
        console.print(f"[bold]{method.name}[/]\n{escape(method.explanation())}\n", highlight=False, soft_wrap=True)
        for part in method.parts:
            for option, field in part.options_type.model_fields.items():
                choices = " | ".join(repr(choice) for choice in get_args(field.annotation) if isinstance(choice, str))
                allowed = f"   ({choices})" if choices else ""
                console.print(f"  algorithm.{part.name}.{option} = {field.default!r}{allowed}", highlight=False)
                if field.description:
                    words = " ".join(field.description.replace("``", "").split())
                    console.print(Padding(escape(words), (0, 0, 0, 6)), style="dim", highlight=False)
        for variant, values in method.variants.items():
            listed = ", ".join(f"{key} = {value!r}" for key, value in values.items()) or "the defaults"
            console.print(f"  variant {variant}: {listed}", highlight=False, soft_wrap=True)


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="Folder of results: SETTING/RUN/summary.json.")] = Path("results"),
    page: Annotated[Path | None, typer.Option(help="Write the table into this page, between its marks.")] = None,
) -> None:
    """Print finished runs as a table with the paper's numbers beside them."""
    from fedfa.report.results_page import refresh_page, results_table
    from fedfa.studies.files import write_atomically

    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; name one that holds SETTING/RUN/summary.json")
    if page is None:
        typer.echo(results_table(folder))
    else:
        write_atomically(page, refresh_page(page, folder))


@app.command()
def version() -> None:
    """Print the version."""
    import fedfa

    console.print(fedfa.__version__)
