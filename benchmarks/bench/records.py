"""Measure a section and keep everything that was measured as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfa
from benchmarks.bench.contender import measure_interleaved, rotated
from benchmarks.bench.sections import Section
from fedfa.engines.worker_count import available_cores
from fedfa.errors import RunError
from fedfa.experiment.run import processor_name, source_commit


def measure_section(section: Section, repetitions: int, arrays: Path, notify: Callable[[str], None]) -> dict[str, Any]:
    """Measure the contenders interleaved, in every repetition in another order, and return the record."""
    measurements: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in section.contenders}
    about = environment()
    for repetition in range(repetitions):
        order = rotated(section.contenders, 2 * repetition)
        prefix = f"{section.name} {repetition + 1}/{repetitions}: "
        # (mypy cannot infer the type of a lambda with a default argument.)
        reports = measure_interleaved(order, arrays, lambda news, prefix=prefix: notify(prefix + news))  # type: ignore[misc]  # bound now
        for contender, report in zip(order, reports, strict=True):
            measurements[contender.name].append(report)
    return {
        "section": section.name,
        "title": section.title,
        "about": about,
        "repetitions": repetitions,
        "by_round": True,
        "sample_steps": section.task.sample_steps if section.task else None,
        "aims": [{"of": section.compared, "to": to, "at_least": least} for to, least in section.targets.items()],
        "contenders": [
            {"name": c.name, "title": c.title, "note": c.note, "measurements": measurements[c.name]}
            for c in section.contenders
        ],
    }  # fmt: skip


def environment() -> dict[str, Any]:
    """Date, machine, versions, commit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor_name(),
        "cores": available_cores(),
        "memory_gb": round(memory / 2**30, 1) if memory else None,
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {
            "fedfa": fedfa.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": source_commit(),
    }


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Write the record of a section as ``SECTION.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{record['section']}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_records(directory: Path) -> dict[str, dict[str, Any]]:
    """The records in a directory, by section.

    Raises:
        RunError: There is none, or one cannot be read.
    """
    records = {}
    for path in sorted(directory.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            records[str(record["section"])] = record
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not a benchmark record ({error}); measure the section again") from None
    if not records:
        raise RunError(f"{directory} holds no benchmark records; create them with `make bench`")
    return records
