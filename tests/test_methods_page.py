"""docs/methods.md knows every method, and only those there are."""

from __future__ import annotations

import re
from pathlib import Path

from fedfa.algorithms.registry import methods

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_has_every_method_and_no_other() -> None:
    first_cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.split("## Combining")[0], flags=re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(methods())


def test_every_variant_is_named() -> None:
    for variant in methods()["fedfa"].variants:
        assert f"`{variant}`" in PAGE
