"""Validation samples: what is held out, that choosing looks at nothing else, and that the test set is used once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfa
from fedfa.data import DataSet, Samples
from fedfa.data.validation import hold_out
from fedfa.engines.local import LocalEngine
from fedfa.errors import ConfigError, DataError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from tests.experiment.run_toys import assert_same_run, equal_tensors, small
from tests.learning.test_personal_evaluation import two_domains


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that evaluations read, in order."""
    found: list[str] = []
    answers = LocalEngine.answers

    def watched(self: LocalEngine, model: Any, broadcast: Any, client: Any, on: Any = "test", *more: Any) -> Any:
        found.append(on)
        return answers(self, model, broadcast, client, on, *more)

    monkeypatch.setattr(LocalEngine, "answers", watched)
    return found


def positions_of(federation: fedfa.Federation) -> list[int]:
    return sorted(federation.partition.order.tolist())


@pytest.mark.parametrize("where", ["server:0.25", "clients:0.25"])
def test_what_is_held_out_is_trained_on_by_nobody(where: str, blobs: DataSet) -> None:
    whole = blobs.split("shards:2", clients=6)
    made = hold_out(whole, where, seed=1)
    assert made.validation is not None
    kept, held = positions_of(made), made.validation.samples
    assert len(kept) + len(held) == len(blobs.train)
    missing = sorted(set(positions_of(whole)) - set(kept))
    assert len(missing) == len(held)
    expected = {tuple(row) for row in blobs.train.inputs[missing].tolist()}
    assert {tuple(row) for row in held.inputs.tolist()} == expected
    again = hold_out(whole, where, seed=1)
    assert again.validation is not None
    assert torch.equal(held.inputs, again.validation.samples.inputs)
    other = hold_out(whole, where, seed=2)
    assert other.validation is not None
    assert not torch.equal(held.inputs, other.validation.samples.inputs)


def test_a_share_of_each_client_or_of_each_class_and_domain(blobs: DataSet) -> None:
    whole = blobs.split("shards:2", clients=6)
    clients = hold_out(whole, "clients:0.25", seed=1)
    assert (whole.sizes - clients.sizes).tolist() == [round(0.25 * size) for size in whole.sizes]
    assert clients.validation is not None
    assert len(clients.validation_of(2)) == whole.sizes[2] - clients.sizes[2]
    domains = two_domains().split("domains", clients=6)
    server = hold_out(domains, "server:0.25", seed=1)
    assert server.validation is not None
    samples = server.validation.samples
    assert samples.domains is not None
    groups = (samples.labels + 4 * samples.domains).bincount(minlength=8)
    assert groups.tolist() == [round(0.25 * 30)] * 8
    only = server.validation_of(0).domains  # a client of the first domain
    assert only is not None
    assert set(only.tolist()) == {0}


def test_a_client_with_two_samples_keeps_one(blobs: DataSet) -> None:
    small_set = fedfa.data.dataset_from(
        (np.eye(4, dtype=np.float32).repeat(3, 0), np.arange(12) % 4), test_fraction=0.3
    )
    made = hold_out(small_set.split("iid", clients=4), "clients:0.9", seed=1)
    assert made.sizes.min() >= 1


def test_rounds_look_at_validation_and_the_chosen_model_at_the_test_set_once(
    blobs: DataSet, tmp_path: Path, touched: list[str]
) -> None:
    result = run(small("fedavg", data={"validation": "clients:0.2"}), tmp_path / "run", data=blobs)
    assert touched == ["validation"] * 4 + ["test"]
    by_round = {record["round"]: record["accuracy"] for record in result.metrics}
    assert all(record["evaluated"]["on"] == "validation" for record in result.metrics)
    chosen = result.summary["chosen"]
    assert chosen["by"] == "best validation accuracy"
    assert by_round[chosen["round"]] == max(by_round.values()) == result.summary["best_accuracy"]
    assert result.summary["final_accuracy"] == result.summary["test"]["accuracy"]
    assert result.summary["evaluated"] == {"model": "global", "on": "validation", "final": "test"}
    loaded = fedfa.load(tmp_path / "run", data=blobs)
    assert equal_tensors(loaded.weights(), result.model)
    right = loaded.predict(blobs.test.inputs) == blobs.test.labels
    assert float(right.double().mean()) == pytest.approx(result.final_accuracy)


def rising_then_falling(best: int) -> Callable[[Any, Any], float]:
    """A metric that is best in one evaluation: it counts its calls."""
    calls = 0

    def peak(labels: np.ndarray, scores: np.ndarray) -> float:
        nonlocal calls
        calls += 1
        return -abs(calls - best)

    return peak


