"""The server's side: a Flower ``ServerApp`` that drives the project's own round loop with sites as clients.

Run folder, checkpoints, resume, surveys and summaries are the simulator's: the loop is :func:`fedfa.studies.run.run`,
and only the engine is another one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.flower.environment import hush

hush()
from flwr.app import Context  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from fedfa.engines.engine import Engine  # noqa: E402
from fedfa.errors import FederationError, FedfaError, RunError  # noqa: E402
from fedfa.flower.directory import Directory  # noqa: E402
from fedfa.flower.engine import FlowerEngine  # noqa: E402
from fedfa.flower.logs import speak  # noqa: E402
from fedfa.flower.post import Post  # noqa: E402
from fedfa.flower.settings import FederationSettings, RunConfig  # noqa: E402
from fedfa.flower.site import DataLoader, outputs_of, own_test_data, require_model, without_data  # noqa: E402
from fedfa.learning.server import ServerState  # noqa: E402
from fedfa.studies.files import write_atomically  # noqa: E402
from fedfa.studies.run import RunResult, run  # noqa: E402
from fedfa.studies.settings import Settings  # noqa: E402
from fedfa.studies.setup import Laboratory, ModelMaker, assemble, prepare  # noqa: E402

log = logging.getLogger("fedfa")

RECORD = "federation.json"
"""In the run folder: the run's key on the sites' disks, and how many samples each site said it holds."""
RUNS_VARIABLE = "FEDFA_RUNS"


def make_server_app(make_model: ModelMaker | None = None, load_test_data: DataLoader | None = None) -> ServerApp:
    """The server's app.

    Args:
        make_model: Makes the network; left out, the one that the settings name.
        load_test_data: Gives test data from the run config, for evaluations on the server where sites bring their own
            data; in the forms of :func:`fedfa.flower.site.own_test_data`. Without it they evaluate on the sites.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        speak()
        try:
            federate(grid, context.run_config, context.run_id, make_model, load_test_data)
        except FedfaError as error:
            log.error("%s", error)
            raise

    return app


def federate(
    grid: Grid,
    run_config: dict[str, Any],
    run_id: int,
    make_model: ModelMaker | None = None,
    load_test_data: DataLoader | None = None,
) -> RunResult:
    """Find the sites, then train with them and record it; goes on with the run that the folder holds.

    Args:
        grid: Flower's way to the nodes.
        run_config: What the app's configuration says.
        run_id: Flower's number of the run; names the folder if nothing else does.
        make_model: See :func:`make_server_app`.
        load_test_data: See :func:`make_server_app`.
    """
    config = RunConfig(run_config)
    config.check()
    federation = config.federation
    out = run_folder(federation, run_id)
    post = Post(grid, federation.poll_seconds, federation.link_seconds)
    directory = Directory(post)
    sites = _gather(directory, federation)
    own_data = directory.input_shape is not None
    config = RunConfig(run_config, own_data=own_data)
    settings = config.settings(sites).with_own(network=make_model is not None, data=own_data)
    log.info("%s with %d sites (%d are here); record in %s", settings.algorithm.recipe, sites, len(directory.here), out)

    def laboratory(resolved: Settings) -> Laboratory:
        record = Record.open(out, directory)
        rules = federation
        if own_data:
            plain = _without_data(resolved, directory, make_model, load_test_data, run_config)
            if len(plain.federation.dataset.test) == 0 and rules.evaluation != "sites":
                log.warning("the server has no test data: models are evaluated on the sites")
                rules = rules.model_copy(update={"evaluation": "sites"})
        else:
            plain = prepare(resolved, model=make_model)

        def engine(lab: Laboratory) -> Engine:
            return FlowerEngine(lab, post, directory, rules, record.run)

        return SitesLaboratory(**vars(plain), make_engine=engine, announced=record.sizes if own_data else None)

    result = run(settings, out, resume=federation.resume, watch=_tell(settings, sites), laboratory=laboratory)
    log.info("accuracy %.2f %% after %d rounds", 100 * result.final_accuracy, settings.rounds)
    return result


