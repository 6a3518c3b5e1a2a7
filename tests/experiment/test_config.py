from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedfa.algorithms.registry import methods
from fedfa.data import parse_partition
from fedfa.errors import AlgorithmError, ConfigError, DataError, FedfaError
from fedfa.experiment.config import Config, preset_layer, presets, read_toml
from fedfa.experiment.layers import assign, nest, parse_assignment

ALGORITHMS: list[tuple[str, str | None]] = [
    (name, variant) for name, method in methods().items() for variant in (None, *method.variants)
]


def asked(algorithm: str, variant: str | None) -> dict[str, Any]:
    return {"algorithm": {"name": algorithm, **({"variant": variant} if variant else {})}}


# -- presets and the record -------------------------------------------------------------------------------------------
def test_there_are_methods_variants_and_presets_to_test() -> None:
    assert {("fedavg", "authors"), ("fedfa", "paper"), ("fedfa", "authors"), ("fedfa", None)} <= set(ALGORITHMS)
    assert {"digits-c2", "fmnist-c2", "fmnist-dir0.1", "cifar10-c2", "cifar100-c20", "mixed-digits"} <= set(presets())


@pytest.mark.parametrize("name", sorted(presets()))
def test_config_toml_of_every_preset_reads_back_as_itself(name: str) -> None:
    for algorithm, variant in ALGORITHMS:
        config = Config.preset(name, asked(algorithm, variant))
        text = config.to_toml()
        back = Config.resolve(tomllib.loads(text))
        assert back == config
        assert back.to_toml() == text
        assert back.build_algorithm().title == algorithm


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_says_what_it_is(name: str) -> None:
    assert len(presets()[name]) > 15


