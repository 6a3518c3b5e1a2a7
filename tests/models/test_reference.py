"""The user's own networks by reference."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import fedfa
from fedfa.cli.app import app
from fedfa.errors import ModelError
from fedfa.models import build_model, load_network, network_reference

NET = """
from torch import nn

print("imported")

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        return self.fc(self.body(x))

class Outer:
    class Inner(Net):
        pass

def small():
    return Net(4)

def sized(width):
    return Net(width)

def number():
    return 3

def broken():
    raise RuntimeError("out of ideas")

size = 3
network = Net()
"""


class Module(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)


def make_module() -> nn.Module:
    return Module()


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "net.py"


def test_a_class_or_function_of_a_file(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = build_model("net.py:Net", (1, 8, 8), 10), build_model(f"{net}:Net", (1, 8, 8), 10)
    assert type(first) is type(second)
    assert build_model("net.py:small", (1, 8, 8), 10).get_submodule("fc").in_features == 4
    assert build_model("net.py:Net", (1, 8, 8), 10, {"width": 5}).get_submodule("fc").in_features == 5
    assert isinstance(build_model("net.py:Outer.Inner", (1, 8, 8), 10), type(first))
    assert capsys.readouterr().out == "imported\n", "once, whatever the path"


def test_an_edited_file_is_imported_again(net: Path) -> None:
    before = load_network("net.py:Net")
    net.write_text(NET.replace("width=16", "width=3"))
    os.utime(net, ns=(1, 1))
    assert load_network("net.py:Net") is not before
    assert load_network("net.py:Net")().get_submodule("fc").in_features == 3


def test_a_class_of_a_module_or_of_main(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_network(f"{__name__}:Module") is Module
    assert isinstance(load_network(f"{__name__}:make_module")(), Module)
    monkeypatch.setattr(sys.modules["__main__"], "Module", Module, raising=False)
    assert load_network("__main__:Module") is Module


@pytest.mark.parametrize(
    ("reference", "messages"),
    [
        ("absent.py:Net", ["no file", "absent.py", "relative to the current directory"]),
        ("net.py:Nett", ["net.py has no 'Nett'", "did you mean 'Net'?"]),
        ("net.py:size", ["net.py:size is of type int", "subclass of nn.Module"]),
        ("net.py:network", ["net.py:network is of type Net", "function that returns a network"]),
        ("net.py:Outer", ["net.py:Outer is the class Outer"]),
        ("net.py:sized", ["needs the arguments width", "default values"]),
        ("net.py:number", ["returned an object of type int"]),
        ("net.py:broken", ["failed: RuntimeError: out of ideas", "net.py, line 29"]),
        ("no_such_package.nets:Net", ["no module 'no_such_package.nets'", "FILE.py:NAME"]),
        ("fedfa.models:Nett", ["fedfa.models has no 'Nett'"]),
    ],
)
def test_wrong_references_are_explained(net: Path, reference: str, messages: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(reference, (1, 8, 8), 10)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("x = 1\nraise ValueError('stop')\n", ["ValueError: stop", "bad.py, line 2"]),
        ("x = (\n", ["SyntaxError", "bad.py, line 1"]),
        ("\nimport no_such_package\n", ["No module named 'no_such_package'", "bad.py, line 2"]),
    ],
)
def test_a_failing_import_is_located(net: Path, text: str, messages: list[str]) -> None:
    net.with_name("bad.py").write_text(text)
    with pytest.raises(ModelError) as caught:
        load_network("bad.py:Net")
    for message in ["bad.py cannot be imported", *messages]:
        assert message in str(caught.value)


def test_options_that_the_network_does_not_have_are_refused(net: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.options = .*hidden.*--set model\.options="):
        build_model("net.py:Net", (1, 8, 8), 10, {"hidden": [3]})


def test_references_of_classes_and_functions(net: Path) -> None:
    assert network_reference(Module) == f"{__name__}:Module"
    assert network_reference(make_module) == f"{__name__}:make_module"
    assert network_reference(load_network("net.py:Net")) == f"{net}:Net"


def test_what_has_no_name_has_no_reference() -> None:
    def nested() -> nn.Module:
        return Module()

    class Local(Module):
        pass

    for maker in (lambda: Module(), nested, Local, Module(), functools.partial(Module), 3):
        assert network_reference(maker) is None


SCRIPT = """
from torch import nn
from fedfa.models import load_network, network_reference

print("run")

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

reference = network_reference(Net)
assert load_network(reference) is Net
print(reference)
"""


@pytest.mark.system
def test_the_running_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for command in ([str(script)], ["-m", "script"], ["-c", SCRIPT]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "run\n__main__:Net\n", command
    with pytest.raises(ModelError, match=r"'Net' was defined in the script or notebook that trained .*model="):
        load_network("__main__:Net")


def test_the_command_line_trains_an_own_network(net: Path, data_dir: Path) -> None:
    arguments = ["run", "--preset", "digits-c2", "--rounds", "1", "--set", "model.name=net.py:Net"]
    arguments += ["--set", "model.options.width=5", "--set", f"data.dir={data_dir}", "--out", "run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert 'name = "net.py:Net"' in Path("run/config.toml").read_text()
    assert fedfa.load("run").model().get_submodule("fc").in_features == 5, "its options arrive"
