"""docs/diagnostics.md: its example runs, and it documents every key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedfa.data import DataSet
from fedfa.diagnostics.records import diagnostics_records
from fedfa.experiment.config import DiagnosticsConfig
from fedfa.experiment.run import run
from tests.experiment.run_toys import small

PAGE = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text(encoding="utf-8")


def test_the_example_runs(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    (code,) = re.findall(r"<!-- tested: python -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.count("\n") == 3


def test_every_key_of_the_record_and_of_the_configuration_is_documented(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedfa", rounds=1, diagnostics={"every": 1}), tmp_path / "run", data=blobs)
    (record,) = diagnostics_records(tmp_path / "run")

    def keys(value: dict[str, Any]) -> set[str]:
        inner = [keys(item) for item in value.values() if isinstance(item, dict)]
        return set(value).union(*inner)

    # "positive_pairs" and "positive_mean" are documented with their histogram
    documented = {key for key in keys(record) if not re.fullmatch(r"(positive|negative)_(pairs|mean)", key)}
    assert not {key for key in documented | set(DiagnosticsConfig.model_fields) if not re.search(rf"`\.?{key}`", PAGE)}
