"""The site's side: a Flower ``ClientApp`` that calls the one local loop of the project.

==================  ================================================================================================
``query.site``      who are you? (number, and for data of the site's own: how many samples, what shape)
``train``           one round for one client, from the plan it received
``train.survey``    what the client tells after the last round (CCVR …)
``evaluate``        test a model on the site's test data, with the site's own layers where the method has such
==================  ================================================================================================
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedfa.flower.environment import hush

hush()
from flwr.app import Context, Error, Message  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.typing import Mod  # noqa: E402

import fedfa  # noqa: E402
from fedfa.errors import DataError, FederationError, FedfaError, RunError  # noqa: E402
from fedfa.flower.messages import (  # noqa: E402
    Announcement,
    Instruction,
    SiteEvaluation,
    SiteResult,
    describe_evaluation,
    describe_result,
    describe_site,
    read_instruction,
    read_model,
    read_plan,
)
from fedfa.flower.process_age import since_process_start  # noqa: E402
from fedfa.flower.settings import RunConfig  # noqa: E402
from fedfa.flower.site import DataLoader, Site, open_site, own_dataset, own_number, require_model  # noqa: E402
from fedfa.flower.site_state import SiteState, state_directory  # noqa: E402
from fedfa.learning.client import MODEL  # noqa: E402
from fedfa.learning.tensors import PartTensors  # noqa: E402
from fedfa.studies.setup import ModelMaker  # noqa: E402

log = logging.getLogger("fedfa")

Answer = Callable[[Message, Context], Message]

FAILED = 1001
"""Code of an error that fedfa reports itself; Flower's own are small numbers."""
_READY_SITES = 8
"""How many sites a process keeps ready: one with Flower's usual process per message, more where they share one."""


def make_client_app(
    load_data: DataLoader | None = None, make_model: ModelMaker | None = None, *, mods: Sequence[Mod] = ()
) -> ClientApp:
    """The site's app.

    Args:
        load_data: Gives the site's own data from its node config: ``{"train": (x, y), "test": (x, y)}``, or what
            :func:`fedfa.flower.site.own_dataset` takes besides. Left out, the site holds part ``partition-id`` of the
            data set that the settings name.
        make_model: Makes the network; left out, the one that the settings name.
        mods: Flower's modifiers, around every answer.
    """
    app = ClientApp(mods=list(mods))
    desk = _Desk(load_data, make_model)
    app.query("site")(_telling_errors(desk.announce))
    app.train()(_telling_errors(desk.train))
    app.train("survey")(_telling_errors(desk.train))
    app.evaluate()(_telling_errors(desk.evaluate))
    return app


def _telling_errors(answer: Answer) -> Answer:
    """The same answer, but what goes wrong is told to the server in one line."""

    def guarded(message: Message, context: Context) -> Message:
        try:
            return answer(message, context)
        except Exception as error:
            problem = str(error) if isinstance(error, FedfaError) else f"{type(error).__name__}: {error}"
            log.error("%s", problem, exc_info=not isinstance(error, FedfaError))
            return Message(Error(FAILED, problem), reply_to=message)

    return guarded


