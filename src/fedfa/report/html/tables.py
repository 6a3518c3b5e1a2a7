"""The tables of a chapter as HTML: results, costs to reach accuracies, settings, commands, versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fedfa.report.html.chapters import Chapter, Method, Spread
from fedfa.report.html.chart import Table, number
from fedfa.report.html.commands import command_of
from fedfa.report.html.figures import Looks, reach
from fedfa.report.html.palette import Style
from fedfa.report.html.reading import Run
from fedfa.studies.layers import flat
from fedfa.studies.outcome import accuracies, costs


def scroll(inner: str, label: str) -> str:
    """A frame in which a wide table moves sideways, by keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inner}</div>'


def details(words: str, inner: str, identity: str) -> str:
    """Something to open."""
    return f'<details id="{escape(identity)}"><summary>{escape(words)}</summary>{inner}</details>'


def plain(table: Table, label: str) -> str:
    """A table of text."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    return scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>", label) + note


def swatch(look: Style) -> str:
    """A short line in a method's look."""
    dash = f";stroke-dasharray:{' '.join(f'{part:g}' for part in look.dash)}" if look.dash else ""
    return (
        '<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">'
        f'<path d="M0 4H22" style="stroke:var(--{look.colour});stroke-width:3{dash}"/></svg>'
    )


# -- results ----------------------------------------------------------------------------------------------------------
def figures_of(run: Run) -> Mapping[str, float]:
    """A run's results: recorded ones, or those of its rounds so far."""
    if run.summary is not None:
        found = dict(run.summary)
    else:
        found = {**accuracies(run.metrics), **(costs(run.metrics) if run.metrics else {})}
    if any("cpu_seconds" not in record for record in run.metrics):
        found.pop("cpu_seconds", None)  # older records lack it; a part of the time would mislead
    last = [record["accuracy"] for record in run.evaluated][-10:]
    if last:
        mean = sum(last) / len(last)
        found["swing"] = (sum((value - mean) ** 2 for value in last) / len(last)) ** 0.5
    return found


def _figure(key: str, factor: float) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found = figures_of(run).get(key)
        return factor * found if isinstance(found, int | float) else None

    return value


#: Key in the summary, words, what they mean, factor, digits, whether the most is set in bold.
_COLUMNS: tuple[tuple[str, str, str, float, int, bool], ...] = (
    ("final_accuracy", "final %", "after the last round, or after what follows it", 100, 2, True),
    ("best_accuracy", "best %", "of all rounds", 100, 2, True),
    ("last10_accuracy", "last 10 %", "mean of the last ten evaluations", 100, 2, True),
    ("swing", "swing", "standard deviation of these ten evaluations", 100, 2, False),
    ("seconds", "seconds", "of training by the clock, evaluations apart, whatever else the machine did", 1, 0, False),
    ("cpu_seconds", "CPU s", "processor time of the clients' training", 1, 0, False),
    ("bytes_up", "MB up", "from clients to the server", 1e-6, 1, False),
    ("bytes_down", "MB down", "from the server to clients", 1e-6, 1, False),
)


def results(chapter: Chapter, looks: Looks) -> str:
    """The table of methods, best mean of the last ten first."""
    spreads = [
        [method.over(_figure(key, factor)) for key, _, _, factor, _, _ in _COLUMNS] for method in chapter.methods
    ]
    if not any(cell for row in spreads for cell in row):
        return ""
    last_ten = [spread.mean if (spread := row[2]) else -1.0 for row in spreads]
    order = sorted(range(len(spreads)), key=lambda place: -last_ten[place])
    most = [
        max((cell.mean for row in spreads if (cell := row[column])), default=0.0) for column in range(len(_COLUMNS))
    ]
    head = '<th scope="col">method</th><th scope="col">seeds</th><th scope="col">rounds</th>' + "".join(
        f'<th scope="col" title="{escape(meaning)}"{_sorted(key)}>{escape(words)}</th>'
        for key, words, meaning, *_ in _COLUMNS
    )
    rows = []
    for place in order:
        method = chapter.methods[place]
        cells = []
        for column, spread in enumerate(spreads[place]):
            *_, digits, bold = _COLUMNS[column]
            mark = " most" if bold and spread and spread.mean == most[column] and len(spreads) > 1 else ""
            value = spread.mean if spread else -1
            cells.append(f'<td data-v="{value:.6g}" class="words{mark}">{_spread(spread, digits, deviation=bold)}</td>')
        seeds = len(method.runs)
        rows.append(
            f'<tr><th scope="row">{swatch(looks[method.name])}{escape(method.name)}</th>'
            f'<td data-v="{seeds}">{seeds}</td><td data-v="{min(r.done for r in method.runs)}">{_rounds(method)}</td>'
            f"{''.join(cells)}</tr>"
        )
    several = any(len(method.runs) > 1 for method in chapter.methods)
    words = "Means over seeds, the seeds' standard deviation in brackets. " if several else ""
    meanings = "; ".join(f"{name}: {meaning}" for _, name, meaning, *_ in _COLUMNS)
    body = f"<table class='sorts'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    note = f"{words}Bold: the highest. {meanings}."
    return f'<div class="box">{scroll(body, "Results by method")}<p class="quiet small">{escape(note)}</p></div>'


def _sorted(key: str) -> str:
    return ' aria-sort="descending"' if key == "last10_accuracy" else ""


