"""The commands. They import what they need when they run, so that `fedfa --help` starts quickly."""

from __future__ import annotations

import hashlib
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.padding import Padding

from fedfa.cli.common import (
    AlgorithmExpression,
    Assignments,
    ConfigFile,
    DataDir,
    Jobs,
    Json,
    Preset,
    Rounds,
    Seeds,
    console,
    errors,
    parse_seeds,
    plain_table,
    print_json,
    result_text,
    say,
)
from fedfa.cli.completion import (
    complete_algorithm,
    complete_assignment,
    complete_methods_and_all,
    complete_preset,
    complete_section,
)
from fedfa.cli.dashboard import dashboard
from fedfa.cli.data import app as data_app
from fedfa.cli.fleet import app as fleet_app
from fedfa.cli.flower import app as flower_app
from fedfa.cli.model import export, predict
from fedfa.cli.paper import app as paper_app
from fedfa.cli.report import report
from fedfa.errors import ConfigError, FedfaError, RunError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(data_app, name="data", help="Find, download, check and inspect data sets and their splits.")
app.add_typer(fleet_app, name="fleet", help="Devices, links and availability of the clients.")
app.add_typer(flower_app, name="flower", help="Federations between real sites, on Flower.")
app.add_typer(
    paper_app, name="paper", help="The paper's tables and figures: run what is missing, compare with the paper."
)
app.command()(report)
app.command()(predict)
app.command()(export)
app.command()(dashboard)

_show_traceback = False


class Stopped(BaseException):
    """The system asked the process to terminate (SIGTERM)."""


def main() -> None:
    """Run the command line; an error of fedfa is one message and exit code 1."""

    def stop(_signal: int, _frame: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        app()
    except FedfaError as error:
        if _show_traceback:
            errors.print_exception()
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
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the full traceback of an error.")] = False,
) -> None:
    """Federated learning on heterogeneous data: FedFA and the methods it is compared with."""
    global _show_traceback
    _show_traceback = traceback


@app.command()
def run(
    file: ConfigFile = None,
    preset: Preset = None,
    algorithm: AlgorithmExpression = None,
    assignments: Assignments = None,
    rounds: Rounds = None,
    seed: Seeds = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory; default: one below runs/. With several seeds, NAME-sSEED each."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run directory.")] = False,
    until: Annotated[
        int | None, typer.Option(min=1, help="Pause after this round; --resume goes on from there.")
    ] = None,
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
    """Train one algorithm on one federation, and record everything in a run directory."""
    from fedfa.experiment.config import Config
    from fedfa.experiment.layers import merge

    seeds = parse_seeds(seed)
    if file is None and preset is None and resume:
        if out is None:
            raise typer.BadParameter("--resume continues the run in a run directory; name it with --out")
        if not (out / "config.toml").exists():
            raise ConfigError(f"{out} holds no run (no config.toml); to start one, name a config file or --preset")
        file = out / "config.toml"
    base, asked = layers_of(file, preset, assignments, rounds, data_dir, algorithm=algorithm)
    count = int(workers) if workers is not None and workers.isdecimal() else workers
    chosen = {"workers": count, "kind": engine, "address": address}
    asked = merge(asked, {"engine": {key: value for key, value in chosen.items() if value is not None}})
    configs = [Config.resolve(base, asked, {} if one is None else {"seed": one}) for one in seeds or (None,)]
    if address is not None and configs[0].engine.kind != "ray":
        raise typer.BadParameter("--address belongs to a Ray cluster; add --engine ray")
    title = preset or (file.stem if file else "run")
    for config in configs:
        directory = out or Path("runs") / default_name(title, config, assignments)
        if out is not None and len(configs) > 1:
            directory = out.with_name(f"{out.name}-s{config.seed}")
        _train(config, directory, resume=resume, until=until)


