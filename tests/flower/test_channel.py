"""The channel between sites: the simulator's bits and bytes, through Flower's messages and through real processes."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from fedfa.channel.channel import Coded
from fedfa.channel.codecs import codec
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.flower.messages import BadMessageError, pack, payload_nbytes, unpack
from fedfa.flower.operate.federation import LocalFederation
from tests.experiment.run_toys import client_states, equal_tensors
from tests.flower import real
from tests.flower.loopback import QUICK, federate
from tests.flower.small_sites import SITES
from tests.flower.test_equivalence import assert_same, simulate, state_on_sites


# -- messages ---------------------------------------------------------------------------------------------------------
def coded(name: str = "int4", numbers: int = 600) -> Coded:
    value = torch.linspace(-1, 1, numbers).reshape(2, -1)
    return Coded.of(name, codec(name), value, np.random.default_rng(1))


def test_coded_tensors_travel_beside_plain_ones() -> None:
    one = coded()
    record = pack({"a": one, "b": torch.arange(3)})
    found = unpack(record)
    assert torch.equal(found["a"], one.decoded())
    assert torch.equal(found["b"], torch.arange(3))
    assert payload_nbytes(record) == 300 + 2 * 4 + 3 * 8


def test_a_small_message_cannot_ask_for_much_memory() -> None:
    bomb = Coded("topk", (2**39,), np.zeros(8, np.uint8))
    with pytest.raises(BadMessageError, match="more than 1000"):
        unpack(pack({"a": bomb}), most=1000)


@pytest.mark.parametrize(
    "entry",
    [
        Coded("int4", (600,), np.zeros(5, np.uint8)),
        Coded("gzip", (600,), np.zeros(5, np.uint8)),
        Coded("topk", (2,), np.full(8, 255, np.uint8)),
        Coded("int8+deflate", (600,), np.full(8, 7, np.uint8)),
    ],
)
def test_coded_tensors_that_are_none_are_refused(entry: Coded) -> None:
    with pytest.raises(BadMessageError):
        unpack(pack({"a": entry}))


def test_any_damage_to_a_coded_message_is_refused_or_gives_a_tensor_of_its_shape() -> None:
    record = pack({"a": coded("int8+deflate")})
    (array,) = record.values()
    draw = np.random.default_rng(2)
    for _ in range(500):
        data = bytearray(array.data)
        data[draw.integers(len(data))] = draw.integers(256)
        try:
            found = unpack({"fedfa.packed": Array("uint8", (len(data),), array.stype, bytes(data))}, most=2400)
        except BadMessageError:
            continue
        assert sum(value.numel() for value in found.values()) <= 600


# -- the same bits and bytes ------------------------------------------------------------------------------------------
CHANNELS = {
    "fedfa": "channel.up=int8 channel.down=int8",
    "scaffold": "channel.up=topk channel.share=0.1 channel.down=float16",
    "fedavg": "channel.up=int4 channel.down=int8 channel.entropy=deflate",
    "fedprox": "channel.up=sign",
    "ccvr": "channel.up=int8",
}


@pytest.mark.parametrize("algorithm", CHANNELS)
def test_flower_and_the_simulator_agree_behind_a_channel(algorithm: str, tmp_path: Path, data_dir: Path) -> None:
    """Records too, so the payloads have the simulated bytes; errors that were not sent stay on the sites."""
    settings = f"{QUICK['settings']} {CHANNELS[algorithm]}"
    config = {"algorithm": algorithm, "cohort.clients": 3, "settings": settings}
    flower = federate(tmp_path, {**config, "data.dir": str(data_dir)}, SITES)
    simulated = simulate(tmp_path, config, data_dir).directory
    assert_same(flower, simulated)
    if client_state := client_states(simulated):
        there = state_on_sites(tmp_path, flower)
        assert all(equal_tensors(there[name], client_state[name]) for name in client_state)
        assert any(name.startswith("channel/") for state in there.values() for name in state)


def test_a_contribution_that_does_not_fit_is_rejected(tmp_path: Path, data_dir: Path) -> None:
    """A group of a component that the algorithm lacks: rejected by name, and the round completes with the others."""

    def tampered(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train" and asked.content.config_records["plan"]["client"] == 0:
            tensors: dict[str, Any] = dict(unpack(reply.content.array_records["contribution"]))
            tensors |= {"other/sum#weight": torch.ones(1), "other/sum:x": torch.ones(3)}
            reply.content["contribution"] = pack(tensors)
        return reply

    config = {"algorithm": "fedavg", "settings": f"{QUICK['settings']} channel.up=int8", "federation.quorum": 0.5}
    out = federate(tmp_path, {**config, "rounds": 1, "data.dir": str(data_dir)}, SITES, tamper=tampered)
    (record,) = real.metrics(out)
    assert record["federation"]["rejected"] == [0]


# -- bytes on a real wire ---------------------------------------------------------------------------------------------
class CountingLink:
    """Forwards connections to an address, and counts the bytes that pass, TLS and all."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._there = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.bytes: Counter[str] = Counter()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:  # closed
                return
            try:
                there = socket.create_connection(self._there)
            except OSError:  # the SuperLink has ended
                here.close()
                continue
            for name, source, target in (("up", here, there), ("down", there, here)):
                threading.Thread(target=self._forward, args=(name, source, target), daemon=True).start()

    def _forward(self, name: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                self.bytes[name] += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[tuple[LocalFederation, CountingLink]]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(folder) as federation:
        federation.start_superlink()
        link = CountingLink(federation.address)
        federation.register(*range(2))
        for site in range(2):
            federation.start_site(site, real.site_config(site, 2, data_dir, folder / "sites"), address=link.address)
        for site in range(2):
            federation.wait_for_site(site)
        yield federation, link
        link.close()


FRAMING = 0.01
PER_MESSAGE = 40_000
"""What a message may take on the wire beside its payload: one per cent, and 40 kB (see docs/fleet.md)."""


@pytest.mark.system
@pytest.mark.parametrize("channel", [{}, {"up": "int4", "down": "int8", "entropy": "deflate"}])
def test_the_bytes_on_the_wire_are_those_of_the_simulator(
    channel: dict[str, str], linked: tuple[LocalFederation, CountingLink], data_dir: Path, tmp_path: Path
) -> None:
    """FedFA (model and anchors), two sites over TLS, two rounds, a network of 332,000 numbers."""
    federation, link = linked
    quick = real.quick_settings("fedfa", rounds=2, sites=2).to_dict()
    network = {"model": {"name": "mlp", "options": {"hidden": [1024, 256]}}}
    settings = Config.resolve(quick, network, {"channel": channel})
    before = Counter(link.bytes)
    real.finish(real.submit(federation, settings, tmp_path / "flower", data_dir), tmp_path / "flower")
    counted = link.bytes - before
    here = run(settings.model_copy(update={"data": settings.data.model_copy(update={"dir": str(data_dir)})}),
               tmp_path / "simulator")  # fmt: skip
    simulated = real.metrics(here.directory)
    records = real.metrics(tmp_path / "flower")
    messages = 2 * 2
    for direction in ("up", "down"):
        payload = sum(record[f"bytes_{direction}"] for record in simulated)
        assert [r[f"bytes_{direction}"] for r in records] == [r[f"bytes_{direction}"] for r in simulated]
        framing = counted[direction] - payload
        print(f"{channel} {direction}: payload {payload}, wire {counted[direction]}, framing {framing}")  # noqa: T201
        assert 0 < framing < FRAMING * payload + PER_MESSAGE * messages
    real.assert_same_tensors(tmp_path / "flower" / "model.safetensors", here.directory / "model.safetensors")