def _spread(spread: Spread | None, digits: int, *, deviation: bool) -> str:
    if spread is None:
        return "–"
    beside = f" ({spread.deviation:,.{digits}f})" if deviation and spread.deviation is not None else ""
    return f"{spread.mean:,.{digits}f}{beside}"


def _rounds(method: Method) -> str:
    done, asked = min(run.done for run in method.runs), max(run.rounds for run in method.runs)
    return str(done) if method.finished else f"{done} of {asked}"


# -- costs ------------------------------------------------------------------------------------------------------------
def reaching(chapter: Chapter, looks: Looks, targets: Sequence[float]) -> str:
    """Rounds, seconds and megabytes until an evaluation first gave each accuracy."""
    if not targets:
        return ""
    groups = "".join(f'<th class="group" scope="colgroup" colspan="3">{target:g} %</th>' for target in targets)
    names = '<th scope="col">round</th><th scope="col">s</th><th scope="col">MB</th>' * len(targets)
    rows = []
    for method in chapter.methods:
        cells = []
        for target in targets:
            found = reach(method, target / 100)
            if found is None:
                cells.append('<td data-v="1e99">–</td>' * 3)
                continue
            share = f" ({found.seeds} of {found.of})" if found.seeds < found.of else ""
            for value, more in ((found.rounds, share), (found.seconds, ""), (found.megabytes, "")):
                digits = 0 if value >= 20 or value == round(value) else 1
                cells.append(f'<td data-v="{value:.6g}">{number(value, digits)}{more}</td>')
        rows.append(f'<tr><th scope="row">{swatch(looks[method.name])}{escape(method.name)}</th>{"".join(cells)}</tr>')
    table = (
        f'<table class="sorts"><thead><tr><td></td>{groups}</tr><tr><th scope="col">method</th>{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    note = (
        "Round, seconds of training by the clock and megabytes (both ways) until an evaluation first gave the "
        "accuracy; a dash where none did. Seeds: means over those that did, in brackets how many where not all. "
        "Training that swings reaches an accuracy before it holds it."
    )
    return (
        f'<div class="box">{scroll(table, "Costs to reach accuracies")}<p class="quiet small">{escape(note)}</p></div>'
    )


# -- settings, commands, versions -------------------------------------------------------------------------------------
def settings(chapter: Chapter, identity: str) -> str:
    """In what the methods differ, and all that they share."""
    common, differing = chapter.settings()
    parts = []
    if differing:
        # Options of a part that only some methods have would fill the table with dashes: they stand with the method.
        shared = {key: values for key, values in differing.items() if not key.startswith("algorithm.")}
        if shared:
            rows = [[key, *(_value(value) for value in values)] for key, values in shared.items()]
            names = ["setting", *(method.name for method in chapter.methods)]
            parts.append(
                "<p>Methods differ beyond the algorithm:</p>" + plain(Table(names, rows), "Settings that differ")
            )
        lines = []
        for place, method in enumerate(chapter.methods):
            own = [
                f"{k.removeprefix('algorithm.')} = {_value(v[place])}"
                for k, v in differing.items()
                if k not in shared and v[place] is not None
            ]
            lines.append(
                f'<tr><th scope="row">{escape(method.name)}</th>'
                f'<td class="text wrap">{escape("; ".join(own))}</td></tr>'
            )
        head = '<th scope="col">method</th><th scope="col" class="text">algorithm</th>'
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        parts.append(details("Options of each method", scroll(table, "Options of each method"), f"{identity}-options"))
    rows_common = [[key, _value(value)] for key, value in common.items()]
    everything = plain(Table(["setting", "value"], rows_common), "Settings that all share")
    parts.append(details("Settings that all share", everything, f"{identity}-common"))
    return "".join(parts)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def commands(chapter: Chapter) -> str:
    """What to type to repeat each run."""
    lines = "".join(f"<li>{escape(command_of(run))}</li>" for run in chapter.runs)
    return f'<ol class="commands">{lines}</ol>'


def versions(chapter: Chapter) -> str:
    """With what and where the runs were made."""
    header = ("fedfa", "torch", "numpy", "python", "commit", "processor", "device", "data fingerprint")
    made: dict[tuple[str, ...], list[str]] = {}
    for run in chapter.runs:
        if run.summary is None:
            continue
        known = flat(run.summary)
        keys = (*(f"versions.{name}" for name in header[:4]), "commit", "machine.processor", "machine.device")
        row = tuple(str(known.get(key) or "–") for key in (*keys, "data.fingerprint"))
        made.setdefault(row, []).append(run.folder.name)
    if not made:
        return '<p class="quiet">Versions are recorded when a run is finished.</p>'
    # The runs have a line of their own: beside eight columns there is no room for names.
    rows = "".join(
        '<tr class="with-next">' + "".join(f'<td class="text words">{escape(_shortened(cell))}</td>' for cell in row)
        + f'</tr><tr><td class="text wrap quiet" colspan="{len(header)}">runs: {escape(", ".join(names))}</td></tr>'
        for row, names in made.items()
    )  # fmt: skip
    head = "".join(f'<th scope="col" class="text">{escape(name)}</th>' for name in header)
    return scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>", "Versions")


def _shortened(cell: str) -> str:
    """A commit or fingerprint by its first letters; what follows it stays.

    Example:
        >>> _shortened("0123456789abcdef0123456789abcdef01234567 with changes")
        '0123456789ab with changes'
    """
    first, _, rest = cell.partition(" ")
    short = first[:12] if len(first) >= 40 and all(letter in "0123456789abcdef" for letter in first) else first
    return f"{short} {rest}".strip()
