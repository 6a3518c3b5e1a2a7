"""Figures of the diagnostics: distances, similarities, drift, gradients, anchors, embedded features.

They are made from ``diagnostics.jsonl`` and the stored probe features; what a run has not measured is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedfa.errors import FedfaError
from fedfa.experiment.recorded_runs import Problem, RecordedRun
from fedfa.report.html.chart import NARROW, WIDE, Figure, Table, number
from fedfa.report.html.figures import MethodStyles, as_series, line_figure
from fedfa.report.html.grouping import Chapter, MethodRuns
from fedfa.report.html.heat_maps import ColourScale, Heat, heat_maps
from fedfa.report.html.line_charts import Axis, Panel, Series, hover_lines, multiples
from fedfa.report.html.palette import Style
from fedfa.report.html.scatter_plots import ScatterPanel, scatter_plots

Value = Callable[[Mapping[str, Any]], float | None]


def _at(*path: str) -> Value:
    """Selects the number at a path in a record; of a list, the mean."""

    def value(record: Mapping[str, Any]) -> float | None:
        found: Any = record
        for step in path:
            found = found.get(step) if isinstance(found, Mapping) else None
        if isinstance(found, list):
            return _mean(found)
        return found if isinstance(found, int | float) else None

    return value


#: Name, title, label of the axis, caption, value.
_CURVES: tuple[tuple[str, str, str, str, Value], ...] = (
    ("feature-distance", "Distance of features between clients", "mean L2 distance",
     "Between two clients' features of the same probe sample, for classes that both hold.",
     _at("feature_distance", "mean")),
    ("feature-distance-relative", "The same, relative to the features' size", "distance / norm",
     "All pairs of clients; methods differ in the scale of their features.", _at("feature_distance", "relative")),
    ("classifier-cosine", "Similarity of classifier updates", "mean cosine",
     "Between clients, class by class: 1 is the same direction, below 0 they oppose each other.",
     _at("classifier_cosine", "mean")),
    ("cka", "Similarity of representations", "linear CKA",
     "Linear centred kernel alignment of the clients' probe features: 1 is the same up to rotation and scale.",
     _at("cka", "mean")),
    ("positive-similarity", "Features of the same class, different clients", "mean cosine",
     "Positive pairs: high means that clients agree on where a class lies.", _at("pair_similarity", "positive_mean")),
    ("negative-similarity", "Features of different classes, different clients", "mean cosine",
     "Negative pairs: high means that classes are mixed up.", _at("pair_similarity", "negative_mean")),
    ("drift", "Drift of the clients' weights", "mean L2 norm",
     "How far local training moves a client from the broadcast model.", _at("drift", "norm")),
    ("drift-agreement", "Agreement of the clients' updates", "share",
     "|mean update|² / mean |update|²: 1 all equal, 1/K for K orthogonal ones.", _at("drift", "agreement")),
    ("gradient", "Gradient at the classifier", "L2 norm",
     "Of the probe's mean loss with respect to the classifier of the global model.", _at("gradient", "global")),
)  # fmt: skip


def diagnostics_figures(
    chapter: Chapter, method_styles: MethodStyles, classes: Sequence[str], problems: list[Problem]
) -> list[Figure]:
    """All figures for which a chapter has diagnostics."""
    figures = [figure for curve in _CURVES if (figure := _curve(chapter, method_styles, *curve)) is not None]
    return [
        *figures,
        *_histograms(chapter, method_styles),
        *_anchors(chapter, method_styles, classes),
        *_embeddings(chapter, classes, problems),
    ]


def _curve(
    chapter: Chapter, method_styles: MethodStyles, name: str, title: str, label: str, caption: str, value: Value
) -> Figure | None:
    series = [as_series(m.name, method_styles[m.name], m.curve(value, "diagnostics")) for m in chapter.methods]
    series = [one for one in series if one.points]
    if not series:
        return None
    x = Axis("round", low=0, whole=True)
    low = 0.0 if min(y for one in series for _, y in one.points) >= 0 else None
    return line_figure(name, title, caption, series, x, Axis(label, low=low), half=True)


def _histograms(chapter: Chapter, method_styles: MethodStyles) -> list[Figure]:
    """Cosines of positive and negative pairs at the last measured round, a panel for each method."""
    panels: list[Panel] = []
    rows = []
    for method in chapter.methods:
        record = next(
            (r for r in reversed(method.runs[0].diagnostics) if r.get("pair_similarity", {}).get("edges")), None
        )
        if record is None:
            continue
        pairs = record["pair_similarity"]
        edges = pairs["edges"]
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        lines = []
        for kind, style in (("positive", Style("ink")), ("negative", Style("muted", (5, 3)))):
            counts = pairs.get(kind) or []
            total = sum(counts)
            if total:
                shares = [(at, 100 * count / total) for at, count in zip(middles, counts, strict=False)]
                lines.append(Series(f"{kind} pairs", style, shares))
        if lines:
            panels.append(Panel(f"{method.name}, round {record['round']}", lines))
            means = [number(pairs.get(f"{kind}_mean")) for kind in ("positive", "negative")]
            rows.append([method.name, str(record["round"]), *means])
    if not panels:
        return []
    x, y = Axis("cosine", low=-1, high=1), Axis("share of pairs, %", low=0)
    return [
        Figure(
            "pair-similarity", "Similarity of features between clients",
            "Cosines between features of different clients at the last measured round, first seed. Positive pairs are "
            "of the same class, negative pairs of different classes. The further apart, the better.",
            "For each method the histograms of cosines of positive and of negative pairs.",
            multiples(panels, x, y, WIDE, panel_width=260), multiples(panels, x, y, NARROW, panel_width=172),
            hover=[hover_lines(panel.series, "cosine", " %") for panel in panels],
            table=Table(["method", "round", "mean of positive pairs", "mean of negative pairs"], rows),
        )
    ]  # fmt: skip


def _anchors(chapter: Chapter, method_styles: MethodStyles, classes: Sequence[str]) -> list[Figure]:
    """Cosines between anchors at the last measured round; movement and norm of the anchors by round."""
    heats: list[Heat] = []
    rows: list[list[str]] = []
    for method in chapter.methods:
        record: dict[str, Any] = next((r for r in reversed(method.runs[0].diagnostics) if r.get("anchors")), {})
        for name, anchors in record.get("anchors", {}).items():
            cosines = anchors.get("cosines") or []
            if not cosines:
                continue
            labels = list(classes) if len(classes) == len(cosines) else [str(label) for label in range(len(cosines))]
            title = method.name if name == "anchors/anchors" else f"{method.name}: {name.rpartition('/')[2]}"
            heats.append(Heat(labels, labels, cosines, f"{title}, round {record['round']}", "class", "class"))
            rows.append([title, number(anchors.get("mean_cosine")), number(_mean(anchors.get("norms")))])
    if not heats:
        return []

    scale = ColourScale(-1, 1, "cosine", "d")
    figures = [
        Figure(
            "anchors", "Cosines between class anchors",
            "At the last measured round, first seed. Near 0 off the diagonal: anchors are orthogonal.",
            "For each method with anchors a heat map of the cosines between the anchors of two classes.",
            heat_maps(heats, WIDE, scale, square=True), heat_maps(heats, NARROW, scale, square=True),
            hover=[heat.hover() for heat in heats],
            table=Table(["method", "mean cosine", "mean norm"], rows),
        )
    ]  # fmt: skip
    for what, title, caption in (
        ("movement", "Movement of the anchors", "Mean over classes of how far an anchor moved since the round before."),
        ("norms", "Norm of the anchors", "Mean over classes."),
    ):
        curve = _curve(chapter, method_styles, f"anchor-{what}", title, "L2 norm", caption, _of_anchors(what))
        figures += [] if curve is None else [curve]
    return figures


def _mean(values: Any) -> float | None:
    numbers = [one for one in values or [] if isinstance(one, int | float)]
    return statistics.fmean(numbers) if numbers else None


def _of_anchors(what: str) -> Value:
    def value(record: Mapping[str, Any]) -> float | None:
        first = next(iter((record.get("anchors") or {}).values()), None)
        return _mean(first.get(what)) if isinstance(first, Mapping) else None

    return value


def _embeddings(chapter: Chapter, classes: Sequence[str], problems: list[Problem]) -> list[Figure]:
    """t-SNE of the features, by class and by client, at the first and the last stored round."""
    panels: list[tuple[str, Any]] = []
    for method in chapter.methods:
        for title, run, round in _stored(method):
            embedding = _embedding(run, round, problems)
            if embedding is not None:
                panels.append((title, embedding))
    if not panels:
        return []
    labels = sorted({int(label) for _, e in panels for label in e.label})
    clients = sorted({int(client) for _, e in panels for client in e.client})
    names = [classes[label] if label < len(classes) else str(label) for label in labels]
    figures = []
    for word, categories, key in (("class", labels, names), ("client", clients, [f"client {c}" for c in clients])):
        drawn = []
        for title, embedding in panels:
            of = embedding.label if word == "class" else embedding.client
            groups = [[(float(x), float(y)) for x, y in embedding.xy[of == one]] for one in categories]
            stars = []
            if word == "class" and embedding.anchors is not None:
                stars = [(float(x), float(y)) for x, y in (embedding.anchors[label] for label in labels)]
            drawn.append(ScatterPanel(title, groups, stars))
        panel = 230 if len(drawn) > 3 else 330
        stars_note = " Large outlined markers are the class anchors." if any(one.stars for one in drawn) else ""
        figures.append(
            Figure(
                f"features-by-{word}", f"Features in the plane, by {word}",
                "t-SNE of the clients' probe features, one embedding for all clients of a panel; each client on "
                "samples of classes it holds. Only short distances are meaningful, long ones and axes are not."
                f"{stars_note}",
                f"Scatter plots, a panel for each method and round, coloured by {word}.",
                scatter_plots(drawn, key, WIDE, panel_width=panel), scatter_plots(drawn, key, NARROW, panel_width=172),
            )
        )  # fmt: skip
    return figures


def _stored(method: MethodRuns) -> list[tuple[str, RecordedRun, int]]:
    """The first and the last round with stored features, of the first seed that has any."""
    from fedfa.diagnostics.records import DiagnosticsRecords

    for run in method.runs:
        rounds = DiagnosticsRecords(run.path).shown_rounds()
        if rounds:
            return [(f"{method.name}, round {at}", run, at) for at in sorted({rounds[0], rounds[-1]})]
    return []


def _embedding(run: RecordedRun, round: int, problems: list[Problem]) -> Any:
    try:
        from fedfa.diagnostics.embedding import shared_embedding

        return shared_embedding(run.path, round)
    except (FedfaError, ImportError, OSError) as error:
        problems.append(Problem(run.path, f"no embedding of the features of round {round}: {error}"))
        return None
