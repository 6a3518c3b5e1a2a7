"""Every example of the gallery trains, and the page shows what they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gallery import GALLERY, scores

PAGE = (Path(__file__).parents[2] / "docs" / "own_data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GALLERY)
def test_an_example_of_the_gallery_trains(name: str) -> None:
    accuracy, f1 = scores(GALLERY[name](), "fedfa", rounds=2)
    assert 0 < accuracy <= 1
    assert 0 < f1 <= 1
    assert f"| {name} |" in PAGE
