"""Refresh the tables of docs/performance.md from the records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.bench.tables import tables
from fedfa.errors import RunError

_MARKS = re.compile(r"(<!-- bench (\S+): begin -->\n).*?(<!-- bench \2: end -->)", re.DOTALL)


def refresh_page(page: Path, records: dict[str, dict[str, Any]]) -> str:
    """The text of the page with new tables between ``<!-- bench SECTION: begin -->`` and ``end``.

    Sections without a record keep their text. Between the marks of ``machine`` goes where and when each was measured.

    Raises:
        RunError: The page cannot be read, or has no marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"the page {page} cannot be read: {error.strerror}") from None
    if not _MARKS.search(text):
        raise RunError(f"{page} has no marks <!-- bench SECTION: begin --> … end for the tables")

    def between(found: re.Match[str]) -> str:
        begin, section, end = found.groups()
        if section == "machine":
            return f"{begin}\n{machine(records)}\n\n{end}"
        if section not in records:
            return found.group()
        blocks = [table.markdown() for table in tables(records[section])]
        return begin + "\n" + "\n\n".join(blocks) + "\n\n" + end

    return _MARKS.sub(between, text)


def machine(records: dict[str, dict[str, Any]]) -> str:
    """Where and when the sections were measured, one line for all that agree."""
    lines: dict[str, list[str]] = {}
    for section, record in records.items():
        about = record["about"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        commit = about["commit"] or "no commit"
        whole_runs = len(record["contenders"]) > 1 and not record.get("by_round")
        text = (
            f"{about['processor']}, {about['cores']} cores, {about['memory_gb']} GB; {about['system']}; {versions}; "
            f"{about['date'][:10]}, commit {commit[:7]}{' with changes' if 'changes' in commit else ''}; "
            f"{record['repetitions']} repetitions{' of whole runs' if whole_runs else ''}"
        )
        lines.setdefault(text, []).append(section)
    return "\n".join(f"- {', '.join(sections)}: {text}" for text, sections in lines.items())
