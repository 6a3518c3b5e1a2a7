"""FedBN: normalisation layers stay with the client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedfa.algorithms.fedbn import EVERY, normalisation_tensors
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.context import Role
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel
from fedfa.models.zoo import build_model
from tests.experiment.run_toys import client_states, equal_tensors, small

BATCH_NORM = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def network(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(8)) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), norm(), nn.ReLU(), nn.Linear(8, 4))


def local_names(model: Callable[[], nn.Module], blobs: DataSet, layers: str = "all") -> set[str]:
    experiment = Experiment.from_config(
        small("fedbn", algorithm={"fedbn": {"layers": layers}}), data=blobs, model=model
    )
    return {name for name, role in experiment.roles.items() if role is Role.LOCAL}


@pytest.mark.parametrize("layers", ["all", "batch"])
def test_parameters_and_statistics_of_batch_norm_are_local(blobs: DataSet, layers: str) -> None:
    assert local_names(network(), blobs, layers) == BATCH_NORM


@pytest.mark.parametrize(
    ("norm", "tensors"),
    [
        (lambda: nn.GroupNorm(2, 8), {"1.weight", "1.bias"}),
        (lambda: nn.LayerNorm(8), {"1.weight", "1.bias"}),
        (lambda: nn.RMSNorm(8), {"1.weight"}),
        (lambda: nn.BatchNorm1d(8, affine=False), BATCH_NORM - {"1.weight", "1.bias"}),
        (lambda: nn.BatchNorm1d(8, track_running_stats=False), {"1.weight", "1.bias"}),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
            {"1.1.weight", "1.1.bias"},
        ),
    ],
    ids=["group", "layer", "rms", "without affine", "without statistics", "instance"],
)
def test_every_kind_of_normalisation(blobs: DataSet, norm: Callable[[], nn.Module], tensors: set[str]) -> None:
    assert local_names(network(norm), blobs) == tensors


def test_only_batch_norm_if_asked(blobs: DataSet) -> None:
    def both() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.Linear(8, 4))

    assert local_names(both, blobs, "batch") == BATCH_NORM
    assert local_names(both, blobs, "all") == BATCH_NORM | {"2.weight", "2.bias"}


def test_normalisation_that_is_switched_off_stays_frozen(blobs: DataSet) -> None:
    def fixed() -> nn.Module:
        net = network()()
        net.get_parameter("1.weight").requires_grad_(False)
        return net

    assert local_names(fixed, blobs) == BATCH_NORM - {"1.weight"}


def test_the_networks_of_the_paper_that_normalise() -> None:
    for name, shape in (("cnn-mixed-digits", (3, 28, 28)), ("resnet18-gn", (3, 32, 32))):
        with torch.device("meta"):  # shapes are enough
            split = SplitModel.of(build_model(name, shape, 10))
        assert normalisation_tensors(split, EVERY), f"the error message recommends {name}"


def test_a_network_without_normalisation_is_refused(blobs: DataSet) -> None:
    with pytest.raises(AlgorithmError, match=r'has none: choose model\.name = "cnn-mixed-digits"'):
        Experiment.from_config(small("fedbn"), data=blobs)
    bare = network(lambda: nn.LayerNorm(8, elementwise_affine=False))
    with pytest.raises(AlgorithmError, match="has none"):
        Experiment.from_config(small("fedbn"), data=blobs, model=bare)
    only_batch = small("fedbn", algorithm={"fedbn": {"layers": "batch"}})
    with pytest.raises(AlgorithmError, match=r'other kinds than BatchNorm: set algorithm\.fedbn\.layers = "all"'):
        Experiment.from_config(only_batch, data=blobs, model=network(lambda: nn.GroupNorm(2, 8)))


def test_the_rest_is_averaged_and_the_layers_never_leave(tmp_path: Path, blobs: DataSet) -> None:
    """One round of all six clients, of 40 samples each: the mean of what each would have sent with FedAvg.

    In the first round no client has tensors of its own yet, so local training is FedAvg's in both methods.
    """
    asked = {"rounds": 1, "cohort": {"clients": 6}}
    result = run(small("fedbn", **asked), tmp_path / "fedbn", data=blobs, model=network())
    fedavg = run(small("fedavg", **asked), tmp_path / "fedavg", data=blobs, model=network())
    start = Experiment.from_config(small("fedbn"), data=blobs, model=network()).state.model
    client_state = [own(tensors) for tensors in client_states(tmp_path / "fedbn").values()]
    assert len(client_state) == 6
    for name, value in result.model.items():
        if name in BATCH_NORM:
            assert torch.equal(value, start[name]), "the server's own never moves"
            mean = torch.stack([tensors[name].double() for tensors in client_state]).mean(0)
            assert_close(mean, fedavg.model[name].double(), rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(value, fedavg.model[name])
    assert all(tensors.keys() == BATCH_NORM for tensors in client_state)
    assert not equal_tensors(client_state[0], client_state[1])
    sent = 4 * 4 * 8 + 8  # four vectors of eight and a counter of eight bytes
    assert fedavg.metrics[0]["bytes_down"] - result.metrics[0]["bytes_down"] == 6 * sent


def own(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model/"): value for name, value in tensors.items()}


def test_a_client_goes_on_with_its_own_layers(tmp_path: Path, blobs: DataSet) -> None:
    """The counter of batches: as many as the client itself has made in all rounds so far."""
    result = run(small("fedbn", rounds=4), tmp_path / "run", data=blobs, model=network())
    for file, tensors in client_states(tmp_path / "run").items():
        client = int(file.partition(".")[0])
        rounds = sum(client in record["cohort"] for record in result.metrics)
        assert tensors["model/1.num_batches_tracked"].item() == rounds * 2 * 3  # two epochs of three batches


def test_fedbn_combines_with_other_methods(tmp_path: Path, blobs: DataSet) -> None:
    for algorithm in ("fedfa+fedbn", "fedbn+fedadam", "fedprox+fedbn", "scaffold+fedbn"):
        result = run(small(algorithm, rounds=2), tmp_path / algorithm, data=blobs, model=network())
        assert all(name in tensors for tensors in map(own, client_states(tmp_path / algorithm).values())
                   for name in BATCH_NORM)  # fmt: skip
        assert result.final_accuracy > 0
