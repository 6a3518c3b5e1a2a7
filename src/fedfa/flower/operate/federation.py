"""A federation of real processes on this machine: one SuperLink and one SuperNode per site.

Every process has its own home directory and log, and is started with the commands that a user would type; see
``docs/flower.md``. With TLS every site has a key, and only registered keys are admitted.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from fedfa.errors import FedfaError
from fedfa.experiment.files import write_atomically
from fedfa.flower.operate.fork_server import can_fork, fork_server_path
from fedfa.flower.operate.keys import NodeKey, ServerKeys, make_node_key, make_server_keys
from fedfa.flower.operate.processes import (
    OperationError,
    ProcessGroup,
    SupervisedProcess,
    log_excerpt,
    private_environment,
)
from fedfa.flower.operate.watched import RESTARTED, watched_command

Value = str | int | float | bool
CONNECTION = "here"
"""Name of the SuperLink in the Flower configuration that is written."""
START_LIMIT = 120.0
"""Seconds for a process to start and answer; on a busy machine imports take a while."""
CALL_LIMIT = 90.0
"""Seconds for a call of the ``flwr`` command."""


class LocalFederation(AbstractContextManager["LocalFederation"]):
    """SuperLink and SuperNodes on this machine.

    Args:
        folder: Directory for keys, homes, logs and the SuperLink's database. Those of an earlier federation are
            replaced; logs are appended to.
        tls: Use certificates and registered keys; otherwise everything is open.
        fork_server: Whether sites handle messages in forks of one process with all imports, if the system allows it.

    Example::

        with LocalFederation(Path("try")) as federation:
            federation.start_superlink()
            for site in range(3):
                federation.start_site(site, {"partition-id": site, "num-partitions": 3})
            run = federation.submit(app, {"rounds": 3})
            federation.processes.wait_for("the run", lambda: run.exit_code is not None, seconds=600, needed=[])
    """

    def __init__(self, folder: Path, tls: bool = True, fork_server: bool = True) -> None:
        _check_commands()
        self.folder, self.tls = folder.absolute(), tls
        self.processes = ProcessGroup()
        self._keys: dict[int, NodeKey] = {}
        self._ports: dict[str, int] = {}
        # Not below the folder: a socket's name must be short.
        self._fork_server = tempfile.TemporaryDirectory(prefix="fedfa-") if fork_server and can_fork() else None
        for stale in ("keys", "homes", "configs"):
            shutil.rmtree(self.folder / stale, ignore_errors=True)
        for stale_file in self.folder.glob("superlink.db*"):
            stale_file.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server_keys: ServerKeys | None = None
        if tls:
            self._server_keys = make_server_keys(self.folder / "keys", ["localhost", "127.0.0.1"], days=30)

    def __exit__(self, *_: object) -> None:
        self.processes.stop()
        if self._fork_server is not None:
            self._fork_server.cleanup()

    # -- the server -------------------------------------------------------------------------------------------
    @property
    def address(self) -> str:
        """Address of the SuperLink."""
        return f"127.0.0.1:{self._port('superlink')}"

    @property
    def superlink(self) -> SupervisedProcess:
        """The SuperLink."""
        return self.processes.running["superlink"]

    def start_superlink(self) -> SupervisedProcess:
        """Start the SuperLink and wait until it answers. When restarted, it keeps its database."""
        what = "the SuperLink to answer"
        for attempt in range(3):
            superlink = self._launch_superlink()
            try:
                self.processes.wait_for(what, self._answers, seconds=START_LIMIT, needed=[superlink])
                break
            except OperationError:
                # Another process may take the port between our choice of it and its use by the SuperLink.
                taken = "address already in use" in superlink.output().lower()
                if attempt == 2 or not taken or self.processes.running.keys() != {"superlink"}:
                    raise
                self._ports.pop("superlink")
        self._write_connection()
        return superlink

    def wait_for_superlink(self) -> None:
        """Wait until the SuperLink answers."""
        self.processes.wait_for("the SuperLink to answer", self._answers, seconds=START_LIMIT, needed=[self.superlink])

    def superlink_restarts(self) -> int:
        """How often the SuperLink was started again."""
        return self.superlink.output().count(RESTARTED)

    def _launch_superlink(self) -> SupervisedProcess:
        command = [
            *watched_command("superlink"), "--host", "127.0.0.1", "--port", str(self._port("superlink")),
            "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        if self._server_keys is None:
            command += ["--insecure"]
        else:
            keys = self._server_keys
            command += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.certificate)]
            command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        return self._start("superlink", command)

    def _answers(self) -> bool:
        keys = self._server_keys
        trust = ssl.create_default_context(cafile=str(keys.authority)) if keys else True
        url = f"{'https' if keys else 'http'}://{self.address}/health"
        try:
            return httpx.get(url, verify=trust, trust_env=False, timeout=5).status_code == 200
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise  # another server, or broken keys: waiting does not help
            return False

    # -- the sites --------------------------------------------------------------------------------------------
    def key_of(self, site: int) -> NodeKey:
        """The key of a site, created on first use."""
        if site not in self._keys:
            self._keys[site] = make_node_key(self.folder / "keys", f"site{site}")
        return self._keys[site]

    def register(self, *sites: int) -> None:
        """Register the sites' keys with the SuperLink; without TLS there are none."""
        if not self.tls:
            return
        calls = [  # in parallel: each takes seconds, most of it to start
            self._start_call(f"register{site}", "supernode", "register", str(self.key_of(site).public), CONNECTION)
            for site in sites
        ]
        for call in calls:
            self._finish_call(call)

    def start_site(
        self,
        site: int,
        config: Mapping[str, Value],
        *,
        register: bool = True,
        program: Sequence[str] = (),
        address: str | None = None,
    ) -> SupervisedProcess:
        """Start a site's SuperNode without waiting for it.

        Args:
            site: Its number.
            config: The node config.
            register: Register its key first, if it is not registered yet.
            program: Program to run in place of ``flower-supernode``, without the fork server.
            address: Address of the SuperLink, e.g. of a reverse proxy. Defaults to the SuperLink itself.
        """
        name = f"site{site}"
        command = [
            *(program or watched_command("supernode")),
            "--superlink", address or self.address, "--port", str(self._port(name)),
            "--node-config", self._config_file(name, config),
            # A SuperNode without a SuperLink ends by itself.
            "--max-wait-time", str(START_LIMIT),
        ]  # fmt: skip
        if self._server_keys is None:
            command += ["--insecure"]
        else:
            if register and site not in self._keys:
                self.register(site)
            command += ["--root-certificates", str(self._server_keys.authority)]
            command += ["--auth-supernode-private-key", str(self.key_of(site).private)]
        return self._start(name, command, variables={} if program else self._fork_server_variables())

    def _fork_server_variables(self) -> dict[str, str]:
        """Environment of a SuperNode that uses the fork server, which is started on first use."""
        if self._fork_server is None:
            return {}
        directory = Path(self._fork_server.name)
        started = self.processes.running.get("fork-server")
        if started is None or started.exit_code is not None:
            self._start("fork-server", [sys.executable, "-m", "fedfa.flower.operate.fork_server", str(directory)])
        return {"PATH": fork_server_path(directory)}

    def joined(self, site: int) -> bool:
        """Whether the site's SuperNode has been admitted since its last start."""
        return "SuperNode ID:" in self.processes.running[f"site{site}"].output()

    def wait_for_site(self, site: int) -> None:
        """Wait until the site's SuperNode has been admitted."""
        self.processes.wait_for(
            f"site {site} to join", lambda: self.joined(site), seconds=START_LIMIT,
            needed=[self.processes.running[f"site{site}"], self.superlink],
        )  # fmt: skip

    # -- runs -------------------------------------------------------------------------------------------------
    def site_keys_file(self, sites: int) -> str:
        """Write which key belongs to which site, for ``federation.site_keys``; without TLS there are none."""
        if not self.tls:
            return ""
        path = self.folder / "keys" / "sites.toml"
        write_atomically(path, tomli_w.dumps({str(site): self.key_of(site).public.name for site in range(sites)}))
        return str(path)

    def submit(self, app: Path, run_config: Mapping[str, Value]) -> SupervisedProcess:
        """Submit a run; the returned process streams the run's log and ends with the run."""
        command = [flower_command("flwr"), "run", str(app.absolute()), CONNECTION, "--stream"]
        return self._start("run", [*command, "--run-config", self._config_file("run", run_config)], home="flwr")

    def flwr(self, *arguments: str) -> str:
        """Call the ``flwr`` command and return its output.

        Raises:
            OperationError: It failed or took too long.
        """
        return self._finish_call(self._start_call("flwr", *arguments))

    def _start_call(self, name: str, *arguments: str) -> SupervisedProcess:
        return self._start(name, [flower_command("flwr"), *arguments], home="flwr")

    def _finish_call(self, call: SupervisedProcess) -> str:
        code = call.wait(CALL_LIMIT)
        if code is None:
            call.kill()
        if code != 0:
            how = f"did not end in {CALL_LIMIT:.0f} s" if code is None else "failed"
            raise OperationError(f"`{call.command}` {how}\n{log_excerpt(call)}")
        return call.output()

    # -- files and ports --------------------------------------------------------------------------------------
    def _start(
        self, name: str, command: list[str], home: str | None = None, variables: Mapping[str, str] | None = None
    ) -> SupervisedProcess:
        environment = private_environment(self._home(home or name), **(variables or {}))
        return self.processes.start(name, command, self.folder / "logs" / f"{name}.log", environment)

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return home

    def _port(self, name: str) -> int:
        """A free port, the same at every call."""
        while name not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports.values():
                self._ports[name] = port
        return self._ports[name]

    def _write_connection(self) -> None:
        trust: dict[str, Any] = {"insecure": True}
        if self._server_keys is not None:
            trust = {"root-certificates": str(self._server_keys.authority)}
        known = {"default": CONNECTION, CONNECTION: {"address": self.address, **trust}}
        write_atomically(self._home("flwr") / "config.toml", tomli_w.dumps({"superlink": known}))

    def _config_file(self, name: str, values: Mapping[str, Value]) -> str:
        """Write a configuration as a .toml file, in which Flower accepts any string."""
        path = self.folder / "configs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, tomli_w.dumps(dict(values)))
        return str(path)


def flower_command(name: str) -> str:
    """Path of one of Flower's commands, preferably next to this Python."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedfaError(f"the command {name} is missing: pip install 'fedfa[flower]'")
    return found


def _check_commands() -> None:
    if sys.platform == "win32":
        raise FedfaError("Flower's SuperLink and SuperNode run on Linux and macOS; on Windows use WSL")
    for name in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr"):
        flower_command(name)
