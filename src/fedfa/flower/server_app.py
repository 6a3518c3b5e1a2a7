"""The server's side: a Flower ``ServerApp`` that drives fedfa's own round loop with sites as clients.

Run directory, checkpoints, resume, final passes and summaries are the simulator's: the loop is
:func:`fedfa.experiment.run.run`, with another engine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedfa.flower.environment import disable_telemetry

disable_telemetry()
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import add_exit_handler

from fedfa.data import Federation
from fedfa.engines.engine import Engine
from fedfa.errors import ConfigError, FederationError, FedfaError, RunError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.config import OWN, Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import read_json, write_json
from fedfa.experiment.run import RunResult, run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.flower.config import FederationConfig, RunConfig
from fedfa.flower.engine import CHECKPOINTS, FlowerEngine, RoundImpossibleError
from fedfa.flower.node_registry import NodeRegistry
from fedfa.flower.operate.keys import site_keys
from fedfa.flower.secure_engine import SecureFlowerEngine
from fedfa.flower.site import (
    DataLoader,
    outputs_of,
    own_test_data,
    refuse_common_statistics,
    require_model,
    without_data,
)
from fedfa.flower.transport import Transport
from fedfa.learning.round import TrainClients
from fedfa.protection.secure.encoding import SMALLEST

log = logging.getLogger("fedfa")

RECORD = "federation.json"
"""File in the run directory: the run's key on the sites' disks, and the announced number of samples per site."""
RUNS_VARIABLE = "FEDFA_RUNS"


def make_server_app(make_model: ModelSource | None = None, load_test_data: DataLoader | None = None) -> ServerApp:
    """Make the server's app.

    Args:
        make_model: Returns the network. Defaults to the configured one.
        load_test_data: Returns test data for evaluation on the server if sites bring their own data, given the run
            config; in the forms of :func:`fedfa.flower.site.own_test_data`. Without it the sites evaluate.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _log_with_flower()
        try:
            federate(grid, context.run_config, context.run_id, make_model, load_test_data)
        except FedfaError as error:
            # Flower prints a page about an unhandled exception; what the user needs to know comes last.
            add_exit_handler(partial(log.error, "%s", error), run_before_force_exit=True)
            raise

    return app


def _log_with_flower() -> None:
    """Send fedfa's log to Flower's handlers: the process's console and ``flwr run --stream``."""
    for handler in logging.getLogger("flwr").handlers:
        if handler not in log.handlers:
            log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def federate(
    grid: Grid,
    run_config: dict[str, Any],
    run_id: int,
    make_model: ModelSource | None = None,
    load_test_data: DataLoader | None = None,
) -> RunResult:
    """Find the sites, then train with them and record the run; resumes the run in the run directory.

    Args:
        grid: Flower's access to the nodes.
        run_config: The app's configuration.
        run_id: Flower's id of the run; the default name of the run directory.
        make_model: See :func:`make_server_app`.
        load_test_data: See :func:`make_server_app`.
    """
    config = RunConfig(run_config)
    config.check()
    federation = config.federation
    out = run_directory(federation, run_id)
    transport = Transport(grid, federation.poll_seconds, federation.link_seconds)
    registry = NodeRegistry(transport, site_keys(Path(federation.site_keys)) if federation.site_keys else None)
    sites = _wait_for_sites(registry, federation)
    own_data = registry.input_shape is not None
    config = RunConfig(run_config, own_data=own_data)
    settings = _name_own(config.config(sites), network=make_model is not None, data=own_data)
    if settings.privacy.masks and sites < SMALLEST:
        raise FederationError(
            f"privacy.masks = true needs {SMALLEST} sites or more, not {sites}: a sum of two tells each the other's"
        )
    connected = len(registry.connected)
    log.info("%s with %d sites (%d connected); run directory %s", settings.algorithm.name, sites, connected, out)

    def experiment(resolved: Config) -> Experiment:
        record = Record.open(out, registry)
        rules = federation
        data = None
        if own_data:
            data = _without_data(resolved, registry, make_model, load_test_data, run_config)
            if len(data.dataset.test) == 0 and (resolved.privacy.on or resolved.privacy.masks):
                raise FederationError(
                    "the server has no test data, and with [privacy] there are no evaluations on the sites' data; give "
                    "the server's app load_test_data"
                )
            if len(data.dataset.test) == 0 and rules.evaluation != "sites":
                log.warning("the server has no test data: models are evaluated on the sites")
                rules = rules.model_copy(update={"evaluation": "sites"})
        # Known before anything is built: the privacy budget depends on how many sites hold samples.
        announced = staticmethod(record.sizes) if own_data else None
        sites_experiment: type[SitesExperiment] = type("Sites", (SitesExperiment,), {"announced": announced})
        found = sites_experiment.from_config(resolved, model=make_model, data=data)
        assert isinstance(found, SitesExperiment)
        _check_evaluation(resolved, found.has_client_models, own_data, rules.evaluation)
        kind = SecureFlowerEngine if resolved.privacy.masks else FlowerEngine
        found.make_engine = lambda: kind(found, transport, registry, rules, record.run)
        return found

    resume = federation.resume
    while True:
        try:
            result = run(
                settings, out, resume=resume, watch=_log_round(settings, sites), experiment=experiment,
                checkpoints=CHECKPOINTS,
            )  # fmt: skip
            break
        except RoundImpossibleError as error:
            if (round := RunDirectory(out, CHECKPOINTS).roll_back()) is None:
                raise
            resume = True
            log.error("%s. Nobody can train from here: rolling back to the checkpoint of round %d", error, round)
    log.info("accuracy %.2f %% after %d rounds", 100 * result.final_accuracy, settings.rounds)
    return result


