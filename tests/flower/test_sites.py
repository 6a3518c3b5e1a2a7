"""Run configs, own test data and combined evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedfa.data import DataSet, Normalisation, Samples
from fedfa.errors import ConfigError, DataError
from fedfa.experiment.config import Config
from fedfa.flower.config import RunConfig
from fedfa.flower.messages import SiteEvaluation
from fedfa.flower.server_app import _check_evaluation
from fedfa.flower.site import own_test_data, without_data
from fedfa.flower.site_evaluations import combine
from fedfa.learning.evaluate import judge


# -- evaluations ------------------------------------------------------------------------------------------------------
def evaluation_of(site: int, hit: torch.Tensor, labels: torch.Tensor, domains: torch.Tensor | None) -> SiteEvaluation:
    made = judge({"hit": hit, "loss": torch.ones(len(hit)) * site}, labels, 3, domains=domains, domain_names=("a", "b"))
    by_domain = () if domains is None else tuple(int((domains == "ab".index(n)).sum()) for n in made.domain_accuracy)
    return SiteEvaluation(site, made, tuple(labels.bincount(minlength=3).tolist()), by_domain)


@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=30),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_combined_evaluations_are_that_of_all_samples_in_one_place(
    sites: list[list[tuple[bool, int, int]]], with_domains: bool
) -> None:
    columns = [[torch.tensor(column) for column in zip(*site, strict=True)] for site in sites]
    each = [
        evaluation_of(number, hit, labels, domains if with_domains else None)
        for number, (hit, labels, domains) in enumerate(columns)
    ]
    hit, labels, domains = (torch.cat(column) for column in zip(*columns, strict=True))
    loss = torch.cat([torch.ones(len(site)) * number for number, site in enumerate(sites)])
    whole = judge(
        {"hit": hit, "loss": loss}, labels, 3, domains=domains if with_domains else None, domain_names=("a", "b")
    )
    found = combine(each)
    assert (found.accuracy, found.class_accuracy) == (whole.accuracy, whole.class_accuracy)
    assert found.domain_accuracy == whole.domain_accuracy
    assert found.loss == pytest.approx(whole.loss)


def test_accuracy_is_the_mean_over_domains() -> None:
    """Nine samples of one domain, all right, and one of another, wrong: one half, not nine tenths."""
    labels = torch.zeros(9, dtype=torch.int64)
    right = evaluation_of(0, torch.ones(9, dtype=torch.bool), labels, labels)
    wrong = evaluation_of(1, torch.zeros(1, dtype=torch.bool), labels[:1], torch.ones(1, dtype=torch.int64))
    assert combine([right, wrong]).accuracy == 0.5


# -- the server's test data -------------------------------------------------------------------------------------------
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3))


def component(count: int, value: float) -> tuple[Any, Any]:
    return torch.full((count, 2), value).numpy(), (torch.arange(count) % 3).numpy()


@pytest.mark.parametrize(
    "loaded", [component(6, 2.0), {"test": component(6, 2.0)}, {"train": component(30, 1.0), "test": component(6, 2.0)}]
)
def test_the_server_evaluates_on_the_test_split(loaded: Any) -> None:
    test = own_test_data(loaded, network)
    federation = without_data(test, 3, torch.zeros(2, 2), 4)
    assert len(federation.dataset.test) == 6
    assert (federation.dataset.test.inputs == 2).all()
    assert federation.dataset.normalisation == Normalisation()


def test_a_data_set_is_tested_with_its_own_normalisation(blobs: DataSet) -> None:
    given = DataSet(
        "own",
        blobs.train,
        Samples(blobs.test.inputs, blobs.test.labels),
        blobs.classes,
        (),
        Normalisation((0.5,), (2.0,)),
        "x",
        {},
    )
    made = without_data(own_test_data(given, network), 4, torch.zeros(2, 6), 4).dataset
    assert made.test is given.test
    assert made.normalisation == given.normalisation


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ({"train": component(6, 1.0)}, "load_test_data returned the splits train; return 'test'"),
        ({"test": component(6, 1.0), "tests": component(6, 1.0)}, "splits test, tests"),
    ],
)
def test_invalid_test_data_is_rejected(loaded: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        own_test_data(loaded, network)


def test_a_data_set_without_test_samples_is_rejected(blobs: DataSet) -> None:
    empty = blobs.test.subset(torch.zeros(0, dtype=torch.int64))
    given = DataSet("own", blobs.train, empty, blobs.classes, (), Normalisation(), "x", {})
    with pytest.raises(DataError, match="no test samples"):
        own_test_data(given, network)


# -- run configs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "variant"),
    [
        ({"algorithm": "fedfa@authors"}, "authors"),
        ({"algorithm": "fedfa"}, "default"),
        ({"algorithm": "fedfa@authors", "settings": "algorithm.variant=paper"}, "paper"),
    ],
)
def test_a_method_is_named_as_on_the_command_line(values: dict[str, Any], variant: str) -> None:
    config = RunConfig({"preset": "digits-c2", **values}).config(3)
    assert (config.algorithm.name, config.algorithm.variant) == ("fedfa", variant)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"settings": "local.lr='0.1"}, r"settings = .* cannot be split into assignments: No closing quotation"),
        ({"data.clients": "x"}, r"data\.clients = 'x' is not a number of sites"),
        ({"data": 3}, r"data = 3: this is a table"),
        ({"settings": "model=3"}, r"model = 3: this is a table"),
        ({"diagnostics.every": 1}, r"leave diagnostics\.every and diagnostics\.features out"),
        ({"preset": "digits-c3"}, "did you mean 'digits-c2'"),
    ],
)
def test_an_invalid_run_config_is_rejected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig({"preset": "digits-c2", **values}).check()


# -- what only a server with the samples can evaluate -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "client_models", "own_data", "where", "refused"),
    [
        ({"evaluation": {"metrics": ["auroc"]}}, False, False, "server", False),
        ({"evaluation": {"metrics": ["auroc"]}}, False, True, "server", False),
        ({"evaluation": {"metrics": ["auroc"]}}, False, False, "sites", True),
        ({"evaluation": {"metrics": ["auroc"]}}, True, False, "server", True),
        ({"data": {"validation": "server:0.1"}}, False, False, "server", False),
        ({"data": {"validation": "server:0.1"}}, False, True, "server", True),
        ({"evaluation": {"clients": "all"}}, False, True, "server", True),
        ({"evaluation": {"clients": "none"}}, True, True, "sites", False),
    ],
)
def test_metrics_and_validation_are_refused_where_the_server_lacks_the_samples(
    layer: dict[str, Any], client_models: bool, own_data: bool, where: str, refused: bool
) -> None:
    config = Config.resolve(layer)
    if refused:
        with pytest.raises(ConfigError, match="leave"):
            _check_evaluation(config, client_models, own_data, where)
    else:
        _check_evaluation(config, client_models, own_data, where)
