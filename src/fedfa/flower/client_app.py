"""The site's side: a Flower ``ClientApp`` that runs fedfa's local loop.

====================  ==============================================================================================
``query.site``        announce the site (number; for own data also the number of samples and the input shape)
``train``             train one round for one client
``train.final_pass``  compute the contribution to the pass after the last round (CCVR …)
``query.secure_…``    stages of a secure sum; ``train.secure`` trains and sends the masked contribution
``evaluate``          test a model on the site's test data, with the site's personal layers if the algorithm has them
====================  ==============================================================================================
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedfa.flower.environment import disable_telemetry

disable_telemetry()
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

import fedfa
from fedfa.channel.channel import CHANNEL
from fedfa.errors import DataError, FederationError, FedfaError, RunError
from fedfa.experiment.build import ModelSource
from fedfa.experiment.protected import relied_on
from fedfa.flower.config import RunConfig
from fedfa.flower.messages import (
    Announcement,
    Instruction,
    SiteEvaluation,
    SiteResult,
    decode_instruction,
    decode_model,
    decode_plan,
    encode_announcement,
    encode_evaluation,
    encode_result,
)
from fedfa.flower.secure_site import Trained, announce_keys, send_masked, send_shares, share_secrets
from fedfa.flower.site import DataLoader, Site, open_site, own_dataset, own_number, require_model
from fedfa.flower.site_state import SiteState, state_directory
from fedfa.learning.client import MODEL, ClientResult, RoundPlan
from fedfa.learning.tensors import ComponentTensors

log = logging.getLogger("fedfa")

Handler = Callable[[Message, Context], Message]

FAILED = 1001
"""Code of errors that fedfa reports; Flower's own codes are small numbers."""
REQUIRE_MASKS = "require-masks"
"""Node config: whether the site refuses everything but secure sums, whatever the server's config says."""
REQUIRE_NOISE = "require-noise"
"""Node config: smallest noise multiplier that sites must add themselves for this one to take part."""
_CACHED_SITES = 8
"""Maximum number of cached sites per process; more than one only if a process serves several."""


def make_client_app(
    load_data: DataLoader | None = None, make_model: ModelSource | None = None, *, mods: Sequence[Mod] = ()
) -> ClientApp:
    """Make the site's app.

    Args:
        load_data: Returns the site's own data, given its node config: ``{"train": (x, y), "test": (x, y)}``, or another
            form that :func:`fedfa.flower.site.own_dataset` accepts. By default the site holds partition
            ``partition-id`` of the configured data set.
        make_model: Returns the network. Defaults to the configured one.
        mods: Flower's modifiers, applied to every message.
    """
    app = ClientApp(mods=list(mods))
    handler = _MessageHandler(load_data, make_model)
    app.query("site")(_reporting_errors(handler.announce))
    app.train()(_reporting_errors(handler.train))
    app.train("final_pass")(_reporting_errors(handler.train))
    app.evaluate()(_reporting_errors(handler.evaluate))
    app.query("secure_keys")(_reporting_errors(announce_keys))
    app.query("secure_shares")(_reporting_errors(share_secrets))
    app.train("secure")(_reporting_errors(lambda message, context: send_masked(message, context, handler.train_plan)))
    app.query("secure_unmask")(_reporting_errors(send_shares))
    return app


def _reporting_errors(handle: Handler) -> Handler:
    """Wrap a handler so that an error is reported to the server in one line."""

    def guarded(message: Message, context: Context) -> Message:
        try:
            return handle(message, context)
        except Exception as error:
            problem = str(error) if isinstance(error, FedfaError) else f"{type(error).__name__}: {error}"
            log.error("%s", problem, exc_info=not isinstance(error, FedfaError))
            return Message(Error(FAILED, problem), reply_to=message)

    return guarded


