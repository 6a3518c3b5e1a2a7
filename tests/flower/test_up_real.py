"""One real federation over loopback: TLS, registered keys, three SuperNodes; FedFA and FedAvg through it."""

from __future__ import annotations

import ssl
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
import torch

from fedfa.data import load
from fedfa.data.cache import data_directory
from fedfa.errors import DataError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import run
from fedfa.flower.operate.federation import LocalFederation
from fedfa.flower.operate.keys import make_server_keys
from tests.flower import real

pytest.importorskip("flwr")
pytestmark = pytest.mark.system

SITES = 3


@pytest.fixture(scope="module")
def fashion() -> Path:
    """A data directory that holds Fashion-MNIST: the user's own, into which it is fetched if need be."""
    try:
        load("fashion-mnist")
    except DataError as error:
        pytest.skip(f"Fashion-MNIST cannot be had here: {error}")
    return data_directory()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, fashion: Path) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(folder) as started:
        real.start(started, SITES, fashion, folder / "sites")
        yield started


@pytest.mark.parametrize("algorithm", ["fedfa", "fedavg"])
def test_three_sites_with_tls_and_keys_train_to_the_same_bits_as_the_simulator(
    algorithm: str, federation: LocalFederation, fashion: Path, tmp_path: Path
) -> None:
    """Fashion-MNIST, 20,000 samples of some classes at each site."""
    settings = real.quick_settings(algorithm, rounds=2, sites=SITES, data="fashion-mnist", batch_size=200)
    out = tmp_path / "flower"
    summary = real.finish(real.submit(federation, settings, out, fashion), out)
    records = real.metrics(out)
    assert [record["round"] for record in records] == [1, 2]
    assert all(sorted(record["cohort"]) == [0, 1, 2] for record in records)
    here = run(settings, tmp_path / "simulator")
    assert summary["final_accuracy"] == here.final_accuracy > 0.3
    real.assert_same_tensors(out / "model.safetensors", here.directory / "model.safetensors")
    real.assert_same_tensors(out / "server.safetensors", here.directory / "server.safetensors")
    if algorithm == "fedfa":
        before = Experiment.from_config(settings).training.init().components["anchors"]
        after = load_tensors(out / "server.safetensors")
        for name, value in before.items():
            moved = (after[f"anchors/{name}"] - value).double().norm(dim=-1) if value.is_floating_point() else None
            assert moved is None or moved.ndim == 0 or bool(torch.all(moved > 0)), "every class's anchor moves"


def test_a_site_with_an_unregistered_key_is_not_admitted(
    federation: LocalFederation, fashion: Path, tmp_path: Path
) -> None:
    """A site with a valid key and the server's certificate, whose key is not registered."""
    before = federation.flwr("supernode", "list", "here", "--format", "json")
    program = [str(Path(sys.executable).parent / "fedfa"), "flower", "supernode"]
    config = real.site_config(7, 8, fashion, tmp_path)
    stranger = federation.start_site(7, config, register=False, program=program)
    assert stranger.wait(real.LIMIT) not in (None, 0), "it ends by itself"
    assert not federation.joined(7)
    assert "activate" in stranger.output().lower()
    after = federation.flwr("supernode", "list", "here", "--format", "json")
    assert after.count('"node-id"') == before.count('"node-id"') == SITES
    assert all(federation.processes.running[f"site{site}"].exit_code is None for site in range(SITES))


def test_an_unencrypted_connection_and_an_unknown_certificate_are_refused(
    federation: LocalFederation, tmp_path: Path
) -> None:
    def ask(scheme: str, authority: Path | None = None) -> int:
        context = ssl.create_default_context(cafile=None if authority is None else str(authority))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"{scheme}://{federation.address}/health", timeout=30) as answer:
            return int(answer.status)

    assert ask("https", federation.folder / "keys" / "ca.crt") == 200
    with pytest.raises(OSError, match=r"(?i)certificate verify failed"):
        ask("https", make_server_keys(tmp_path, ["localhost", "127.0.0.1"]).authority)
    with pytest.raises((OSError, HTTPException)):
        ask("http")
