from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.data.definition import Edition
from fedfa.data.sets import DEFINITIONS
from tests.data.data_files import write_mnist


@pytest.fixture
def tiny_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny set in Fashion-MNIST's format, which replaces `fashion-mnist` and has no provider."""
    folder = tmp_path / "files"
    write_mnist(folder)
    known = DEFINITIONS["fashion-mnist"]

    def no_other(name: str) -> DataSet:
        raise AssertionError(name)

    content = known.read(folder, no_other).digests()
    tiny = replace(known, editions=(Edition("tiny", 40, 20, (4,) * 10, content),), providers=())
    monkeypatch.setitem(DEFINITIONS, "fashion-mnist", tiny)
    return folder