class _MessageHandler:
    """Handles the server's messages."""

    def __init__(self, load_data: DataLoader | None, make_model: ModelSource | None) -> None:
        self.load_data, self.make_model, self._first_message = load_data, make_model, True
        self._sites: OrderedDict[object, Site] = OrderedDict()

    def announce(self, message: Message, context: Context) -> Message:
        """Announce the site. Data are only loaded if they are the site's own."""
        number, sites = own_number(context.node_config), context.node_config.get("num-partitions")
        announcement = Announcement(number, None if sites is None else int(sites), fedfa.__version__)
        if self.load_data is not None:
            head = RunConfig(context.run_config).head
            dataset = own_dataset(self.load_data(context.node_config), require_model(self.make_model), head)
            run_config = RunConfig(context.run_config, own_data=True)
            announcement = replace(
                announcement,
                samples=min(1, len(dataset.train)) if run_config.masks else len(dataset.train),  # its number stays here
                input_shape=dataset.input_shape,
                integer_inputs=not dataset.train.is_image and not dataset.train.inputs.is_floating_point(),
            )
        return Message(encode_announcement(announcement), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train a round, or compute the contribution to the final pass."""
        started, age = time.perf_counter(), _process_age() if self._first_message else None
        self._first_message = False
        instruction, plan = decode_instruction(message.content), decode_plan(message.content)
        site, state = self._site(instruction, context), _state(instruction, context)
        _refuse_unmasked(site, context)
        client_state, lost = _load_client_state(state, instruction)
        prepared = time.perf_counter()
        (result,) = site.engine.train(plan, [site.client], lambda _: client_state)
        wire = None
        if (channel := site.experiment.channel) is not None:
            wire, kept = channel.encoded_result(result, plan, client_state.get(CHANNEL, {}))
            result = replace(result, client_state=kept)
        trained = time.perf_counter()
        keeps = _keep(state, instruction, plan, result)
        stages = {"prepare": prepared - started, "train": trained - prepared, "keep": time.perf_counter() - trained}
        stages |= {} if age is None else {"start": age}
        reply = SiteResult(replace(result, client_state={}), instruction.run, plan.round, keeps, lost, stages)
        return Message(encode_result(reply, wire), reply_to=message)

    def train_plan(self, message: Message, context: Context, plan: RoundPlan) -> Trained:
        """Train for a secure sum: nothing of the result leaves from here."""
        instruction = decode_instruction(message.content)
        site, state = self._site(instruction, context), _state(instruction, context)
        if not site.experiment.config.privacy.masks:
            raise FederationError("a secure sum needs contributions in fixed point: set privacy.masks = true")
        _refuse_too_little_noise(site, plan, context)
        client_state, lost = _load_client_state(state, instruction)
        (result,) = site.engine.train(plan, [site.client], lambda _: client_state)
        config, keeps = site.experiment.config, _keep(state, instruction, plan, result)
        return Trained(result, keeps, lost, relied_on(config, site.experiment.task.num_clients))

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate the model on the site's test data."""
        instruction = decode_instruction(message.content)
        model, broadcast = decode_model(message.content)
        site = self._site(instruction, context)
        _refuse_unmasked(site, context)
        client_state, _ = _load_client_state(_state(instruction, context), instruction)
        test = site.engine.test_samples(site.client)
        if len(test) == 0:
            raise DataError("this site has no test data; let load_data return 'test', or evaluate on the server")
        evaluation = site.engine.evaluate({**model, **client_state.get(MODEL, {})}, broadcast, site.client)
        by_class = tuple(test.labels.bincount(minlength=site.experiment.task.num_classes).tolist())
        by_domain: tuple[int, ...] = ()
        if evaluation.domain_accuracy and test.domains is not None:
            names = site.experiment.federation.dataset.domains
            by_domain = tuple(int((test.domains == names.index(name)).sum()) for name in evaluation.domain_accuracy)
        counted = SiteEvaluation(site.client, evaluation, by_class, by_domain)
        return Message(encode_evaluation(counted), reply_to=message)

    def _site(self, instruction: Instruction, context: Context) -> Site:
        """Open the site, once per process and client; fail if its network, data or code are not the server's."""
        key = (instruction.config, instruction.client, str(sorted(context.node_config.items())))
        if key not in self._sites:
            site = open_site(
                instruction.config, instruction.client, context.node_config, self.load_data, self.make_model
            )
            _check_origin(site, instruction, own_data=self.load_data is not None)
            self._sites[key] = site
            while len(self._sites) > _CACHED_SITES:
                self._sites.popitem(last=False)
        return self._sites[key]


def _process_age() -> float | None:
    """Seconds since the start of this process; None without ``/proc``.

    Reads ``/proc`` because psutil derives the start time from the boot time in whole seconds.
    """
    try:
        # Field 22 of proc(5) is the start time; the command name before it is in parentheses and may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def _keep(state: SiteState, instruction: Instruction, plan: RoundPlan, result: ClientResult) -> bool:
    """Store the client state after a round; return whether there is any."""
    # A client that clears its state must not find it again: once there was a version, an empty one counts too.
    keeps = not plan.final_pass and bool(result.client_state or instruction.versions)
    if keeps:
        state.save(plan.round + 1, result.client_state)
        state.keep_only([*instruction.versions, plan.round + 1])
    return keeps


def _refuse_unmasked(site: Site, context: Context) -> None:
    """Refuse to send anything of this site alone, where the run or the site's own config rules that out."""
    own = context.node_config
    if site.experiment.config.privacy.masks or own.get(REQUIRE_MASKS, False) or REQUIRE_NOISE in own:
        raise FederationError(
            "this site takes part in secure sums only (privacy.masks, or require-masks or require-noise in its node "
            "config), but the server asked for its own contribution or evaluation"
        )


def _refuse_too_little_noise(site: Site, plan: RoundPlan, context: Context) -> None:
    """Refuse less noise, or noise of another's, than the site's own config asks for."""
    if REQUIRE_NOISE not in context.node_config:
        return
    least, private = float(context.node_config[REQUIRE_NOISE]), site.experiment.config.privacy
    found = float(plan.broadcast["privacy"]["noise"]) if private.distributed else 0.0
    if found < least:
        raise FederationError(
            f"this site's node config has require-noise={least:g}, but the run has "
            + (f"a noise multiplier of {found:g}" if private.distributed else 'not privacy.noise_by = "clients"')
        )


def _state(instruction: Instruction, context: Context) -> SiteState:
    configured = context.node_config.get("state-dir")
    directory = state_directory(None if configured is None else str(configured))
    return SiteState(directory, instruction.run, instruction.client)


def _load_client_state(state: SiteState, instruction: Instruction) -> tuple[ComponentTensors, bool]:
    """Load the current version of the client state; the flag tells whether it is missing or damaged."""
    if not instruction.versions:
        return {}, False
    problem = f"the client state of round {instruction.versions[-1]} is missing in {state.directory}"
    try:
        client_state = state.load(instruction.versions[-1])
        if client_state is not None:
            return client_state, False
    except RunError as error:  # it is damaged
        problem = str(error)
    if not instruction.renew_lost_state:
        raise RunError(f"{problem}; restore it, or set federation.lost_state = renew")
    log.warning("%s; starting with empty state", problem)
    return {}, True


def _check_origin(site: Site, instruction: Instruction, own_data: bool) -> None:
    origin = site.experiment.origin()
    if own_data:  # the server cannot know them
        origin.pop("data")
    for what, fingerprint in origin.items():
        if instruction.origin.get(what, fingerprint) != fingerprint:
            raise FederationError(
                f"the {what} here is not the server's: its fingerprint is {fingerprint}, the server's "
                f"{instruction.origin[what]}; install the same version of fedfa (here {fedfa.__version__}) and use the "
                "same app and data"
            )


app = make_client_app()
