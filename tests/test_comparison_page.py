"""docs/comparison.md: its small program runs, and its counts are those of its programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "comparison.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## (FedJAX|pfl-research|fedfa)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def row(title: str) -> dict[str, int]:
    """A row of numbers of the first table, by framework."""
    (cells,) = re.findall(rf"^\| {title} \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    return dict(zip(("FedJAX", "pfl-research", "fedfa"), map(int, cells), strict=True))


@pytest.mark.system
def test_the_small_program_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- tested: python -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3"]
    assert not list(tmp_path.iterdir()), "an experiment writes files only on request"


def test_the_counted_lines_and_names_are_those_of_the_programs() -> None:
    lines = {name: len(re.findall(r"^\s*[^\s#].*$", code, re.MULTILINE)) for name, code in PROGRAMS.items()}
    assert lines == row("lines of the program")
    names = {
        name: {word for found in re.findall(pattern, PROGRAMS[name], re.MULTILINE) for word in re.split(r",\s*", found)}
        for name, pattern in (
            ("FedJAX", r"\b(fedjax(?:\.\w+)+)"), ("pfl-research", r"^from pfl\S* import (\w+(?:, \w+)*)"),
            ("fedfa", r"\b(fedfa(?:\.\w+)+)"),
        )
    }  # fmt: skip
    assert {name: len(found) for name, found in names.items()} == row("names of the framework in the program")
