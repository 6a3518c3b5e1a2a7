"""Figures of what was seen inside training: distances, similarities, drift, gradients, anchors, features in the plane.

Everything is read from ``insight.jsonl`` and the stored probe features; what a run has not measured is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedfa.errors import FedfaError
from fedfa.report.html.chapters import Chapter, Method
from fedfa.report.html.chart import NARROW, WIDE, Figure, Table, number
from fedfa.report.html.clouds import Cloud, clouds
from fedfa.report.html.figures import Looks, as_series, line_figure
from fedfa.report.html.heat_maps import Heat, heat_maps
from fedfa.report.html.lines import Axis, Panel, Series, hover_lines, multiples
from fedfa.report.html.palette import Style
from fedfa.report.html.reading import Problem, Run

Value = Callable[[Mapping[str, Any]], float | None]


def _at(*path: str) -> Value:
    """The number at a place in a record; a list there gives its mean."""

    def value(record: Mapping[str, Any]) -> float | None:
        found: Any = record
        for step in path:
            found = found.get(step) if isinstance(found, Mapping) else None
        if isinstance(found, list):
            numbers = [one for one in found if isinstance(one, int | float)]
            return statistics.fmean(numbers) if numbers else None
        return found if isinstance(found, int | float) else None

    return value


#: Name, title, words of the axis, caption, value.
_CURVES: tuple[tuple[str, str, str, str, Value], ...] = (
    ("feature-distance", "Distance of features between clients", "mean L2 distance",
     "Between two clients' features of the same probe sample, for classes that both hold.",
     _at("feature_distance", "mean")),
    ("feature-distance-relative", "The same, relative to the features' size", "distance / norm",
     "All pairs of clients; methods differ in the scale of their features.", _at("feature_distance", "relative")),
    ("classifier-cosine", "Similarity of classifier updates", "mean cosine",
     "Between clients, class by class: 1 is the same direction, below 0 they pull against each other.",
     _at("classifier_cosine", "mean")),
    ("cka", "Similarity of representations", "linear CKA",
     "Linear centred kernel alignment of the clients' probe features: 1 is the same up to rotation and scale.",
     _at("cka", "mean")),
    ("positive-similarity", "Features of the same class, different clients", "mean cosine",
     "Positive pairs: high means that clients agree on where a class lies.", _at("pair_similarity", "positive_mean")),
    ("negative-similarity", "Features of different classes, different clients", "mean cosine",
     "Negative pairs: high means that classes are mixed up.", _at("pair_similarity", "negative_mean")),
    ("drift", "Drift of the clients' weights", "mean L2 norm",
     "How far local training moves a client from the model it received.", _at("drift", "norm")),
    ("drift-agreement", "Agreement of the clients' updates", "share",
     "|mean update|² / mean |update|²: 1 all equal, 1/K for K orthogonal ones.", _at("drift", "agreement")),
    ("gradient", "Gradient at the classifier", "L2 norm",
     "Of the probe's mean loss with respect to the classifier of the global model.", _at("gradient", "global")),
)  # fmt: skip


def insight_figures(chapter: Chapter, looks: Looks, classes: Sequence[str], problems: list[Problem]) -> list[Figure]:
    """All figures that the measurements of a chapter allow."""
    figures = [figure for curve in _CURVES if (figure := _curve(chapter, looks, *curve)) is not None]
    return [
        *figures,
        *_histograms(chapter, looks),
        *_anchors(chapter, looks, classes),
        *_embeddings(chapter, classes, problems),
    ]


def _curve(
    chapter: Chapter, looks: Looks, name: str, title: str, words: str, caption: str, value: Value
) -> Figure | None:
    series = [as_series(m.name, looks[m.name], m.curve(value, "insight")) for m in chapter.methods]
    series = [one for one in series if one.points]
    if not series:
        return None
    x = Axis("round", low=0, whole=True)
    low = 0.0 if min(y for one in series for _, y in one.points) >= 0 else None
    return line_figure(name, title, caption, series, x, Axis(words, low=low), half=True)


def _histograms(chapter: Chapter, looks: Looks) -> list[Figure]:
    """Cosines of positive and of negative pairs at the last measured round, a panel for each method."""
    panels: list[Panel] = []
    rows = []
    for method in chapter.methods:
        record = next((r for r in reversed(method.runs[0].insight) if r.get("pair_similarity", {}).get("edges")), None)
        if record is None:
            continue
        pairs = record["pair_similarity"]
        edges = pairs["edges"]
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        lines = []
        for kind, look in (("positive", Style("ink")), ("negative", Style("muted", (5, 3)))):
            counts = pairs.get(kind) or []
            total = sum(counts)
            if total:
                shares = [(at, 100 * count / total) for at, count in zip(middles, counts, strict=False)]
                lines.append(Series(f"{kind} pairs", look, shares))
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


def _anchors(chapter: Chapter, looks: Looks, classes: Sequence[str]) -> list[Figure]:
    """Cosines between anchors at the last measured round, and how far anchors move and how long they are."""
    heats: list[Heat] = []
    rows: list[list[str]] = []
    for method in chapter.methods:
        record: dict[str, Any] = next((r for r in reversed(method.runs[0].insight) if r.get("anchors")), {})
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

    def draw(width: float) -> Any:
        return heat_maps(heats, width, low=-1, high=1, scale="d", panel_width=330, key="cosine", square=True)

    figures = [
        Figure(
            "anchors", "Cosines between class anchors",
            "At the last measured round, first seed. Near 0 off the diagonal: anchors stand at right angles.",
            "For each method with anchors a heat map of the cosines between the anchors of two classes.",
            draw(WIDE), draw(NARROW), hover=[heat.hover() for heat in heats],
            table=Table(["method", "mean cosine", "mean norm"], rows),
        )
    ]  # fmt: skip
    for what, title, caption in (
        ("movement", "Movement of the anchors", "Mean over classes of how far an anchor moved since the round before."),
        ("norms", "Length of the anchors", "Mean over classes."),
    ):
        series = [as_series(m.name, looks[m.name], m.curve(_of_anchors(what), "insight")) for m in chapter.methods]
        series = [one for one in series if one.points]
        if series:
            axes = Axis("round", low=0, whole=True), Axis("L2 norm", low=0)
            figures.append(line_figure(f"anchor-{what}", title, caption, series, *axes, half=True))
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
    """Features in the plane (t-SNE): by class and by client, of the first and the last stored round."""
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
    for word, kinds, key in (("class", labels, names), ("client", clients, [f"client {c}" for c in clients])):
        drawn = []
        for title, embedding in panels:
            of = embedding.label if word == "class" else embedding.client
            groups = [[(float(x), float(y)) for x, y in embedding.xy[of == kind]] for kind in kinds]
            stars = []
            if word == "class" and embedding.anchors is not None:
                stars = [(float(x), float(y)) for x, y in (embedding.anchors[label] for label in labels)]
            drawn.append(Cloud(title, groups, stars))
        panel = 230 if len(drawn) > 3 else 330
        stars_words = (
            " Large marks with an outline are the class anchors." if any(cloud.stars for cloud in drawn) else ""
        )
        figures.append(
            Figure(
                f"features-by-{word}", f"Features in the plane, by {word}",
                "t-SNE of the clients' probe features, one embedding for all clients of a picture; each client on "
                "samples of classes it holds. Distances near by say something, far ones and axes do not."
                f"{stars_words}",
                f"Clouds of points, a panel for each method and round, coloured by {word}.",
                clouds(drawn, key, WIDE, panel_width=panel), clouds(drawn, key, NARROW, panel_width=172),
            )
        )  # fmt: skip
    return figures


def _stored(method: Method) -> list[tuple[str, Run, int]]:
    """The first and the last round whose features are there, of the first seed that has any."""
    from fedfa.insight.records import shown_rounds

    for run in method.runs:
        rounds = shown_rounds(run.folder)
        if rounds:
            return [(f"{method.name}, round {at}", run, at) for at in sorted({rounds[0], rounds[-1]})]
    return []


def _embedding(run: Run, round: int, problems: list[Problem]) -> Any:
    try:
        from fedfa.insight.embedding import shared_embedding

        return shared_embedding(run.folder, round)
    except (FedfaError, ImportError, OSError) as error:
        problems.append(Problem(run.folder, f"no picture of the features of round {round}: {error}"))
        return None
