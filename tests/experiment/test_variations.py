"""The settings of a comparison: what `--vary` reads, and where each setting's runs go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfa.errors import ConfigError
from fedfa.experiment.config import Config, preset_layer
from fedfa.experiment.layers import assign
from fedfa.experiment.variations import Variation, directory_name, parse_variation, plan_configs


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=0.5,0.1", (0.5, 0.1)),
        (" a = 1 , 2 ", (1, 2)),
        ("a=[0.1, 0.5]", (0.1, 0.5)),
        ("a=true,false", (True, False)),
        ("a=iid,shards:2,dirichlet:0.1", ("iid", "shards:2", "dirichlet:0.1")),
        ("a=auto,2", ("auto", 2)),
        ('a="x,y","z"', ("x,y", "z")),
        ("a=[8],[8, 4]", ([8], [8, 4])),
        ("a=[[8], [8, 4]]", ([8], [8, 4])),
        ("a={kind='iid'},{kind='shards', shards=2}", ({"kind": "iid"}, {"kind": "shards", "shards": 2})),
    ],
)
def test_values_of_variations(text: str, values: tuple[Any, ...]) -> None:
    assert parse_variation(text) == Variation("a", values)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("local.lr", "write key=value,value"),
        ("=1,2", "write key=value,value"),
        ("local.lr=0.5", "needs two values or more.*--set"),
        ("local.lr=", "needs two values or more"),
        ("local.lr=0.5,0.50", "has 0.5 twice"),
        ("a=b,,c", "empty value"),
        ("a=[8, 4],x", "put each word in quotes"),
        ("seed=1,2", "repeat --seed instead"),
        ("algorithm.name=fedavg,fedfa", "repeat --algorithm instead"),
        ("algorithm=fedavg,fedfa", "repeat --algorithm instead"),
        ("algorithm={name='fedavg'},{variant='paper'}", "repeat --algorithm instead"),
        ("algorithm.variant=paper,authors", "METHOD@VARIANT"),
    ],
)
def test_what_is_no_variation(text: str, labels: str) -> None:
    with pytest.raises(ConfigError, match=labels):
        parse_variation(text)


def planned(bases: list[str], *texts: str, common: dict[str, Any] | None = None) -> dict[str, Config]:
    config = plan_configs(
        {name: preset_layer(name) for name in bases}, common or {}, [parse_variation(text) for text in texts], Path("x")
    )
    return {one.directory.as_posix(): Config.resolve(*one.layers) for one in config}


def test_a_single_setting_keeps_its_runs_where_they_always_were() -> None:
    [(directory, config)] = planned(["digits-c2"], common={"rounds": 3}).items()
    assert directory == "x"
    assert config == Config.preset("digits-c2", {"rounds": 3})


def test_presets_and_variations_give_every_combination() -> None:
    found = planned(["digits-c2", "fmnist-c2"], "local.lr=0.5,0.1", "data.partition=iid,shards:3", common={"rounds": 7})
    assert list(found) == [
        f"x/{preset},data.partition={split},local.lr={lr}"
        for preset in ("digits-c2", "fmnist-c2") for lr in (0.5, 0.1) for split in ("iid", "shards_3")
    ]  # fmt: skip
    assert [one.data.name for one in found.values()] == ["digits"] * 4 + ["fashion-mnist"] * 4
    assert [one.local.lr for one in found.values()] == [0.5, 0.5, 0.1, 0.1] * 2
    assert [one.data.partition.kind for one in found.values()] == ["iid", "shards"] * 4
    assert {one.rounds for one in found.values()} == {7}


def test_the_order_of_variations_does_not_move_the_runs() -> None:
    one = planned(["digits-c2"], "local.lr=0.5,0.1", "local.epochs=1,2")
    other = planned(["digits-c2"], "local.epochs=1,2", "local.lr=0.5,0.1")
    assert one == other
    more = planned(["digits-c2", "fmnist-c2"], "local.lr=0.5,0.1", "local.epochs=1,2")
    assert one.items() <= more.items(), "another preset leaves them where they are too"


def test_titles_name_the_preset_only_where_it_tells_them_apart() -> None:
    lr = [parse_variation("local.lr=0.5,0.1")]
    assert [one.title for one in plan_configs({"a": {}}, {}, lr, Path())] == ["local.lr=0.5", "local.lr=0.1"]
    assert [one.title for one in plan_configs({"a": {}, "b": {}}, {}, lr[:0], Path())] == ["a", "b"]
    assert plan_configs({"a": {}, "b": {}}, {}, lr, Path())[3].labels == ("b", "local.lr=0.1")


@pytest.mark.parametrize(
    "values",
    [
        ["shards:2", "shards_2", "shards 2", "Shards:2", "shards/2", "shards-2"],
        [[8, 4], [84], "8_4", [8, [4]]],
        ["x" * 200, "x" * 201],
        ["", "-", "..", "../..", "/", "con:"],
    ],
)
def test_folder_names_are_safe_and_tell_all_values_apart(values: list[Any]) -> None:
    names = [directory_name("digits-c2", {"some.key": value}) for value in values]
    assert len({name.lower() for name in names}) == len(values), names
    for name in names:
        assert name.startswith("digits-c2,some.key=")
        assert len(name) <= 120
        assert not set(name) & set('/\\:*?"<>| \n')


def test_a_key_that_is_varied_twice_or_set_too_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--vary local\.lr, but it is varied already"):
        planned(["digits-c2"], "local.lr=0.5,0.1", "local.lr=1,2")
    with pytest.raises(ConfigError, match=r"--vary local\.lr, but it is set for all settings already"):
        planned(["digits-c2"], "local.lr=0.5,0.1", common=assign({}, ["local.lr=1"]))
