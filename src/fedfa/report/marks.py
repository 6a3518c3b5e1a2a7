"""Marks in tables: whose model was evaluated, and on what, where that is not the global model on the test set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedfa.experiment.record import whose_accuracy

CLIENTS, VALIDATED = "†", "‡"
MEANINGS = {
    CLIENTS: "† no global model: the mean over the last round's clients, each with its own model on the test samples "
    "of its own domains, or on all where there is one domain",
    VALIDATED: "‡ with validation samples: final is the chosen model on the test set, evaluated once; best and last 10 "
    "are on the validation samples",
}


def marks_of(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The marks of a run, from its records.

    Example:
        >>> marks_of([{"accuracy": 0.5, "client_accuracy": {"0": 0.5}}]), marks_of([{"accuracy": 0.5}])
        ('†', '')
    """
    whose = whose_accuracy(metrics)
    return (CLIENTS if whose.get("model") == "clients" else "") + (VALIDATED if whose.get("on") == "validation" else "")


def marked(name: str, marks: Iterable[str]) -> str:
    """A name with marks, each once.

    Example:
        >>> marked("local", ["†", "", "†‡"]), marked("fedavg", [""])
        ('local †‡', 'fedavg')
    """
    found = "".join(mark for mark in MEANINGS if any(mark in one for one in marks))
    return f"{name} {found}" if found else name


def marks_text(marks: Iterable[str]) -> str:
    """What the marks of a table mean, as sentences; empty if it has none."""
    used = set("".join(marks))
    return " ".join(f"{text}." for mark, text in MEANINGS.items() if mark in used)
