"""What shells, editors and programs read: completion, JSON, several seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfa.algorithms.registry import methods
from fedfa.cli import completion
from fedfa.cli.common import parse_seeds
from fedfa.errors import ConfigError
from fedfa.experiment.config import Config, presets
from fedfa.experiment.config_keys import config_keys, json_schema
from fedfa.experiment.run import run
from tests.cli.test_commands import Ask, ask, config  # noqa: F401


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory of its own, with the completions of this version."""
    monkeypatch.setenv("FEDFA_DATA", str(tmp_path / "data"))
    file = tmp_path / "data" / "completion.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"version": completion._version(), **completion.compute()}))
    return file


def shell(arguments: list[str], incomplete: str) -> list[str]:
    """What bash would offer, from a real process."""
    words = ["fedfa", *arguments, incomplete]
    environment = {
        **os.environ, "_FEDFA_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    program = "import sys; sys.argv = ['fedfa']; from fedfa.cli.app import app; app(prog_name='fedfa')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.split()


def test_the_shell_completes_presets_methods_and_keys() -> None:
    assert set(shell(["run", "--preset"], "fmnist-c")) == {name for name in presets() if name.startswith("fmnist-c")}
    assert shell(["compare", "--algorithm"], "fedav") == ["fedavg", "fedavgm"]


def test_completion_continues_expressions_variants_keys_and_values() -> None:
    assert completion.complete_algorithm("fedprox+fedad")[0][0].startswith("fedprox+fedad")
    assert {word for word, _ in completion.complete_algorithm("fedfa@p")} == {"fedfa@plus", "fedfa@paper"}
    meaning = next(key.description for key in config_keys() if key.name == "local.lr")
    assert ("local.lr=", meaning) in completion.complete_assignment("local.l")
    assert "algorithm.anchors.mu=" in [word for word, _ in completion.complete_assignment("algorithm.anchors.m")]
    assert [w for w, _ in completion.complete_assignment("model.buffers=l")] == ["model.buffers=local"]
    assert ("all", "every method that fits") in completion.complete_methods_and_all("a")
    assert "digits" in dict(completion.complete_dataset("dig"))
    assert "local" in dict(completion.complete_section("lo"))


def test_stored_completions_need_no_torch_and_follow_the_code(cache: Path) -> None:
    words = {"version": completion._version(), **completion.compute()}
    program = (
        "import sys\nfrom fedfa.cli.completion import complete_preset\nfound = complete_preset('digits')\n"
        "print(len(found), sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"
    cache.write_text(json.dumps({**words, "version": "older", "presets": {"gone": ""}}))
    assert "gone" not in dict(completion.complete_preset(""))
    assert "gone" not in cache.read_text(), "the file is written again"


# -- JSON -------------------------------------------------------------------------------------------------------------
def test_config_lists_type_default_and_meaning(ask: Ask) -> None:  # noqa: F811
    code, out, _ = ask("config", "local")
    assert code == 0
    assert "local.lr = 0.01  (float > 0)" in out
    assert "Learning rate of the local" in out
    assert "rounds" not in out.split("\n")[0]


def test_config_schema_describes_every_key_and_accepts_every_config(ask: Ask) -> None:  # noqa: F811
    code, out, _ = ask("config", "--json")
    assert code == 0
    schema = json.loads(out)
    assert schema == json.loads(json.dumps(json_schema(), default=str))
    for key in config_keys():
        place = schema
        for step in key.name.split("."):
            place = place["properties"][step]
            if "$ref" in place:
                place = schema["$defs"][place["$ref"].rpartition("/")[2]]
        assert place
    lr = schema["$defs"]["LocalTraining"]["properties"]["lr"]
    assert (lr["exclusiveMinimum"], lr["default"]) == (0, Config().local.lr)


def test_tables_can_be_printed_as_json(ask: Ask) -> None:  # noqa: F811
    assert json.loads(ask("presets", "--json")[1]) == presets()
    listed = json.loads(ask("algorithms", "--json")[1])
    assert [one["name"] for one in listed] == list(methods())
    (fedfa,) = json.loads(ask("algorithms", "fedfa", "--json")[1])
    assert fedfa["options"]["algorithm.anchors.mu"]["default"] == 0.1
    digits = next(one for one in json.loads(ask("data", "list", "--json")[1]) if one["name"] == "digits")
    assert len(digits["classes"]) == 10


def test_comparison_as_json_is_alone_on_standard_output(ask: Ask, config: Path, tmp_path: Path) -> None:  # noqa: F811
    for method, seed in (("fedavg", 1), ("fedavg", 2), ("fedprox", 1), ("fedprox", 2)):
        own = Config.from_file(config, {"algorithm": {"name": method}, "seed": seed})
        run(own, tmp_path / "runs" / f"{method}-s{seed}")
    arguments = ["--algorithm", "fedavg", "--algorithm", "fedprox", "--seed", "1,2", "--out", "runs", "--json"]
    code, out, err = ask("compare", config, *arguments)
    assert code == 0, err
    (setting,) = json.loads(out)
    assert sorted(setting["methods"]["fedavg"]["seeds"]) == ["1", "2"]
    (pair,) = setting["differences"]
    means = {name: one["mean"] for name, one in setting["methods"].items()}
    assert pair["final_accuracy"]["mean"] == pytest.approx(means["fedprox"] - means["fedavg"])
    assert pair["exceeds_seed_noise"] == "unknown: two seeds"
    assert "4 of 4 runs" in err


# -- seeds ------------------------------------------------------------------------------------------------------------
def test_run_with_several_seeds_makes_a_directory_for_each(ask: Ask, config: Path, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = ask("run", config, "--seed", "3,5", "--rounds", "1", "--out", "runs/mine")
    assert code == 0, err
    assert out.count("accuracy") >= 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine-s3", "mine-s5"]
    assert Config.from_file(tmp_path / "runs" / "mine-s5" / "config.toml").seed == 5


@pytest.mark.parametrize("text", ["1,x", "1,,2", "-1", "1.5", ""])
def test_wrong_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seed"):
        parse_seeds([text])
