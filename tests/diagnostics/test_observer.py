"""Diagnostics of runs: they do not affect training, and the record matches the clients' models."""

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
from fedfa.diagnostics.observer import Schedule
from fedfa.diagnostics.probe import Probe
from fedfa.diagnostics.records import DiagnosticsRecords, diagnostics_records
from fedfa.errors import ConfigError, RunError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.experiment.finalize import finalize
from fedfa.experiment.run import run
from fedfa.learning.tensors import Tensors
from tests.experiment.run_toys import STATEFUL, client_states, equal_tensors, small, timeless

EVERY_ROUND: dict[str, Any] = {"every": 1, "samples": 20, "features": [2, -1]}


def with_diagnostics(algorithm: str = "fedfa", **more: Any) -> Config:
    return small(algorithm, **{"diagnostics": EVERY_ROUND, **more})


def batch_norm_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def diagnostics_files(folder: Path) -> dict[str, bytes]:
    """The contents of all diagnostics files by name."""
    files = [folder / "diagnostics.jsonl", *sorted((folder / "diagnostics").glob("*"))]
    return {file.name: file.read_bytes() for file in files}


# -- no effect on training --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedfa", "scaffold", "moon+fedadam", "matching", STATEFUL])
def test_diagnostics_do_not_change_a_bit_of_training(tmp_path: Path, blobs: DataSet, algorithm: str) -> None:
    run(small(algorithm), tmp_path / "off", data=blobs)
    run(with_diagnostics(algorithm), tmp_path / "on", data=blobs)
    assert_same_training(tmp_path / "off", tmp_path / "on")


def test_diagnostics_do_not_affect_batch_statistics_and_dropout(tmp_path: Path, blobs: DataSet) -> None:
    """The probe is evaluated in evaluation mode: no statistics are updated, nothing is sampled."""
    for buffers in ("average", "local"):
        model = {"buffers": buffers}
        run(small("fedfa", model=model), tmp_path / f"off-{buffers}", data=blobs, model=batch_norm_network)
        run(with_diagnostics("fedfa", model=model), tmp_path / f"on-{buffers}", data=blobs, model=batch_norm_network)
        assert_same_training(tmp_path / f"off-{buffers}", tmp_path / f"on-{buffers}")


def assert_same_training(off: Path, on: Path) -> None:
    for name in ("model.safetensors", "server.safetensors"):
        assert (off / name).read_bytes() == (on / name).read_bytes(), name
    name = "checkpoint.safetensors"  # its notes are of a record with times
    assert equal_tensors(load_tensors(off / name), load_tensors(on / name))
    assert timeless(off) == timeless(on)  # bytes sent included
    kept_off, kept_on = client_states(off), client_states(on)
    assert kept_off.keys() == kept_on.keys()
    assert all(equal_tensors(kept_off[name], kept_on[name]) for name in kept_off)
    assert len(diagnostics_records(on)) == 4


def test_without_diagnostics_there_is_no_component_and_no_file(tmp_path: Path, blobs: DataSet) -> None:
    experiment = Experiment.from_config(small(), data=blobs)
    assert experiment.observer() is None
    assert "diagnostics" not in [component.name for component in experiment.algorithm.components]
    run(small(), tmp_path / "run", data=blobs)
    assert not [*(tmp_path / "run").glob("diagnostics*"), *(tmp_path / "run").glob("insight*")]


def test_diagnostics_do_not_depend_on_workers_or_stacking(tmp_path: Path, blobs: DataSet) -> None:
    engines = [{"workers": workers, "execution": "each"} for workers in (1, 2, 3)]
    engines.append({"workers": 1, "execution": "stacked"})
    for number, engine in enumerate(engines):
        run(with_diagnostics("fedfa", engine=engine), tmp_path / str(number), data=blobs)
    first, *others = (diagnostics_files(tmp_path / str(number)) for number in range(4))
    assert all(files == first for files in others)
    assert list(first) == ["diagnostics.jsonl", "round00002.safetensors", "round00004.safetensors"]


