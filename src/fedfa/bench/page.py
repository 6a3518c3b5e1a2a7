"""The records on a page: tables between marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedfa.bench.tables import tables
from fedfa.errors import RunError

_MARKS = re.compile(r"(<!-- bench (\S+): begin -->\n).*?(<!-- bench \2: end -->)", re.DOTALL)
MACHINE = "machine"
"""Between marks of this name stands where and when the sections were measured."""


def refresh_page(page: Path, records: dict[str, dict[str, Any]]) -> str:
    """The page's text with its tables made anew.

    A section stands between ``<!-- bench SECTION: begin -->`` and ``end``. Marks of sections that were not measured
    keep what they hold.

    Raises:
        RunError: The page cannot be read, or has no marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"the page {page} cannot be read: {error.strerror}") from None
    if not _MARKS.search(text):
        raise RunError(f"{page} has no marks <!-- bench SECTION: begin --> … end between which tables go")

    def between(found: re.Match[str]) -> str:
        begin, section, end = found.groups()
        if section == MACHINE:
            return f"{begin}\n{machine(records)}\n\n{end}"
        if section not in records:
            return found.group()
        blocks = [table.markdown() for table in tables(records[section])]
        return begin + "\n" + "\n\n".join(blocks) + "\n\n" + end

    return _MARKS.sub(between, text)


def machine(records: dict[str, dict[str, Any]]) -> str:
    """Where and when, a line for each difference."""
    lines: dict[str, list[str]] = {}
    for section, record in records.items():
        about = record["about"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        commit = about["commit"] or "no commit"
        words = (
            f"{about['processor']}, {about['cores']} cores, {about['memory_gb']} GB; {about['system']}; {versions}; "
            f"{about['date'][:10]}, commit {commit[:7]}{' with changes' if 'changes' in commit else ''}; "
            f"{record['repetitions']} repetitions"
        )
        lines.setdefault(words, []).append(section)
    return "\n".join(f"- {', '.join(sections)}: {words}" for words, sections in lines.items())