def test_the_record_is_complete() -> None:
    """config.toml has every value, defaults included; only what is not set is left out."""
    recorded = tomllib.loads(Config.preset("digits-c2", asked("fedfa", None)).to_toml())
    assert recorded["local"] == {
        "epochs": 5, "batch_size": 16, "lr": 0.1, "lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.001,
        "drop_last": False, "optimiser": "sgd", "schedule": "constant", "warmup": 0,
        "precision": "float32",
    }  # fmt: skip
    assert recorded["data"]["partition"] == {"kind": "shards", "classes_per_client": 2}
    assert recorded["algorithm"]["variant"] == "default"
    assert recorded["algorithm"]["fedavg"] == {"weighting": "samples"}
    assert recorded["algorithm"]["anchors"]["mu"] == 0.1
    assert set(Config.model_fields) == set(recorded)


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'fmnist-c3' \(did you mean 'fmnist-"):
        preset_layer("fmnist-c3")


# -- layers -----------------------------------------------------------------------------------------------------------
def test_layers_defaults_variant_file_set(tmp_path: Path) -> None:
    """lr_decay: default 1, the variant `authors` 0.99, a file 0.9, --set 0.8; the later wins."""

    def lr_decay(*layers: dict[str, Any]) -> float:
        return Config.resolve(*layers).local.lr_decay

    variant = asked("fedfa", "authors")
    file = tmp_path / "config.toml"
    file.write_text('[algorithm]\nrecipe = "fedfa"\nvariant = "authors"\n[local]\nlr_decay = 0.9\n')
    assert lr_decay(asked("fedfa", None)) == 1.0
    assert lr_decay(variant) == 0.99
    assert lr_decay(read_toml(file)) == 0.9
    assert lr_decay(read_toml(file), parse_assignment("local.lr_decay=0.8")) == 0.8
    assert lr_decay({"local": {"lr_decay": 0.9}}, variant) == 0.9, "a variant never overrides an explicit value"


def test_variants_set_what_the_ledger_says() -> None:
    paper, authors = (Config.resolve(asked("fedfa", variant)) for variant in ("paper", "authors"))
    assert (paper.local.lr_decay, authors.local.lr_decay) == (1.0, 0.99)
    assert (paper.cohort.selection, authors.cohort.selection) == ("uniform", "authors")
    assert (paper.data.normalise, authors.data.normalise) == ("dataset", "authors")
    assert paper.algorithm.options["anchors"]["start"] == "zero"
    assert authors.algorithm.options["anchors"]["start"] == "received"
    decay = {variant: Config.resolve(asked("fedavg", variant)).local.weight_decay for variant in ("paper", "authors")}
    assert decay == {"paper": 0.001, "authors": 0.0001}
    assert authors.local.weight_decay == 0.001


def test_an_algorithm_can_be_given_as_text() -> None:
    assert Config.resolve({"algorithm": "fedfa@paper"}) == Config.resolve(asked("fedfa", "paper"))


def test_a_partition_is_replaced_whole() -> None:
    config = Config.resolve(
        {"data": {"partition": {"kind": "dirichlet", "alpha": 0.1, "min_size": 3}}},
        {"data": {"partition": {"kind": "shards", "classes_per_client": 3}}},
    )
    assert config.data.partition == parse_partition("shards:3")


@pytest.mark.parametrize(
    ("short", "table"),
    [
        ("shards:3", {"kind": "shards", "classes_per_client": 3}),
        ("dirichlet:0.1", {"kind": "dirichlet", "alpha": 0.1}),
        ("iid", {"kind": "iid"}),
        ("domains/shards:2", {"kind": "domains", "inner": {"kind": "shards", "classes_per_client": 2}}),
    ],
)
def test_partition_as_short_text_and_as_table(short: str, table: dict[str, Any]) -> None:
    a, b = (Config.resolve({"data": {"partition": form}}) for form in (short, table))
    assert a == b
    assert a.data.partition == parse_partition(short)


def test_cohort_counts() -> None:
    def count(of: int, **cohort: Any) -> int:
        return Config.resolve({"cohort": cohort}).cohort.count(of)

    assert count(100) == 10
    assert count(100, clients=7) == 7
    assert count(100, rate=0.25) == 25
    assert count(3, rate=0.01) == 1


def test_the_reference_code_rounds_the_cohort_down() -> None:
    """int(C · K), at least one; the rounding is recorded only where it makes a difference."""
    for clients, rate, nearest, down in ((100, 0.1, 10, 10), (35, 0.1, 4, 3), (17, 0.1, 2, 1), (9, 0.1, 1, 1)):
        asked = {"data": {"clients": clients}, "cohort": {"rate": rate}}
        text, code = (
            Config.resolve(asked, {"algorithm": {"name": "fedfa", "variant": v}}) for v in ("paper", "authors")
        )
        assert [one.cohort.count(clients) for one in (text, code)] == [nearest, down], clients
        assert code.cohort.rounding == (None if nearest == down else "down")
        assert Config.resolve(code.to_dict()) == code


def test_learning_rate_of_a_round() -> None:
    local = Config.resolve({"local": {"lr": 0.5, "lr_decay": 0.5}}).local
    assert [local.in_round(t).lr for t in range(3)] == [0.5, 0.25, 0.125]


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"round": 3}, ["unknown key round", "did you mean 'rounds'?", "allowed here", "seed"]),
        ({"local": {"momentun": 0.9}}, ["unknown key local.momentun", "did you mean 'momentum'?", "lr_decay"]),
        ({"local": {"zzz": 0.9}}, ["unknown key local.zzz", "weight_decay"]),
        ({"data": {"client": 9}}, ["unknown key data.client", "did you mean 'clients'?"]),
        (
            {"data": {"partition": {"kind": "shards", "classes_per_clint": 2}}},
            ["classes_per_clint", "did you mean 'classes_per_client'?"],
        ),
        ({"algorithm": {"name": "fedfa", "anchor": {"mu": 1}}}, ["algorithm.anchor", "did you mean 'anchors'?"]),
        (
            {"algorithm": {"name": "fedfa", "anchors": {"momentm": 1}}},
            ["unknown key algorithm.anchors.momentm", "did you mean 'momentum'?"],
        ),
        ({"algorithm": {"name": "fedfa", "varient": "paper"}}, ["algorithm.varient", "did you mean 'variant'?"]),
        ({"algorithm": {"name": "fedavg", "anchors": {"mu": 1}}}, ["'fedavg' has no component 'anchors'"]),
        ({"local": {"lr": "fast"}}, ["local.lr = 'fast'", "number"]),
        ({"local": {"lr": -1}}, ["local.lr = -1", "greater than 0"]),
        ({"rounds": 0}, ["rounds = 0", "greater than or equal to 1"]),
        ({"rounds": 1.5}, ["rounds = 1.5", "integer"]),
        ({"local": 3}, ["local = 3"]),
        ({"device": "gpu"}, ["device = 'gpu'", "'auto'", "'cuda'"]),
        ({"cohort": {"selection": "random"}}, ["cohort.selection = 'random'", "'uniform'", "'size'"]),
        ({"cohort": {"rate": 1.5}}, ["cohort.rate = 1.5", "less than or equal to 1"]),
        ({"model": {"buffers": "drop"}}, ["model.buffers = 'drop'", "'average' or 'local'"]),
        (
            {"algorithm": {"name": "fedfa", "anchors": {"loss": "classes"}}},
            ["algorithm.anchors.loss = 'classes'", "'sample' or 'class'"],
        ),
        ({"algorithm": {"name": "fedfa", "variant": "papr"}}, ["'papr'", "did you mean 'paper'?", "authors"]),
        ({"algorithm": {"name": "fedfb"}}, ["unknown method 'fedfb'", "did you mean 'fedfa'?"]),
        ({"algorithm": {"name": "fedfa+"}}, ["'fedfa+'", "joined by '+'"]),
        ({"algorithm": {"name": "no/such/file.py"}}, ["no file", "no/such/file.py"]),
        ({"algorithm": 3}, ["algorithm = 3: this is a table", "algorithm.name"]),
        ({"algorithm": {"anchors": 3}}, ["algorithm.anchors = 3: this is a table", "OPTION = VALUE", "momentum"]),
        ({"with": {"moon": {"muu": 3}}}, ["unknown key with.moon.muu", "did you mean 'mu'?"]),
        ({"with": 3}, ["with = 3: this is a table", "with.COMPONENT.OPTION = VALUE"]),
        ({"with": {"anchors": 3}}, ["algorithm.anchors = 3: this is a table"]),
        ({"data": {"partition": "shard:2"}}, ["shard", "shards"]),
        ({"data": {"partition": "dirichlet:-1"}}, ["alpha", "greater than 0"]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:60],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(layer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(FedfaError) as caught:
        Config.resolve(layer)
    assert isinstance(caught.value, (ConfigError, AlgorithmError, DataError))
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.resolve({"rounds": 0, "local": {"lr": -1, "momentun": 1}})
    assert len(str(caught.value).splitlines()) == 3


def test_settings_cannot_be_changed() -> None:
    config = Config.resolve({})
    with pytest.raises(ValueError, match="frozen"):
        config.rounds = 3  # type: ignore[misc]  # it is frozen


def test_files_that_are_missing_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.toml; `fedfa presets`"):
        Config.from_file(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"is a directory; name a TOML file, such as the config\.toml"):
        Config.from_file(tmp_path)
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: .*line 1"):
        Config.from_file(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        Config.from_file(tmp_path / "bytes.toml")


# -- --set ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=0.5", 0.5),
        ("a=1e-3", 0.001),
        ("a=true", True),
        ("a=false", False),
        ("a=True", "True"),
        ("a=authors", "authors"),
        ('a="authors"', "authors"),
        ("a=shards:2", "shards:2"),
        ("a=domains/dirichlet:0.1", "domains/dirichlet:0.1"),
        ("a=[1, 2]", [1, 2]),
        ('a=["x", "y"]', ["x", "y"]),
        ("a={kind = 'iid'}", {"kind": "iid"}),
        ("a=/data/my set/x=y", "/data/my set/x=y"),
        ("a=", ""),
        (" a =1", 1),
    ],
)
def test_values_of_assignments(text: str, value: object) -> None:
    assert parse_assignment(text) == {"a": value}


