"""Measuring a section, and the record of it: everything that was measured, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedfa
from fedfa.bench.contender import Contender, measure, measure_in_turns
from fedfa.bench.sections import Section
from fedfa.engines.cores import available_cores
from fedfa.errors import RunError
from fedfa.studies.files import write_atomically
from fedfa.studies.run import processor_name, source_commit

Tell = Callable[[str], None]
"""Called with a line of news."""


def measure_section(section: Section, repeat: int, arrays: Path, tell: Tell) -> dict[str, Any]:
    """Run the contenders in turns, as often as asked, each time beginning with another one; after a failure once more.

    What disturbs the machine for a while then disturbs all of them. A turn is a whole run, or, in sections by round, a
    round or a few.
    """
    found: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in section.contenders}
    about = circumstances(datetime.now(UTC))
    for repetition in range(repeat):
        turn = repetition * 2 % len(section.contenders)
        order = [*section.contenders[turn:], *section.contenders[:turn]]
        if section.by_round:
            reports = measure_in_turns(
                order, arrays, partial(_tell_of, tell, f"{section.name} {repetition + 1}/{repeat}")
            )
            for contender, one in zip(order, reports, strict=True):
                found[contender.name].append(one)
            continue
        for contender in order:
            tell(f"{section.name} {repetition + 1}/{repeat}: {contender.title}")
            one = measure(contender, arrays)
            if "failed" in one:
                tell(f"that failed ({one['failed']}); once more")
                one = measure(contender, arrays)
            found[contender.name].append(one)
    return {
        "section": section.name,
        "title": section.title,
        "about": about,
        "repetitions": repeat,
        "by_round": section.by_round,
        "sample_steps": section.task.sample_steps if section.task else None,
        "aims": [{"of": aim.of, "to": aim.to, "at_least": aim.at_least} for aim in section.aims],
        "contenders": [
            {"name": c.name, "title": c.title, "note": c.note, "measurements": found[c.name]}
            for c in section.contenders
        ],
    }  # fmt: skip


def _tell_of(tell: Tell, where: str, contender: Contender, words: str) -> None:
    tell(f"{where}: {contender.title}: {words}")


def circumstances(moment: datetime) -> dict[str, Any]:
    """Machine, versions, date, commit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "date": moment.strftime("%Y-%m-%d %H:%M UTC"),
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


def write_record(folder: Path, record: dict[str, Any]) -> Path:
    """Keep a section's record as ``SECTION.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['section']}.json"
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return path


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder, by section.

    Raises:
        RunError: There is none, or one cannot be read.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            records[str(record["section"])] = record
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not the record of a benchmark ({error}); measure again") from None
    if not records:
        raise RunError(f"{folder} holds no record of a benchmark; `fedfa bench --out {folder}` makes them")
    return records
