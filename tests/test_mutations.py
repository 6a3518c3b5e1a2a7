"""Mutation tests: with one wrong sign or factor in a method, one of its tests must fail.

Slow, on request: each mutation is one change in a copy of the source, and a run of the tests that should detect it.
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
    in_algorithm("gradients", "_foreach_sub(list", "_foreach_add(list", "tests/algorithms/test_fedprox.py"),
    in_algorithm("feddyn", "dual, -1.0)", "dual, 1.0)"),
    in_algorithm("feddyn", "/ server.num_clients", "/ server.aggregate.clients"),
    in_algorithm("feddyn", "- h[name] / alpha", "+ h[name] / alpha"),
    in_algorithm("scaffold", "name, ctx) - _or_zero(own", "name, ctx) + _or_zero(own"),
    in_algorithm("scaffold", "return 1.0, server.aggregate.clients / server.num_clients", "return 1.0, 1.0"),
    in_algorithm("scaffold", "(ctx.steps * ctx.local.lr)", "ctx.local.lr"),
    in_algorithm("fednova", "(length or 1.0)", "1.0"),
    in_algorithm("fednova", "1.0 - pull * distance", "1.0 + pull * distance"),
    in_algorithm("server_optimisers", "* (v - square).sign()", "* (square - v).sign()"),
    in_algorithm("server_optimisers", "self.tau**2", "0.0"),
    in_algorithm("moon", "= prev - glob", "= glob - prev"),
    in_algorithm("fedproc", "each = -similarity", "each = similarity"),
    in_algorithm("fedproc", "1 - round / rounds", "round / rounds"),
    in_algorithm("fedproto", "nearest = (-distance)", "nearest = distance"),
    in_algorithm("fedlc", "counts.pow(-0.25)", "counts.pow(-0.5)"),
    in_algorithm("fedlc", "return -label_margins", "return label_margins"),
    in_algorithm("ccvr", "count / (count - 1)", "(count - 1) / count"),
    in_algorithm("ccvr", "- torch.outer(mean, mean)", "+ torch.outer(mean, mean)"),
    in_algorithm("scaffold", "(old / new if old else 1.0)", "1.0"),
    in_algorithm("feddyn", "self.alpha * self.mean_size", "self.alpha / self.mean_size"),
    in_algorithm("fedntd", "(received - local)", "(local - received)"),
    in_algorithm("fedntd", "(others >= labels.unsqueeze(-1))", "0 * labels.unsqueeze(-1)"),
    in_algorithm("fedrs", "held + self.alpha * (1 - held)", "self.alpha * held + (1 - held)"),
    in_algorithm("fedsam", "alpha=self.rho / length", "alpha=-self.rho / length"),
    in_algorithm("feddecorr", "(size * dim) ** 2", "size * dim**2"),
    in_algorithm("fednh", "self.rho * old + (1 - self.rho) * seen", "self.rho * seen + (1 - self.rho) * old"),
    in_algorithm("fedacg", "value + self.momentum * sent", "value - self.momentum * sent"),
    in_algorithm("fedfac", "2 - 2 * cosine.mean", "2 + 2 * cosine.mean"),
    in_algorithm("averaging", "(1 - rate) * way", "rate * way"),
    in_algorithm("fedexp", "(2 * (of_mean + self.epsilon))", "(of_mean + self.epsilon)"),
    in_algorithm("matched_averaging", "maximize=True", "maximize=False"),
    in_algorithm(
        "final_calibration",
        "batch.gradient(weight, bias), self.lr)",
        "batch.gradient(weight, bias), -self.lr)",
        "tests/experiment/test_final_calibration.py",
    ),
    in_algorithm("fedfa", "loss = loss + self.mu", "loss = loss - self.mu", "tests/algorithms/test_anchor_layers.py"),
    in_algorithm("anchor_kernels", "2 * gradients[0]", "0 * gradients[0]", EQUATIONS),
    in_algorithm("anchor_kernels", "y.shape[-1] if counts is None", "1 if counts is None", EQUATIONS),
    in_algorithm("anchor_kernels", "= anchors / classes", "= anchors", EQUATIONS),
    in_algorithm("anchor_kernels", ".sub_(self.labels)", "", EQUATIONS),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_method_does_not_pass(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "fedfa", tmp_path / "fedfa")
    target = tmp_path / "fedfa" / mutation.file
    text = target.read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1, "the source has changed: update the mutation"
    target.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0",
        "-o", f"pythonpath={tmp_path} .", str(ROOT / mutation.tests),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, f"no test failed (exit {done.returncode}):\n{done.stdout[-2000:]}"