def test_the_model_of_the_best_round_is_chosen_and_tested(blobs: DataSet, tmp_path: Path) -> None:
    settings = {"evaluation": {"monitor": "own:peak"}}
    data = blobs.split("shards:2", clients=6)
    common: dict[str, Any] = {"data": data, "model": "mlp", "cohort": 4, "validation": "server:0.2"}
    made = Experiment("fedavg", **common, metrics=[rising_then_falling(2)], settings=settings | {"rounds": 5})
    states = {record.round: made.state for record in made.rounds(5)}
    assert made.choice.best_record() is made.records[1]
    assert made.test()["chosen"] == {"round": 2, "by": "best validation own:peak"}
    assert equal_tensors(made.weights(), states[2].model)
    assert not equal_tensors(made.weights(), states[5].model)
    expected = float((made.predict(blobs.test.inputs) == blobs.test.labels).double().mean())
    assert made.test()["accuracy"] == pytest.approx(expected)


def test_early_stopping_waits_as_long_as_it_is_told(blobs: DataSet) -> None:
    data = blobs.split("shards:2", clients=6)
    settings = {"evaluation": {"monitor": "own:peak"}}
    common: dict[str, Any] = {"data": data, "model": "mlp", "cohort": 4, "validation": "server:0.2"}
    made = Experiment("fedavg", **common, metrics=[rising_then_falling(3)], settings=settings)
    assert [record.round for record in made.rounds(20, patience=2)] == [1, 2, 3, 4, 5]
    assert made.chosen_state.round == 3
    with pytest.raises(ConfigError, match=r"set data\.validation"):
        Experiment("fedavg", data=data, model="mlp").rounds(3, patience=2)


def test_a_run_that_is_interrupted_chooses_the_same(blobs: DataSet, tmp_path: Path) -> None:
    config = small("fedfa", data={"validation": "clients:0.2"}, evaluation={"patience": 3}, rounds=8)
    whole = run(config, tmp_path / "whole", data=blobs)

    class KilledError(Exception):
        pass

    def kill_after(round: int) -> Callable[[dict[str, Any]], None]:
        def watch(record: dict[str, Any]) -> None:
            if record["round"] == round:
                raise KilledError

        return watch

    for round in (1, 2, 4):
        with pytest.raises(KilledError):
            run(config, tmp_path / "pieces", data=blobs, resume=True, watch=kill_after(round))
    run(config, tmp_path / "pieces", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "pieces")
    assert RunDirectory(tmp_path / "pieces").summary()["chosen"] == whole.summary["chosen"]  # type: ignore[index]


def test_own_validation_samples(blobs: DataSet, tmp_path: Path) -> None:
    own = (blobs.test.inputs[:20].numpy(), blobs.test.labels[:20].numpy())
    config = small("fedavg", rounds=2)
    result = run(config, tmp_path / "run", data=blobs, validation=own)
    assert RunDirectory(tmp_path / "run").config().data.validation == "own"
    without = run(config, tmp_path / "without", data=blobs)
    assert equal_tensors(RunDirectory(tmp_path / "run").saved().model, RunDirectory(tmp_path / "without").saved().model)  # type: ignore[union-attr]
    assert result.metrics[0]["accuracy"] * 20 == pytest.approx(round(result.metrics[0]["accuracy"] * 20))
    assert without.summary["evaluated"]["on"] == "test"
    with pytest.raises(DataError, match="give them again"):
        run(config, tmp_path / "other", data=blobs, validation="own")
    np.savez(tmp_path / "val.npz", x=own[0], y=own[1])
    named = run(config, tmp_path / "named", data=blobs, validation=str(tmp_path / "val.npz"))
    assert [one["accuracy"] for one in named.metrics] == [one["accuracy"] for one in result.metrics]
    with pytest.raises(DataError, match="validation inputs are"):
        run(config, tmp_path / "wrong", data=blobs, validation=(np.zeros((4, 3), np.float32), np.arange(4)))


def test_personal_methods_choose_the_last_round(blobs: DataSet, tmp_path: Path, touched: list[str]) -> None:
    config = small("local", data={"validation": "clients:0.2"}, rounds=2)
    result = run(config, tmp_path / "run", data=blobs)
    assert result.summary["chosen"] == {"round": 2, "by": "last round"}
    assert touched.count("test") == 4  # the models of the last round's clients, once each
    assert result.metrics[0]["evaluated"]["samples"] == "those that the client held out"
    with pytest.raises(ConfigError, match="of which only the last are"):
        run(
            small("local", data={"validation": "clients:0.2"}, evaluation={"choose": "best"}),
            tmp_path / "b",
            data=blobs,
        )


