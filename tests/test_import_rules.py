"""The rules of the house, read from the source: who may import whom, who may print, what is never used."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from doctest import ELLIPSIS, DocTestFinder, DocTestRunner
from pathlib import Path

import pytest

import fedfa

SOURCE = Path(fedfa.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def where(path: Path) -> str:
    """The module's name below fedfa, with dots: ``learning.part``."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, by its full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(folder: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(SOURCE).parts[0] == folder]


def folders_of_fedfa(path: Path) -> set[str]:
    """The folders (and single modules) of fedfa that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("fedfa.")}


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40
    assert {"algorithms", "learning", "engines", "studies", "cli", "data", "models"} <= {
        path.relative_to(SOURCE).parts[0] for path in FILES
    }
    assert {"learning", "errors"} <= folders_of_fedfa(SOURCE / "algorithms" / "fedfa.py")


@pytest.mark.parametrize("path", below("algorithms"), ids=where)
def test_algorithms_know_only_the_frame(path: Path) -> None:
    assert folders_of_fedfa(path) <= {"learning", "algorithms", "models", "errors", "messages"}
    others = {name.partition(".")[0] for name in imports(path)} - {"fedfa", "torch", "numpy", "pydantic", "safetensors"}
    others -= {"scipy"} if path.name == "fedma.py" else set()  # inside the function that needs it
    assert others <= sys.stdlib_module_names


@pytest.mark.parametrize("path", below("engines"), ids=where)
def test_engines_know_no_algorithm(path: Path) -> None:
    assert not folders_of_fedfa(path) & {"algorithms", "studies", "insight", "report", "analysis", "cli"}


@pytest.mark.parametrize("path", below("learning"), ids=where)
def test_the_frame_knows_nothing_above_it(path: Path) -> None:
    above = {"engines", "studies", "cli", "data", "algorithms", "insight", "report", "analysis"}
    assert not folders_of_fedfa(path) & above


@pytest.mark.parametrize("path", below("insight"), ids=where)
def test_insight_looks_and_takes_no_part(path: Path) -> None:
    """It knows no method; of the studies only how files are written, for studies look through it."""
    assert folders_of_fedfa(path) <= {"insight", "learning", "models", "data", "engines", "studies", "errors"}
    assert not any(
        name.startswith("fedfa.studies") and not f"{name}.".startswith("fedfa.studies.files.") for name in imports(path)
    )


@pytest.mark.parametrize("path", below("paper"), ids=where)
def test_the_papers_studies_stand_below_reports(path: Path) -> None:
    assert not folders_of_fedfa(path) & {"report", "cli"}


@pytest.mark.parametrize("path", [*below("models"), *below("data")], ids=where)
def test_models_and_data_stand_at_the_bottom(path: Path) -> None:
    assert folders_of_fedfa(path) <= {path.relative_to(SOURCE).parts[0], "errors", "messages", "learning"}
    assert not any(name.startswith("fedfa.learning") and "random" not in name for name in imports(path))


@pytest.mark.parametrize("path", [path for path in FILES if "cli" not in path.parts], ids=where)
def test_nobody_imports_the_command_line(path: Path) -> None:
    if path.name != "__main__.py":
        assert "cli" not in folders_of_fedfa(path)


@pytest.mark.parametrize("path", [path for path in FILES if path not in below("cli")], ids=where)
def test_only_the_command_line_prints(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), f"line {node.lineno} prints"
    assert not any(name.split(".")[0] in ("rich", "typer", "click") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=where)
def test_only_one_folder_knows_flower(path: Path) -> None:
    if not where(path).startswith("flower."):
        assert not any(name.split(".")[0] == "flwr" for name in imports(path))


#: CIFAR is published as pickles; this one reader admits nothing in them but arrays.
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


@pytest.mark.parametrize("path", FILES, ids=where)
def test_no_pickle_and_nothing_that_unpickles(path: Path) -> None:
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    if path != READS_CIFAR:
        assert not {name.partition(".")[0] for name in imports(path)} & forbidden
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
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
from fedfa.bench.scaling import pictures
from fedfa.studies.run import run
from fedfa.studies.settings import Settings

settings = {"rounds": 1, "device": "cpu", "data": {"clients": 4, "partition": "iid"}, "cohort": {"clients": 4},
            "model": {"name": "mlp", "options": {"hidden": [8]}}, "algorithm": {"recipe": sys.argv[2]},
            "engine": {"workers": 1, "execution": sys.argv[3]}}
run(Settings.resolve(settings), Path(sys.argv[1]) / "run", data=pictures(40))
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("recipe", "execution"), [("fedavg", "each"), ("fedfa", "each"), ("moon", "each"), ("fedavg", "auto")]
)
def test_a_run_loads_no_package_that_only_slows_its_start(recipe: str, execution: str, tmp_path: Path) -> None:
    """Torch loads sympy, for half a second, when a backward pass is begun in some ways, and its compiler, for more than
    one, when somebody looks at operations."""
    command = [sys.executable, "-c", LOADED, str(tmp_path), recipe, execution]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded
    assert not loaded & {"sympy", "ray", "flwr", "matplotlib", "pandas", "scipy", "rich"}