def _train(config: Any, directory: Path, *, resume: bool, until: int | None) -> None:
    from fedfa.cli.progress import RoundsProgress
    from fedfa.experiment import run as runs
    from fedfa.experiment.build import load_dataset

    with console.status(f"loading {escape(config.data.name)}"):
        load_dataset(config)  # downloads it the first time; the run then finds it in the cache
    with RoundsProgress(console) as progress:
        watch = progress.add(config.algorithm.name, config.rounds)
        try:
            result = runs.run(config, directory, resume=resume, watch=watch, until=until)
        except (KeyboardInterrupt, Stopped):
            progress.stop()
            again = f"fedfa run --resume --out {shlex.quote(str(directory))}"
            errors.print(f"stopped. Continue with: {escape(again)}", soft_wrap=True)
            raise
    summary = result.summary
    if not summary:
        again = f"fedfa run --resume --out {shlex.quote(str(directory))}"
        say(f"paused after {result.metrics[-1]['round']} of {config.rounds} rounds. Continue with: {escape(again)}")
        return
    spent = f"ε = {summary['epsilon']:.2f} at δ = {summary['delta']:g}; " if "epsilon" in summary else ""
    say(f"{result_text(summary)}; {summary['seconds']:.0f} s of training; {spent}record in {escape(str(directory))}")