def test_without_validation_nothing_changes(blobs: DataSet, tmp_path: Path) -> None:
    result = run(small("fedavg", rounds=1), tmp_path / "run", data=blobs)
    assert {"chosen", "test"}.isdisjoint(result.summary)
    assert not list((tmp_path / "run").glob("best*"))
    assert "metrics" not in result.metrics[0]


@pytest.mark.parametrize("text", ["server", "server:1", "clients:0", "clients:x", " "])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation"):
        small("fedavg", data={"validation": text})


def test_compare_reports_the_test_set(blobs: DataSet) -> None:
    data = blobs.split("shards:2", clients=6)
    made = fedfa.compare(["fedavg"], data=data, model="mlp", rounds=2, cohort=4, validation="server:0.2")
    (one,) = made.runs
    assert one.tested is not None
    assert one.accuracies["final_accuracy"] == one.tested["accuracy"]
    assert "validation" in str(made)


def test_samples_of_one_s_own_type_are_taken_as_they_are(blobs: DataSet) -> None:
    chosen = Samples(blobs.test.inputs[:8], blobs.test.labels[:8])
    made = Experiment("fedavg", data=blobs.split("iid", clients=4), model="mlp", cohort=2, validation=chosen)
    record = next(made.rounds(1))
    assert record.evaluated["on"] == "validation"


def texts(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = {"tokens": rng.integers(0, 30, (count, 6)), "mask": np.arange(6) < rng.integers(1, 7, (count, 1))}
    return inputs, np.arange(count) % 3


def as_tuple(given: tuple[dict[str, np.ndarray], np.ndarray]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    return tuple(given[0].values()), given[1]


@pytest.mark.parametrize("form", [lambda given: given, as_tuple], ids=["dictionary", "tuple"])
def test_validation_samples_of_several_arrays(form: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens with a mask: held out of the clients, or given, they reach the network as they are."""
    inputs, labels = texts(60, 1)
    federation = fedfa.data.dataset_from(form((inputs, labels))).split("iid", clients=4, seed=1)
    held = hold_out(federation, "clients:0.25", seed=1).validation
    assert held is not None
    prepared = federation.dataset.normalisation.batch(held.samples.inputs)
    tokens, mask = prepared.values() if isinstance(prepared, dict) else prepared
    rows = {(tuple(row), tuple(hidden)) for row, hidden in zip(*(v.tolist() for v in inputs.values()), strict=True)}
    assert {(tuple(r), tuple(h)) for r, h in zip(tokens.tolist(), mask.tolist(), strict=True)} <= rows
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
    caplog.clear()
    given = hold_out(federation, "own", seed=1, given=form(texts(9, 2))).validation
    assert given is not None
    prepared = federation.dataset.normalisation.batch(given.samples.inputs)
    tokens = next(iter(prepared.values())) if isinstance(prepared, dict) else prepared[0]
    assert torch.equal(tokens, torch.from_numpy(texts(9, 2)[0]["tokens"]))
    assert "training and test" not in caplog.text, "the given samples are not compared with themselves"


def test_validation_arrays_that_would_be_read_as_others_are_refused() -> None:
    """Rows of as many bytes, but in another order or of another type: nothing else would notice."""
    inputs, labels = texts(60, 1)
    federation = fedfa.data.dataset_from((inputs, labels)).split("iid", clients=4, seed=1)
    swapped = {"mask": inputs["mask"], "tokens": inputs["tokens"]}
    halves = {"tokens": np.zeros((60, 12), np.float32), "mask": inputs["mask"]}
    for wrong in (swapped, halves, tuple(inputs.values()), {"tokens": inputs["tokens"]}, inputs["tokens"]):
        with pytest.raises(
            DataError, match=r"validation inputs are .*, but those of own tokens int64 \[6\], mask bool"
        ):
            hold_out(federation, "own", seed=1, given=(wrong, labels))


class _Weigh(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(30, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask.float().unsqueeze(-1)
        found: torch.Tensor = self.head((self.words(tokens) * weights).sum(1) / weights.sum(1))
        return found


def test_choosing_goes_by_validation_samples_of_several_arrays() -> None:
    data = fedfa.data.dataset_from(texts(60, 1)).split("iid", clients=4, seed=1)
    experiment = fedfa.Experiment("fedavg", data=data, model=_Weigh, cohort=2, validation=texts(9, 2))
    last = list(experiment.rounds(2, progress=False))[-1]
    assert last["evaluated"]["on"] == "validation"
    assert last.accuracy is not None
    assert (9 * last.accuracy) % 1 == pytest.approx(0, abs=1e-6), "a share of nine samples"
