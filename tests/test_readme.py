"""The README's code runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[tuple[str, str]]:
    """Code blocks marked with ``<!-- tested: kind argument -->``, as (argument, code)."""
    return re.findall(rf"<!-- tested: {kind} ?(.*?) ?-->\n```python\n(.*?)```", README, flags=re.DOTALL)


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) == 2
    assert [name for name, _ in blocks("file")] == ["pull.py"]


@pytest.mark.parametrize("code", [code for _, code in blocks("python")])
def test_python_examples_run(code: str, tmp_path: Path) -> None:
    run([sys.executable, "-c", code], tmp_path)


def test_own_algorithm_is_short_and_runs_alone_and_combined(tmp_path: Path) -> None:
    ((name, code),) = blocks("file")
    (tmp_path / name).write_text(code, encoding="utf-8")
    assert len(code.splitlines()) <= 36
    for recipe, out in ((name, "alone"), (f"fedfa+{name}", "combined")):
        command = ["run", "--preset", "digits-c2", "--algorithm", recipe, "--rounds", "3", "--out", out]
        printed = run([sys.executable, "-m", "fedfa", *command, "--set", "algorithm.pull.strength=0.1"], tmp_path)
        assert "after 3 rounds" in printed


def test_the_pull_really_pulls(tmp_path: Path) -> None:
    """With a strong pull the model hardly leaves its start, so one round changes less."""
    from safetensors.torch import load_file

    ((name, code),) = blocks("file")
    (tmp_path / name).write_text(code, encoding="utf-8")
    norms = {}
    for strength in ("0", "5"):
        command = ["run", "--preset", "digits-c2", "--algorithm", name, "--rounds", "1", "--out", strength]
        run([sys.executable, "-m", "fedfa", *command, "--set", f"algorithm.pull.strength={strength}"], tmp_path)
        state = load_file(tmp_path / strength / "server.safetensors")
        norms[strength] = sum(value.norm() for key, value in state.items() if key.startswith("pull/"))
    assert norms["5"] < 0.7 * norms["0"]


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^(?:make )(\w+)", README, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
