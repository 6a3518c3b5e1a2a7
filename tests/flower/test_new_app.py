"""The app that `fedfa flower new` writes; that it runs as written is shown in test_up_network.py."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app as command_line
from fedfa.errors import FedfaError
from fedfa.flower import app_folder
from fedfa.flower.config import RunConfig
from fedfa.flower.operate.new_app import project_name, write_app


def config_of(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return project


def test_the_new_app_has_every_key_of_the_built_in_app_and_names_its_own_module(tmp_path: Path) -> None:
    write_app(tmp_path / "Our Clinic")
    new, built_in = config_of(tmp_path / "Our Clinic"), config_of(app_folder())
    assert new["project"]["name"] == "our-clinic"
    assert new["tool"]["flwr"]["app"]["components"] == {"serverapp": "site_app:server", "clientapp": "site_app:client"}
    values, others = new["tool"]["flwr"]["app"]["config"], built_in["tool"]["flwr"]["app"]["config"]
    assert values.keys() == others.keys()
    assert values["federation"].keys() == others["federation"].keys()
    assert values["preset"] == ""
    assert values["federation"]["evaluation"] == "sites"


def test_the_new_apps_run_config_is_valid(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    values = config_of(tmp_path / "app")["tool"]["flwr"]["app"]["config"]
    rules = values.pop("federation")
    config = RunConfig({**values, **{f"federation.{key}": value for key, value in rules.items()}}, own_data=True)
    settings = config.config(sites=3)
    assert settings.rounds == 5
    assert settings.local.lr == 0.1
    assert settings.data.clients == 3


def test_the_new_apps_example_data_are_skewed_repeatable_and_fit_its_network(tmp_path: Path) -> None:
    import torch

    write_app(tmp_path / "app")
    spec = importlib.util.spec_from_file_location("site_app", tmp_path / "app" / "site_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = []
    for site in range(4):
        (x, y), (test_x, test_y) = module.load_data({"partition-id": site}).values()
        assert (len(x), len(test_x)) == (len(y), len(test_y)) == (150, 50)
        again = module.load_data({"partition-id": site})["train"][0]
        assert (x == again).all()
        held.append(set(y.tolist()))
        assert module.make_model()(torch.from_numpy(x)).shape == (150, 4)
    assert held == [{0, 1}, {1, 2}, {2, 3}, {0, 3}]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("precious")
    with pytest.raises(FedfaError, match="exists and is not empty"):
        write_app(tmp_path)
    assert (tmp_path / "something").read_text() == "precious"
    write_app(tmp_path / "empty")
    before = (tmp_path / "empty" / "site_app.py").read_bytes()
    with pytest.raises(FedfaError, match="exists and is not empty"):
        write_app(tmp_path / "empty")
    assert (tmp_path / "empty" / "site_app.py").read_bytes() == before


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedfaError, match=r"cannot write to .*file/app: Not a directory"):
        write_app(tmp_path / "file" / "app")


@pytest.mark.parametrize(("folder", "name"), [("A_b.C", "a-b-c"), ("日本", "federation"), ("x", "x")])
def test_every_folder_gives_a_name_that_flower_allows(folder: str, name: str) -> None:
    assert project_name(folder) == name


def test_the_command_prints_the_next_steps(tmp_path: Path) -> None:
    done = CliRunner().invoke(command_line, ["flower", "new", str(tmp_path / "app")])
    assert done.exit_code == 0, done.output
    assert "fedfa flower up --app" in done.output
    assert sorted(path.name for path in (tmp_path / "app").iterdir()) == ["README.md", "pyproject.toml", "site_app.py"]
