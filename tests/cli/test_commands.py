"""The command line as a user meets it: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfa.algorithms.registry import methods
from fedfa.cli import main
from fedfa.experiment.config import presets

CONFIG = """
rounds = 2
device = "cpu"
[data]
name = "digits"
clients = 10
offline = true
[model]
name = "mlp"
options = { hidden = [8] }
[cohort]
clients = 2
[local]
epochs = 1
batch_size = 32
"""

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Run a command in this process; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedfa", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), output.out, output.err

    return command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my study.toml"
    path.write_text(CONFIG)
    return path


# -- looking around ---------------------------------------------------------------------------------------------------
def test_help_lists_the_commands(ask: Ask) -> None:
    code, out, _ = ask("--help")
    assert code == 0
    for command in ("run", "demo", "presets", "algorithms", "data", "version"):
        assert command in out


def test_help_explains_arguments(ask: Ask) -> None:
    """Combinations of typer and click exist that leave these words out."""
    assert "A config file (TOML)." in " ".join(ask("run", "--help")[1].split())


def test_help_of_run_lists_its_options(ask: Ask) -> None:
    code, out, _ = ask("run", "--help")
    assert code == 0
    for option in ("--preset", "--algorithm", "--set", "--rounds", "--seed", "--out", "--resume", "--data-dir"):
        assert option in out


def test_without_a_command_it_helps(ask: Ask) -> None:
    code, out, err = ask()
    assert code in (0, 2)
    assert "presets" in out + err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["presets", "--help"]])
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    """So that it answers at once."""
    program = (
        "import sys\nfrom fedfa.cli import main\n"
        f"sys.argv = {['fedfa', *arguments]!r}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_presets(ask: Ask) -> None:
    code, out, _ = ask("presets")
    assert code == 0
    for name, words in presets().items():
        assert name in out
        assert words[:40] in out


def test_algorithms(ask: Ask) -> None:
    code, out, _ = ask("algorithms")
    assert code == 0
    for method in methods().values():
        assert method.name in out
    assert "fedfa algorithms NAME" in out


def test_one_algorithm_is_explained_with_its_options_and_variants(ask: Ask) -> None:
    code, out, _ = ask("algorithms", "fedfa")
    assert code == 0
    for words in (
        "arXiv:2211.09299", "algorithm.anchors.mu = 0.1", "algorithm.calibration.when = 'step'", "variant paper:",
        "variant authors:", "local.lr_decay = 0.99",
    ):  # fmt: skip
        assert words in out


def test_an_algorithm_of_the_users_own_is_explained(ask: Ask, tmp_path: Path) -> None:
    code = "class Mine(Component):\n    def begin(self, ctx):\n        pass\n"
    (tmp_path / "mine.py").write_text(f'"""My own idea."""\nfrom fedfa import Component\n{code}')
    exit_code, out, _ = ask("algorithms", "mine.py")
    assert exit_code == 0
    assert "My own idea." in out


def test_version(ask: Ask) -> None:
    import fedfa

    assert ask("version")[1].strip() == ask("--version")[1].strip() == fedfa.__version__


# -- a run ------------------------------------------------------------------------------------------------------------
def test_a_run_from_a_file(ask: Ask, config: Path, data_dir: Path, tmp_path: Path) -> None:
    arguments = [config, "--algorithm", "fedavg", "--set", "local.lr=0.2", "--rounds", "3", "--seed", "7"]
    code, out, _ = ask("run", *arguments, "--data-dir", data_dir, "--out", tmp_path / "r")
    assert code == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["rounds"], summary["algorithm"], summary["seeds"]["training"]) == (3, "fedavg", 7)
    assert f"accuracy {summary['final_accuracy']:.2%} after 3 rounds" in out
    assert str(tmp_path / "r") in out
    assert "lr = 0.2" in (tmp_path / "r" / "config.toml").read_text()


def test_a_run_goes_by_default_into_a_folder_that_says_what_it_is(
    ask: Ask, config: Path, data_dir: Path, tmp_path: Path
) -> None:
    arguments = ["--set", "algorithm.variant=authors", "--set", f"data.dir={data_dir}", "--rounds", "1", "--seed", "3"]
    assert ask("run", config, *arguments)[0] == 0
    assert (tmp_path / "runs" / "my study-fedfa-authors-s3" / "summary.json").exists()


def test_a_folder_that_exists_is_refused_and_resume_reads_it(
    ask: Ask, config: Path, data_dir: Path, tmp_path: Path
) -> None:
    arguments = ["run", config, "--data-dir", data_dir, "--out", tmp_path / "r"]
    assert ask(*arguments)[0] == 0
    code, _, err = ask(*arguments)
    assert_one_error(code, err, "holds a run already", "--resume", "overwrite=True")
    assert ask(*arguments, "--resume")[0] == 0
    assert ask("run", "--resume", "--out", tmp_path / "r")[0] == 0
    assert ask("run", "--resume", "--out", tmp_path / "r", "--rounds", "3")[0] == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["rounds"] == 3


# -- errors -----------------------------------------------------------------------------------------------------------
def assert_one_error(code: int, err: str, *words: str) -> None:
    assert code == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "local.learning_rat=1"], ["unknown key local.learning_rat", "allowed here"]),
        (["--set", "local.momentun=0.9"], ["unknown key local.momentun", "did you mean 'momentum'?"]),
        (["--set", "local.lr=fast"], ["local.lr = 'fast'"]),
        (["--set", "local.lr"], ["--set 'local.lr'", "key=value"]),
        (["--algorithm", "fedfb"], ["unknown method 'fedfb'", "did you mean 'fedfa'?"]),
        (["--algorithm", "mine.py"], ["no file", "mine.py"]),
        (["--algorithm", "fedfa@papr"], ["'papr'", "did you mean 'paper'?"]),
        (["--set", "algorithm=3"], ["algorithm = 3", "algorithm.name = '3'"]),
        (["--set", "with.moon.muu=5"], ["unknown key with.moon.muu", "did you mean 'mu'?"]),
        (["--set", "device=mps"], ["mps"]),
        (["--set", "cohort.clients=11"], ["the cohort has 11 clients", "cohort.clients"]),
        (["--set", "model.name=cnn-fmnist"], ["8×8", "too small"]),
        (["--set", "model.options.hiden=[3]"], ["'mlp'", "options", "hiden"]),
        (["--set", "data.partition=[x]"], ["data.partition", "'[x]'", "shards"]),
        (["--set", "local.lr=1e30"], ["client", "round 1", "local.lr"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_errors_are_one_clear_message(
    ask: Ask, config: Path, data_dir: Path, arguments: list[str], words: list[str]
) -> None:
    code, _, err = ask("run", config, "--data-dir", data_dir, *arguments)
    assert_one_error(code, err, *words)


def test_a_missing_config(ask: Ask) -> None:
    assert_one_error(*ask("run", "nowhere.toml")[::2], "no configuration file nowhere.toml", "fedfa presets")


def test_a_folder_as_config(ask: Ask, tmp_path: Path) -> None:
    assert_one_error(*ask("run", tmp_path)[::2], "is a directory", "config.toml")


def test_nothing_to_resume(ask: Ask) -> None:
    assert_one_error(*ask("run", "--resume", "--out", "nothing-here")[::2], "nothing-here holds no run", "--preset")


def test_results_of_nothing(ask: Ask) -> None:
    assert_one_error(*ask("results", "nowhere")[::2], "there is no directory nowhere")


def test_an_unknown_preset(ask: Ask) -> None:
    assert_one_error(*ask("run", "--preset", "digits-c3")[::2], "digits-c3", "did you mean 'digits-c2'?")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "name what to run"),
        (["run", "--resume"], "name it with --out"),
        (["demo", "--rounds", "0"], "--rounds"),
        (["run", "x.toml", "--preset", "digits-c2"], "not both"),
        (["run", "--round", "3"], "--rounds"),
        (["rum"], "rum"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_of_the_command_line(ask: Ask, arguments: list[str], words: str) -> None:
    code, _, err = ask(*arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.system
def test_a_real_process_ends_with_one_message_and_code_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedfa", "run", "--preset", "digits-c2", "--set", "local.momentun=1"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert_one_error(done.returncode, done.stderr, "unknown key local.momentun", "did you mean 'momentum'?")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [], "a run that cannot start leaves nothing behind"