def test_dotted_keys_nest() -> None:
    assert nest("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert parse_assignment("algorithm.anchors.mu=0.2") == {"algorithm": {"anchors": {"mu": 0.2}}}


@pytest.mark.parametrize("text", ["local.lr", "=3", "  =3", ""])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_assignment(text)


def test_assignments_go_over_a_layer() -> None:
    below = {"rounds": 3, "local": {"lr": 1}}
    assert assign(below, ["local.lr=2", "local.epochs=5"]) == {"rounds": 3, "local": {"lr": 2, "epochs": 5}}
    assert below == {"rounds": 3, "local": {"lr": 1}}


@pytest.mark.parametrize(
    "texts", [["local.lr=0.5", "local.lr=0.1"], ["local.lr=1", " local.lr =1"], ["local={lr = 1}", "local.lr=2"]]
)
def test_a_key_that_is_set_twice_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--set local\.lr is given twice; give it once"):
        assign({}, texts)


def test_a_model_and_its_options_are_set_in_either_order() -> None:
    texts = ["model.options.hidden=[8]", "model.name=mlp"]
    for order in (texts, texts[::-1]):
        model = Config.preset("fmnist-c2", assign({}, order)).model
        assert (model.name, model.options) == ("mlp", {"hidden": [8]})
    below = {"model": {"name": "mlp", "options": {"hidden": [8]}}}
    assert assign(below, ["model.name=logistic"]) == {"model": {"name": "logistic"}}, "they would not fit"


def test_assignments_reach_the_settings() -> None:
    texts = ["algorithm.variant=authors", "data.partition=iid", "data.offline=true", "model.options.hidden=[8, 4]"]
    config = Config.preset("digits-c2", *map(parse_assignment, texts))
    assert config.algorithm.variant == "authors"
    assert config.data.partition == parse_partition("iid")
    assert config.data.offline is True
    assert config.model.options == {"hidden": [8, 4]}


# -- a complete configuration under another algorithm or variant ----------------------------------------------------
def complete(**algorithm: object) -> dict[str, Any]:
    return Config.preset("fmnist-c2", {"algorithm": algorithm, "local": {"epochs": 3}}).to_dict()


@pytest.mark.parametrize("variant", ["paper", "authors", "default"])
@pytest.mark.parametrize("other", ["paper", "authors", "default"])
def test_another_variant_over_a_complete_configuration_is_that_variant(variant: str, other: str) -> None:
    switched = Config.resolve(complete(name="fedfa", variant=other), {"algorithm": {"variant": variant}})
    assert switched.to_dict() == complete(name="fedfa", variant=variant)


def test_another_algorithm_over_a_complete_configuration_drops_the_old_components() -> None:
    switched = Config.resolve(complete(name="fedfa", variant="authors"), {"algorithm": {"name": "fedavg"}})
    assert switched.to_dict() == complete(name="fedavg")
    back = Config.resolve(switched.to_dict(), {"algorithm": {"name": "fedfa", "variant": "authors"}})
    assert back.to_dict() == complete(name="fedfa", variant="authors")


def test_what_was_chosen_beyond_the_variant_survives_the_switch() -> None:
    chosen = complete(name="fedfa", variant="paper", anchors={"mu": 0.7, "absent": "keep"})
    switched = Config.resolve(chosen, {"algorithm": {"variant": "authors"}})
    assert switched.algorithm.options["anchors"]["mu"] == 0.7
    assert switched.local.lr_decay == 0.99


def test_one_value_of_a_partition_can_be_set() -> None:
    config = Config.preset("fmnist-dir0.1", nest("data.partition.alpha", 0.7))
    assert config.data.partition.model_dump()["alpha"] == 0.7
    other = Config.preset("fmnist-dir0.1", {"data": {"partition": {"kind": "shards", "classes_per_client": 3}}})
    assert other.data.partition.kind == "shards"


def test_another_model_leaves_the_options_of_the_presets_model_behind() -> None:
    assert Config.preset("digits-c2", {"model": {"name": "logistic"}}).model.options == {}
    assert Config.preset("digits-c2", {"model": {"name": "mlp"}}).model.options == {"hidden": [32]}


def test_the_number_of_clients_follows_the_data_only_where_they_are_natural() -> None:
    assert Config.resolve({"data": {"partition": "natural"}}).data.number_of_clients is None
    assert Config.resolve({"data": {"partition": "natural:50"}}).data.number_of_clients is None
    assert Config.resolve({"data": {"partition": "iid"}}).data.number_of_clients == 100
