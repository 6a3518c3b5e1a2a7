"""Looking inside runs: that training does not notice, and that the record says what happened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.data import DataSet, Samples
from fedfa.errors import RunError, SettingsError
from fedfa.insight.observer import Schedule
from fedfa.insight.probe import Probe
from fedfa.insight.records import feature_rounds, insight_records, probe_features
from fedfa.learning.tensors import Tensors
from fedfa.studies.conclude import conclude
from fedfa.studies.files import load_tensors
from fedfa.studies.run import run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import Laboratory, prepare
from tests.studies.study_toys import STATEFUL, equal_tensors, kept_by_clients, small, timeless

LOOK: dict[str, Any] = {"every": 1, "samples": 20, "features": [2, -1]}


def looking(recipe: str = "fedfa", **more: Any) -> Settings:
    return small(recipe, **{"insight": LOOK, **more})


def batch_norm_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def seen(folder: Path) -> dict[str, bytes]:
    """Everything that was recorded of the inside, as bytes by file."""
    files = [folder / "insight.jsonl", *sorted((folder / "insight").glob("*"))]
    return {file.name: file.read_bytes() for file in files}


# -- nothing is changed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["fedfa", "scaffold", "moon+fedadam", "fedma", STATEFUL])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, blobs: DataSet, recipe: str) -> None:
    run(small(recipe), tmp_path / "off", data=blobs)
    run(looking(recipe), tmp_path / "on", data=blobs)
    assert_same_training(tmp_path / "off", tmp_path / "on")


def test_a_network_with_statistics_and_dropout_does_not_notice_either(tmp_path: Path, blobs: DataSet) -> None:
    """The probe goes through in evaluation mode: no statistics are gathered, nothing is drawn."""
    for buffers in ("average", "local"):
        model = {"buffers": buffers}
        run(small("fedfa", model=model), tmp_path / f"off-{buffers}", data=blobs, model=batch_norm_network)
        run(looking("fedfa", model=model), tmp_path / f"on-{buffers}", data=blobs, model=batch_norm_network)
        assert_same_training(tmp_path / f"off-{buffers}", tmp_path / f"on-{buffers}")


def assert_same_training(off: Path, on: Path) -> None:
    for name in ("model.safetensors", "server.safetensors", "checkpoint.safetensors"):
        assert (off / name).read_bytes() == (on / name).read_bytes(), name
    assert timeless(off) == timeless(on)  # bytes sent included
    kept_off, kept_on = kept_by_clients(off), kept_by_clients(on)
    assert kept_off.keys() == kept_on.keys()
    assert all(equal_tensors(kept_off[name], kept_on[name]) for name in kept_off)
    assert len(insight_records(on)) == 4


def test_off_means_off(tmp_path: Path, blobs: DataSet) -> None:
    laboratory = prepare(small(), data=blobs)
    assert laboratory.observer() is None
    assert "insight" not in [part.name for part in laboratory.recipe.parts]
    run(small(), tmp_path / "run", data=blobs)
    assert not list((tmp_path / "run").glob("insight*"))


def test_every_number_of_workers_and_clients_side_by_side_see_the_same(tmp_path: Path, blobs: DataSet) -> None:
    for workers in (1, 2, 3):
        run(looking("fedfa", engine={"workers": workers, "execution": "each"}), tmp_path / str(workers), data=blobs)
    run(looking("fedfa", engine={"workers": 1, "execution": "stacked"}), tmp_path / "stacked", data=blobs)
    assert seen(tmp_path / "1") == seen(tmp_path / "2") == seen(tmp_path / "3") == seen(tmp_path / "stacked")
    assert list(seen(tmp_path / "1")) == ["insight.jsonl", "round00002.safetensors", "round00004.safetensors"]


@pytest.mark.parametrize("every", [1, 2], ids=["each round saved", "every second round saved"])
def test_a_run_that_was_stopped_after_each_round_has_seen_the_same(tmp_path: Path, blobs: DataSet, every: int) -> None:
    settings = looking(STATEFUL, checkpoint={"every": every})
    run(settings, tmp_path / "whole", data=blobs)
    for last in (1, 2, 3, 4):

        def stop(record: Mapping[str, Any], last: int = last) -> None:
            if record["round"] == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(settings, tmp_path / "stopped", data=blobs, resume=True, watch=stop)
    with (tmp_path / "stopped" / "insight.jsonl").open("a") as file:
        file.write('{"round": 4, "cut sho')  # what a kill may leave
    run(settings, tmp_path / "stopped", data=blobs, resume=True)
    assert seen(tmp_path / "whole") == seen(tmp_path / "stopped")


def test_features_of_rounds_that_no_checkpoint_counts_are_forgotten(tmp_path: Path, blobs: DataSet) -> None:
    settings = looking(checkpoint={"every": 3})

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "run", data=blobs, watch=stop)
    assert feature_rounds(tmp_path / "run") == [2]

    def stop_at_once(record: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "run", data=blobs, resume=True, watch=stop_at_once)
    assert feature_rounds(tmp_path / "run") == []
    assert [record["round"] for record in insight_records(tmp_path / "run")] == [1]


# -- when -------------------------------------------------------------------------------------------------------------
def test_the_rounds_that_are_due() -> None:
    every, chosen = Schedule(7, 3), Schedule(7, 0, [2, -1])
    assert [round for round in range(1, 8) if every.due(round)] == [3, 6, 7]
    assert not any(every.stores(round) for round in range(1, 8))
    assert [round for round in range(1, 8) if chosen.due(round)] == [2, 7]
    assert [round for round in range(1, 8) if chosen.stores(round)] == [2, 7]


def test_impossible_settings_are_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"insight\.features.*counted from 1"):
        small(insight={"features": [0]})
    with pytest.raises(SettingsError, match=r"insight\.samples"):
        small(insight={"samples": 0})


def test_without_test_samples_there_is_nothing_to_look_at(tmp_path: Path, blobs: DataSet) -> None:
    empty = replace(blobs, test=blobs.test.subset(torch.tensor([], dtype=torch.int64)))
    with pytest.raises(RunError, match=r"takes test samples.*insight\.every = 0"):
        run(looking(), tmp_path / "run", data=empty)


def test_a_survey_is_no_round_to_look_at(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedavg+ccvr"), tmp_path / "run", data=blobs)
    assert [record["round"] for record in insight_records(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_conclusion_takes_over_what_was_seen(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedavg"), tmp_path / "trained", data=blobs)
    conclude(tmp_path / "trained", "ccvr", tmp_path / "concluded", data=blobs)
    assert seen(tmp_path / "trained") == seen(tmp_path / "concluded")


# -- what -------------------------------------------------------------------------------------------------------------
def local_models(laboratory: Laboratory) -> dict[int, Tensors]:
    """The models of the first round's clients, read off their contributions: start + sum / weight."""
    state = laboratory.initial_state()
    cohort = laboratory.cohort(0)
    plan = laboratory.plan(state, laboratory.settings.local.in_round(0))
    models = {}
    for result in laboratory.engine().train(plan, cohort, lambda _: {}):
        entry = result.sums["fedavg/model"]
        models[result.client] = {
            name: state.model[name] + value / entry.weight for name, value in entry.tensors.items()
        }
    return models


