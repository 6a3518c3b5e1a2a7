"""The engine whose clients are sites at the other end of a network.

The round loop is the simulator's (:mod:`fedfa.studies.run`); this engine only carries its plans to sites and their
results back. Where a simulator's client cannot fail, a site can: a round ends with those that answered in time with
something sound, if they are enough. Because clients return sums and weights, their mean is right whoever is missing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedfa.errors import FederationError
from fedfa.flower.checks import Expected, form_of, largest_norm
from fedfa.flower.directory import Directory
from fedfa.flower.messages import (
    BadMessageError,
    Instruction,
    SiteEvaluation,
    instruct,
    model_record,
    read_evaluation,
    read_result,
    received_records,
)
from fedfa.flower.post import Mailing, Post, Reply
from fedfa.flower.settings import FederationSettings
from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.random import stream
from fedfa.learning.tensors import PartTensors, Tensors
from fedfa.studies.setup import Laboratory

from flwr.app import RecordDict  # isort: skip  (after what hushes it)

log = logging.getLogger("fedfa")

RECEIPT = "site"
"""Under this name the run folder notes, instead of what a client keeps, which versions of it lie on the site's disk."""


@dataclass
class _Round:
    """One round under way."""

    plan: RoundPlan
    expected: Expected
    queue: list[int]
    """Clients in the order in which their results are handed on."""
    cohort: int
    """How many were asked for."""
    results: dict[int, ClientResult] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    """Clients whose results were handed on."""
    problems: dict[int, str] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    replaced: dict[int, int] = field(default_factory=dict)
    versions: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def good(self) -> int:
        return len(self.results) + len(self.done)

    def in_order(self) -> Iterator[ClientResult]:
        """Results that can be handed on: those before which no other can come any more."""
        while self.queue and self.queue[0] in self.results:
            client = self.queue.pop(0)
            self.done.append(client)
            yield self.results.pop(client)

    def rest(self) -> Iterator[ClientResult]:
        """What there is, in order; the others are left behind."""
        self.queue = [client for client in self.queue if client in self.results]
        yield from self.in_order()


