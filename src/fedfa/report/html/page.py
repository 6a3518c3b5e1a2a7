"""The page: one self-contained HTML file with a chapter for each group of runs."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import fedfa
from fedfa.errors import FedfaError
from fedfa.experiment.recorded_runs import Problem, RecordedRun
from fedfa.report.html import tables
from fedfa.report.html.chart import Figure
from fedfa.report.html.clock_figures import clock_figures, reaching_table
from fedfa.report.html.commands import watching
from fedfa.report.html.data_split import Split, Splits
from fedfa.report.html.diagnostics_figures import diagnostics_figures
from fedfa.report.html.drawing import FONT, inline_svg
from fedfa.report.html.figures import (
    MethodStyles,
    accuracy_figures,
    class_figures,
    cost_figures,
    domain_figures,
    loss_figures,
    slug,
    split_figure,
    targets_of,
)  # fmt: skip
from fedfa.report.html.grouping import Chapter, partition_text
from fedfa.report.html.headline import differences, headline, overview
from fedfa.report.html.palette import css
from fedfa.report.html.tuning_figures import still_training, tuning_figures, tuning_record

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Makes the browser refuse all network access."""


@dataclass
class Page:
    """Builds a page; ``html`` is its text, ``figures`` its figures by file name."""

    chapters: Sequence[Chapter]
    method_styles: MethodStyles
    problems: list[Problem]
    """What could not be read; what cannot be shown is added."""
    splits: Splits
    targets: Sequence[float] = ()
    """Accuracies in percent for the table of costs; empty for round ones."""
    refresh: int | None = None
    """Seconds after which the page reloads itself; None for never."""
    command: str = ""
    """The command that writes the page."""
    policy: str = _POLICY
    """What the browser may load."""
    chooser: str = ""
    """A form above the chapters, on a page that is served."""
    script: str = ""
    """A script besides the page's own, on a page that is served."""
    state: str | None = None
    """State of the records on a page that is served: it reloads itself when another is announced."""

    def __post_init__(self) -> None:
        self.problems = list(self.problems)
        self.figures: dict[str, Figure] = {}
        self._prefix = ""
        self._tunings = {
            chapter.group: record for chapter in self.chapters if (record := self._tuning_of(chapter)) is not None
        }
        self.html = self._document([self._chapter(chapter, place) for place, chapter in enumerate(self.chapters)])

    def _tuning_of(self, chapter: Chapter) -> Mapping[str, Any] | None:
        try:
            return tuning_record(chapter)
        except (ValueError, OSError, FedfaError) as error:
            self.problems.append(Problem(Path(chapter.group).parent, f"the tuning cannot be shown: {error}"))
            return None

    @property
    def _runs(self) -> list[RecordedRun]:
        return [run for chapter in self.chapters for run in chapter.runs]

    def _document(self, bodies: Sequence[str]) -> str:
        files = resources.files("fedfa.report.html")
        style, script = (files.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
        mono = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
        live = self.refresh is not None or self.state is not None
        state = "" if self.state is None else f' data-state="{escape(self.state)}"'
        meta = f'<meta http-equiv="refresh" content="{self.refresh}">' if self.refresh is not None else ""
        title = self.chapters[0].title if len(self.chapters) == 1 else "Report"
        return (
            f'<!doctype html>\n<html lang="en"{" data-live" if live else ""}{state}><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(self.policy)}">{meta}'
            f'<link rel="icon" href="data:,"><title>{escape(title)} · fedfa</title>\n'
            f"<style>\n:root{{--font:{FONT};--mono:{mono}}}\n{css()}{style}</style></head>\n<body>\n"
            f"{self._top(title)}<main>{self.chooser}{self._notes()}{overview(self.chapters)}"
            f"{''.join(bodies) or _NOTHING}</main>\n"
            f"{self._foot()}\n<script>\n{script}{self.script}</script></body></html>\n"
        )

    def _top(self, title: str) -> str:
        when = f"Written {_clock(time.time())}"
        if self.refresh is not None:
            when += f"; reloads every {self.refresh} s"
        elif self.state is not None:
            when = f"Read {_clock(time.time())}; follows the records"
        contents = ""
        if len(self.chapters) > 1:
            links = "".join(f'<li><a href="#c{n}">{escape(c.title)}</a></li>' for n, c in enumerate(self.chapters))
            contents = f'<nav aria-label="Chapters"><ul>{links}</ul></nav>'
        return (
            f'<header class="top"><div><h1>{escape(title)}</h1>'
            f'<p class="quiet">{_state(self._runs)}. {when}.</p>{self._stale()}'
            f'{contents}</div><button type="button" id="theme" hidden>Colours</button></header>'
        )

    def _stale(self) -> str:
        """A hint how to keep the page up to date while runs continue."""
        if self.refresh is not None or self.state is not None or (self.chapters and not still_training(self._runs)):
            return ""
        command = watching(self.command or "fedfa report DIRECTORY")
        return (
            '<p class="quiet">This page does not update itself. While runs continue, '
            f"<code>{escape(command)}</code> keeps it up to date.</p>"
        )

    def _notes(self) -> str:
        """What is missing from the page, and why."""
        if not self.problems:
            return ""
        items = "".join(f"<li><code>{escape(str(p.path))}</code>: {escape(p.message)}</li>" for p in self.problems)
        return f'<div class="box notes" role="note"><h4>Missing or incomplete</h4><ul>{items}</ul></div>'

    def _foot(self) -> str:
        made = f" by <code>{escape(self.command)}</code>" if self.command else ""
        return (
            f"<footer><p>Made{made} with fedfa {escape(fedfa.__version__)}, Python {platform.python_version()}. "
            "Accuracies are of the global model on the test set unless a method keeps parameters in its clients."
            "</p></footer>"
        )

    # -- a chapter --------------------------------------------------------------------------------------------
    def _chapter(self, chapter: Chapter, place: int) -> str:
        self._prefix = f"{slug(chapter.title)}-" if len(self.chapters) > 1 else ""
        identity = f"c{place}"
        split = self.splits.of(chapter.runs[0])
        classes = split.classes if isinstance(split, Split) else ()
        method_styles = self.method_styles
        tuning = self._tunings.get(chapter.group)
        sections: dict[str, Callable[[], str]] = {
            "Tuning": lambda: "" if tuning is None else self._figures(tuning_figures(tuning)),
            "Accuracy": lambda: (
                self._figures(accuracy_figures(chapter, method_styles)) + tables.results(chapter, method_styles)
            ),
            "Differences": lambda: differences(chapter),
            "Loss": lambda: self._figures(loss_figures(chapter, method_styles)),
            "Time and bytes": lambda: self._costs(chapter),
            "On the clock": lambda: self._on_clock(chapter),
            "Data": lambda: self._split(split),
            "Classes": lambda: self._figures(class_figures(chapter, classes)),
            "Domains": lambda: self._figures(domain_figures(chapter)),
            "Diagnostics": lambda: self._figures(diagnostics_figures(chapter, method_styles, classes, self.problems)),
            "Configuration": lambda: f'<div class="box">{tables.configs(chapter, identity)}</div>',
            "Commands and versions": lambda: (
                f'<div class="box">{tables.commands(chapter)}{tables.versions(chapter)}</div>'
            ),
        }
        body = "".join(self._section(chapter, name, make) for name, make in sections.items())
        heading = f'<h2 class="chapter" id="{identity}">{escape(chapter.title)}</h2>' if len(self.chapters) > 1 else ""
        where = f" Records in <code>{escape(chapter.group)}</code>." if chapter.group else ""
        sentence = headline(chapter) if tuning is None else ""
        lead = f'<p class="headline">{escape(sentence)}</p>' if sentence else ""
        lead += f"<p class='lead'>{escape(_setting_text(chapter))}{where}</p>"
        return f"<section>{heading}{lead}{'' if tuning else _unfinished(chapter.runs)}{body}</section>"

    def _section(self, chapter: Chapter, name: str, make: Callable[[], str]) -> str:
        """A section, or a note: one malformed record must not prevent the whole page."""
        try:
            inner = make()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            where = Path(chapter.group or chapter.runs[0].path)
            self.problems.append(Problem(where, f"{name} cannot be shown: {type(error).__name__}: {error}"))
            return ""
        return f"<h3>{name}</h3>{inner}" if inner else ""

    def _costs(self, chapter: Chapter) -> str:
        table = tables.reaching(chapter, self.method_styles, targets_of(chapter, self.targets))
        return table + self._figures(cost_figures(chapter, self.method_styles)) if table else ""

    def _on_clock(self, chapter: Chapter) -> str:
        table = reaching_table(chapter, self.targets)
        shown = tables.plain(table, "Virtual time and bytes to reach accuracies") if table else ""
        shown = f'<div class="box">{shown}</div>' if shown else ""
        return shown + self._figures(clock_figures(chapter, self.method_styles))

    def _split(self, split: Split | str) -> str:
        if isinstance(split, str):
            return f'<p class="quiet">The split cannot be shown: {escape(split)}.</p>'
        return self._figures([split_figure(split)])

    # -- figures ----------------------------------------------------------------------------------------------
    def _figures(self, figures: Sequence[Figure]) -> str:
        """Figures below each other, those of half width side by side."""
        html = ""
        for half, group in groupby(figures, key=lambda figure: figure.half):
            inner = "".join(map(self._figure, group))
            html += f'<div class="halves">{inner}</div>' if half else inner
        return html

    def _figure(self, figure: Figure) -> str:
        label = f"f{len(self.figures)}"
        name = f"{self._prefix}{figure.name}"
        self.figures[name] = figure
        drawings = "".join(
            inline_svg(drawing, figure.title, figure.alt, css=f"drawing {kind}", label=f"{label}{kind[0]}")
            for kind, drawing in (("wide", figure.wide), ("narrow", figure.narrow))
        )
        caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
        data = ""
        if figure.table is not None:
            data += tables.details("Data as a table", tables.plain(figure.table, figure.title), f"{label}-data")
        if figure.hover:
            values = json.dumps(figure.hover, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
            data += f'<script type="application/json" class="values">{values}</script>'
        return (
            f'<figure class="box" id="{escape(name)}"><h4>{escape(figure.title)}</h4>'
            f'<div class="chart">{drawings}</div>{caption}{data}</figure>'
        )


_NOTHING = '<p class="lead">No run could be read yet.</p>'


def _state(runs: Sequence[RecordedRun]) -> str:
    """How many runs there are, and how many are not finished."""
    open_runs = len(still_training(runs))
    if not runs:
        return "No run yet"
    if len(runs) == 1:
        return "1 run, not finished" if open_runs else "1 run, finished"
    return f"{len(runs)} runs, {open_runs} not finished" if open_runs else f"{len(runs)} runs, all finished"


def _clock(seconds: float) -> str:
    """Format a time as a date, which stays true whenever the page is read."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _setting_text(chapter: Chapter) -> str:
    """What all runs of a chapter have in common, in a sentence."""
    common, _ = chapter.configs()
    config = chapter.runs[0].config
    data = config.get("data", {})
    clients = f" over {data['clients']} clients" if data.get("clients") else ""
    texts = [f"{data.get('name', '?')}, split by {partition_text(data.get('partition')) or '?'}{clients}"]
    texts.append(f"network {config.get('model', {}).get('name', '?')}")
    for key, text in (
        ("rounds", "{} round{s}"), ("cohort.clients", "{} client{s} a round"),
        ("cohort.rate", "{:.0%} of the clients a round"),
        ("local.epochs", "{} local epoch{s}"), ("local.batch_size", "batches of {}"), ("local.lr", "learning rate {}"),
    ):  # fmt: skip
        if common.get(key) is not None and not (key == "cohort.rate" and common.get("cohort.clients")):
            texts.append(text.format(common[key], s="" if common[key] == 1 else "s"))
    seeds = sorted({run.seed for run in chapter.runs})
    texts.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}")
    return "; ".join(texts) + "."


def _unfinished(runs: Sequence[RecordedRun]) -> str:
    """Progress of unfinished runs."""
    rows = []
    for run in still_training(runs):
        rows.append(
            f'<span>{escape(run.path.name)}</span><progress max="{max(run.rounds, 1)}" value="{run.done}" '
            f'aria-label="{escape(run.path.name)}"></progress><span>{run.done} of {run.rounds} rounds, '
            f"last record {_clock(run.changed)}</span>"
        )
    return f'<div class="box"><h4>Not finished</h4><div class="going">{"".join(rows)}</div></div>' if rows else ""