@dataclass(frozen=True)
class SitesLaboratory(Laboratory):
    """What the server works with when the clients are sites."""

    make_engine: Callable[[Laboratory], Engine] = field(kw_only=True)
    announced: Callable[[int], np.ndarray] | None = field(kw_only=True)
    """Samples of each site as they said themselves; None where the server knows the split."""

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each client holds."""
        return super().sizes if self.announced is None else self.announced(len(self.federation))

    def engine(self, state: ServerState | None = None) -> Engine:
        """The one that reaches the sites."""
        return self.make_engine(self)


def run_folder(federation: FederationSettings, run_id: int) -> Path:
    """Where the run is recorded; a relative path is below ``FEDFA_RUNS``, where that is set."""
    base = Path(os.environ.get(RUNS_VARIABLE, "")).expanduser()
    return base / (federation.run_folder or f"runs/flower-{run_id}")


def _gather(directory: Directory, federation: FederationSettings) -> int:
    """Wait for the sites: for all of them, or when the time is over for enough."""

    def number() -> int | None:
        return federation.sites or directory.sites()

    def all_here() -> bool:
        known = number()
        return known is not None and len(directory.here) >= known

    if not directory.wait_for(all_here, federation.wait_seconds):
        known, here = number(), len(directory.here)
        if known is None or here < max(1, math.ceil(federation.quorum * known)):
            wanted = "as many as num-partitions in their node config says" if known is None else str(known)
            refused = "".join(f" Node {node}: {why}." for node, why in sorted(directory.problems.items()))
            raise FederationError(
                f"{here} sites said who they are within {federation.wait_seconds:g} s, but {wanted} are expected and a "
                f"share of {federation.quorum:g} is needed; start the SuperNodes, give each --node-config "
                f"'partition-id=I num-partitions=N', or raise federation.wait_seconds.{refused}"
            )
        log.warning("going on with %d of %d sites", here, known)
    known = number()
    assert known is not None
    if strange := sorted(client for client in directory.here if client >= known):
        raise FederationError(f"there are {known} sites, but some say they are number {strange}; count from 0")
    directory.limit = known  # whoever comes later must fit too
    return known


def _without_data(
    settings: Settings,
    directory: Directory,
    make_model: ModelMaker | None,
    load_test_data: DataLoader | None,
    run_config: dict[str, Any],
) -> Laboratory:
    """What the server works with when the sites bring their own data."""
    maker = require_model(make_model)
    test = None if load_test_data is None else own_test_data(load_test_data(run_config), maker, settings.model.head)
    assert directory.input_shape is not None
    example = torch.zeros(2, *directory.input_shape)
    classes = outputs_of(maker, settings.model.head)
    return assemble(settings, without_data(test, classes, example, settings.data.clients or 1), maker)


class Record:
    """What the run folder knows of the sites.

    Args:
        path: The run folder.
        directory: Knows the sites that are there.
        run: The run's key.
        samples: Samples by site, from before.
    """

    def __init__(self, path: Path, directory: Directory, run: str, samples: dict[int, int]) -> None:
        self.path, self.run, self._directory, self._samples = path, run, directory, samples

    @classmethod
    def open(cls, path: Path, directory: Directory) -> Record:
        """Read it, or begin it with a new key.

        Raises:
            RunError: It is damaged.
        """
        file = path / RECORD
        if not file.exists():
            record = cls(path, directory, secrets.token_hex(16), {})
            record._write()
            return record
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            key, samples = content["run"], {int(site): int(count) for site, count in content["samples"].items()}
            if not re.fullmatch(r"[0-9a-f]{32}", key):
                raise ValueError(f"{key!r} is no key")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{file} is damaged ({error}); put back a copy, or choose another run folder") from None
        return cls(path, directory, key, samples)

    def sizes(self, clients: int) -> np.ndarray:
        """Samples of each site; one where nothing is known yet, so that it can be drawn when it comes."""
        known = {**self._samples, **self._directory.samples}
        if known != self._samples:
            self._samples = known
            self._write()
        return np.array([known.get(client, 1) for client in range(clients)], dtype=np.int64)

    def _write(self) -> None:
        samples = {str(site): count for site, count in sorted(self._samples.items())}
        write_atomically(self.path / RECORD, json.dumps({"run": self.run, "samples": samples}, indent=2) + "\n")


def _tell(settings: Settings, sites: int) -> Callable[[dict[str, Any]], None]:
    def tell(record: dict[str, Any]) -> None:
        accuracy = "not evaluated" if record["accuracy"] is None else f"accuracy {100 * record['accuracy']:.2f} %"
        what = "survey" if record.get("survey") else f"round {record['round']}/{settings.rounds}"
        log.info(
            "%s: %s, %d of %d sites, %.1f s", what, accuracy, len(record["cohort"]), sites, record["train_seconds"]
        )

    return tell


app = make_server_app()
