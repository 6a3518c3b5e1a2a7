"""A final pass, added to a run that was trained without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError, RunError
from fedfa.experiment.config import Config
from fedfa.experiment.finalize import finalize
from fedfa.experiment.run import run
from tests.experiment.run_toys import assert_same_run, small


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "scaffold"])
def test_a_final_pass_afterwards_is_the_same_as_training_with_it(
    tmp_path: Path, blobs: DataSet, algorithm: str
) -> None:
    run(small(algorithm), tmp_path / "trained", data=blobs)
    after = finalize(tmp_path / "trained", "ccvr", tmp_path / "after", data=blobs)
    run(small(f"{algorithm}+ccvr"), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "after", tmp_path / "whole")
    assert after.summary["accuracy_before_final_pass"] == after.metrics[-2]["accuracy"]


def test_variants_and_options_stay_and_new_options_count(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedfa", algorithm={"variant": "authors", "anchors": {"mu": 0.3}}), tmp_path / "trained", data=blobs)
    options = {"algorithm": {"ccvr": {"samples": 7}}}
    finalize(tmp_path / "trained", "ccvr", tmp_path / "after", options, data=blobs)
    config = Config.from_file(tmp_path / "after" / "config.toml")
    assert config.algorithm.name == "fedfa+ccvr"
    assert config.algorithm.variant == "authors"
    assert config.algorithm.options["anchors"]["mu"] == 0.3
    assert config.algorithm.options["ccvr"]["samples"] == 7
    assert config.local.lr_decay == 0.99


def test_a_method_that_acts_in_training_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedavg"), tmp_path / "trained", data=blobs)
    with pytest.raises(AlgorithmError, match="'fedprox' acts in training"):
        finalize(tmp_path / "trained", "fedprox", tmp_path / "after", data=blobs)
    assert not (tmp_path / "after").exists()


def test_what_cannot_follow_is_refused_before_anything_is_written(tmp_path: Path, blobs: DataSet) -> None:
    """Pooling has no hook of its own and yet changes everything; a component without a final pass adds nothing."""
    run(small("fedfa"), tmp_path / "trained", data=blobs)
    with pytest.raises(AlgorithmError, match="'centralised' acts in training"):
        finalize(tmp_path / "trained", "centralised", tmp_path / "after", data=blobs)
    with pytest.raises(RunError, match="nothing would follow"):
        finalize(tmp_path / "trained", None, tmp_path / "after", {"algorithm": {"final": {"lr": 0.2}}}, data=blobs)
    with pytest.raises(RunError, match=r"local\.lr affects the training"):
        finalize(tmp_path / "trained", "ccvr", tmp_path / "after", {"local": {"lr": 0.2}}, data=blobs)
    run(small("fedavg", rounds=1), tmp_path / "taken", data=blobs)
    with pytest.raises(RunError, match="holds a run already; choose another --out"):
        finalize(tmp_path / "trained", "ccvr", tmp_path / "taken", data=blobs)
    other = replace(blobs, fingerprint="other")
    with pytest.raises(RunError, match="data changed since"):
        finalize(tmp_path / "trained", "ccvr", tmp_path / "after", data=other)
    (tmp_path / "trained" / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="only its record"):
        finalize(tmp_path / "trained", "ccvr", tmp_path / "after", data=blobs)
    with pytest.raises(RunError, match="cannot be extended: it has no checkpoint"):
        run(small("fedfa", rounds=6), tmp_path / "trained", data=blobs, resume=True)
    assert not (tmp_path / "after").exists()
    assert (tmp_path / "trained" / "summary.json").exists()


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a finished run"):
        finalize(tmp_path, "ccvr", tmp_path / "after")


def test_options_for_components_that_an_algorithm_may_have() -> None:
    """On CIFAR-10 the paper gives MOON μ = 5: the preset says so, and it counts only in algorithms with MOON."""
    assert Config.preset("cifar10-c2", {"algorithm": {"name": "moon"}}).algorithm.options["moon"]["mu"] == 5
    assert Config.preset("fmnist-c2", {"algorithm": {"name": "moon"}}).algorithm.options["moon"]["mu"] == 1
    assert "moon" not in Config.preset("cifar10-c2", {"algorithm": {"name": "fedavg"}}).algorithm.options
    own = {"algorithm": {"name": "moon", "moon": {"mu": 2.0}}}
    assert Config.preset("cifar10-c2", own).algorithm.options["moon"]["mu"] == 2
    with pytest.raises(ConfigError, match=r"\[with.mon\] \(did you mean 'moon'\?\)"):
        Config.resolve({"with": {"mon": {"mu": 1}}})
