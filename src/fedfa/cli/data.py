"""Commands for data sets and their splits. Heavy imports happen inside the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fedfa.cli.common import DataDir, Json, console, print_json, say
from fedfa.cli.completion import complete_dataset

if TYPE_CHECKING:
    from fedfa.data import DataSet, Federation
    from fedfa.data.definition import DataSetDefinition

app = typer.Typer(no_args_is_help=True)
Offline = Annotated[bool, typer.Option("--offline", help="Make no network call.")]
Source = Annotated[Path | None, typer.Option("--from", help="Folder with the set's files.")]


@app.callback()
def data() -> None:
    """Obtain, verify and show data sets and their splits."""


@app.command(name="list")
def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the known data sets, and which of them are in the data directory."""
    from fedfa.data import cache
    from fedfa.data.sets import DEFINITIONS

    directory = cache.data_directory(data_dir)
    if as_json:
        print_json([_definition(one, cache.is_cached(directory, one.name)) for one in DEFINITIONS.values()])
        return
    table = Table("name", "here", "train + test", "image", "classes", "comes from", box=None, pad_edge=False)
    for definition in DEFINITIONS.values():
        counts = definition.editions[0] if definition.editions else None
        sources = [provider.kind for provider in definition.providers] or ["your files (--from)"]
        table.add_row(
            definition.name,
            "[green]yes[/]" if cache.is_cached(directory, definition.name) else "–",
            f"{counts.train:,} + {counts.test:,}" if counts and counts.train else "",
            "×".join(map(str, definition.shape)),
            str(len(definition.classes)),
            definition.made_of or ", ".join(dict.fromkeys(sources)),
        )
    console.print(table)
    say(f"\nData directory: {escape(str(directory))}. Your own: an .npz file or a folder of class folders.")


def _definition(definition: DataSetDefinition, here: bool) -> dict[str, Any]:
    counts = definition.editions[0] if definition.editions else None
    return {
        "name": definition.name,
        "here": here,
        "train": counts and counts.train,
        "test": counts and counts.test,
        "shape": definition.shape,
        "classes": definition.classes,
    }


@app.command()
def get(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of data sets; `fedfa data list` shows them.", autocompletion=complete_dataset),
    ],
    source: Source = None,
    data_dir: DataDir = None,
    offline: Offline = False,
    again: Annotated[bool, typer.Option("--again", help="Obtain it anew even if it is cached.")] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept unknown content; the manifest records it.")
    ] = False,
) -> None:
    """Obtain data sets, verify them and store them in the data directory."""
    from fedfa.data import load

    for name in names:
        began = time.perf_counter()
        with _downloads() as progress:
            dataset = load(
                name,
                data_dir=data_dir,
                offline=offline,
                source=source,
                again=again,
                unverified=unverified,
                progress=progress,
            )
        _describe(dataset, time.perf_counter() - began)


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="Name of a data set, or the path of your own data.", autocompletion=complete_dataset),
    ],
    partition: Annotated[
        str | None,
        typer.Option(help="A partition: iid, shards:2, classes:2:250, dirichlet:0.1, domains/shards:2, natural …"),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients; default 100, or one per writer.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 1,
    rows: Annotated[int, typer.Option(help="Number of clients in the table.")] = 20,
    picture: Annotated[
        Path | None, typer.Option(help="Also plot it, to a file that ends in .png, .svg or .pdf.")
    ] = None,
    style: Annotated[str, typer.Option(help="Style of the picture: bubbles, heat or auto.")] = "auto",
    label: Annotated[str | None, typer.Option(help="Column of the labels of your own table.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Its input columns, separated by commas; default: all.")] = None,
    client_column: Annotated[str | None, typer.Option(help="Column that names the clients.")] = None,
    domain_column: Annotated[str | None, typer.Option(help="Column that names the domains.")] = None,
    source: Source = None,
    data_dir: DataDir = None,
    offline: Offline = False,
) -> None:
    """Show a data set and a split of it: a table and, on request, a picture."""
    from fedfa.data import Columns, load, parse_partition, partition_text
    from fedfa.report.partition_picture import contact_sheet, partition_picture

    partition = partition or ("natural" if client_column else None)
    spec = None if partition is None else parse_partition(partition)
    columns = Columns(label, tuple(inputs.split(",")) if inputs else None, client_column, domain_column)
    with _downloads() as progress:
        dataset = load(name, data_dir=data_dir, offline=offline, source=source, columns=columns, progress=progress)
    _describe(dataset, None)
    if spec is None:
        if picture is not None:
            say(f"picture: {escape(str(contact_sheet(dataset, picture)))}")
        return
    federation = dataset.split(spec, clients, seed)
    title = f"{dataset.name}, {partition_text(spec)}, {len(federation):,} clients, seed {seed}"
    console.print()
    console.print(_table(federation, rows))
    say(f"\n{federation.summary()}")
    if picture is not None:
        say(f"picture: {escape(str(partition_picture(federation, picture, title=title, style=style)))}")


