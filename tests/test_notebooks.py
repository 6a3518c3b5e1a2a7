"""The notebooks in examples/: they run, and they are committed with what they print and draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def test_there_are_six() -> None:
    assert [name[0] for name in NAMES] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_outputs_are_committed_small_and_without_errors(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert len(text) < 150_000
    assert "/home/" not in text
    assert "/tmp/" not in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="pip install '.[notebooks]'")
    pytest.importorskip("ipykernel", reason="pip install '.[notebooks]'")
    from tools.run_notebooks import execute

    execute(path, tmp_path)
