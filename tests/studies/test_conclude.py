"""What follows the last round, added to a run that was trained without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.errors import RecipeError, RunError, SettingsError
from fedfa.studies.conclude import conclude
from fedfa.studies.run import run
from fedfa.studies.settings import Settings
from tests.studies.study_toys import assert_same_run, small


@pytest.mark.parametrize("recipe", ["fedavg", "fedfa", "scaffold"])
def test_concluding_afterwards_is_the_same_as_training_with_it(tmp_path: Path, blobs: DataSet, recipe: str) -> None:
    run(small(recipe), tmp_path / "trained", data=blobs)
    after = conclude(tmp_path / "trained", "ccvr", tmp_path / "after", data=blobs)
    run(small(f"{recipe}+ccvr"), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "after", tmp_path / "whole")
    assert after.summary["accuracy_before_survey"] == after.metrics[-2]["accuracy"]


def test_variants_and_options_stay_and_new_options_count(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedfa", algorithm={"variant": "authors", "anchors": {"mu": 0.3}}), tmp_path / "trained", data=blobs)
    options = {"algorithm": {"ccvr": {"samples": 7}}}
    conclude(tmp_path / "trained", "ccvr", tmp_path / "after", options, data=blobs)
    settings = Settings.from_file(tmp_path / "after" / "config.toml")
    assert settings.algorithm.recipe == "fedfa+ccvr"
    assert settings.algorithm.variant == "authors"
    assert settings.algorithm.options["anchors"]["mu"] == 0.3
    assert settings.algorithm.options["ccvr"]["samples"] == 7
    assert settings.local.lr_decay == 0.99


def test_a_method_with_a_say_in_training_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedavg"), tmp_path / "trained", data=blobs)
    with pytest.raises(RecipeError, match="'fedprox' has a say in the training"):
        conclude(tmp_path / "trained", "fedprox", tmp_path / "after", data=blobs)
    assert not (tmp_path / "after").exists()


def test_what_cannot_follow_is_refused_before_anything_is_written(tmp_path: Path, blobs: DataSet) -> None:
    """Pooling has no hook of its own and yet changes everything; a part that asks nobody anything adds nothing."""
    run(small("fedfa"), tmp_path / "trained", data=blobs)
    with pytest.raises(RecipeError, match="'centralised' has a say in the training"):
        conclude(tmp_path / "trained", "centralised", tmp_path / "after", data=blobs)
    with pytest.raises(RunError, match="nothing would follow"):
        conclude(tmp_path / "trained", None, tmp_path / "after", {"algorithm": {"final": {"lr": 0.2}}}, data=blobs)
    with pytest.raises(RunError, match=r"local\.lr has a say"):
        conclude(tmp_path / "trained", "ccvr", tmp_path / "after", {"local": {"lr": 0.2}}, data=blobs)
    run(small("fedavg", rounds=1), tmp_path / "taken", data=blobs)
    with pytest.raises(RunError, match="holds a run already; choose another --out"):
        conclude(tmp_path / "trained", "ccvr", tmp_path / "taken", data=blobs)
    other = replace(blobs, fingerprint="other")
    with pytest.raises(RunError, match="data changed since"):
        conclude(tmp_path / "trained", "ccvr", tmp_path / "after", data=other)
    (tmp_path / "trained" / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="only its record"):
        conclude(tmp_path / "trained", "ccvr", tmp_path / "after", data=blobs)
    with pytest.raises(RunError, match="cannot be made longer: it has no checkpoint"):
        run(small("fedfa", rounds=6), tmp_path / "trained", data=blobs, resume=True)
    assert not (tmp_path / "after").exists()
    assert (tmp_path / "trained" / "summary.json").exists()


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a finished run"):
        conclude(tmp_path, "ccvr", tmp_path / "after")


def test_options_for_parts_that_a_recipe_may_have() -> None:
    """On CIFAR-10 the paper gives MOON μ = 5: the preset says so, and it counts only where MOON takes part."""
    assert Settings.preset("cifar10-c2", {"algorithm": {"recipe": "moon"}}).algorithm.options["moon"]["mu"] == 5
    assert Settings.preset("fmnist-c2", {"algorithm": {"recipe": "moon"}}).algorithm.options["moon"]["mu"] == 1
    assert "moon" not in Settings.preset("cifar10-c2", {"algorithm": {"recipe": "fedavg"}}).algorithm.options
    own = {"algorithm": {"recipe": "moon", "moon": {"mu": 2.0}}}
    assert Settings.preset("cifar10-c2", own).algorithm.options["moon"]["mu"] == 2
    with pytest.raises(SettingsError, match=r"\[with.mon\] \(did you mean 'moon'\?\)"):
        Settings.resolve({"with": {"mon": {"mu": 1}}})