@contextmanager
def _downloads() -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress bars of downloads, on a terminal only; yields what to call with a name, what is done and the total."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(escape(what), total=None)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _describe(dataset: DataSet, seconds: float | None) -> None:
    """Describe a data set in a few lines."""
    shape = "×".join(str(size) for size in dataset.train.inputs.shape[1:])
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    lines = [
        f"[bold]{escape(dataset.name)}[/]{took}: {len(dataset.train):,} training + {len(dataset.test):,} test samples, "
        f"{shape}, {dataset.num_classes} classes",
        f"  source: {dataset.manifest.get('source')}; edition: {dataset.manifest.get('edition', 'own')}; "
        f"checksum {dataset.fingerprint[:16]}",
    ]
    for part in ("train", "test"):
        about = dataset.manifest.get(part)
        if not isinstance(about, dict):
            continue
        counts = about["per_class"]
        if dataset.domains:
            domains = zip(dataset.domains, about["per_domain"], strict=True)
            lines.append(f"  {part} by domain: " + ", ".join(f"{name} {count:,}" for name, count in domains))
        listed = " ".join(str(count) for count in counts) if len(counts) <= 12 else f"{min(counts)} to {max(counts)}"
        writers = f"; {about['writers']:,} writers" if "writers" in about else ""
        lines.append(f"  {part} by class: {listed}{writers}")
    if "terms" in dataset.manifest:
        lines.append(f"  terms: {dataset.manifest['terms']}")
    say("\n".join(lines))


def _table(federation: Federation, rows: int) -> Table:
    """Clients × classes, each cell coloured by its share of the client's samples."""
    dataset = federation.dataset
    shown = min(rows, len(federation))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("client", justify="right")
    if dataset.domains:
        table.add_column("domain")
    table.add_column("samples", justify="right")
    wide = dataset.num_classes <= 20
    for name in dataset.classes if wide else ("classes held",):
        table.add_column(name[:5] if wide else name, justify="right")
    for number in range(shown):
        client = federation.client(number)
        counts = client.label_counts.tolist()
        row: list[str | Text] = [federation.names[number] if federation.names else str(number)]
        if dataset.domains and dataset.train.domains is not None:
            held = sorted(set(dataset.train.domains[client.positions].tolist()))
            row.append(", ".join(dataset.domains[domain] for domain in held))
        row.append(f"{client.size:,}")
        if wide:
            row += [_cell(count, client.size) for count in counts]
        else:
            row.append(str(sum(count > 0 for count in counts)))
        table.add_row(*row)
    if shown < len(federation):
        table.add_row("…")
    return table


def _cell(count: int, size: int) -> Text:
    if not count:
        return Text("·", style="dim")
    level = min(5, int(6 * count / size))
    return Text(str(count), style=("blue", "cyan", "green", "yellow", "bright_yellow bold", "bright_red bold")[level])