def layers_of(
    file: Path | None,
    preset: str | None,
    assignments: list[str] | None,
    rounds: int | None,
    data_dir: Path | None,
    *,
    algorithm: str | None = None,
    seed: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config layer of the file or preset, and that of the command line; ``--set`` takes precedence."""
    from fedfa.experiment.config import preset_layer, read_toml
    from fedfa.experiment.layers import assign, expression_and_variant

    if file is not None and preset is not None:
        raise typer.BadParameter("give a config file or --preset, not both")
    if file is None and preset is None:
        raise typer.BadParameter("name what to run: a config file, or --preset NAME (`fedfa presets` lists them)")
    base = read_toml(file) if file is not None else preset_layer(preset or "")
    asked: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    if seed is not None:
        asked["seed"] = seed
    if data_dir is not None:
        asked["data"] = {"dir": str(data_dir)}
    if algorithm is not None:
        asked["algorithm"] = expression_and_variant(algorithm)
    return base, assign(asked, assignments or [])


def default_name(base: str, config: Any, assignments: list[str] | None) -> str:
    """A descriptive name for a run directory; runs that differ by ``--set`` get different names."""
    from fedfa.experiment.config import affects_result

    expression = "-".join(Path(name).stem for name in config.algorithm.name.split("+"))
    variant = f"-{config.algorithm.variant}" if config.algorithm.variant not in (None, "default") else ""
    keys = {text: text.partition("=")[0].strip() for text in assignments or []}
    others = sorted(text for text, key in keys.items() if key != "algorithm.variant" and affects_result(key))
    mark = f"-{hashlib.blake2b(repr(others).encode(), digest_size=3).hexdigest()}" if others else ""
    return f"{base}-{expression}{variant}{mark}-s{config.seed}"


@app.command()
def compare(
    file: ConfigFile = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a preset (`fedfa presets` lists them); repeat it for more.", autocompletion=complete_preset
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            help="Algorithm expression, e.g. fedavg or fedfa@plus; repeat it. `all`: every method.",
            autocompletion=complete_methods_and_all,
        ),
    ] = None,
    assignments: Assignments = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="One setting per value, e.g. local.lr=0.5,0.1; repeat it for every combination.",
            autocompletion=complete_assignment,
        ),
    ] = None,
    rounds: Rounds = None,
    seed: Seeds = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Directory of the run directories and the tables.")] = Path("runs/compare"),
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Train several algorithms in one setting or more, and print them side by side. Continues where it stopped."""
    from fedfa.experiment.run_processes import RunProcesses

    with RunProcesses().prestart() as processes:  # it starts while this process imports torch
        from fedfa.cli.compare import run_compare
        from fedfa.experiment.variations import parse_variation, plan_configs

        bases: dict[str, dict[str, Any]] = {}
        for name in preset or (None,):
            base, asked = layers_of(file, name, assignments, rounds, data_dir)
            title = name or (file.stem if file else "")
            if title in bases:
                raise typer.BadParameter(f"--preset {title} is given twice; name each once")
            bases[title] = base
        planned = plan_configs(bases, asked, [parse_variation(text) for text in vary or []], out)
        shown, methods, seeds = errors if as_json else console, algorithm or ["all"], parse_seeds(seed)
        run_compare(shown, methods, seeds, planned, out, jobs, processes, as_json=as_json)


@app.command()
def tune(
    file: ConfigFile = None,
    preset: Preset = None,
    algorithm: Annotated[str | None, typer.Option(help="Algorithm expression; default: the config's.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=log:LOW..HIGH",
            help="What to tune: KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE; repeat it for more.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of trials.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the training of each trial: 1 to this number.")] = 2,
    assignments: Assignments = None,
    rounds: Rounds = None,
    validation: Annotated[
        str, typer.Option(help="Validation samples, where the config names none: server:SHARE or clients:SHARE.")
    ] = "clients:0.1",
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Directory of the study and its runs.")] = Path("runs/tune"),
    jobs: Jobs = None,
) -> None:
    """Find the config values that do best on validation samples. Continues where it stopped."""
    from fedfa.cli.tune import run_tune, tune_arguments
    from fedfa.experiment.config import Config
    from fedfa.experiment.layers import merge
    from fedfa.experiment.tuning import TuningPlan, parse_parameter

    base, asked = layers_of(file, preset, assignments, rounds, data_dir, algorithm=algorithm)
    config = Config.resolve(base, asked)
    if config.data.validation is None:
        asked = merge(asked, {"data": {"validation": validation}})
    plan = TuningPlan(
        (base, asked), tuple(map(parse_parameter, param or [])), trials, tuple(range(1, seeds + 1)), out
    )  # fmt: skip
    name = algorithm or config.algorithm.name
    if algorithm is None and config.algorithm.variant not in (None, "default"):
        name = f"{name}@{config.algorithm.variant}"
    run_tune(console, plan, jobs, tune_arguments(file, preset, name, rounds, data_dir, assignments or []))


@app.command()
def finalize(
    run_directory: Annotated[Path, typer.Argument(help="Run directory of a finished run.")],
    out: Annotated[Path, typer.Option(help="The new run directory.")],
    algorithm: Annotated[str | None, typer.Option(help="A method of the final pass, e.g. ccvr.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="E.g. algorithm.final.steps=1000.",
            autocompletion=complete_assignment,
        ),
    ] = None,
) -> None:
    """Add a final pass (CCVR, FedFA's final calibration) to a finished run, without training again."""
    from fedfa.experiment.finalize import finalize as final_pass
    from fedfa.experiment.layers import assign

    with console.status("final pass over all clients"):
        summary = final_pass(run_directory, algorithm, out, assign({}, assignments or [])).summary
    say(
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/], before {summary['accuracy_before_final_pass']:.2%}; "
        f"record in {escape(str(out))}"
    )


@app.command()
def theory(
    run_directory: Annotated[
        Path | None, typer.Argument(help="A run directory; its last checkpoint is evaluated.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Name of a preset, instead of a run.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Algorithm expression, with --preset.")] = None,
    assignments: Assignments = None,
    after: Annotated[int, typer.Option(min=0, help="With --preset: train this many rounds first.")] = 0,
    clients: Annotated[int, typer.Option(min=2, help="Number of clients to compare, pair by pair.")] = 10,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
) -> None:
    """Measure both sides of the paper's Lemmas 1 to 3 and Theorems 1 to 4 on real client updates, and print them."""
    from fedfa.cli.theory import run_theory

    if run_directory is not None:
        if preset is not None or algorithm is not None or assignments or after or data_dir is not None:
            raise typer.BadParameter(
                "a run directory has its own config; leave out --preset, --algorithm, --set, --after, --data-dir"
            )
        run_theory(console, run_directory, (), 0, clients, out)
        return
    if preset is None:
        raise typer.BadParameter("name a run directory, or --preset NAME (`fedfa presets` lists them)")
    base, asked = layers_of(None, preset, assignments, None, data_dir, algorithm=algorithm)
    run_theory(console, None, (base, asked), after, clients, out)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of the records and the picture.")] = Path("runs/demo"),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; default: what fits in about two minutes.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again even if a finished demo exists.")] = False,
    data_dir: DataDir = None,
) -> None:
    """FedAvg against FedFA on Fashion-MNIST whose clients hold two classes each."""
    from fedfa.cli.demo import run_demo

    run_demo(console, out, rounds=rounds, fresh=fresh, data_dir=data_dir)


