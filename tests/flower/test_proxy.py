"""The reverse proxy of the manual: its nginx block as printed there, before a real SuperLink."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedfa.flower.operate.federation import LocalFederation
from tests.flower import real

pytest.importorskip("flwr")

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
]
MANUAL = Path(__file__).parents[2] / "docs" / "flower.md"
PIECE = 5 * 2**20
"""Bytes of the pieces in which Flower sends an array."""


@dataclass(frozen=True)
class Proxied:
    """A SuperLink, and nginx before it."""

    federation: LocalFederation
    port: int

    def transport(self, path: str, body: bytes = b"", *, directly: bool = False) -> tuple[int, str]:
        """Send a request as Flower's clients do, the path as it is; status and text of the answer."""
        host, port = ("127.0.0.1", int(self.federation.address.split(":")[1])) if directly else ("localhost", self.port)
        trust = ssl.create_default_context(cafile=str(self.federation.folder / "keys" / "ca.crt"))
        connection = http.client.HTTPSConnection(host, port, timeout=30, context=trust)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/protobuf"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()


def nginx_configuration(folder: Path, keys: Path, superlink: str, port: int) -> str:
    """The manual's block with this machine's ports and paths, in the least that nginx needs around it."""
    blocks = re.findall(r"```nginx\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert len(blocks) == 1
    block: str = blocks[0]
    for theirs, ours, times in (
        ("listen 8443 ssl;", f"listen 127.0.0.1:{port} ssl;", 1),
        ("/etc/fedfa/", f"{keys}/", 3),
        ("127.0.0.1:8000", superlink, 1),
    ):
        assert block.count(theirs) == times, theirs
        block = block.replace(theirs, ours)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # One supervised process: it ends with the test, whatever happens.
    return (
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log {folder}/access.log;\n{places}{block}}}\n"
    )


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("proxy")
    assert NGINX is not None
    with LocalFederation(folder / "federation", fork_server=False) as federation, socket.socket() as probe:
        federation.start_superlink()
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        configuration = folder / "nginx.conf"
        configuration.write_text(
            nginx_configuration(folder, federation.folder / "keys", federation.address, port), encoding="utf-8"
        )
        command = [NGINX, "-e", "stderr", "-c", str(configuration)]
        nginx = federation.processes.start("nginx", command, folder / "nginx.log", {})

        def listens() -> bool:
            with socket.socket() as caller:
                return caller.connect_ex(("127.0.0.1", port)) == 0

        federation.processes.wait_for("nginx to listen", listens, seconds=30, needed=[nginx])
        yield Proxied(federation, port)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/health",
        "/",
        "//v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
    ],
)
def test_the_proxy_refuses_paths_outside_v1_fleet(path: str, proxied: Proxied) -> None:
    status, text = proxied.transport(path)
    assert (status, "nginx" in text) == (403, True)


def test_without_the_proxy_runs_can_be_listed(proxied: Proxied) -> None:
    """What the refusals above are worth: the same request is served to whoever reaches the SuperLink itself."""
    assert proxied.transport("/v1/control/list-runs", directly=True)[0] == 200


def test_the_superlink_gets_the_path_that_nginx_has_checked(proxied: Proxied) -> None:
    """Passed on as typed, this path is unknown to the SuperLink (404); cleaned, it leads to where a key is wanted."""
    path = "/v1/control/../fleet/activate-node"
    assert proxied.transport(path, directly=True)[0] == 404
    assert proxied.transport(path)[0] == 401


def test_pieces_of_a_model_reach_the_superlink_and_endless_requests_do_not(proxied: Proxied) -> None:
    """Zeros are no message, and the SuperLink says so (400): it has read them all. nginx's own limit is 1 MiB."""
    status, text = proxied.transport("/v1/fleet/activate-node")
    assert status == 401
    assert "nginx" not in text
    status, text = proxied.transport("/v1/fleet/push-object", bytes(PIECE + 2**16))
    assert status == 400
    assert "nginx" not in text
    assert proxied.transport("/v1/fleet/push-object", bytes(17 * 2**20))[0] == 413


def test_a_site_with_a_registered_key_joins_through_the_proxy(proxied: Proxied, tmp_path: Path) -> None:
    config = real.site_config(0, 1, tmp_path, tmp_path)  # data are not asked for before there is a run
    proxied.federation.start_site(0, config, address=f"localhost:{proxied.port}")
    proxied.federation.wait_for_site(0)
    log = (proxied.federation.folder.parent / "access.log").read_text()
    assert '"POST /v1/fleet/activate-node HTTP/1.1" 200' in log
