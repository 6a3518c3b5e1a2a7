"""The examples of docs/own_data.md run as they stand."""

from __future__ import annotations

import re

import pytest

from tests.data.data_files import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=["table", "clients"])
def test_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "docs/own_data.md", "exec"), {})
    assert capsys.readouterr().out == "True\n"
