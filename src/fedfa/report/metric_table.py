"""Metrics and clients' own data of finished runs as a table: whose model, on what, averaged over what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.learning.metrics import is_own
from fedfa.seed_means import SeedMean

OWN_DATA = {"mean": "own data: mean", "worst_decile": "own data: worst tenth", "spread": "own data: spread"}
NOTE = (
    "On the test set, in percent (your own metrics as they are), means over seeds. In brackets what a value averages "
    "over, from the inside out. Own data: the accuracy on each client's own distribution, its mean, the mean of the "
    "worst tenth of the clients and the standard deviation over clients, with the model that is named."
)


def metric_table(methods: Mapping[str, Sequence[RecordedRun]]) -> tuple[list[str], list[list[str]]] | None:
    """Header and rows, a row per method; None if no run has metrics or clients' own data."""
    labels: dict[str, str] = {}
    rows: list[tuple[str, str, dict[str, str]]] = []
    for method, runs in methods.items():
        found: dict[str, dict[int, float]] = {}
        model = ""
        for run in runs:
            summary = run.summary or {}
            averages = _averages(run)
            for name, value in (summary.get("metrics") or {}).items():
                if isinstance(value, int | float):
                    labels.setdefault(name, averages.get(name, "samples"))
                    found.setdefault(name, {})[run.seed] = value if is_own(name) else 100 * value
            own = summary.get("own_data") or {}
            model = {"clients": "clients' own", "global": "global"}.get(str(own.get("model")), model)
            for key, title in OWN_DATA.items():
                if isinstance(own.get(key), int | float):
                    labels.setdefault(title, "")
                    found.setdefault(title, {})[run.seed] = 100 * own[key]
        if found:
            rows.append((method, model or "–", {name: str(SeedMean.over(by_seed)) for name, by_seed in found.items()}))
    if not rows:
        return None
    columns = sorted(labels, key=lambda name: name in OWN_DATA.values())
    header = [f"{name} ({labels[name]})" if labels[name] else name for name in columns]
    has_own = any(name in OWN_DATA.values() for name in columns)
    return ["method", *header, *(["own data: model"] if has_own else [])], [
        [method, *(values.get(name, "–") for name in columns), *([model] if has_own else [])]
        for method, model, values in rows
    ]


def _averages(run: RecordedRun) -> dict[str, Any]:
    tested = (run.summary or {}).get("test") or (run.metrics[-1] if run.metrics else {})
    return dict((tested.get("evaluated") or {}).get("averages") or {})
