"""Which build of torch `make` installs."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest

from tools import install_torch

PIP = """
import sys
from pathlib import Path
log = Path(sys.argv[1])
log.write_text((log.read_text() if log.exists() else "") + " ".join(sys.argv[2:]) + "\\n")
sys.exit("+cpu" in sys.argv[2])
"""
"""Stands for a pip whose index lacks the CPU build."""


def test_examples() -> None:
    assert doctest.testmod(install_torch).failed == 0


@pytest.mark.parametrize(("card", "index"), [(True, None), (False, None), (False, "https://mirror.example/cpu")])
def test_the_cpu_build_is_tried_first_only_without_a_card(card: bool, index: str | None) -> None:
    choices = install_torch.attempts("2.13.0", "linux", card, index)
    assert choices[-1] == ["torch==2.13.0"]
    assert len(choices) == (1 if card else 2)
    assert (index in choices[0]) == (index is not None)


def test_the_usual_build_is_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setattr(install_torch, "has_nvidia_card", lambda: False)
    monkeypatch.setattr(install_torch, "installed", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install_torch, "size_of", lambda folder: 5_700_000_000)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    install_torch.main((sys.executable, str(tmp_path / "pip.py"), str(tmp_path / "log")))
    version = install_torch.wanted_version(install_torch.CONSTRAINTS.read_text())
    assert (tmp_path / "log").read_text().split() == [f"torch=={version}+cpu", f"torch=={version}"]
    printed = capsys.readouterr().out
    assert "5.7 GB" in printed
    assert "TORCH_INDEX" in printed


def test_size_counts_files_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "c").symlink_to(tmp_path / "a" / "b")
    assert install_torch.size_of(tmp_path) == 5