def _check_evaluation(config: Config, client_models: bool, own_data: bool, where: str) -> None:
    """Refuse what only a server that holds the samples can evaluate.

    Raises:
        ConfigError: With what to change.
    """
    if config.evaluation.metrics and (client_models or where != "server"):
        raise ConfigError(
            "evaluation.metrics need the scores of all test samples in one place, but here sites evaluate; leave them "
            'out, or set federation.evaluation = "server"'
        )
    asked = {"data.validation": config.data.validation, "evaluation.clients": config.evaluation.clients}
    for key, value in asked.items():
        if value not in (None, "none") and (client_models or own_data or where != "server"):
            raise ConfigError(
                f"{key} = {value!r} needs a server that knows the sites' data, as with a data set of fedfa and "
                'federation.evaluation = "server"; leave it out'
            )


class SitesExperiment(Experiment):
    """An experiment whose clients are sites."""

    simulation: ClassVar[bool] = False
    make_engine: Callable[[], Engine]
    announced: Callable[[int], np.ndarray] | None = None
    """Number of samples of each site as announced by the sites; None where the server knows the split."""

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client."""
        return super().sizes if self.announced is None else self.announced(len(self.federation))

    def carried(self, engine: Engine) -> TrainClients:
        """The engine's clients; its messages pass the channel by themselves."""
        return engine.train

    def engine(self) -> Engine:
        """The engine that reaches the sites."""
        return self.make_engine()


def _name_own(config: Config, *, network: bool, data: bool) -> Config:
    """The config with a network or data of the sites' own named as such: a path on the server means nothing to them."""
    changed: dict[str, Any] = {}
    if network:
        changed["model"] = config.model.model_copy(update={"name": OWN, "options": {}})
    if data:
        changed["data"] = config.data.model_copy(update={"name": OWN})
    return config.model_copy(update=changed)


def run_directory(federation: FederationConfig, run_id: int) -> Path:
    """Run directory; a relative path is resolved against ``FEDFA_RUNS``, if set."""
    base = Path(os.environ.get(RUNS_VARIABLE, "")).expanduser()
    return base / (federation.run_folder or f"runs/flower-{run_id}")