@pytest.mark.parametrize("every", [1, 2], ids=["checkpoint each round", "checkpoint every second round"])
def test_an_interrupted_run_has_the_same_diagnostics(tmp_path: Path, blobs: DataSet, every: int) -> None:
    config = with_diagnostics(STATEFUL, checkpoint={"every": every})
    run(config, tmp_path / "whole", data=blobs)
    for last in (1, 2, 3, 4):

        def stop(record: Mapping[str, Any], last: int = last) -> None:
            if record["round"] == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "stopped", data=blobs, resume=True, watch=stop)
    with (tmp_path / "stopped" / "diagnostics.jsonl").open("a") as file:
        file.write('{"round": 4, "cut sho')  # what a kill may leave
    run(config, tmp_path / "stopped", data=blobs, resume=True)
    assert diagnostics_files(tmp_path / "whole") == diagnostics_files(tmp_path / "stopped")


def test_resuming_removes_features_after_the_checkpoint(tmp_path: Path, blobs: DataSet) -> None:
    config = with_diagnostics(checkpoint={"every": 3})

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", data=blobs, watch=stop)
    assert DiagnosticsRecords(tmp_path / "run").rounds() == [2]

    def stop_at_once(record: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", data=blobs, resume=True, watch=stop_at_once)
    assert DiagnosticsRecords(tmp_path / "run").rounds() == []
    assert [record["round"] for record in diagnostics_records(tmp_path / "run")] == [1]


# -- schedule ---------------------------------------------------------------------------------------------------------
def test_scheduled_rounds() -> None:
    every, chosen = Schedule(7, 3), Schedule(7, 0, [2, -1])
    assert [round for round in range(1, 8) if every.due(round)] == [3, 6, 7]
    assert not any(every.stores(round) for round in range(1, 8))
    assert [round for round in range(1, 8) if chosen.due(round)] == [2, 7]
    assert [round for round in range(1, 8) if chosen.stores(round)] == [2, 7]


def test_invalid_configuration_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"diagnostics\.features.*counted from 1"):
        small(diagnostics={"features": [0]})
    with pytest.raises(ConfigError, match=r"diagnostics\.samples"):
        small(diagnostics={"samples": 0})


def test_diagnostics_without_test_samples_are_an_error(tmp_path: Path, blobs: DataSet) -> None:
    empty = replace(blobs, test=blobs.test.subset(torch.tensor([], dtype=torch.int64)))
    with pytest.raises(RunError, match=r"require test samples.*diagnostics\.every = 0"):
        run(with_diagnostics(), tmp_path / "run", data=empty)