class FlowerEngine:
    """Trains and evaluates on sites.

    Args:
        laboratory: What the server works with.
        post: Sends messages.
        directory: Knows the sites.
        settings: How they are waited for and trusted.
        run: The run's key on the sites' disks.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        post: Post,
        directory: Directory,
        settings: FederationSettings,
        run: str,
    ) -> None:
        self.lab, self.post, self.directory, self.settings, self.run = laboratory, post, directory, settings, run
        self.local = laboratory.local_engine()
        self._trainer = ClientTrainer(laboratory.task.model, laboratory.recipe, laboratory.roles, laboratory.device)
        dataset = laboratory.federation.dataset
        self._example = dataset.normalisation.batch(dataset.train.inputs[:2])
        self._settings_text = laboratory.settings.to_toml()
        self._origin = laboratory.origin()
        self._versions: dict[int, tuple[int, ...]] = {}
        self._remarks: dict[str, Any] = {}

    # -- training -----------------------------------------------------------------------------------------------
    def train(
        self, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`. May end with fewer results than clients.

        Raises:
            FederationError: Too few sites answered, however often it was tried.
        """
        started = time.monotonic()
        form = form_of(self._trainer, plan, self._example)
        expected = Expected(self.run, plan, form, self.lab.recipe, largest_norm(self.settings.norm_limit, plan.model))
        now = _Round(plan, expected, list(clients), len(clients))
        needed = max(1, math.ceil(self.settings.quorum * len(clients)))
        letters = _Letters(self, plan, kept)
        formed = time.monotonic()
        stages: dict[str, float] = {"form": formed - started}
        for attempt in range(1, self.settings.attempts + 1):
            if attempt > 1:
                log.warning(
                    "round %d: %d of %d updates, %d are needed; trying again (%d of %d)",
                    plan.round + 1, now.good(), now.cohort, needed, attempt, self.settings.attempts,
                )  # fmt: skip
                self._await(now, needed)
            else:
                self.directory.refresh()
            yield from self._attempt(now, letters, needed, stages)
            if now.good() >= needed:
                break
        else:
            reasons = "; ".join(f"site {client}: {why}" for client, why in sorted(now.problems.items()))
            raise FederationError(
                f"round {plan.round + 1}: {now.good()} of {now.cohort} sites sent a sound update, but "
                f"{needed} are needed (federation.quorum = {self.settings.quorum:g}). {reasons}. The run goes on from "
                "its last checkpoint when it is started again"
            )
        yield from now.rest()
        stages["round"] = time.monotonic() - started
        self._remark(now, clients, stages)

    def _await(self, now: _Round, needed: int) -> None:
        """Wait for as many of the missing sites as are needed; for a while."""

        def enough() -> bool:
            there = sum(client not in now.results and client in self.directory.here for client in now.queue)
            return now.good() + there >= needed

        self.directory.wait_for(enough, self.settings.wait_seconds)

    def _attempt(self, now: _Round, letters: _Letters, needed: int, stages: dict[str, float]) -> Iterator[ClientResult]:
        """Ask everyone who has not answered well yet, and hear them until all did or the time is over."""
        seconds = self.settings.round_seconds
        until = time.monotonic() + seconds
        begun = time.monotonic()
        asked: dict[int, int] = {}
        mailing = self._ask([c for c in now.queue if c not in now.results], now, letters, asked, seconds)
        stages["send"] = stages.get("send", 0.0) + time.monotonic() - begun
        over = until
        for reply in mailing.replies(until):
            if reply is None:
                if time.monotonic() >= over:
                    break
                continue
            client = asked.pop(reply.node)
            if self._take(reply, client, now, stages):
                self.directory.trust(reply.node)
                yield from now.in_order()
            elif self.settings.replace and (other := self._substitute(now)) is not None:
                now.queue.remove(client)
                now.queue.append(other)
                now.replaced[client] = other
                mailing.add(self._ask([other], now, letters, asked, max(1.0, until - time.monotonic())))
            if self.settings.grace_seconds and now.good() >= needed and over == until:
                over = min(until, time.monotonic() + self.settings.grace_seconds)
        for node in mailing.silent:
            client = asked[node]
            self._fail(now, client, node, f"no reply within {time.monotonic() - begun:.0f} s")
            self.directory.doubt(node)

    def _ask(
        self, clients: Sequence[int], now: _Round, letters: _Letters, asked: dict[int, int], seconds: float
    ) -> Mailing:
        """Send the plan to these clients, or to others in place of those that are not connected."""
        to_nodes: dict[int, RecordDict] = {}
        waiting = list(clients)
        while waiting:
            client = waiting.pop(0)
            node = self.directory.node_of(client)
            if node is not None:
                now.problems.pop(client, None)
                asked[node] = client
                to_nodes[node] = letters.to(client)
                continue
            self._fail(now, client, None, "not connected")
            if self.settings.replace and not now.plan.survey and (other := self._substitute(now)) is not None:
                now.queue[now.queue.index(client)] = other
                now.replaced[client] = other
                waiting.append(other)
        kind = "train.survey" if now.plan.survey else "train"
        return self.post.send(to_nodes, kind, str(now.plan.round + 1), seconds)

    def _substitute(self, now: _Round) -> int | None:
        """Another site for this round, drawn from those that are connected and have no part in it."""
        taken = {*now.queue, *now.done, *now.problems}
        free = sorted(c for c in self.directory.here if c not in taken and self._size(c) > 0)
        if not free or now.plan.survey:
            return None
        draw = stream(self.lab.settings.seed, "substitute", now.plan.round, len(now.replaced))
        return int(draw.choice(free))

    def _take(self, reply: Reply, client: int, now: _Round, stages: dict[str, float]) -> bool:
        """Check a reply; keep it if it is sound."""
        if reply.content is None:
            self._fail(now, client, reply.node, reply.problem)
            self.directory.doubt(reply.node)
            return False
        began = time.monotonic()
        try:
            site = read_result(reply.content)
            now.expected.check(site, client, self._size(client))
            stages["check"] = stages.get("check", 0.0) + time.monotonic() - began
        except BadMessageError as error:
            self._fail(now, client, reply.node, f"rejected: {error}")
            now.rejected.append(client)
            return False
        for stage, spent in (site.seconds or {}).items():
            stages[f"site {stage}"] = max(stages.get(f"site {stage}", 0.0), spent)
        if site.lost:
            log.warning(
                "round %d: site %d (node %d) lost what it kept and began anew", now.plan.round + 1, client, reply.node
            )
        receipt: PartTensors = {}
        if site.keeps:
            now.versions[client] = (*self._versions.get(client, ()), now.plan.round + 1)
            receipt = {RECEIPT: {"versions": torch.tensor(now.versions[client], dtype=torch.int64)}}
        now.results[client] = replace(site.result, kept=receipt)
        now.problems.pop(client, None)
        return True

    def _fail(self, now: _Round, client: int, node: int | None, why: str) -> None:
        now.problems[client] = why
        where = f"site {client}" if node is None else f"node {node} (site {client})"
        what = f"update of {where} {why}" if why.startswith("rejected") else f"{where}: {why}"
        log.warning("round %d: %s", now.plan.round + 1, what)

    def _size(self, client: int) -> int:
        return int(self.lab.sizes[client])

    # -- what sites keep ----------------------------------------------------------------------------------------
    def look_up(self, client: int, round: int, kept: Callable[[int], PartTensors]) -> None:
        """Read from the run folder which versions of its state a client has."""
        receipt = kept(client).get(RECEIPT, {}).get("versions")
        found = [] if receipt is None else [int(version) for version in receipt.tolist()]
        self._versions[client] = self._needed(found, round)

    def _needed(self, versions: Sequence[int], round: int) -> tuple[int, ...]:
        """Of these, the ones that may be asked for from this round on.

        A server that dies goes on from its last checkpoint, and wants its sites as they were then: so the newest
        version of the surest checkpoint's time stays, and all that came later.
        """
        every = self.lab.settings.checkpoint.every
        saved = round // every * every  # while this round goes on, this checkpoint is surely there
        settled = [version for version in versions if version <= saved]
        return (*settled[-1:], *(version for version in versions if version > saved))

    # -- evaluation ---------------------------------------------------------------------------------------------
    def evaluate(self, model: Tensors, received: PartTensors, client: int | None = None) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`: on the server's test data, on the sites' own, or on both.

        With both, the server's counts; what the sites say is remarked on.
        """
        if client is not None:
            return self.evaluate_each({client: model}, received)[client]
        if self.settings.evaluation == "server":
            return self.local.evaluate(model, received)
        self.directory.refresh()
        answers = self._ask_evaluations(sorted(self.directory.here), model, received, personal=False)
        if self.settings.evaluation == "sites":
            return combine(_some(answers))
        if answers:  # else the warnings tell why, and the server's own evaluation is what counts
            self._remarks.setdefault("federation", {})["sites_accuracy"] = combine(answers).accuracy
        return self.local.evaluate(model, received)

    def evaluate_each(self, models: Mapping[int, Tensors], received: PartTensors) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`: each site has its own tensors, and adds them itself."""
        if not models:
            return {}
        model = next(iter(models.values()))
        self.directory.refresh()
        found = _some(self._ask_evaluations(list(models), model, received, personal=True))
        answers = {one.client: one.evaluation for one in found}
        return {client: answers[client] for client in models if client in answers}

    def _ask_evaluations(
        self, clients: Sequence[int], model: Tensors, received: PartTensors, personal: bool
    ) -> list[SiteEvaluation]:
        records = {"model": model_record(model), **received_records(received)}
        asked = {node: client for client in clients if (node := self.directory.node_of(client)) is not None}
        letters = {
            node: RecordDict({**records, "plan": instruct(self.instruction(client, personal))})
            for node, client in asked.items()
        }
        seconds, grace = self.settings.round_seconds, self.settings.grace_seconds
        needed = max(1, math.ceil(self.settings.quorum * len(asked)))
        mailing = self.post.send(letters, "evaluate", "evaluation", seconds)
        found: dict[int, SiteEvaluation] = {}
        over = until = time.monotonic() + seconds
        for reply in mailing.replies(until):
            if grace and len(found) >= needed and over == until:
                over = min(until, time.monotonic() + grace)
            if reply is None:
                if time.monotonic() >= over:
                    break
                continue
            client = asked[reply.node]
            try:
                if reply.content is None:
                    raise BadMessageError(reply.problem)
                site = read_evaluation(reply.content, self.lab.task.num_classes)
                if site.client != client:
                    raise BadMessageError(f"it calls itself client {site.client}")
                found[client] = site
            except BadMessageError as error:
                log.warning("evaluation of node %d (site %d) is left out: %s", reply.node, client, error)
        for node in mailing.silent:
            log.warning("evaluation of node %d (site %d) is left out: no reply in time", node, asked[node])
        return [found[client] for client in clients if client in found]

    def instruction(self, client: int, with_state: bool = True) -> Instruction:
        """What a site must know besides the tensors."""
        return Instruction(
            run=self.run,
            client=client,
            settings=self._settings_text,
            origin=self._origin,
            versions=self._versions.get(client, ()) if with_state else (),
            renew_lost_state=self.settings.lost_state == "renew",
        )

    # -- the record ---------------------------------------------------------------------------------------------
    def _remark(self, now: _Round, clients: Sequence[int], stages: Mapping[str, float]) -> None:
        absent = [client for client in clients if client not in now.done]
        if not now.plan.survey:
            self._versions |= {client: now.versions[client] for client in now.done if client in now.versions}
        self._remarks = {
            "federation": {
                **({"absent": absent} if absent else {}),
                **({"rejected": now.rejected} if now.rejected else {}),
                **({"replaced": {str(old): new for old, new in now.replaced.items()}} if now.replaced else {}),
                "seconds": {stage: round(spent, 4) for stage, spent in stages.items()},
            }
        }

    def remarks(self) -> dict[str, Any]:
        """Who was absent, rejected or replaced, and where the time went."""
        said, self._remarks = self._remarks, {}
        return said

    def close(self) -> None:
        """Nothing to let go of: the grid is Flower's."""


