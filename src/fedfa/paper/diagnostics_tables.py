"""Diagnostics of a study's runs as tables: each method after its first and after its last round."""

from __future__ import annotations

from collections.abc import Mapping

from fedfa.paper.declarations import Column
from fedfa.paper.figures import FigureRuns, accuracy_by_round, diagnostic_by_round
from fedfa.text_tables import markdown_table

MEASURES: Mapping[str, tuple[str, str]] = {
    "cosine of clients' classifier updates, row by row": ("classifier_cosine", "mean"),
    "of the whole classifier as one vector": ("classifier_cosine", "whole"),
    "agreement of whole updates (1/clients if orthogonal)": ("drift", "agreement"),
    "distance of features, all pairs": ("feature_distance", "all"),
    "the same as a share of the features' norm": ("feature_distance", "relative"),
    "of pairs that both hold the class, as a share": ("feature_distance", "mean_relative"),
    "gradient of the loss at the global classifier": ("gradient", "global"),
}
"""Labels, and where the values stand in a record; docs/diagnostics.md defines them."""


def diagnostics_tables(shown: FigureRuns) -> list[tuple[Column, list[str], list[list[str]]]]:
    """Header and rows for each column with runs: a line per measure and for the accuracy, a cell per method.

    Raises:
        RunError: A run has no diagnostics.
    """
    tables = []
    for column in shown.columns_with_runs():
        methods = shown.rows_with_runs([column])
        each = [shown.at(column, method) for method in methods]
        rows = [
            [label, *(_change(*diagnostic_by_round(runs, path)) for runs in each)] for label, path in MEASURES.items()
        ]
        rows.append(["accuracy, %", *(_change(*accuracy_by_round(runs), decimals=1) for runs in each)])
        tables.append((column, [f"after round 1 → {shown.rounds}", *(method.title for method in methods)], rows))
    return tables


def diagnostics_markdown(shown: FigureRuns) -> str:
    """The tables as Markdown."""
    return "\n\n".join(
        f"**{column.title}**\n\n{markdown_table(header, rows)}" for column, header, rows in diagnostics_tables(shown)
    )


def _change(rounds: list[int], mean: list[float], _: list[float], decimals: int | None = None) -> str:
    """``0.18 → 0.14``; the first value is a dash if the first round was not measured."""
    if not rounds:
        return "–"
    first = _number(mean[0], decimals) if rounds[0] == 1 else "–"
    return f"{first} → {_number(mean[-1], decimals)}"


def _number(value: float, decimals: int | None) -> str:
    if decimals is None:
        decimals = 1 if abs(value) >= 10 else 2
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−")  # + 0.0 turns -0.0 into 0.0