def test_the_final_pass_is_not_measured(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedavg+ccvr"), tmp_path / "run", data=blobs)
    assert [record["round"] for record in diagnostics_records(tmp_path / "run")] == [1, 2, 3, 4]


def test_finalizing_copies_the_diagnostics(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedavg"), tmp_path / "trained", data=blobs)
    finalize(tmp_path / "trained", "ccvr", tmp_path / "finalized", data=blobs)
    assert diagnostics_files(tmp_path / "trained") == diagnostics_files(tmp_path / "finalized")


# -- record -----------------------------------------------------------------------------------------------------------
def local_models(experiment: Experiment) -> dict[int, Tensors]:
    """The models of the first round's clients, read off their contributions: start + sum / weight."""
    state = experiment.training.init()
    cohort = experiment.cohort(0)
    plan = experiment.training.plan(state, experiment.config.local.in_round(0))
    models = {}
    for result in experiment.engine().train(plan, cohort, lambda _: {}):
        entry = result.contribution["fedavg/model"]
        models[result.client] = {
            name: state.model[name] + value / entry.weight for name, value in entry.tensors.items()
        }
    return models


def test_the_record_matches_the_clients_models(tmp_path: Path, blobs: DataSet) -> None:
    """The same quantities from separately trained clients, with plain torch."""
    config = with_diagnostics("fedavg", rounds=1)
    run(config, tmp_path / "run", data=blobs)
    (record,) = diagnostics_records(tmp_path / "run")
    experiment = Experiment.from_config(small("fedavg", rounds=1, engine={"workers": 1}), data=blobs)
    start = experiment.training.init().model
    models = local_models(experiment)
    assert record["clients"] == list(models) == experiment.cohort(0)
    probe = Probe.of(blobs, 20, 1)

    def features(weights: Tensors) -> Tensor:
        return torch.relu(probe.inputs @ weights["fc1.0.weight"].mT + weights["fc1.0.bias"]).double()

    k = len(models)
    h = torch.stack([features(weights) for weights in models.values()])
    distances = [(h[i] - h[j]).norm(dim=-1).mean() for i in range(k) for j in range(i)]
    assert record["feature_distance"]["all"] == pytest.approx(float(sum(distances) / len(distances)), rel=1e-4)
    assert record["feature_distance"]["authors"] == pytest.approx(
        float(sum(distances) / len(distances)) * (k - 1) / k, rel=1e-4
    )

    scale = float(h.square().sum(-1).mean().sqrt())
    assert record["feature_distance"]["relative"] == pytest.approx(record["feature_distance"]["all"] / scale, rel=1e-4)
    if record["feature_distance"]["mean"] is not None:
        relative = record["feature_distance"]["mean"] / scale
        assert record["feature_distance"]["mean_relative"] == pytest.approx(relative, rel=1e-4)

    def rows(weights: Tensors) -> Tensor:
        weight, bias = (weights[name] - start[name] for name in ("head.weight", "head.bias"))
        return torch.cat([weight, bias.unsqueeze(1)], dim=1).double()

    updates = [rows(weights) for weights in models.values()]
    cosines = [torch.cosine_similarity(updates[i], updates[j]).mean() for i in range(k) for j in range(i)]
    assert record["classifier_cosine"]["mean"] == pytest.approx(float(sum(cosines) / len(cosines)), rel=1e-3, abs=1e-4)

    norms = [
        math.sqrt(sum(float((weights[name] - start[name]).double().square().sum()) for name in start))
        for weights in models.values()
    ]
    assert record["drift"]["norm"] == pytest.approx(norms, rel=1e-4)
    components = zip(record["drift"]["extractor"], record["drift"]["classifier"], strict=True)
    assert [math.hypot(*component) for component in components] == pytest.approx(norms, rel=1e-4)

    final = load_tensors(tmp_path / "run" / "model.safetensors")
    weight = final["head.weight"].double().requires_grad_()
    logits = features(final) @ weight.mT + final["head.bias"].double()
    torch.nn.functional.cross_entropy(logits, probe.labels).backward()
    assert weight.grad is not None
    assert record["gradient"]["global"] == pytest.approx(float(weight.grad.norm()), rel=1e-4)
    assert record["gradient"]["global_by_class"] == pytest.approx(weight.grad.norm(dim=1).tolist(), rel=1e-4)
    assert record["accuracy"]["global"] == pytest.approx(float((logits.argmax(-1) == probe.labels).double().mean()))


def test_compared_clients_and_their_classes(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedavg", diagnostics={**EVERY_ROUND, "clients": 3}), tmp_path / "run", data=blobs)
    experiment = Experiment.from_config(small("fedavg"), data=blobs)
    for number, record in enumerate(diagnostics_records(tmp_path / "run")):
        assert record["clients"] == experiment.cohort(number)[:3]
        for client, classes in zip(record["clients"], record["holds"], strict=True):
            assert classes == torch.unique(experiment.federation.client(client).labels).tolist()
        for matrix in (record["cka"]["matrix"], record["drift"]["matrix"], record["feature_distance"]["matrix"]):
            assert [len(row) for row in matrix] == [3, 3, 3]


def test_recorded_anchors_are_those_of_the_server(tmp_path: Path, blobs: DataSet) -> None:
    result = run(with_diagnostics("fedfa", rounds=2), tmp_path / "run", data=blobs)
    anchors = load_tensors(result.directory / "server.safetensors")["anchors/anchors"].double()
    first, last = diagnostics_records(result.directory)
    assert last["anchors"]["anchors/anchors"]["norms"] == pytest.approx(anchors.norm(dim=1).tolist(), rel=1e-6)
    initial = Experiment.from_config(small("fedfa"), data=blobs).training.init().components["anchors"]["anchors"]
    assert initial.double().norm(dim=1).tolist() == [1, 1, 1, 1]
    assert all(moved > 0 for moved in first["anchors"]["anchors/anchors"]["movement"])
    assert torch.equal(DiagnosticsRecords(result.directory).features(2)["anchors"].double(), anchors)


def test_prototypes_are_recorded_as_anchors_and_control_variates_are_not(tmp_path: Path, blobs: DataSet) -> None:
    for algorithm, names in (("fedproc", ["fedproc/prototypes"]), ("scaffold", []), ("fedadam", [])):
        run(with_diagnostics(algorithm, rounds=1), tmp_path / algorithm, data=blobs)
        (record,) = diagnostics_records(tmp_path / algorithm)
        assert list(record["anchors"]) == names


def test_private_client_models_have_no_global_measurements(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedproto"), tmp_path / "run", data=blobs)
    record = diagnostics_records(tmp_path / "run")[-1]
    assert record["gradient"]["global"] is None
    assert record["accuracy"]["global"] is None
    assert len(record["gradient"]["clients"]) == 4
    assert record["feature_distance"]["all"] > 0
    assert "global" not in DiagnosticsRecords(tmp_path / "run").features(2)


def test_a_single_client_has_no_pairs(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("centralised"), tmp_path / "run", data=blobs)
    record = diagnostics_records(tmp_path / "run")[0]
    assert record["clients"] == [0]
    assert record["holds"] == [[0, 1, 2, 3]]
    assert record["cka"]["mean"] is None
    assert record["drift"]["norm"][0] > 0


class InfiniteInEvaluation(nn.Module):
    """Trains normally; its features are infinite in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x)
        logits: Tensor = self.head(features if self.training else features / 0)
        return logits


def test_non_finite_features_do_not_fail_the_run(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedavg"), tmp_path / "run", data=blobs, model=InfiniteInEvaluation)
    for line in (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert record["clients"] == []
        assert record["feature_distance"]["all"] is None
        assert record["gradient"]["global"] is None


def test_own_samples_are_those_of_the_clients_domains_and_classes(tmp_path: Path, blobs: DataSet) -> None:
    def in_domains(samples: Samples) -> Samples:
        return Samples(samples.inputs, samples.labels, domains=(torch.arange(len(samples)) // 4) % 2)

    data = replace(blobs, train=in_domains(blobs.train), test=in_domains(blobs.test), domains=("left", "right"))
    more = {"data": {"clients": 4, "partition": "domains"}, "diagnostics": {**EVERY_ROUND, "samples": 16}}
    config = with_diagnostics("fedavg", rounds=1, **more)
    federation = Experiment.from_config(config, data=data).federation
    run(config, tmp_path / "run", data=data)
    stored = DiagnosticsRecords(tmp_path / "run").features(1)
    assert torch.bincount(stored["domains"]).tolist() == [8, 8]
    assert not stored["own"].bool().all()
    for row, client in enumerate(stored["clients"].tolist()):
        samples = federation.client(client)
        assert data.train.domains is not None
        domains = set(data.train.domains[samples.positions].tolist())
        classes = set(samples.labels.tolist())
        expected = [
            domain in domains and label in classes
            for domain, label in zip(stored["domains"].tolist(), stored["labels"].tolist(), strict=True)
        ]
        assert stored["own"][row].bool().tolist() == expected


# -- features ---------------------------------------------------------------------------------------------------------
def test_stored_features_have_the_documented_names_and_shapes(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedfa"), tmp_path / "run", data=blobs)
    assert DiagnosticsRecords(tmp_path / "run").rounds() == [2, 4]
    stored = DiagnosticsRecords(tmp_path / "run").features(4)
    shapes = {name: tuple(value.shape) for name, value in stored.items()}
    assert shapes == {
        "features": (4, 20, 8), "global": (20, 8), "labels": (20,), "positions": (20,), "clients": (4,),
        "own": (4, 20), "anchors": (4, 8),
    }  # fmt: skip
    assert torch.equal(stored["labels"], blobs.test.labels[stored["positions"]])


def test_features_that_were_not_stored_are_an_error(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedfa"), tmp_path / "run", data=blobs)
    with pytest.raises(RunError, match=r"no probe features of round 3 \(stored: 2, 4\).*diagnostics\.features=\[3\]"):
        DiagnosticsRecords(tmp_path / "run").features(3)


def test_files_of_earlier_releases_stay_readable(tmp_path: Path, blobs: DataSet) -> None:
    run(with_diagnostics("fedfa"), tmp_path / "run", data=blobs)
    records, features = diagnostics_records(tmp_path / "run"), DiagnosticsRecords(tmp_path / "run").features(2)
    (tmp_path / "run" / "diagnostics.jsonl").rename(tmp_path / "run" / "insight.jsonl")
    (tmp_path / "run" / "diagnostics").rename(tmp_path / "run" / "insight")
    assert diagnostics_records(tmp_path / "run") == records
    assert equal_tensors(DiagnosticsRecords(tmp_path / "run").features(2), features)