def _some(answers: list[SiteEvaluation]) -> list[SiteEvaluation]:
    """These, if there are any."""
    if not answers:
        raise FederationError(
            "no site could evaluate the model; see the warnings above. With federation.evaluation = server the "
            "server does it, if it has test data"
        )
    return answers


class _Letters:
    """The messages of a round; arrays are made once and shared by all of them."""

    def __init__(self, engine: FlowerEngine, plan: RoundPlan, kept: Callable[[int], PartTensors]) -> None:
        self._engine, self._plan, self._kept = engine, plan, kept
        self._records = {"model": model_record(plan.model), **received_records(plan.received)}

    def to(self, client: int) -> RecordDict:
        self._engine.look_up(client, self._plan.round, self._kept)
        return RecordDict({**self._records, "plan": instruct(self._engine.instruction(client), self._plan)})


def combine(each: Sequence[SiteEvaluation]) -> Evaluation:
    """One evaluation from several sites', as if their test samples lay in one place.

    Example:
        >>> a = SiteEvaluation(0, Evaluation(1.0, 0.1, [1.0, None], {}), (3, 0))
        >>> b = SiteEvaluation(1, Evaluation(0.0, 0.5, [0.0, 0.0], {}), (1, 0))
        >>> combine([a, b]).accuracy
        0.75
    """
    classes: dict[int, list[tuple[float, int]]] = {}
    domains: dict[str, list[tuple[float, int]]] = {}
    for site in each:
        one = site.evaluation
        for number, (share, count) in enumerate(zip(one.class_accuracy, site.class_counts, strict=True)):
            classes.setdefault(number, []).append((share or 0.0, count))
        for (name, accuracy), count in zip(one.domain_accuracy.items(), site.domain_counts, strict=True):
            domains.setdefault(name, []).append((accuracy, count))
    by_class = [_share(parts) if any(count for _, count in parts) else None for parts in classes.values()]
    by_domain = {name: _share(domains[name]) for name in sorted(domains)}
    everything = _share([part for parts in classes.values() for part in parts])
    several = all(site.evaluation.domain_accuracy for site in each)
    sizes = [sum(site.class_counts) for site in each]
    loss = sum(size * site.evaluation.loss for size, site in zip(sizes, each, strict=True)) / sum(sizes)
    return Evaluation(sum(by_domain.values()) / len(by_domain) if several else everything, loss, by_class, by_domain)


def _share(parts: Sequence[tuple[float, int]]) -> float:
    """The share of hits in several parts together, each given by its own share and its number of samples.

    Hits are whole numbers, so rounding them brings back what was divided: the result is exact.
    """
    return sum(round(share * count) for share, count in parts) / sum(count for _, count in parts)
