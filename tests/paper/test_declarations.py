"""Declared studies: complete, valid, and in line with the paper's text and numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fedfa.errors import ConfigError
from fedfa.experiment.config import Config
from fedfa.models.zoo import build_model
from fedfa.paper.cells import key_of, places
from fedfa.paper.declarations import (
    published,
    published_numbers,
    read_study,
    reading,
    readings,
    source,
    studies,
    study,
)  # fmt: skip
from fedfa.paper.tables import numbers_by_key
from tests.paper.small_study import DECLARED

TABLES = [name for name, one in studies().items() if one.kind == "table"]


def test_studies_cover_the_papers_tables_and_figures() -> None:
    assert list(studies()) == [
        "label-skew", "feature-skew", "momentum", "ablation", "calibration-phases", "features-and-classifiers",
        "similarity-histograms", "sample-rate-and-epochs", "batch-size", "client-numbers", "lambda-and-initialisation",
    ]  # fmt: skip
    assert {name: len(places(studies()[name], "authors")) for name in TABLES} == {
        # 3 data sets × (3 splits × 6 methods + 2 without skew); EMNIST 6 + Mixed Digits 4 × 6 + 2; 3 × 4 + 2; 3 × 3; 8
        "label-skew": 60, "feature-skew": 32, "momentum": 14, "ablation": 9, "calibration-phases": 8,
    }  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_every_number_of_the_paper_has_a_cell_and_every_cell_a_number(name: str) -> None:
    """But one: the calibration after the last round is this project's own."""
    declared = studies()[name]
    cells = {(column.name, row.name) for column in declared.columns for row in declared.rows_of(column)}
    numbers = {(c, r) for c, rows in published_numbers()[name].items() if isinstance(rows, dict) for r in rows}
    assert cells - {("fmnist/c2", "after-last-round")} == numbers
    assert source(name)


@pytest.mark.parametrize("name", list(studies()))
@pytest.mark.parametrize("how", list(readings()))
def test_every_cell_can_be_run(name: str, how: str) -> None:
    """Each is complete settings with the paper's rounds, and no two of one column are the same run by mistake."""
    declared = studies()[name]
    for column in declared.columns:
        keys = [place.key for place in places(declared, how) if place.column == column]
        assert len(set(keys)) == len(keys), f"{column.name} holds a run twice"


def test_cell_configs_are_those_of_the_papers_text() -> None:
    """100 clients, 10 a round, batches of 64, 5 epochs, 200 rounds, rate 0.01, weight decay 0.001; with momentum 0.9;
    MOON's μ is 5 on CIFAR-10 and 1 elsewhere; the diagnostics have 10 clients, 15 rounds, 10 epochs.
    """
    for name in ("label-skew", "feature-skew", "momentum"):
        for place in places(studies()[name], "paper"):
            config = place.config(studies()[name].rounds, 1)
            assert config.rounds == 200
            assert (config.data.clients, config.cohort.count(100)) == (100, 10)
            local = config.local
            assert (local.batch_size, local.epochs, local.lr, local.weight_decay) == (64, 5, 0.01, 0.001)
            assert local.momentum == (0.9 if name == "momentum" else 0.0)
            if place.row.name == "moon":
                assert config.algorithm.options["moon"]["mu"] == (5 if place.name.startswith("cifar10/") else 1)
    for place in places(studies()["features-and-classifiers"], "paper"):
        config = place.config(15, 1)
        assert (config.data.clients, config.cohort.count(10), config.local.epochs) == (10, 10, 10)
        assert config.diagnostics.every == 1


def test_cell_networks_are_those_of_the_papers_table() -> None:
    """Diagnostics use their own networks; Mixed Digits' has GroupNorm in the text, not in the published code."""
    for name in ("features-and-classifiers", "similarity-histograms"):
        for place in places(study(name), "authors"):
            digits = place.name.startswith("digits/")
            assert place.config(15, 1).model.name == ("cnn-validation-digits" if digits else "cnn-validation")
    for how, options in (("authors", {"norm": "none"}), ("paper", {}), ("default", {})):
        for place in (p for p in places(study("feature-skew"), how) if p.name.startswith("digits/")):
            model = place.config(200, 1).model
            assert (model.name, model.options) == ("cnn-mixed-digits", options)
    assert build_model("cnn-mixed-digits", (3, 28, 28), 10).state_dict().keys() > (
        build_model("cnn-mixed-digits", (3, 28, 28), 10, {"norm": "none"}).state_dict().keys()
    ), "without options the network is the text's"


def test_sample_rate_study_has_200_rounds_and_batch_size_study_400() -> None:
    """The paper's two figures: sample rate and epochs with 200 rounds; the same and batch sizes with 400."""
    shorter, longer = study("sample-rate-and-epochs"), study("batch-size")
    assert (shorter.rounds, longer.rounds) == (200, 400)
    assert {c.name: c.config for c in shorter.columns}.items() <= {c.name: c.config for c in longer.columns}.items()
    usual = [p.key for p in places(longer, "authors") if p.name in ("rate/0.1/moon", "batch/64/moon", "epochs/5/moon")]
    assert len(usual) == 3
    assert len(set(usual)) == 1, "one run stands in all three panels"