def _wait_for_sites(registry: NodeRegistry, federation: FederationConfig) -> int:
    """Wait for all sites, or until the deadline for a quorum; return the number of sites."""

    def number() -> int | None:
        return federation.sites or registry.sites()

    def all_connected() -> bool:
        known = number()
        return known is not None and registry.counts(known) >= known

    complete, known = registry.wait_for(all_connected, federation.wait_seconds), number()
    if known is not None:
        registry.settle(known)
    connected = len(registry.connected)
    if known is None or connected < max(1, math.ceil(federation.quorum * known)):
        wanted = "as many as num-partitions in their node config" if known is None else str(known)
        refused = "".join(f" Node {node}: {why}." for node, why in sorted(registry.problems.items()))
        raise FederationError(
            f"{connected} sites announced themselves within {federation.wait_seconds:g} s, but {wanted} are expected "
            f"and a fraction of {federation.quorum:g} is needed; start the SuperNodes, give each --node-config "
            f"'partition-id=I num-partitions=N' with the same N, or raise federation.wait_seconds.{refused}"
        )
    if not complete:
        log.warning("continuing with %d of %d sites", connected, known)
    return known


def _without_data(
    settings: Config,
    registry: NodeRegistry,
    make_model: ModelSource | None,
    load_test_data: DataLoader | None,
    run_config: dict[str, Any],
) -> Federation:
    """Set up the server for sites that bring their own data."""
    maker = require_model(make_model)
    test = None if load_test_data is None else own_test_data(load_test_data(run_config), maker, settings.model.head)
    assert registry.input_shape is not None
    refuse_common_statistics(settings)
    if settings.data.standardise != "none" and test is not None:
        raise ConfigError(
            "data.standardise: the server has no statistics of the sites' data, so it cannot standardise its test "
            "data; evaluate at the sites (evaluation = 'sites'), without load_test_data"
        )
    example = torch.zeros(2, *registry.input_shape, dtype=torch.int64 if registry.integer_inputs else torch.float32)
    classes = outputs_of(maker, settings.model.head)
    return without_data(test, classes, example, settings.data.clients or 1)


class Record:
    """The run directory's record of the sites."""

    def __init__(self, path: Path, registry: NodeRegistry, run: str, samples: dict[int, int]) -> None:
        self.path, self.run, self._registry, self._samples = path, run, registry, samples

    @classmethod
    def open(cls, path: Path, registry: NodeRegistry) -> Record:
        """Read the record, or create it with a new key.

        Raises:
            RunError: It is damaged.
        """
        file = path / RECORD
        if not file.exists():
            record = cls(path, registry, secrets.token_hex(16), {})
            record._write()
            return record
        try:
            content = read_json(file)
            key, samples = content["run"], {int(site): int(count) for site, count in content["samples"].items()}
            if not re.fullmatch(r"[0-9a-f]{32}", key):
                raise ValueError(f"{key!r} is not a key")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{file} is damaged ({error}); restore a copy, or choose another run directory") from None
        return cls(path, registry, key, samples)

    def sizes(self, clients: int) -> np.ndarray:
        """Samples of each site; 1 if unknown, so that the site can be drawn once it joins."""
        known = {**self._samples, **self._registry.samples}
        if known != self._samples:
            self._samples = known
            self._write()
        return np.array([known.get(client, 1) for client in range(clients)], dtype=np.int64)

    def _write(self) -> None:
        samples = {str(site): count for site, count in sorted(self._samples.items())}
        write_json(self.path / RECORD, {"run": self.run, "samples": samples})


def _log_round(settings: Config, sites: int) -> Callable[[dict[str, Any]], None]:
    def log_round(record: dict[str, Any]) -> None:
        accuracy = "not evaluated" if record["accuracy"] is None else f"accuracy {100 * record['accuracy']:.2f} %"
        what = "final pass" if record.get("final_pass") else f"round {record['round']}/{settings.rounds}"
        log.info(
            "%s: %s, %d of %d sites, %.1f s", what, accuracy, len(record["cohort"]), sites, record["train_seconds"]
        )

    return log_round


app = make_server_app()