def test_the_record_is_that_of_the_clients_models(tmp_path: Path, blobs: DataSet) -> None:
    """The clients of one round trained apart, their models looked at with plain torch."""
    settings = looking("fedavg", rounds=1)
    run(settings, tmp_path / "run", data=blobs)
    (record,) = insight_records(tmp_path / "run")
    laboratory = prepare(small("fedavg", rounds=1, engine={"workers": 1}), data=blobs)
    start = laboratory.initial_state().model
    models = local_models(laboratory)
    assert record["clients"] == list(models) == laboratory.cohort(0)
    probe = Probe.of(blobs, 20, 1)

    def features(weights: Tensors) -> Tensor:
        return torch.relu(probe.inputs @ weights["fc1.0.weight"].mT + weights["fc1.0.bias"]).double()

    k = len(models)
    h = torch.stack([features(weights) for weights in models.values()])
    apart = [(h[i] - h[j]).norm(dim=-1).mean() for i in range(k) for j in range(i)]
    assert record["feature_distance"]["all"] == pytest.approx(float(sum(apart) / len(apart)), rel=1e-4)
    assert record["feature_distance"]["authors"] == pytest.approx(
        float(sum(apart) / len(apart)) * (k - 1) / k, rel=1e-4
    )

    scale = float(h.square().sum(-1).mean().sqrt())
    assert record["feature_distance"]["relative"] == pytest.approx(record["feature_distance"]["all"] / scale, rel=1e-4)
    if record["feature_distance"]["mean"] is not None:
        relative = record["feature_distance"]["mean"] / scale
        assert record["feature_distance"]["mean_relative"] == pytest.approx(relative, rel=1e-4)

    def rows(weights: Tensors) -> Tensor:
        weight, bias = (weights[name] - start[name] for name in ("head.weight", "head.bias"))
        return torch.cat([weight, bias.unsqueeze(1)], dim=1).double()

    changes = [rows(weights) for weights in models.values()]
    cosines = [torch.cosine_similarity(changes[i], changes[j]).mean() for i in range(k) for j in range(i)]
    assert record["classifier_cosine"]["mean"] == pytest.approx(float(sum(cosines) / len(cosines)), rel=1e-3, abs=1e-4)

    norms = [
        math.sqrt(sum(float((weights[name] - start[name]).double().square().sum()) for name in start))
        for weights in models.values()
    ]
    assert record["drift"]["norm"] == pytest.approx(norms, rel=1e-4)
    parts = zip(record["drift"]["extractor"], record["drift"]["classifier"], strict=True)
    assert [math.hypot(*part) for part in parts] == pytest.approx(norms, rel=1e-4)

    final = load_tensors(tmp_path / "run" / "model.safetensors")
    weight = final["head.weight"].double().requires_grad_()
    logits = features(final) @ weight.mT + final["head.bias"].double()
    torch.nn.functional.cross_entropy(logits, probe.labels).backward()
    assert weight.grad is not None
    assert record["gradient"]["global"] == pytest.approx(float(weight.grad.norm()), rel=1e-4)
    assert record["gradient"]["global_by_class"] == pytest.approx(weight.grad.norm(dim=1).tolist(), rel=1e-4)
    assert record["accuracy"]["global"] == pytest.approx(float((logits.argmax(-1) == probe.labels).double().mean()))


