"""Secure sums between real processes under attack: sites killed at every stage, a server's memory that is searched.

The apps of these tests are the built-in one with a modifier at the sites that stops at a chosen message until a file
appears, so that what happens meanwhile does not depend on timing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedfa.experiment.files import load_tensors
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.new_app import write_app
from fedfa.flower.secure_messages import KEYS, SHARES, TRAIN, UNMASK
from tests.flower import real
from tests.flower.test_faults_real import command_of, restarted

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SITES = 4
VICTIM = 3
RULES: dict[str, Value] = {"quorum": 0.5, "grace_seconds": 5.0, "round_seconds": 120.0, "evaluation": "server"}

STOPPING = '''
"""Site {site} says in a file that it has received a message of one kind, and waits; every site notes its updates."""

import time
from pathlib import Path

import fedfa.flower.client_app as sites
from fedfa.experiment.files import save_tensors
from fedfa.flower import make_client_app, make_server_app

FOLDER = Path({folder!r})
opened = sites._MessageHandler._site


def noting(self, instruction, context):
    site = opened(self, instruction, context)
    if "train" not in vars(site.engine):
        train = site.engine.train

        def noted(plan, clients, client_state):
            for result in train(plan, clients, client_state):
                tensors = {{
                    f"{{group}}:{{name}}": value
                    for group, entry in result.contribution.items() for name, value in entry.tensors.items()
                }}
                save_tensors(FOLDER / f"update{{result.client}}-{{plan.round}}.safetensors", tensors)
                yield result

        site.engine.train = noted
    return site


sites._MessageHandler._site = noting


def stop(message, context, call_next):
    kind, folder = message.metadata.message_type, FOLDER
    if context.node_config["partition-id"] == {site} and kind in {kinds!r}:
        number = len(list(folder.glob("reached*")))
        (folder / f"reached{{number}}").touch()
        while not (folder / f"go{{number}}").exists():
            time.sleep(0.05)
    return call_next(message, context)


client = make_client_app(mods=[stop])
server = make_server_app()
'''


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, states: Path) -> Iterator[LocalFederation]:
    with LocalFederation(tmp_path_factory.mktemp("federation")) as started:
        real.start(started, SITES, data_dir, states)
        yield started


def stopping_app(folder: Path, site: int, *kinds: str) -> Path:
    """An app whose site stops at messages of these kinds; it notes in ``folder / "notes"``."""
    (folder / "notes").mkdir()
    write_app(folder / "app")
    text = STOPPING.format(site=site, kinds=kinds, folder=str(folder / "notes"))
    (folder / "app" / "site_app.py").write_text(text)
    return folder / "app"


@pytest.mark.parametrize("stage", [KEYS, SHARES, TRAIN, UNMASK])
def test_a_site_killed_at_any_stage_does_not_stop_the_run(
    stage: str, federation: LocalFederation, states: Path, data_dir: Path, tmp_path: Path
) -> None:
    """kill −9 of SuperNode and ClientApp after the site received the stage's message and before it answered.

    Of four sites all must stay for an attempt. Lost before stage 2 ended, the site is not in the sum; lost later, the
    attempt fails without a sum and is repeated with new keys by the other three.
    """
    real.until_joined(federation, VICTIM, real.site_config(VICTIM, SITES, data_dir, states), restarted)
    config = real.quick_settings("fedfa", 2, SITES)
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"masks": True})})
    app, out = stopping_app(tmp_path, VICTIM, stage), tmp_path / "run"
    started = real.submit(federation, config, out, data_dir, app, **RULES)
    real.until(lambda: (tmp_path / "notes" / "reached0").exists(), f"{stage} at site {VICTIM}", started)
    victim = federation.processes.running[f"site{VICTIM}"]
    victim.kill()
    assert not victim.pids()
    real.finish(started, out)
    assert [sorted(record["cohort"]) for record in real.metrics(out)] == [[0, 1, 2]] * 2
    assert all(bool(value.isfinite().all()) for value in load_tensors(out / "model.safetensors").values())


# -- what the server holds ----------------------------------------------------------------------------------------
def windows(update: Path) -> list[bytes]:
    """Parts of a site's update in every form that a server could hold it in: 32 and 64 bits, fixed point."""
    found = []
    for value in load_tensors(update).values():
        exact = value.double().flatten().numpy()
        forms = [exact.astype(np.float32), exact, np.rint(exact * 2**24).astype(np.int64)]
        for form in forms:
            data = form.tobytes()
            parts = [data[k : k + 32] for k in range(0, len(data) - 31, 32)]
            found += [
                part for part in parts if np.count_nonzero(np.frombuffer(part, form.dtype)) == 32 // form.itemsize
            ][:4]
    return found


def memory(process: int) -> Iterator[bytes]:
    """The readable and writable memory of a process."""
    with Path(f"/proc/{process}/mem").open("rb", 0) as file:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if (match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)) is not None:
                start, end = (int(part, 16) for part in match.groups())
                try:
                    file.seek(start)
                    yield file.read(end - start)
                except OSError:  # a page that nobody has touched, or that is gone
                    continue


def holders(federation: LocalFederation, out: Path, parts: list[bytes]) -> set[str]:
    """Where any of the parts is found: memory of the server's processes, SuperLink's database, logs, run directory."""
    found = set()
    for process in federation.superlink.pids():
        if any(part in block for block in memory(process) for part in parts):
            found.add("ServerApp's memory" if "flwr-serverapp" in command_of(process) else "SuperLink's memory")
    files = [*federation.folder.glob("superlink*"), *federation.folder.glob("**/*.log"), *out.glob("*")]
    for file in files:
        if file.is_file() and any(part in file.read_bytes() for part in parts):
            found.add(file.name)
    return found


@pytest.mark.parametrize("masks", [False, True], ids=["plain", "secure"])
def test_the_servers_memory_and_files_hold_no_single_update(
    masks: bool, federation: LocalFederation, states: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Searched while the server has the replies of three sites and waits for the fourth, in both of two rounds.

    The plain federation is the control: there the updates are found.
    """
    real.until_joined(federation, VICTIM, real.site_config(VICTIM, SITES, data_dir, states), restarted)
    config = real.quick_settings("fedfa", 2, SITES)
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"masks": masks})})
    kind = TRAIN if masks else "train"
    app, out, notes = stopping_app(tmp_path, VICTIM, kind), tmp_path / "run", tmp_path / "notes"
    started = real.submit(federation, config, out, data_dir, app, round_seconds=600.0, evaluation="server")
    seen = []
    for number in range(2):
        real.until((notes / f"reached{number}").exists, f"round {number + 1} at site {VICTIM}", started)
        updates = [notes / f"update{site}-{number}.safetensors" for site in range(SITES) if site != VICTIM]
        for update in updates:
            real.until(update.exists, f"the update {update.stem}", started)
        real.settle(lambda: sorted(federation.folder.glob("superlink.db*")), 3.0)  # until their replies have arrived
        noted = [*notes.glob("update*.safetensors")]
        parts = [part for file in noted for part in windows(file)]
        assert len(parts) > 30
        seen.append(holders(federation, out, parts))
        (notes / f"go{number}").touch()
    real.finish(started, out)
    if masks:
        assert seen == [set(), set()]
    else:
        assert all("ServerApp's memory" in places or "SuperLink's memory" in places for places in seen), seen
