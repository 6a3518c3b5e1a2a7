"""Tables of a chapter as HTML: results, costs of reaching accuracies, configuration, commands, versions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fedfa.experiment.layers import flat
from fedfa.report.html.chart import Table, number
from fedfa.report.html.commands import command_of
from fedfa.report.html.figures import MethodStyles, reach
from fedfa.report.html.grouping import Chapter, MethodRuns
from fedfa.report.html.palette import Style
from fedfa.report.marks import marked, marks_of, marks_text
from fedfa.report.metric_table import NOTE, metric_table
from fedfa.seed_means import SeedMean


def scroll(inner: str, label: str) -> str:
    """A frame in which a wide table scrolls, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inner}</div>'


def details(title: str, inner: str, identity: str) -> str:
    """A section that can be opened."""
    return f'<details id="{escape(identity)}"><summary>{escape(title)}</summary>{inner}</details>'


def plain(table: Table, label: str) -> str:
    """A table of text."""
    rows = [_row(escape(row[0]), "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])) for row in table.rows]
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    return _table(_heads(table.header), rows, label) + note


def _heads(names: Sequence[str], css: str = "") -> str:
    return "".join(f'<th scope="col"{css}>{escape(name)}</th>' for name in names)


def _row(name: str, cells: str) -> str:
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _table(heads: str, rows: Sequence[str], label: str, css: str = "") -> str:
    table = f"<table{css}><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return scroll(table, label)


def _with_note(table: str, note: str) -> str:
    return f'<div class="box">{table}<p class="quiet small">{escape(note)}</p></div>'


def swatch(line_style: Style) -> str:
    """A short line in a method's style."""
    dash = f";stroke-dasharray:{' '.join(f'{part:g}' for part in line_style.dash)}" if line_style.dash else ""
    return (
        '<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">'
        f'<path d="M0 4H22" style="stroke:var(--{line_style.colour});stroke-width:3{dash}"/></svg>'
    )


# -- results ----------------------------------------------------------------------------------------------------------
#: Key in the results, label, meaning, factor, digits, whether the maximum is bold.
_COLUMNS: tuple[tuple[str, str, str, float, int, bool], ...] = (
    ("final_accuracy", "final %", "after the last round, or after the final pass", 100, 2, True),
    ("best_accuracy", "best %", "of all evaluations, the final pass included", 100, 2, True),
    ("last10_accuracy", "last 10 %", "mean of the last ten evaluations", 100, 2, True),
    ("swing", "swing", "standard deviation of these ten evaluations", 100, 2, False),
    ("seconds", "seconds", "wall time of the training, without evaluations", 1, 0, False),
    ("cpu_seconds", "CPU s", "processor time of the clients' training", 1, 0, False),
    ("bytes_up", "MB up", "from clients to the server", 1e-6, 1, False),
    ("bytes_down", "MB down", "from the server to clients", 1e-6, 1, False),
    ("epsilon", "ε", "differential privacy: budget spent", 1, 2, False),
)


def results(chapter: Chapter, method_styles: MethodStyles) -> str:
    """The table of methods, sorted by the mean of the last ten evaluations."""
    private = any(method.over_seeds("epsilon", 1) for method in chapter.methods)
    columns = [column for column in _COLUMNS if private or column[0] != "epsilon"]
    spreads = [[method.over_seeds(key, factor) for key, _, _, factor, _, _ in columns] for method in chapter.methods]
    if not any(cell for row in spreads for cell in row):
        return ""
    last_ten = [spread.mean if (spread := row[2]) else -1.0 for row in spreads]
    order = sorted(range(len(spreads)), key=lambda place: -last_ten[place])
    most = [max((cell.mean for row in spreads if (cell := row[column])), default=0.0) for column in range(len(columns))]
    head = _heads(["method", "seeds", "rounds"])
    for key, label, meaning, *_ in columns:
        order_mark = ' aria-sort="descending"' if key == "last10_accuracy" else ""
        head += f'<th scope="col" title="{escape(meaning)}"{order_mark}>{escape(label)}</th>'
    rows = []
    for place in order:
        method = chapter.methods[place]
        cells = []
        for column, spread in enumerate(spreads[place]):
            *_, digits, bold = columns[column]
            mark = " most" if bold and spread and spread.mean == most[column] and len(spreads) > 1 else ""
            value = spread.mean if spread else -1
            cells.append(f'<td data-v="{value:.6g}" class="words{mark}">{_spread(spread, digits, deviation=bold)}</td>')
        seeds = len(method.runs)
        done, asked = min(run.done for run in method.runs), max(run.rounds for run in method.runs)
        rounds = str(done) if method.finished else f"{done} of {asked}"
        first = f'<td data-v="{seeds}">{seeds}</td><td data-v="{done}">{rounds}</td>'
        rows.append(_row(_named(method, method_styles), first + "".join(cells)))
    several = any(len(method.runs) > 1 for method in chapter.methods)
    seeds_note = "Means over seeds, standard deviations in brackets. " if several else ""
    meanings = "; ".join(f"{name}: {meaning}" for _, name, meaning, *_ in columns)
    table = _table(head, rows, "Results by method", " class='sorts'")
    marks = marks_text(marks_of(run.metrics) for run in chapter.runs)
    made = _with_note(table, f"{seeds_note}Bold: the highest. {meanings}. {_fewer(chapter)}{marks}".rstrip())
    measured = metric_table({method.name: method.runs for method in chapter.methods})
    if measured is None:
        return made
    return made + plain(Table(measured[0], measured[1], note=NOTE), "Metrics by method")


def _fewer(chapter: Chapter) -> str:
    """Which methods have fewer than ten evaluations, so that "last 10" is the mean of all of them."""
    counts = {method.name: min(len(run.evaluated) for run in method.runs) for method in chapter.methods}
    fewer = [f"{name} ({count})" for name, count in counts.items() if 0 < count < 10]
    return f"Fewer than ten evaluations, so that last 10 is the mean of all: {', '.join(fewer)}. " if fewer else ""


def _spread(spread: SeedMean | None, digits: int, *, deviation: bool) -> str:
    if spread is None:
        return "–"
    beside = f" ({spread.deviation:,.{digits}f})" if deviation and spread.deviation is not None else ""
    return f"{spread.mean:,.{digits}f}{beside}"


def _named(method: MethodRuns, method_styles: MethodStyles) -> str:
    name = marked(method.name, [marks_of(run.metrics) for run in method.runs])
    return swatch(method_styles[method.name]) + escape(name)


# -- costs ------------------------------------------------------------------------------------------------------------
def reaching(chapter: Chapter, method_styles: MethodStyles, targets: Sequence[float]) -> str:
    """Rounds, seconds and megabytes until the first evaluation with each accuracy."""
    if not targets:
        return ""
    groups = "".join(f'<th class="group" scope="colgroup" colspan="4">{target:g} %</th>' for target in targets)
    heads = f"<td></td>{groups}</tr><tr>" + _heads(["method", *["round", "s", "CPU s", "MB"] * len(targets)])
    rows = []
    for method in chapter.methods:
        cells = []
        for target in targets:
            found = reach(method, target / 100)
            if found is None:
                cells.append('<td data-v="1e99">–</td>' * 4)
                continue
            share = f" ({found.seeds} of {found.of})" if found.seeds < found.of else ""
            for value, more in (
                (found.rounds, share),
                (found.seconds, ""),
                (found.cpu_seconds, ""),
                (found.megabytes, ""),
            ):
                if value is None:
                    cells.append('<td data-v="1e99">–</td>')
                    continue
                digits = 0 if value >= 20 or value == round(value) else 1
                cells.append(f'<td data-v="{value:.6g}">{number(value, digits)}{more}</td>')
        rows.append(_row(_named(method, method_styles), "".join(cells)))
    note = (
        "Round, seconds of training (wall time, and processor time of the clients) and megabytes (up and down) until "
        "the first evaluation with this accuracy; a dash if there is none. Means over the seeds that reach it; their "
        "number in brackets if not all do. A run that fluctuates reaches an accuracy before it holds it."
    )
    return _with_note(_table(heads, rows, "Costs to reach accuracies", ' class="sorts"'), note)


# -- configuration, commands, versions --------------------------------------------------------------------------------
def configs(chapter: Chapter, identity: str) -> str:
    """Config values in which the methods differ, and those that they share."""
    common, differing = chapter.configs()
    parts = []
    if differing:
        # Options of a component that only some methods have would fill the table with dashes: list them by method.
        shared = {key: values for key, values in differing.items() if not key.startswith("algorithm.")}
        if shared:
            rows = [[key, *(_value(value) for value in values)] for key, values in shared.items()]
            names = ["key", *(method.name for method in chapter.methods)]
            parts.append(
                "<p>Methods differ beyond the algorithm:</p>" + plain(Table(names, rows), "Configuration that differs")
            )
        lines = []
        for place, method in enumerate(chapter.methods):
            own = [
                f"{k.removeprefix('algorithm.')} = {_value(v[place])}"
                for k, v in differing.items()
                if k not in shared and v[place] is not None
            ]
            lines.append(_row(escape(method.name), f'<td class="text wrap">{escape("; ".join(own))}</td>'))
        heads = _heads(["method"]) + _heads(["algorithm"], ' class="text"')
        table = _table(heads, lines, "Options of each method")
        parts.append(details("Options of each method", table, f"{identity}-options"))
    rows_common = [[key, _value(value)] for key, value in common.items()]
    everything = plain(Table(["key", "value"], rows_common), "Configuration that all share")
    parts.append(details("Configuration that all share", everything, f"{identity}-common"))
    return "".join(parts)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def commands(chapter: Chapter) -> str:
    """The command that repeats each run."""
    lines = "".join(f"<li>{escape(command_of(run))}</li>" for run in chapter.runs)
    return f'<ol class="commands">{lines}</ol>'


def versions(chapter: Chapter) -> str:
    """Software, machine and data of the runs."""
    header = ("fedfa", "torch", "numpy", "python", "commit", "processor", "device", "data fingerprint")
    made: dict[tuple[str, ...], list[str]] = {}
    for run in chapter.runs:
        if run.summary is None:
            continue
        known = flat(run.summary)
        keys = (*(f"versions.{name}" for name in header[:4]), "commit", "machine.processor", "machine.device")
        row = tuple(str(known.get(key) or "–") for key in (*keys, "data.fingerprint"))
        made.setdefault(row, []).append(run.path.name)
    if not made:
        return '<p class="quiet">Versions are recorded when a run finishes.</p>'
    # The runs have a line of their own: eight columns leave no space for names.
    rows = [
        '<tr class="with-next">' + "".join(f'<td class="text words">{escape(_shortened(cell))}</td>' for cell in row)
        + f'</tr><tr><td class="text wrap quiet" colspan="{len(header)}">runs: {escape(", ".join(names))}</td></tr>'
        for row, names in made.items()
    ]  # fmt: skip
    return _table(_heads(header, ' class="text"'), rows, "Versions")


def _shortened(cell: str) -> str:
    """Abbreviate a commit or fingerprint; keep the text after it.

    Example:
        >>> _shortened("0123456789abcdef0123456789abcdef01234567 with changes")
        '0123456789ab with changes'
    """
    first, _, rest = cell.partition(" ")
    short = first[:12] if len(first) >= 40 and all(letter in "0123456789abcdef" for letter in first) else first
    return f"{short} {rest}".strip()