@app.command()
def presets(as_json: Json = False) -> None:
    """List the presets."""
    from fedfa.experiment.config import presets as known

    if as_json:
        print_json(known())
        return
    console.print(plain_table(("preset", "what it is"), known().items(), texts=2))


@app.command()
def config(
    section: Annotated[
        str | None, typer.Argument(help="A section, e.g. local; default: all.", autocompletion=complete_section)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON schema of a config file, for editors.")
    ] = False,
) -> None:
    """List every config key with its type, default and meaning; `--set KEY=VALUE` sets it."""
    from fedfa.experiment.config_keys import config_keys, json_schema

    if as_json:
        print_json(json_schema())
        return
    keys = [key for key in config_keys() if section in (None, key.name.partition(".")[0])]
    if not keys:
        raise ConfigError(f"there is no config section {section!r}; `fedfa config` lists all keys")
    for key in keys:
        default = "" if key.default is None else f" = {escape(repr(key.default))}"
        console.print(f"[bold]{key.name}[/]{default}  [cyan]({escape(key.kind)})[/]", highlight=False)
        _print_meaning(key.description)
    console.print("\nOptions of an algorithm: fedfa algorithms NAME.")


def _print_meaning(description: str | None) -> None:
    if text := " ".join((description or "").replace("``", "").split()):
        console.print(Padding(escape(text), (0, 0, 0, 6)), style="dim", highlight=False)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="A method to explain.", autocompletion=complete_algorithm)] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or explain one."""
    from fedfa.algorithms.registry import methods, methods_of

    if as_json:
        found = methods().values() if name is None else methods_of(name)
        print_json([method.describe() for method in found])
        return
    if name is None:
        rows = [(method.name, method.summary) for method in methods().values()]
        console.print(plain_table(("method", "what it does"), rows, texts=2))
        console.print("\nfedfa algorithms NAME explains one, with its options and variants. Join them with '+'.")
        return
    for method in methods_of(name):
        say(f"[bold]{method.name}[/]\n{escape(method.explanation())}\n")
        for component in method.components:
            for name, field in component.model_fields.items():
                option = field.alias or name
                choices = " | ".join(repr(choice) for choice in get_args(field.annotation) if isinstance(choice, str))
                allowed = f"   ({choices})" if choices else ""
                console.print(f"  algorithm.{component.name}.{option} = {field.default!r}{allowed}", highlight=False)
                _print_meaning(field.description)
        for variant, values in method.variants.items():
            listed = ", ".join(f"{key} = {value!r}" for key, value in values.items()) or "the defaults"
            say(f"  variant {variant}: {listed}")


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="Directory of results: SETTING/RUN/summary.json.")] = Path("results"),
    page: Annotated[Path | None, typer.Option(help="Write the table into this page, between its markers.")] = None,
) -> None:
    """Print finished runs as a table with the paper's numbers beside them."""
    from fedfa.experiment.files import write_atomically
    from fedfa.report.results_page import refresh_page, results_table

    if not folder.is_dir():
        raise RunError(f"there is no directory {folder}; name one that holds SETTING/RUN/summary.json")
    if page is None:
        typer.echo(results_table(folder))
    else:
        write_atomically(page, refresh_page(page, folder))


@app.command()
def version() -> None:
    """Print the version."""
    import fedfa

    console.print(fedfa.__version__)