class _Desk:
    """Answers messages."""

    def __init__(self, load_data: DataLoader | None, make_model: ModelMaker | None) -> None:
        self.load_data, self.make_model = load_data, make_model
        self._ready: OrderedDict[object, Site] = OrderedDict()

    def announce(self, message: Message, context: Context) -> Message:
        """Who the site is. For a part of a known set the server knows the rest, and no data are opened."""
        number, sites = own_number(context.node_config), context.node_config.get("num-partitions")
        me = Announcement(number, None if sites is None else int(sites), fedfa.__version__)
        if self.load_data is not None:
            head = RunConfig(context.run_config).head
            dataset = own_dataset(self.load_data(context.node_config), require_model(self.make_model), head)
            me = replace(me, samples=len(dataset.train), input_shape=dataset.input_shape)
        return Message(describe_site(me), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """A round, or the survey after the last one."""
        begun, started = since_process_start(), time.perf_counter()
        instruction, plan = read_instruction(message.content), read_plan(message.content)
        site, state = self._site(instruction, context), _state(instruction, context)
        kept, lost = _kept(state, instruction)
        prepared = time.perf_counter()
        (result,) = site.engine.train(plan, [site.client], lambda _: kept)
        trained = time.perf_counter()
        # Who cleared what it kept must not find it again: an empty version counts, once there was one.
        keeps = not plan.survey and bool(result.kept or instruction.versions)
        if keeps:
            state.save(plan.round + 1, result.kept)
            state.keep_only([*instruction.versions, plan.round + 1])
        stages = {"prepare": prepared - started, "train": trained - prepared, "keep": time.perf_counter() - trained}
        stages |= {} if begun is None else {"start": begun}
        reply = SiteResult(replace(result, kept={}), instruction.run, plan.round, keeps, lost, stages)
        return Message(describe_result(reply), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """The model on the site's test data."""
        instruction = read_instruction(message.content)
        model, received = read_model(message.content)
        site = self._site(instruction, context)
        kept, _ = _kept(_state(instruction, context), instruction)
        test = site.engine.test_samples(site.client)
        if len(test) == 0:
            raise DataError("this site has no test data; let load_data return a 'test' part, or evaluate on the server")
        evaluation = site.engine.evaluate({**model, **kept.get(MODEL, {})}, received, site.client)
        by_class = tuple(test.labels.bincount(minlength=site.laboratory.task.num_classes).tolist())
        by_domain: tuple[int, ...] = ()
        if evaluation.domain_accuracy and test.domains is not None:
            names = site.laboratory.federation.dataset.domains
            by_domain = tuple(int((test.domains == names.index(name)).sum()) for name in evaluation.domain_accuracy)
        counted = SiteEvaluation(site.client, evaluation, by_class, by_domain)
        return Message(describe_evaluation(counted), reply_to=message)

    def _site(self, instruction: Instruction, context: Context) -> Site:
        """The site, made ready once per process and client; refused if it works with other things than the server."""
        key = (instruction.settings, instruction.client, str(sorted(context.node_config.items())))
        if key not in self._ready:
            site = open_site(
                instruction.settings, instruction.client, context.node_config, self.load_data, self.make_model
            )
            _check_origin(site, instruction, own_data=self.load_data is not None)
            self._ready[key] = site
            while len(self._ready) > _READY_SITES:
                self._ready.popitem(last=False)
        return self._ready[key]


def _state(instruction: Instruction, context: Context) -> SiteState:
    given = context.node_config.get("state-dir")
    return SiteState(state_directory(None if given is None else str(given)), instruction.run, instruction.client)


def _kept(state: SiteState, instruction: Instruction) -> tuple[PartTensors, bool]:
    """What the client kept as of the version that counts, and whether it should be there but is not."""
    if not instruction.versions:
        return {}, False
    kept = state.load(instruction.versions[-1])
    if kept is not None:
        return kept, False
    problem = f"what this site kept after round {instruction.versions[-1]} is not in {state.folder}"
    if not instruction.renew_lost_state:
        raise RunError(f"{problem}; put it back, or set federation.lost_state = renew")
    log.warning("%s; it begins anew", problem)
    return {}, True


def _check_origin(site: Site, instruction: Instruction, own_data: bool) -> None:
    mine = site.laboratory.origin()
    if own_data:  # nobody else has them
        mine.pop("data")
    for what, mark in mine.items():
        if instruction.origin.get(what, mark) != mark:
            raise FederationError(
                f"the {what} here is not the server's: its fingerprint is {mark}, the server's "
                f"{instruction.origin[what]}; install the same version of fedfa (here {fedfa.__version__}) and use the "
                "same app and data"
            )


app = make_client_app()