def test_who_holds_what_and_how_many_are_compared(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedavg", insight={**LOOK, "clients": 3}), tmp_path / "run", data=blobs)
    laboratory = prepare(small("fedavg"), data=blobs)
    for number, record in enumerate(insight_records(tmp_path / "run")):
        assert record["clients"] == laboratory.cohort(number)[:3]
        for client, classes in zip(record["clients"], record["holds"], strict=True):
            assert classes == torch.unique(laboratory.federation.client(client).labels).tolist()
        for matrix in (record["cka"]["matrix"], record["drift"]["matrix"], record["feature_distance"]["matrix"]):
            assert [len(row) for row in matrix] == [3, 3, 3]


def test_anchors_are_those_of_the_server(tmp_path: Path, blobs: DataSet) -> None:
    result = run(looking("fedfa", rounds=2), tmp_path / "run", data=blobs)
    anchors = load_tensors(result.folder / "server.safetensors")["anchors/anchors"].double()
    first, last = insight_records(result.folder)
    assert last["anchors"]["anchors/anchors"]["norms"] == pytest.approx(anchors.norm(dim=1).tolist(), rel=1e-6)
    begun = prepare(small("fedfa"), data=blobs).initial_state().parts["anchors"]["anchors"]
    assert begun.double().norm(dim=1).tolist() == [1, 1, 1, 1]
    assert all(moved > 0 for moved in first["anchors"]["anchors/anchors"]["movement"])
    assert torch.equal(probe_features(result.folder, 2)["anchors"].double(), anchors)


def test_prototypes_are_found_and_control_variates_are_not(tmp_path: Path, blobs: DataSet) -> None:
    for recipe, names in (("fedproc", ["fedproc/prototypes"]), ("scaffold", []), ("fedadam", [])):
        run(looking(recipe, rounds=1), tmp_path / recipe, data=blobs)
        (record,) = insight_records(tmp_path / recipe)
        assert list(record["anchors"]) == names


def test_where_clients_keep_their_models_nothing_is_said_of_a_global_one(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedproto"), tmp_path / "run", data=blobs)
    record = insight_records(tmp_path / "run")[-1]
    assert record["gradient"]["global"] is None
    assert record["accuracy"]["global"] is None
    assert len(record["gradient"]["clients"]) == 4
    assert record["feature_distance"]["all"] > 0
    assert "global" not in probe_features(tmp_path / "run", 2)


def test_one_client_has_no_pairs(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("centralised"), tmp_path / "run", data=blobs)
    record = insight_records(tmp_path / "run")[0]
    assert record["clients"] == [0]
    assert record["holds"] == [[0, 1, 2, 3]]
    assert record["cka"]["mean"] is None
    assert record["drift"]["norm"][0] > 0


class ExplodesWhenTested(nn.Module):
    """Trains as it should; its features are infinite in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x)
        logits: Tensor = self.head(features if self.training else features / 0)
        return logits


def test_features_that_are_no_numbers_end_no_run(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedavg"), tmp_path / "run", data=blobs, model=ExplodesWhenTested)
    for line in (tmp_path / "run" / "insight.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert record["clients"] == []
        assert record["feature_distance"]["all"] is None
        assert record["gradient"]["global"] is None


def test_with_several_domains_a_client_is_at_home_in_its_own(tmp_path: Path, blobs: DataSet) -> None:
    def in_domains(samples: Samples) -> Samples:
        return Samples(samples.inputs, samples.labels, domains=(torch.arange(len(samples)) // 4) % 2)

    data = replace(blobs, train=in_domains(blobs.train), test=in_domains(blobs.test), domains=("left", "right"))
    more = {"data": {"clients": 4, "partition": "domains"}, "insight": {**LOOK, "samples": 16}}
    settings = looking("fedavg", rounds=1, **more)
    federation = prepare(settings, data=data).federation
    run(settings, tmp_path / "run", data=data)
    stored = probe_features(tmp_path / "run", 1)
    assert torch.bincount(stored["domains"]).tolist() == [8, 8]
    assert not stored["own"].bool().all()
    for row, client in enumerate(stored["clients"].tolist()):
        samples = federation.client(client)
        assert data.train.domains is not None
        home = set(data.train.domains[samples.positions].tolist())
        held = set(samples.labels.tolist())
        expected = [
            domain in home and label in held
            for domain, label in zip(stored["domains"].tolist(), stored["labels"].tolist(), strict=True)
        ]
        assert stored["own"][row].bool().tolist() == expected


# -- features ---------------------------------------------------------------------------------------------------------
def test_the_stored_features_are_named_and_shaped_as_documented(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedfa"), tmp_path / "run", data=blobs)
    assert feature_rounds(tmp_path / "run") == [2, 4]
    stored = probe_features(tmp_path / "run", 4)
    shapes = {name: tuple(value.shape) for name, value in stored.items()}
    assert shapes == {
        "features": (4, 20, 8), "global": (20, 8), "labels": (20,), "positions": (20,), "clients": (4,),
        "own": (4, 20), "anchors": (4, 8),
    }  # fmt: skip
    assert torch.equal(stored["labels"], blobs.test.labels[stored["positions"]])


def test_features_that_were_not_stored_are_asked_for_in_vain(tmp_path: Path, blobs: DataSet) -> None:
    run(looking("fedfa"), tmp_path / "run", data=blobs)
    with pytest.raises(RunError, match=r"no probe features of round 3 \(stored: 2, 4\).*insight\.features=\[3\]"):
        probe_features(tmp_path / "run", 3)
