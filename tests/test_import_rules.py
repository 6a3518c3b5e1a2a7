"""Rules of the source: what each package may import, where output is printed, what is never used."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from doctest import ELLIPSIS, DocTestFinder, DocTestRunner
from functools import cache
from pathlib import Path

import pytest

import fedfa

SOURCE = Path(fedfa.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

MAY_IMPORT = {
    "models": {"learning.random"},
    "data": {"learning.random"},
    "learning": {"models"},
    "algorithms": {"learning", "models", "stacking.products"},
    "stacking": {"learning", "models", "engines.local"},
    "engines": {"learning", "models", "data", "stacking"},
    "fleet": {"learning"},
    "channel": {"learning"},
    "protection": {"learning", "models", "data"},
    "diagnostics": {"learning", "models", "data", "engines", "experiment.files"},
    "experiment": {
        "algorithms",
        "learning",
        "stacking",
        "models",
        "data",
        "engines",
        "diagnostics",
        "fleet",
        "channel",
        "protection",
    },
    "paper": {"experiment", "diagnostics", "protection", "learning", "algorithms", "models", "data", "engines"},
    "report": {"fleet", "paper", "experiment", "diagnostics", "protection", "learning", "algorithms", "models", "data"},
    "flower": {"experiment", "learning", "models", "data", "engines", "channel", "protection"},
}
"""Packages and modules of fedfa that the modules of a package may import, besides those of the package itself and
single modules at the top. ``cli`` may import everything; nothing imports ``cli``."""


def module_name(path: Path) -> str:
    """Name of a module below fedfa, with dots: ``learning.component``."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full name of every module that a file imports, anywhere in the file."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            if node.module.count(".") < 2:  # `from fedfa.learning import batches` imports a module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def below(package: str) -> list[Path]:
    return [path for path in FILES if package_of(path) == package]


def imported_packages(path: Path) -> set[str]:
    """Packages (and single modules) of fedfa that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("fedfa.")}


def test_every_package_has_a_rule() -> None:
    assert len(FILES) > 40
    packages = {package_of(path) for path in FILES if path.parent != SOURCE}
    assert packages == {*MAY_IMPORT, "cli"}
    assert {"learning", "errors", "algorithms"} <= imported_packages(SOURCE / "algorithms" / "fedfa.py")


@pytest.mark.parametrize("path", [path for package in MAY_IMPORT for path in below(package)], ids=module_name)
def test_packages_import_only_what_is_below_them(path: Path) -> None:
    own, packages = package_of(path), {*MAY_IMPORT, "cli"}
    for name in imports(path):
        top, _, imported = name.partition(".")
        if top == "fedfa" and imported.split(".")[0] in packages - {own}:
            allowed = MAY_IMPORT[own]
            assert any(f"{imported}.".startswith(f"{one}.") for one in allowed) or any(
                one.startswith(f"{imported}.") for one in allowed
            ), f"{own} must not import {name}"


@pytest.mark.parametrize("path", below("algorithms"), ids=module_name)
def test_algorithms_use_few_libraries(path: Path) -> None:
    others = {name.partition(".")[0] for name in imports(path)} - {"fedfa", "torch", "numpy", "pydantic", "safetensors"}
    others -= {"scipy"} if path.name == "matched_averaging.py" else set()  # inside the function that needs it
    assert others <= sys.stdlib_module_names


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "cli"], ids=module_name)
def test_nothing_imports_the_command_line(path: Path) -> None:
    if path.name != "__main__.py":
        assert "cli" not in imported_packages(path)


DRAWS_PROGRESS = SOURCE / "experiment" / "progress.py"


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "cli"], ids=module_name)
def test_only_the_command_line_prints(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), f"line {node.lineno} prints"
    if path != DRAWS_PROGRESS:
        assert not any(name.split(".")[0] in ("rich", "typer", "click") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_one_package_imports_flower(path: Path) -> None:
    if package_of(path) != "flower":
        assert not any(name.split(".")[0] == "flwr" for name in imports(path))


#: CIFAR is published as pickles; this reader accepts nothing in them but arrays.
READS_CIFAR = SOURCE / "data" / "formats" / "cifar.py"


def test_the_one_reader_of_pickles_never_unpickles_freely() -> None:
    tree = ast.parse(READS_CIFAR.read_text(encoding="utf-8"))
    uses = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    readers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    # Nothing of pickle but the base class, and every class made from it decides itself what may be called.
    assert [use for use in uses if use.startswith("pickle.")] == ["pickle.Unpickler"] * len(readers)
    for reader in readers:
        assert "find_class" in {item.name for item in reader.body if isinstance(item, ast.FunctionDef)}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_pickle_and_nothing_that_unpickles(path: Path) -> None:
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    if path != READS_CIFAR:
        assert not {name.partition(".")[0] for name in imports(path)} & forbidden
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            assert called not in ("torch.load", "torch.save"), f"line {node.lineno}: {called}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert ast.unparse(keyword.value) == "False", f"line {node.lineno} allows pickle"


# -- the examples in docstrings ---------------------------------------------------------------------------------------
MODULES = [
    module.name
    for module in pkgutil.walk_packages([str(SOURCE)], "fedfa.")
    if not module.name.startswith("fedfa.data") and module.name != "fedfa.__main__"
]


@pytest.mark.parametrize("name", ["fedfa", *MODULES])
def test_examples_of_docstrings(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    module = importlib.import_module(name)
    runner = DocTestRunner(optionflags=ELLIPSIS)
    for test in DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test)
    assert runner.failures == 0


def test_there_are_examples() -> None:
    examples = 0
    for name in MODULES:
        examples += sum(len(test.examples) for test in DocTestFinder().find(importlib.import_module(name), name))
    assert examples > 20


LOADED = """
import sys
from pathlib import Path
import numpy as np
from fedfa.experiment.run import run
from fedfa.experiment.config import Config

settings = {"rounds": 1, "device": "cpu", "data": {"clients": 4, "partition": "iid"}, "cohort": {"clients": 4},
            "model": {"name": "mlp", "options": {"hidden": [8]}}, "algorithm": {"name": sys.argv[2]},
            "engine": {"workers": 1, "execution": sys.argv[3]}}
run(Config.resolve(settings), Path(sys.argv[1]) / "run", data=(np.zeros((50, 4, 4), np.uint8), np.arange(50) % 10))
print(*sys.modules)
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("algorithm", "execution"), [("fedavg", "each"), ("fedfa", "each"), ("moon", "each"), ("fedavg", "auto")]
)
def test_a_run_loads_no_package_that_only_slows_its_start(algorithm: str, execution: str, tmp_path: Path) -> None:
    """Some calls of the backward pass make torch import sympy, for half a second; observing operations makes it import
    its compiler, for more than one."""
    command = [sys.executable, "-c", LOADED, str(tmp_path), algorithm, execution]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded
    assert not loaded & {"sympy", "ray", "flwr", "matplotlib", "pandas", "scipy", "rich"}
