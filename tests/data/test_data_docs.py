"""The statements and examples of docs/data.md."""

from __future__ import annotations

import importlib
import pkgutil
import re
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path

import pytest

import fedfa.data
from fedfa.data import known_names, parse_partition
from fedfa.data.partitions.specs import _ADAPTER
from tests.data.data_files import ROOT

TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_python_examples_run(
    capsys: pytest.CaptureFixture[str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 2
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
        exec(compile(block, "docs/data.md", "exec"), {})
        assert capsys.readouterr().out.startswith("20 ")


def test_every_set_is_described() -> None:
    described = set(re.findall(r"^\| `([a-z0-9-]+)` \|", TEXT, re.M))
    assert described >= set(known_names())


def test_every_split_that_is_named_exists() -> None:
    table = TEXT.split("| partition | what it does |")[1].split("\n\n")[0]
    texts = [text for row in table.splitlines()[2:] for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(texts) > 10
    for text in texts:
        parse_partition(text)


def test_the_configuration_is_valid() -> None:
    import tomllib

    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
    assert _ADAPTER.validate_python(tomllib.loads(block)["data"]["partition"]) == parse_partition("shards:2")


def test_pictures_are_there() -> None:
    for name in re.findall(r"\]\((pictures/[^)]+)\)", TEXT):
        assert (ROOT / "docs" / name).is_file(), name


MODULES = [module.name for module in pkgutil.walk_packages(fedfa.data.__path__, "fedfa.data.")]


@pytest.mark.parametrize("name", ["fedfa.data", *MODULES])
def test_examples_in_docstrings(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    module = importlib.import_module(name)
    runner = DocTestRunner()
    for test in DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test)
    assert runner.failures == 0
