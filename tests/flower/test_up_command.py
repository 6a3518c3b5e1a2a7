"""`fedfa flower up`: its configuration, its errors, and that no process is left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedfa.errors import ConfigError, FedfaError, RunError
from fedfa.experiment.config import Config
from fedfa.flower.config import RunConfig
from fedfa.flower.operate.federation import LocalFederation
from fedfa.flower.operate.keys import make_node_key, make_server_keys
from fedfa.flower.operate.local_deployment import LocalDeployment, _exclusive, app_config_of, as_run_config
from fedfa.flower.operate.new_app import write_app

FEDFA = str(Path(sys.executable).parent / "fedfa")


@pytest.mark.parametrize("preset", ["digits-c2", "fmnist-c2", "mixed-digits-dir0.1", "cifar10-dir0.5-momentum"])
def test_the_run_config_means_exactly_the_settings_of_fedfa_run(preset: str) -> None:
    """Through Flower's flat configuration and back: lists, tables and texts with blanks come out as they went in."""
    layers = {"algorithm": {"name": "fedfa"}, "rounds": 7, "data": {"clients": 3, "dir": "/data/with blanks and 'x'"}}
    settings = Config.preset(
        preset, layers, {"cohort": {"clients": 3}, "model": {"name": "mlp", "options": {"hidden": [8, 4]}}}
    )
    assert RunConfig(as_run_config(settings)).config(sites=3) == settings


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunError, match="already holds a run; continue it with --resume"):
        LocalDeployment(tmp_path, tmp_path).run()


def test_a_second_local_deployment_in_the_same_directory_is_an_error(tmp_path: Path) -> None:
    """It would delete the keys and the database of the first one."""
    (tmp_path / "flower" / "keys").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    with _exclusive(tmp_path / "flower"), pytest.raises(RunError, match="another local deployment is using"):
        LocalDeployment(tmp_path, tmp_path).run()
    assert (tmp_path / "flower" / "keys").exists()
    with _exclusive(tmp_path / "flower"):
        pass  # free again


def test_a_missing_app_and_an_unknown_federation_key_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no Flower app"):
        app_config_of(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config.federation]\nquorum = 0.9\n")
    assert app_config_of(tmp_path)["federation"] == {"quorum": 0.9}
    with pytest.raises(ConfigError, match=r"unknown key federation.quorun.*did you mean 'quorum'"):
        LocalDeployment(tmp_path, tmp_path / "out", federation={"quorun": 0.5}).run()


def test_a_wrong_setting_of_a_custom_app_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    wrong = LocalDeployment(tmp_path / "app", tmp_path / "out", run_config={"settings": "local.lrr=0.1"})
    with pytest.raises(ConfigError, match=r"unknown key local.lrr"):
        wrong.run()
    assert not (tmp_path / "out").exists()


def test_keys_are_private_verify_and_are_never_overwritten(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    server, node = make_server_keys(tmp_path, ["fleet.example", "10.1.2.3"]), make_node_key(tmp_path, "site0")
    for secret in (server.key, node.private):
        assert secret.stat().st_mode & 0o077 == 0
    authority, certificate = (
        x509.load_pem_x509_certificate(p.read_bytes()) for p in (server.authority, server.certificate)
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    private = load_ssh_private_key(node.private.read_bytes(), None)
    public = load_ssh_public_key(node.public.read_bytes())
    assert private.public_key() == public
    with pytest.raises(FedfaError, match="never overwritten"):
        make_node_key(tmp_path, "site0")


def test_every_process_has_its_own_home_and_no_telemetry(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    with LocalFederation(tmp_path, tls=False, fork_server=False) as federation:
        script = "import os, json; print(json.dumps(dict(os.environ)))"
        one = federation._start("one", [sys.executable, "-c", script])
        assert one.wait(30) == 0
        seen = json.loads(one.output())
    assert seen["FLWR_HOME"] == str(tmp_path / "homes" / "one")
    assert (seen["FLWR_TELEMETRY_ENABLED"], seen["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert "127.0.0.1" in seen["NO_PROXY"]


def processes_about(text: str) -> list[str]:
    """Command lines of all processes that mention a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if line and (text in line or text in environment):
                found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_stopped_during_a_run_leaves_no_process_and_can_be_resumed(
    number: signal.Signals, tmp_path: Path, data_dir: Path
) -> None:
    pytest.importorskip("flwr")
    out = tmp_path / "run"
    common = [FEDFA, "flower", "up", "--out", str(out), "--data-dir", str(data_dir)]
    with (tmp_path / "said").open("w") as said:
        up = subprocess.Popen(
            [*common, "--preset", "digits-c2", "--sites", "2", "--rounds", "60"], stdout=said, stderr=said
        )
        try:
            deadline = time.monotonic() + 400
            while not (out / "checkpoint.safetensors").exists():
                assert up.poll() is None, (tmp_path / "said").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            up.send_signal(number)
            code = up.wait(60)
        finally:
            up.kill()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + (30 if number == signal.SIGKILL else 0)  # then nothing waits for the supervisors
    while (left := processes_about(str(out))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    if number == signal.SIGINT:
        assert "Resume with: fedfa flower up --resume --sites 2" in (tmp_path / "said").read_text().replace("\n", " ")
        done = len((out / "metrics.jsonl").read_text().splitlines())
        config = (out / "config.toml").read_text()
        assert "rounds = 60" in config
        (out / "config.toml").write_text(config.replace("rounds = 60", f"rounds = {done + 1}"))
        again = subprocess.run([*common, "--resume"], capture_output=True, text=True, timeout=600, check=False)
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"after {done + 1} rounds" in again.stdout
