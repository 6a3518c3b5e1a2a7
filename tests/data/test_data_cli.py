"""The commands of ``fedfa data``, and the pictures of splits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfa.cli.data import app
from fedfa.data import dataset_from, load
from fedfa.errors import DataError
from fedfa.report.partition_picture import contact_sheet, partition_picture


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_names_every_set(data_dir: Path) -> None:
    output = run("list", "--data-dir", str(data_dir))
    for name in ("fashion-mnist", "cifar100", "mixed-digits", "femnist"):
        assert name in output


def test_get_describes_what_it_got(tiny_fashion: Path, tmp_path: Path) -> None:
    output = run("get", "fashion-mnist", "--from", str(tiny_fashion), "--data-dir", str(tmp_path / "cache"))
    assert "40 training + 20 test samples, 28×28×1, 10 classes" in output
    assert "edition: tiny" in output
    assert "train by class: 4 4 4 4 4 4 4 4 4 4" in output
    assert "terms: MIT licence" in output
    again = run("get", "fashion-mnist", "--offline", "--data-dir", str(tmp_path / "cache"))
    assert "edition: tiny" in again


def test_show_prints_a_table_and_draws_a_picture(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "split.png"
    output = run(
        "show", "digits", "--partition", "shards:2", "--clients", "10", "--rows", "3", "--picture", str(picture),
        "--data-dir", str(data_dir),
    )  # fmt: skip
    assert "10 clients hold 1,442 of 1,442 samples" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    sheet = tmp_path / "sheet.png"
    run("show", "digits", "--picture", str(sheet), "--data-dir", str(data_dir))
    assert sheet.exists()


def test_show_refuses_a_wrong_split_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown kind 'shard'"):
        run("show", "mnist", "--partition", "shard:2", "--data-dir", str(tmp_path))


@pytest.mark.parametrize("style", ["bubbles", "heat", "auto"])
@pytest.mark.parametrize("clients", [3, 60, 1200])
def test_pictures_of_all_sizes(style: str, clients: int, data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    federation = load("digits", data_dir=data_dir).split("dirichlet:0.1:0", clients, 1)
    if style == "bubbles" and clients > 500:
        pytest.skip("bubbles are for few clients")
    assert partition_picture(federation, tmp_path / "p.png", style=style).stat().st_size > 1000


def test_errors_of_pictures_are_explained(data_dir: Path, tmp_path: Path) -> None:
    import numpy as np

    own = dataset_from((np.zeros((10, 2)), np.arange(10) % 2))
    with pytest.raises(DataError, match="holds no images"):
        contact_sheet(own, tmp_path / "x.png")
    federation = own.split("iid", 2, 1)
    with pytest.raises(DataError, match="unknown style"):
        partition_picture(federation, tmp_path / "x.png", style="pie")
