"""A check of the checks: break the maths of a method in one place, and one of its tests must fail.

Slow, on request: each mutation is one change in a copy of the source, and a run of the tests that ought to notice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """One change in the source, and the tests that must not pass with it."""

    file: str
    before: str
    after: str
    tests: str

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}: {self.before.strip()} -> {self.after.strip()}"


def in_algorithm(method: str, before: str, after: str, tests: str | None = None) -> Mutation:
    return Mutation(f"algorithms/{method}.py", before, after, tests or f"tests/algorithms/test_{method}.py")


EQUATIONS = "tests/algorithms/test_fedfa_equations.py"

MUTATIONS = [
    in_algorithm("fedprox", "torch._foreach_sub(list", "torch._foreach_add(list"),
    in_algorithm("feddyn", "dual, -1.0)", "dual, 1.0)"),
    in_algorithm("feddyn", "/ server.num_clients", "/ server.total.clients"),
    in_algorithm("feddyn", "- h[name] / alpha", "+ h[name] / alpha"),
    in_algorithm("scaffold", "name, ctx) - _or_zero(own", "name, ctx) + _or_zero(own"),
    in_algorithm("scaffold", "share, control = server.total.clients / server.num_clients", "share, control = 1.0"),
    in_algorithm("scaffold", "(ctx.steps * ctx.local.lr)", "ctx.local.lr"),
    in_algorithm("fednova", "(length or 1.0)", "1.0"),
    in_algorithm("fednova", "1.0 - pull * way", "1.0 + pull * way"),
    in_algorithm("server_optimisers", "* (v - square).sign()", "* (square - v).sign()"),
    in_algorithm("server_optimisers", "options.tau**2", "0.0"),
    in_algorithm("moon", "= prev - glob", "= glob - prev"),
    in_algorithm("fedproc", "each = -similarity", "each = similarity"),
    in_algorithm("fedproc", "1 - round / rounds", "round / rounds"),
    in_algorithm("fedproto", "nearest = (-distance)", "nearest = distance"),
    in_algorithm("fedlc", "counts.pow(-0.25)", "counts.pow(-0.5)"),
    in_algorithm("fedlc", "return -label_margins", "return label_margins"),
    in_algorithm("ccvr", "count / (count - 1)", "(count - 1) / count"),
    in_algorithm("ccvr", "- torch.outer(mean, mean)", "+ torch.outer(mean, mean)"),
    in_algorithm("fedma", "maximize=True", "maximize=False"),
    in_algorithm(
        "fedfa",
        "batch.gradient(weight, bias), self.options.lr)",
        "batch.gradient(weight, bias), -self.options.lr)",
        "tests/studies/test_final_calibration.py",
    ),
    in_algorithm(
        "fedfa", "loss = torch.add(loss, (", "loss = torch.sub(loss, (", "tests/algorithms/test_anchor_layers.py"
    ),
    in_algorithm("fedfa", "batch.add_gradient(features, gradient)", "pass", EQUATIONS),
    in_algorithm("fedfa", "mu / batch.y.shape[-1]", "mu", EQUATIONS),
    in_algorithm("fedfa", "= anchors / classes", "= anchors", EQUATIONS),
    in_algorithm("fedfa", ".sub_(self.labels)", "", EQUATIONS),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_method_does_not_pass(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "fedfa", tmp_path / "fedfa")
    target = tmp_path / "fedfa" / mutation.file
    text = target.read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1, "the source has changed: say anew what to break"
    target.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0",
        "-o", f"pythonpath={tmp_path} .", str(ROOT / mutation.tests),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, f"no test noticed (exit {done.returncode}):\n{done.stdout[-2000:]}"
