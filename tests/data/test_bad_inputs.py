"""Five hundred generated bad inputs to the Python API and the config: each is refused with an error of fedfa.

Every family makes inputs that are wrong for sure, with random shapes, types, values and places. Nothing may be
accepted in silence, and no other exception may come through.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfa
from fedfa.data import dataset_from, federation_from
from fedfa.errors import FedfaError
from fedfa.experiment.config_keys import config_keys

CASES = 500
Case = tuple[str, Callable[[], object]]
Make = Callable[[np.random.Generator], Case]


def pick(rng: np.random.Generator, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def good(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    count, shape = int(rng.integers(8, 40)), pick(rng, [(3,), (5,), (2, 3), (1, 4, 4)])
    return rng.normal(size=(count, *shape)), np.arange(count) % int(rng.integers(2, 4))


def not_finite(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    x = x.astype(pick(rng, [np.float16, np.float32, np.float64]))
    value = pick(rng, [np.nan, np.inf, -np.inf])
    x[int(rng.integers(len(x)))].flat[0] = value
    as_given = pick(rng, [x, torch.from_numpy(x), x.tolist(), {"a": x}, (x, x)])
    test = pick(rng, [None, (as_given, y)])
    return f"inputs with {value}", lambda: dataset_from((as_given, y), test)


def wrong_labels(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    n = len(y)
    labels = pick(rng, [
        y + 0.5, y.astype(float), y.astype(complex), np.stack([y, y], 1), y[:-1], y[: n // 2], y * 0, y - 1, y * 10_000,
        None, 7, "labels", [None] * n, [{"a": 1}] * n, [[0]] * n, [date(2020, 1, 1)] * n, np.full(n, np.nan),
        torch.rand(n), [0, "a"] * (n // 2) + [0] * (n % 2), np.array(y, dtype="datetime64[D]"), object(), {},
        ["only"] * n, np.zeros((n, 0)), np.eye(n),
    ])  # fmt: skip
    return f"labels {labels!r:.60}", lambda: dataset_from((x, labels))


def wrong_inputs(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    n = len(y)
    inputs = pick(rng, [
        x.astype(complex), np.array(["a"] * n), [[1, 2]] * (n - 1) + [[1]], None, 3.5, "x", np.float32(1), x[:-1],
        x[:, :0], {}, (), {"a": x, "b": x[:-1]}, {"a": np.array(["t"] * n)}, [object()] * n, [None] * n, [{}] * n,
        np.array([date(2020, 1, 1)] * n), np.zeros((n, 3), dtype="timedelta64[s]"), x * 1e300, [x[0]] * 7 + [None],
        np.full((n, 2), 2**64 - 1, dtype=np.uint64), torch.zeros(n, 3, dtype=torch.complex64), [b"bytes"] * n,
    ])  # fmt: skip
    return f"inputs {inputs!r:.60}", lambda: dataset_from((inputs, y))


def wrong_source(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    source = pick(rng, [
        None, 3, 2.5, object(), b"bytes", {1, 2}, (x,), (x, y, y), [x, y, y], {"x": x, "y": y}, {}, {"train": None},
        {"test": (x, y)}, iter([x, y]), "no/such/path", "no/such.npz", "no/such.csv", "no/such.parquet",
        Path("/dev/null"), lambda: (x, y), np.zeros(3), [], [(x[0], 0)], [1, 2, 3], "", type,
        {"train": (x, y), "dev": (x, y)},
        [(x[0], 0), (x[1],)], [None] * 4, [{"label": 1}, {"label": 0}], [{"x": 1}, {"x": 2}],
        [{"x": 1, "label": 0}, {"x": 2}], [(x[0], 0), {"x": x[1]}],
    ])  # fmt: skip
    return f"source {source!r:.60}", lambda: dataset_from(source)


def wrong_test(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    test = pick(rng, [
        (x[..., :1].repeat(7, -1), y), ((255 * np.abs(x)).astype(np.int64), y), (x, y.astype(str)), (x[:0], y[:0]),
        ({"a": x}, y), (x, y + 0.1), (x, y - 1), 3, "nowhere", (x,), (x[:, None], y),
    ])  # fmt: skip
    return f"test {test!r:.60}", lambda: dataset_from((x, y), test)


def wrong_options(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    n = len(y)
    options = pick(rng, [
        {"classes": ["one"]}, {"classes": "ab"}, {"classes": 3}, {"classes": []}, {"classes": ["a"] * 5},
        {"test_fraction": 0}, {"test_fraction": 1}, {"test_fraction": -0.5}, {"test_fraction": 1.5},
        {"test_fraction": float("nan")}, {"test_fraction": "a"}, {"test_fraction": None}, {"test_fraction": True},
        {"label": "y"}, {"inputs": ["a"]}, {"inputs": "a"}, {"inputs": 4}, {"clients": "c"}, {"clients": [1]},
        {"clients": 5}, {"clients": [None] * n}, {"clients": [[1]] * n}, {"clients": y, "writers": y},
        {"clients": [1, "1"] * (n // 2) + [1] * (n % 2)}, {"domains": [float("nan")] * n}, {"domains": {}},
        {"domains": "d"}, {"writers": [{}] * n}, {"clients": np.stack([y, y], 1)[:-1]}, {"validation": 3},
        {"validation": (x[:0], y[:0])}, {"seed": -1}, {"seed": "a"}, {"seed": None}, {"seed": 1.5},
    ])  # fmt: skip
    return f"options {options!r:.60}", lambda: dataset_from((x, y), **options)


def wrong_clients(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    clients = pick(rng, [
        [], {}, None, 3, "ab", [(x, y), (x[:0], y[:0])], [(x, y), (x[:, None], y)], [(x, y), None], [(x, y[:-1])],
        [(x, y), ({"a": x}, y)], [(x, y), (x, y.astype(str))], {"a": (x, y), "b": 3}, {"a": {"test": (x, y)}},
        {1: (x, y), "1": (x, y)}, [(x * np.nan, y)], [(x, y * 0)], [(x, y), (x, y + 0.5)],
        [{"train": (x, y), "dev": 1}],
    ])  # fmt: skip
    return f"clients {clients!r:.60}", lambda: federation_from(clients)


def wrong_split(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    arguments: tuple[Any, ...] = pick(rng, [
        ("shards", 10**6), ("nothing", 3), ("shards:0", 3), ("shards:a", 3), ("dirichlet:-1", 3), ("dirichlet:nan", 3),
        ("classes:99", 3), ("natural", None), ("domains", 2), ("iid", 0), ("iid", -1), (None, 3), (3, 3),
        ("iid", "3"), ("iid", 2.5), ("", 2), ("iid:3", 2), ("quantity:0", 2), ("iid", 2, -1), ("iid", 2, "a"),
        ("iid", 2, None), ("iid", True),
    ])  # fmt: skip
    return f"split{arguments}", lambda: dataset_from((x, y)).split(*arguments)


def wrong_preparation(rng: np.random.Generator) -> Case:
    x, y = good(rng)
    data = partial(dataset_from((x, y)).split, "iid", 2, 0)
    call = pick(rng, [
        ("standardised", "site"), ("standardised", None), ("standardised", 3), ("augmented", None),
        ("augmented", 3), ("augmented", "crop-flip"), ("standardised", ["client"]),
    ])  # fmt: skip
    return f"{call}", lambda: getattr(data(), call[0])(call[1])


DATA = dataset_from((np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2)).split("iid", 4, 0)
TRAINED = fedfa.Experiment("fedavg", data=DATA, model="logistic", cohort=2)


def wrong_prediction(rng: np.random.Generator) -> Case:
    inputs = pick(rng, [
        None, "x", 3, [], np.zeros((2, 5)), np.zeros((2, 4), complex), np.full((2, 4), np.nan), {"a": np.zeros((2, 4))},
        np.array([["a"] * 4]), [[1, 2, 3, 4], [1]], object(), np.zeros((2, 4, 1)), [None] * 4, torch.zeros(3),
        np.full((1, 4), np.inf),
    ])  # fmt: skip
    return f"predict {inputs!r:.60}", lambda: TRAINED.predict(inputs)


def wrong_experiment(rng: np.random.Generator) -> Case:
    options: dict[str, Any] = pick(rng, [
        {"data": None}, {"data": DATA.dataset}, {"data": "digits"}, {"model": None}, {"model": 3}, {"model": "nothing"},
        {"model": object}, {"model": torch.nn.Linear(5, 2)}, {"model": torch.nn.Linear(4, 3)}, {"cohort": 0},
        {"cohort": -1}, {"cohort": 1.5}, {"cohort": "2"}, {"cohort": True}, {"cohort": None}, {"cohort": float("nan")},
        {"local": 3}, {"local": {"lr": 0.1}}, {"seed": -1}, {"seed": "a"}, {"seed": 1.5}, {"workers": 0},
        {"workers": "many"}, {"workers": -2}, {"device": "abacus"}, {"evaluate_every": 0}, {"callbacks": 3},
        {"callbacks": [3]}, {"algorithm": "nothing"}, {"algorithm": 3}, {"algorithm": "fedavg@nothing"},
        {"algorithm": ""}, {"planned_rounds": 0}, {"planned_rounds": "a"}, {"settings": {"data": {"augment": "x"}}},
        {"settings": {"nothing": 1}}, {"settings": {"local": {"lr": float("nan")}}}, {"settings": {"local": 3}},
        {"settings": {"data": {"standardise": "site"}}}, {"settings": 3},
    ])  # fmt: skip
    arguments: dict[str, Any] = {"algorithm": "fedavg", "data": DATA, "model": "logistic", "cohort": 2, **options}
    return f"experiment {options!r:.60}", lambda: fedfa.Experiment(**arguments)


KEYS = [key.name for key in config_keys()]
WRONG = [
    [], {}, {"a": 1}, [1, 2], object(), float("nan"), float("inf"), b"x", (1, 2), -7, 3.7, "nonsense!", None, True, "",
]  # fmt: skip
OPEN = {"data.name", "data.dir", "data.label", "data.domain_column", "model.name", "model.head", "engine.address"}
"""Keys that take any text; whether it names something is found when that is built."""


def wrong_config(rng: np.random.Generator) -> Case:
    key = pick(rng, [key for key in KEYS if not key.startswith("model.options")])
    value = pick(rng, [object(), [[]], {"a": {"b": 1}}, float("nan"), b"x", "nonsense!"])
    if isinstance(value, str | bytes) and key in OPEN:
        value = ["a", object()]
    if key.startswith("algorithm."):
        value = "nothing at all"
    section, _, name = key.partition(".")
    layer = {section: {name: value}} if name else {section: value}
    return f"config {key} = {value!r:.40}", lambda: fedfa.Config.resolve(layer)


def unknown_key(rng: np.random.Generator) -> Case:
    section = pick(rng, ["data", "local", "model", "cohort", "evaluation", "engine", "checkpoint", "diagnostics"])
    name = "".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 9)))) + "_"
    return f"config {section}.{name}", lambda: fedfa.Config.resolve({section: {name: pick(rng, WRONG)}})


FAMILIES: list[Make] = [
    not_finite, wrong_labels, wrong_inputs, wrong_source, wrong_test, wrong_options, wrong_clients, wrong_split,
    wrong_preparation, wrong_prediction, wrong_experiment, wrong_config, unknown_key,
]  # fmt: skip


def test_every_bad_input_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(2026)
    wrong = []
    for number in range(CASES):
        title, call = FAMILIES[number % len(FAMILIES)](rng)
        try:
            found = call()
        except FedfaError as error:
            if len(str(error)) < 15:
                wrong.append(f"{title}: the message is only {error!s}")
        except Exception as error:
            wrong.append(f"{title}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{title}: accepted, giving {found!r:.80}")
    assert not wrong, "\n".join(sorted(set(wrong)))
