from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.data.decoded import digests
from fedfa.data.known import Edition
from fedfa.data.sets import KNOWN
from tests.data.data_files import write_mnist


@pytest.fixture
def tiny_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny set in Fashion-MNIST's format, which `fashion-mnist` now is and which nobody provides."""
    folder = tmp_path / "files"
    write_mnist(folder)
    known = KNOWN["fashion-mnist"]

    def no_parts(name: str) -> DataSet:
        raise AssertionError(name)

    sums = digests(known.read(folder, no_parts))
    tiny = replace(known, editions=(Edition("tiny", 40, 20, (4,) * 10, sums),), providers=())
    monkeypatch.setitem(KNOWN, "fashion-mnist", tiny)
    return folder
