"""docs/insight.md: its example runs, and it names what is recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedfa.data import DataSet
from fedfa.insight.records import insight_records
from fedfa.studies.run import run
from fedfa.studies.settings import InsightSettings
from tests.studies.study_toys import small

PAGE = (Path(__file__).parents[2] / "docs" / "insight.md").read_text(encoding="utf-8")


def test_the_example_runs_as_it_stands(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    (code,) = re.findall(r"<!-- tested: python -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.count("\n") == 3


def test_every_key_of_the_record_and_every_setting_is_on_the_page(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedfa", rounds=1, insight={"every": 1}), tmp_path / "run", data=blobs)
    (record,) = insight_records(tmp_path / "run")

    def keys(value: dict[str, Any]) -> set[str]:
        inner = [keys(item) for item in value.values() if isinstance(item, dict)]
        return set(value).union(*inner)

    # "positive_pairs" and "positive_mean" are described with their histogram
    named = {key for key in keys(record) if not re.fullmatch(r"(positive|negative)_(pairs|mean)", key)}
    assert not {key for key in named | set(InsightSettings.model_fields) if not re.search(rf"`\.?{key}`", PAGE)}