def test_rows_with_a_final_pass_keep_the_training_config_of_their_source() -> None:
    """FedAvg of the published code has a weight decay of its own, which ccvr by itself knows nothing of."""
    declared = study("calibration-phases")
    by_row = {place.row.name: place.config(200, 1) for place in places(declared, "authors")}
    assert by_row["fedavg-ccvr"].local.weight_decay == by_row["fedavg"].local.weight_decay == 0.0001
    assert by_row["fedavg-ccvr"].algorithm.name == "fedavg+ccvr"
    assert by_row["after-last-round"].algorithm.options["final"]["steps"] == 1000
    assert by_row["after-last-round"].algorithm.options["calibration"]["when"] == "never"
    assert by_row["no-calibration"].algorithm.options["final"]["steps"] == 0


def test_equal_cells_of_two_studies_have_one_key() -> None:
    cells = {
        (name, place.name): place.key
        for name in ("label-skew", "ablation", "calibration-phases") for place in places(studies()[name], "authors")
    }  # fmt: skip
    assert cells["label-skew", "fmnist/c2/fedfa"] == cells["ablation", "fmnist/c2/fedfa"]
    assert cells["label-skew", "fmnist/c2/fedfa"] == cells["calibration-phases", "fmnist/c2/each-batch"]
    assert cells["ablation", "fmnist/c2/no-calibration"] == cells["calibration-phases", "fmnist/c2/no-calibration"]
    assert cells["ablation", "fmnist/c2/no-anchor-update"] != cells["ablation", "fmnist/c2/fedfa"]


def test_published_number_of_a_run_is_from_the_first_table_that_has_it() -> None:
    def number(preset: str, norm: str | None = None, **algorithm: Any) -> str:
        network = {} if norm is None else {"model": {"options": {"norm": norm}}}
        rounds, found = numbers_by_key()[key_of(Config.preset(preset, {"algorithm": algorithm, **network}))]
        assert rounds == 200
        return str(found)

    authors = {"name": "fedfa", "variant": "authors"}
    assert number("mixed-digits", "none", **authors) == "90.73(2.01)", "not the ablation's 90.86"
    assert number("mixed-digits", name="fedfa", variant="paper") == "90.73(2.01)"
    assert number("fmnist-c2", **authors) == number("fmnist-c2", name="fedfa", variant="paper") == "84.08(1.22)"
    assert number("fmnist-c2", **authors, calibration={"when": "never"}) == "78.07(2.23)", "not whole FedFA's"
    assert number("fmnist-c2", name="fedprox") == str(published("label-skew", "fmnist/c2", "fedprox"))
    assert key_of(Config.preset("fmnist-c2", {"algorithm": {"name": "fedfa"}})) not in numbers_by_key()
    assert published("label-skew", "fmnist/iid", "moon") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('first = ["fedfa"]', 'first = ["fedafa"]', "'fedafa' is not one of the rows"),
        ('after = "fedavg"', 'after = "nobody"', "'nobody' is not one of the rows"),
        ('name = "no-calibration"', 'name = "fedavg"', "'fedavg' is declared twice"),
        ("rounds = 4", "round = 4", "unknown key round .*rounds"),
        ('kind = "table"', 'kind = "figure"', r"a figure needs a \[picture\] table"),
        ("rounds = 4", "rounds = ", "not valid TOML"),
    ],
)
def test_wrong_declarations_are_rejected_with_the_key(old: str, new: str, message: str) -> None:
    assert old in DECLARED
    with pytest.raises(ConfigError, match=message):
        read_study("small", DECLARED.replace(old, new))


def test_unknown_study_or_reading_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'label-skew'"):
        study("label-skw")
    with pytest.raises(ConfigError, match="did you mean 'authors'"):
        reading("author")


def test_run_key_ignores_what_does_not_change_the_training() -> None:
    place = places(study("label-skew"), "authors")[0]
    one = place.config(200, 1)
    same = place.config(50, 3)
    assert key_of(one) == key_of(same), "rounds and seed are compared separately"
    for section, change in (("local", {"lr": 0.02}), ("data", {"seed": 2}), ("cohort", {"selection": "uniform"})):
        changed = one.model_copy(update={section: getattr(one, section).model_copy(update=change)})
        assert key_of(changed) != key_of(one), section
    for section, change in (("evaluation", {"every": 7}), ("checkpoint", {"every": 5}), ("diagnostics", {"every": 1})):
        changed = one.model_copy(update={section: getattr(one, section).model_copy(update=change)})
        assert key_of(changed) == key_of(one), section
