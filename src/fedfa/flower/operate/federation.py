"""A federation of real processes on this machine: one SuperLink, one SuperNode per site, each as if on its own.

Every process has its own home folder and log, and is driven by the same commands that one would type; see
``docs/flower.md`` for those. With TLS every site has a key, and only registered ones get in.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from fedfa.errors import FedfaError
from fedfa.flower.operate.keys import NodeKey, ServerKeys, make_node_key, make_server_keys
from fedfa.flower.operate.processes import Boxed, OperationError, Processes, last_words, private_environment
from fedfa.flower.operate.warm import can_fork, warm_path
from fedfa.studies.files import write_atomically

Value = str | int | float | bool
CONNECTION = "here"
"""The name of the SuperLink in the Flower configuration that is written."""
START_LIMIT = 120.0
"""Seconds for a process to start and answer; a busy machine takes a while to import everything."""
CALL_LIMIT = 90.0
"""Seconds for a call of the ``flwr`` command."""


class LocalFederation:
    """SuperLink and SuperNodes on this machine.

    Args:
        folder: Keys, homes, logs and the SuperLink's database go here; what a former federation left is replaced, its
            logs are added to.
        tls: With certificates and registered keys; without, everything is open.
        environment: Further environment variables of all processes.
        warm: Whether sites answer messages from one process that has everything imported, where the system allows it.

    Example::

        with LocalFederation(Path("try")) as federation:
            federation.start_superlink()
            for site in range(3):
                federation.start_site(site, {"partition-id": site, "num-partitions": 3})
            run = federation.submit(app, {"rounds": 3})
            federation.processes.wait_for("the run", lambda: run.exit_code is not None, seconds=600, needed=[])
    """

    def __init__(
        self, folder: Path, tls: bool = True, environment: Mapping[str, str] | None = None, warm: bool = True
    ) -> None:
        _find_commands()
        self.folder, self.tls = folder.absolute(), tls
        self.processes = Processes()
        self._others = dict(environment or {})
        self._keys: dict[int, NodeKey] = {}
        self._ports: dict[str, int] = {}
        # Not below the folder: a socket's name must be short.
        self._warm = tempfile.TemporaryDirectory(prefix="fedfa-") if warm and can_fork() else None
        for stale in ("keys", "homes", "configs"):
            shutil.rmtree(self.folder / stale, ignore_errors=True)
        for stale_file in self.folder.glob("superlink.db*"):
            stale_file.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server_keys: ServerKeys | None = None
        if tls:
            self._server_keys = make_server_keys(self.folder / "keys", ["localhost", "127.0.0.1"], days=30)

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.stop()
        if self._warm is not None:
            self._warm.cleanup()

    # -- the server -------------------------------------------------------------------------------------------
    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self._port('superlink')}"

    @property
    def superlink(self) -> Boxed:
        """The SuperLink."""
        return self.processes.running["superlink"]

    def start_superlink(self) -> Boxed:
        """Start the SuperLink and wait until it answers. Started again, it goes on with its database."""
        for attempt in range(3):
            superlink = self._launch_superlink()
            try:
                self.processes.wait_for(
                    "the SuperLink to answer", self._answers, seconds=START_LIMIT, needed=[superlink]
                )
            except OperationError:
                # Between our choice of a free port and its use by the SuperLink somebody else may take it.
                taken = "address already in use" in superlink.output().lower()
                if attempt == 2 or not taken or self.processes.running.keys() != {"superlink"}:
                    raise
                self._ports.pop("superlink")
                continue
            break
        self._write_connection()
        return superlink

    def _launch_superlink(self) -> Boxed:
        command = [
            flower_command("flower-superlink"), "--host", "127.0.0.1", "--port", str(self._port("superlink")),
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
        context = ssl.create_default_context(cafile=str(self._server_keys.authority)) if self._server_keys else None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        scheme = "http" if context is None else "https"
        try:
            with urllib.request.build_opener(*handlers).open(f"{scheme}://{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except ssl.SSLCertVerificationError:
            raise  # somebody else's server, or broken keys: waiting will not help
        except (urllib.error.URLError, OSError):
            return False

    # -- the sites --------------------------------------------------------------------------------------------
    def key_of(self, site: int) -> NodeKey:
        """The key of a site, made when first asked for."""
        if site not in self._keys:
            self._keys[site] = make_node_key(self.folder / "keys", f"site{site}")
        return self._keys[site]

    def register(self, *sites: int) -> None:
        """Let the SuperLink know the keys of sites; without TLS there are none."""
        if not self.tls:
            return
        calls = [  # side by side: each takes seconds, most of it to start
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
    ) -> Boxed:
        """Start a site's SuperNode; does not wait for it.

        Args:
            site: Its number.
            config: The node config.
            register: Whether its key is registered before, if it was not yet.
            program: Instead of ``flower-supernode``; then without our warm process.
            address: Where the site looks for the SuperLink, e.g. at a reverse proxy; left out, where it listens.
        """
        name = f"site{site}"
        command = [
            *(program or [flower_command("flower-supernode")]),
            "--superlink", address or self.address, "--port", str(self._port(name)),
            "--node-config", self._config_file(name, config),
            # Not forever: a SuperNode without a SuperLink ends by itself.
            "--max-wait-time", str(START_LIMIT),
        ]  # fmt: skip
        if self._server_keys is None:
            command += ["--insecure"]
        else:
            if register and site not in self._keys:
                self.register(site)
            command += ["--root-certificates", str(self._server_keys.authority)]
            command += ["--auth-supernode-private-key", str(self.key_of(site).private)]
        return self._start(name, command, variables={} if program else self._warm_variables())

    def _warm_variables(self) -> dict[str, str]:
        """What makes a SuperNode use the warm process, which is started when first asked for."""
        if self._warm is None:
            return {}
        folder = Path(self._warm.name)
        started = self.processes.running.get("warm")
        if started is None or started.exit_code is not None:
            self._start("warm", [sys.executable, "-m", "fedfa.flower.operate.warm", str(folder)])
        return {"PATH": warm_path(folder)}

    def joined(self, site: int) -> bool:
        """Whether the site's SuperNode has been let in since it was last started."""
        return "SuperNode ID:" in self.processes.running[f"site{site}"].output()

    def wait_for_site(self, site: int) -> None:
        """Until the site's SuperNode has been let in."""
        self.processes.wait_for(
            f"site {site} to join", lambda: self.joined(site), seconds=START_LIMIT,
            needed=[self.processes.running[f"site{site}"], self.superlink],
        )  # fmt: skip

    # -- runs -------------------------------------------------------------------------------------------------
    def submit(self, app: Path, run_config: Mapping[str, Value]) -> Boxed:
        """Submit a run; the process that comes back shows the run's log and ends with the run."""
        command = [flower_command("flwr"), "run", str(app.absolute()), CONNECTION, "--stream"]
        return self._start("run", [*command, "--run-config", self._config_file("run", run_config)], home="flwr")

    def flwr(self, *arguments: str) -> str:
        """Call the ``flwr`` command and return what it says.

        Raises:
            OperationError: It failed or took too long.
        """
        return self._finish_call(self._start_call("flwr", *arguments))

    def _start_call(self, name: str, *arguments: str) -> Boxed:
        return self._start(name, [flower_command("flwr"), *arguments], home="flwr")

    def _finish_call(self, call: Boxed) -> str:
        code = call.wait(CALL_LIMIT)
        if code is None:
            call.kill()
        if code != 0:
            how = f"did not end in {CALL_LIMIT:.0f} s" if code is None else "failed"
            raise OperationError(f"`{call.command}` {how}\n{last_words(call)}")
        return call.output()

    # -- inside -----------------------------------------------------------------------------------------------
    def _start(
        self, name: str, command: list[str], home: str | None = None, variables: Mapping[str, str] | None = None
    ) -> Boxed:
        place = self.folder / "homes" / (home or name)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self.folder / "logs" / f"{name}.log"
        return self.processes.start(name, command, log, private_environment(place, **self._others, **(variables or {})))

    def _port(self, name: str) -> int:
        """A free port, the same one at every call."""
        while name not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports.values():
                self._ports[name] = port
        return self._ports[name]

    def _write_connection(self) -> None:
        home = self.folder / "homes" / "flwr"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        trust: dict[str, Any] = {"insecure": True}
        if self._server_keys is not None:
            trust = {"root-certificates": str(self._server_keys.authority)}
        known = {"default": CONNECTION, CONNECTION: {"address": self.address, **trust}}
        write_atomically(home / "config.toml", tomli_w.dumps({"superlink": known}))

    def _config_file(self, name: str, values: Mapping[str, Value]) -> str:
        """Write a configuration; Flower reads files whose name ends with .toml, and in them values of any text."""
        path = self.folder / "configs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, tomli_w.dumps(dict(values)))
        return str(path)


def flower_command(name: str) -> str:
    """Where one of Flower's commands is; beside this Python first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedfaError(f"the command {name} is missing: pip install 'fedfa[flower]'")
    return found


def _find_commands() -> None:
    if sys.platform == "win32":
        raise FedfaError("Flower's SuperLink and SuperNode run on Linux and macOS; on Windows use WSL")
    for name in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr"):
        flower_command(name)
