"""Connection to a Ray cluster: its address, its nodes, and whether they run the same code.

Ray's usage statistics are off unless the user turned them on, and no dashboard is started.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fedfa.errors import FedfaError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10
"""Deadline for a cluster to answer."""

# The start of any gRPC connection: HTTP/2's preface with empty settings. The server answers with its own settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_FRAME = 4


class ClusterError(FedfaError):
    """A Ray cluster cannot be used."""


@dataclass(frozen=True)
class Node:
    """A running node of the cluster."""

    id: str
    address: str
    cores: int


def import_ray() -> Any:
    """Import Ray; raise an error that says how to install it if it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts something
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(
            "the engine \"ray\" needs Ray, which is not installed; install it with: pip install 'fedfa[ray]'"
        ) from error


class Connection:
    """Connection of this process to a cluster; an existing one is used and left open.

    Args:
        address: ``host:port`` of a cluster this machine belongs to; None or ``"auto"``: RAY_ADDRESS, else the cluster
            that runs here; ``"local"``: a new one on this machine, which ends with the connection.

    Raises:
        ClusterError: Ray is missing, or the cluster cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        self._owned = not self.ray.is_initialized()
        if not self._owned:
            current = self.ray.get_runtime_context().gcs_address
            if address not in (None, "auto", "local", current):
                raise ClusterError(
                    f"this process is connected to the Ray cluster {current}, so it cannot use {address}; call "
                    "ray.shutdown() first, or leave the address out"
                )
            return
        self._connect(self._checked(address))

    def nodes(self) -> list[Node]:
        """Running nodes with cores, always in the same order."""
        found = [
            Node(entry["NodeID"], entry["NodeManagerAddress"], int(entry["Resources"].get("CPU", 0)))
            for entry in self.ray.nodes()
            if entry["Alive"]
        ]
        return sorted((node for node in found if node.cores > 0), key=lambda node: node.id)

    def close(self) -> None:
        """Disconnect from the cluster."""
        if self._owned and self.ray.is_initialized():
            with _own_signals():
                self.ray.shutdown()

    def _connect(self, address: str) -> None:
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # else a dead node is reported on a page of warnings
        try:
            with _own_signals(), _loopback_only(address == "local"), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about GPUs, which are not used
                self.ray.init(address=address, logging_level=logging.ERROR, **options)
        except ConnectionError as error:
            raise ClusterError(
                f"no Ray cluster found ({_first_line(error)}); start one with `ray start --head`, set --address "
                "HOST:PORT, or use --address local"
            ) from error
        except Exception as error:  # Ray has no common base class for its errors here
            raise ClusterError(f"cannot connect to Ray at {address}: {_first_line(error)}") from error

    def _checked(self, address: str | None) -> str:
        if address in (None, "auto"):
            address = os.environ.get("RAY_ADDRESS") or "auto"
        if address in ("auto", "local"):
            return address
        if address.startswith("ray://"):
            raise ClusterError(
                f"{address}: fedfa does not support Ray's client server, which would send every update twice; start "
                "the run on a node of the cluster with --address auto"
            )
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ClusterError(f"{address!r} is not the address of a Ray cluster: write HOST:PORT, auto or local")
        _probe(host.strip("[]"), int(port))
        return address


def _probe(host: str, port: int) -> None:
    """Check that a gRPC server answers: Ray itself would retry for minutes and then end the process."""
    problem = f"no Ray cluster answers at {host}:{port}"
    hint = "check that it runs (`ray status`) and that its port can be reached from here"
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(_GREETING)
            reply = b""
            while len(reply) < 9 and (more := connection.recv(9)):
                reply += more
    except TimeoutError:
        raise ClusterError(f"{problem} within {ANSWER_SECONDS} seconds; {hint}") from None
    except OSError as error:
        raise ClusterError(f"{problem} ({error.strerror or error}); {hint}") from None
    if len(reply) < 9 or reply[3] != _SETTINGS_FRAME:
        raise ClusterError(f"{problem}: another program does; {hint}")


@contextmanager
def _loopback_only(wanted: bool) -> Iterator[None]:
    """Have a cluster that starts meanwhile listen on this machine's loopback interface only.

    Ray has one switch for it, meant for systems on which it supports no clusters; its own processes read the variable.
    """
    if not wanted:
        yield
        return
    from ray._private import ray_constants

    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    variable = os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if variable is not None:
            os.environ[name] = variable


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the program's SIGTERM handler, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGTERM, before)


# -- versions ---------------------------------------------------------------------------------------------------------
def actor_class() -> Any:
    """Class of the actors, defined in a function so that Ray sends its code and not a name to import.

    So an actor can report the versions of its node even where fedfa is missing.
    """

    class NodeActor:
        def __init__(self) -> None:
            self.actor: Any = None

        def versions(self) -> dict[str, str | None]:
            import hashlib
            import importlib.util
            import platform
            from importlib import metadata
            from pathlib import Path

            found: dict[str, str | None] = {"python": ".".join(platform.python_version_tuple()[:2])}
            for package in ("torch", "numpy", "fedfa"):
                try:
                    found[package] = metadata.version(package)
                except metadata.PackageNotFoundError:
                    found[package] = None
            spec = importlib.util.find_spec("fedfa")
            if spec is not None and spec.origin is not None:
                source = hashlib.blake2b(digest_size=8)
                root = Path(spec.origin).parent
                # The packages that train a client.
                packages = ("algorithms", "data", "engines", "learning", "models", "stacking")
                for file in sorted(file for package in packages for file in (root / package).rglob("*.py")):
                    source.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
                found["fedfa's source"] = source.hexdigest()
            return found

        def start(self, local: Any) -> Any:
            from fedfa.engines.ray_actor import ClientActor

            self.actor = ClientActor(local)
            return self.actor.report()

        def work(self, *arguments: Any) -> Any:
            return self.actor.work(*arguments)

    return NodeActor


def versions() -> dict[str, str | None]:
    """Versions that a result depends on, and a fingerprint of fedfa's own source."""
    found: dict[str, str | None] = actor_class()().versions()
    return found


def differences(node: str, there: dict[str, str | None], here: dict[str, str | None]) -> str | None:
    """Describe how a node's versions differ from this process's; None if they do not.

    Example:
        >>> differences("10.0.0.7", {"torch": "2.12.0", "fedfa": None}, {"torch": "2.13.0", "fedfa": "0.1.0"})
        'node 10.0.0.7 has torch 2.12.0 (here: 2.13.0), no fedfa (here: 0.1.0)'
    """
    found = []
    for package, mine in here.items():
        theirs = there.get(package)
        if theirs != mine and not (package == "fedfa's source" and there.get("fedfa") != here.get("fedfa")):
            found.append(f"{package} {theirs} (here: {mine})" if theirs else f"no {package} (here: {mine})")
    return f"node {node} has {', '.join(found)}" if found else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
