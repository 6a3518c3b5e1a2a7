"""The engine whose clients are remote sites.

The round loop is the simulator's (:mod:`fedfa.experiment.run`); this engine sends its plans to sites and returns their
results. Unlike a simulated client a site can fail: a round completes with the sites that sent a valid update in time,
if they reach the quorum. Because clients return weighted sums, the mean is correct whichever sites are missing.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedfa.errors import ClientError, FederationError
from fedfa.experiment.experiment import Experiment
from fedfa.flower.checks import (
    ContributionSpec,
    UpdateValidator,
    contribution_spec,
    limit_share,
    resolve_norm_limit,
    spec_nbytes,
)
from fedfa.flower.config import FederationConfig
from fedfa.flower.messages import (
    BadMessageError,
    Instruction,
    SiteEvaluation,
    SiteResult,
    decode_evaluation,
    decode_result,
    encode_instruction,
    encode_tensors,
    payload_nbytes,
)
from fedfa.flower.node_registry import NodeRegistry
from fedfa.flower.site_evaluations import combine, limit_counts
from fedfa.flower.transport import PendingReplies, Reply, Transport
from fedfa.learning.aggregate import Contribution, flatten_contribution
from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.evaluate import EvaluatedOn, Evaluation
from fedfa.learning.random import stream
from fedfa.learning.tensors import ComponentTensors, Tensors

from flwr.app import ArrayRecord, RecordDict  # isort: skip  (after telemetry is disabled)

log = logging.getLogger("fedfa")

CHECKPOINTS = 3
"""Number of checkpoints that a federation keeps, to roll back from a round that made every site fail."""
_FEW = 3
"""Number of sites from which on one site's share is limited."""
_OUTLIER = 0.3
"""Distance from the median accuracy from which on a site's evaluation is pointed out."""
RECEIPT = "site"
"""Component name under which the run directory records, in place of client state, the versions on the site's disk."""


@dataclass
class _Round:
    """A round in progress."""

    plan: RoundPlan
    tensors: Mapping[str, ArrayRecord]  # the plan's tensors, encoded once for all sites
    client_state: Callable[[int], ComponentTensors]
    validator: UpdateValidator
    queue: list[int]  # clients whose results are due, in the order of the cohort
    cohort: int  # number of clients in the cohort
    sizes: Mapping[int, int]  # samples of each client of the cohort
    needed: int  # number of updates that make the quorum
    largest: int  # bytes that a contribution may have
    results: dict[int, ClientResult] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)  # clients whose results were yielded
    problems: dict[int, str] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    limited: dict[int, float] = field(default_factory=dict)  # factors by which weights were reduced
    silent: set[int] = field(default_factory=set)  # clients that did not answer the last attempt
    replaced: dict[int, int] = field(default_factory=dict)
    versions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage

    @property
    def updates(self) -> int:
        return len(self.results) + len(self.done)

    @property
    def has_quorum(self) -> bool:
        return self.updates >= self.needed

    def spend(self, stage: str, since: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + time.monotonic() - since

    def in_order(self) -> Iterator[ClientResult]:
        """Yield results up to the first client whose result is still missing."""
        while self.queue and self.queue[0] in self.results:
            client = self.queue.pop(0)
            self.done.append(client)
            yield self.results.pop(client)

    def rest(self) -> Iterator[ClientResult]:
        """Yield the remaining results in order and skip missing ones."""
        self.queue = [client for client in self.queue if client in self.results]
        yield from self.in_order()


class RoundImpossibleError(FederationError):
    """Nobody can train from the state that the round starts from: neither the server, nor any site that answered."""


class FlowerEngine:
    """Trains and evaluates on sites."""

    def __init__(
        self, experiment: Experiment, transport: Transport, registry: NodeRegistry, config: FederationConfig, run: str
    ) -> None:
        self.transport, self.registry, self.config, self.run = transport, registry, config, run
        self.experiment, self.channel = experiment, experiment.channel
        self.local = experiment.local_engine()
        self._trainer = ClientTrainer(experiment.task.model, experiment.algorithm, experiment.roles, experiment.device)
        dataset = experiment.federation.dataset
        self._example = dataset.normalisation.batch(dataset.train.inputs[:2])
        self._settings_text = experiment.config.to_toml()
        self._origin = experiment.origin()
        self._versions: dict[int, tuple[int, ...]] = {}
        self._remarks: dict[str, Any] = {}

    # -- training -----------------------------------------------------------------------------------------------
    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`. May yield fewer results than clients.

        Raises:
            FederationError: No attempt reached the quorum.
        """
        started = time.monotonic()
        spec = self._spec(plan)
        norm_limit = resolve_norm_limit(self.config.norm_limit, plan.model)
        model, broadcast = (plan.model, plan.broadcast) if self.channel is None else self.channel.encoded_plan(plan)
        now = _Round(
            plan, encode_tensors(model, broadcast), client_state,
            UpdateValidator(self.run, plan, spec, self.experiment.algorithm, norm_limit),
            list(clients), len(clients), {client: self._size(client) for client in clients},
            self._quorum(len(clients)), spec_nbytes(spec),
        )  # fmt: skip
        self.transport.expect(spec_nbytes(spec))
        now.spend("form", started)
        for attempt in range(1, self.config.attempts + 1):
            if attempt > 1:
                log.warning(
                    "round %d: %d of %d updates, %d are needed; retrying (%d of %d)",
                    plan.round + 1, now.updates, now.cohort, now.needed, attempt, self.config.attempts,
                )  # fmt: skip
                self._wait_for_quorum(now)
            else:
                self.registry.refresh()
            yield from self._attempt(now)
            if now.has_quorum:
                break
        else:
            reasons = "; ".join(f"site {client}: {why}" for client, why in sorted(now.problems.items()))
            hopeless = now.updates == 0 and len(now.problems) > 1 and not now.silent
            raise (RoundImpossibleError if hopeless else FederationError)(
                f"round {plan.round + 1}: {now.updates} of {now.cohort} sites sent a valid update, but "
                f"{now.needed} are needed (federation.quorum = {self.config.quorum:g}). {reasons}. Start the run again "
                "to continue from its last checkpoint"
            )
        yield from now.rest()
        now.spend("round", started)
        self._finish(now, clients)

    def _spec(self, plan: RoundPlan) -> ContributionSpec:
        """What a site's contribution must look like."""
        try:
            return contribution_spec(self._trainer, plan, self._example)
        except ClientError as error:
            raise RoundImpossibleError(f"the server itself cannot train from its state: {error}") from None

    def _quorum(self, clients: int) -> int:
        return max(1, math.ceil(self.config.quorum * clients))

    def _wait_for_quorum(self, now: _Round) -> None:
        """Wait until enough of the missing sites are connected, or until the deadline."""

        def enough() -> bool:
            connected = sum(client not in now.results and client in self.registry.connected for client in now.queue)
            return now.updates + connected >= now.needed

        self.registry.wait_for(enough, self.config.wait_seconds)

    def _attempt(self, now: _Round) -> Iterator[ClientResult]:
        """Send the plan to all sites without a valid update, and read replies until all answered or time is up."""
        started = time.monotonic()
        deadline = started + self.config.round_seconds
        clients: dict[int, int] = {}
        now.silent.clear()
        pending = self._send_plan([c for c in now.queue if c not in now.results], now, clients, deadline)
        now.spend("send", started)
        for reply in self._replies(pending, deadline, lambda: now.has_quorum):
            client = clients.pop(reply.node)
            if self._accept(reply, client, now):
                self.registry.trust(reply.node)
                yield from now.in_order()
            elif (other := self._substitute(now)) is not None:
                now.queue.remove(client)
                now.queue.append(other)
                now.replaced[client] = other
                pending.add(self._send_plan([other], now, clients, deadline))
        for node in pending.unanswered:
            self._fail(now, clients[node], node, f"no reply within {time.monotonic() - started:.0f} s")
            now.silent.add(clients[node])
            self.registry.doubt(node)

    def _replies(self, pending: PendingReplies, deadline: float, quorum: Callable[[], bool]) -> Iterator[Reply]:
        """Yield replies until the deadline, or until the grace period after the quorum was reached."""
        shortened = False
        end = deadline
        for reply in pending.replies(deadline):
            if reply is not None:
                yield reply
            if self.config.grace_seconds and not shortened and quorum():
                shortened, end = True, min(deadline, time.monotonic() + self.config.grace_seconds)
            if reply is None and time.monotonic() >= end:
                return

    def _send_plan(self, clients: Sequence[int], now: _Round, asked: dict[int, int], deadline: float) -> PendingReplies:
        """Send the plan to these clients, or to substitutes of those that are not connected."""
        requests: dict[int, RecordDict] = {}
        waiting = list(clients)
        while waiting:
            client = waiting.pop(0)
            node = self.registry.connected.get(client)
            if node is not None:
                now.problems.pop(client, None)
                asked[node] = client
                self._read_versions(client, now.client_state, now.plan.round)
                instruction = encode_instruction(self.instruction(client), now.plan)
                requests[node] = RecordDict({**now.tensors, "plan": instruction})
                continue
            self._fail(now, client, None, "not connected")
            now.silent.add(client)
            if (other := self._substitute(now)) is not None:
                now.queue[now.queue.index(client)] = other
                now.replaced[client] = other
                waiting.append(other)
        kind = "train.final_pass" if now.plan.final_pass else "train"
        return self.transport.send(requests, kind, str(now.plan.round + 1), max(1.0, deadline - time.monotonic()))

    def _substitute(self, now: _Round) -> int | None:
        """Draw a connected site that is not part of the round, if sites may be replaced."""
        if not self.config.replace or now.plan.final_pass:
            return None
        taken = {*now.queue, *now.done, *now.problems}
        free = sorted(c for c in self.registry.connected if c not in taken and self._size(c) > 0)
        if not free:
            return None
        draw = stream(self.experiment.config.seed, "substitute", now.plan.round, len(now.replaced))
        return int(draw.choice(free))

    def _accept(self, reply: Reply, client: int, now: _Round) -> bool:
        """Validate a reply and store its result; return whether it is valid."""
        if reply.content is None:
            self._fail(now, client, reply.node, reply.problem)
            self.registry.doubt(reply.node)
            return False
        began = time.monotonic()
        try:
            site = self._decoded(reply.content, now)
            now.validator.check(site, client, self._size(client))
            now.spend("check", began)
        except BadMessageError as error:
            self._fail(now, client, reply.node, f"rejected: {error}")
            now.rejected.append(client)
            return False
        for stage, spent in (site.seconds or {}).items():
            now.stages[f"site {stage}"] = max(now.stages.get(f"site {stage}", 0.0), spent)
        if site.lost:
            log.warning(
                "round %d: site %d (node %d) lost its client state and started with empty state",
                now.plan.round + 1, client, reply.node,
            )  # fmt: skip
        receipt: ComponentTensors = {}
        if site.keeps:
            now.versions[client] = (*self._versions.get(client, ()), now.plan.round + 1)
            receipt = {RECEIPT: {"versions": torch.tensor(now.versions[client], dtype=torch.int64)}}
        now.results[client] = replace(
            site.result, client_state=receipt, contribution=self._limited(now, client, site.result.contribution)
        )
        now.problems.pop(client, None)
        return True

    def _decoded(self, content: RecordDict, now: _Round) -> SiteResult:
        """What a site sent, out of the channel."""
        site = decode_result(content, now.largest)
        if self.channel is None or now.plan.final_pass:
            return site
        size, flat = (
            payload_nbytes(content.array_records["contribution"]),
            flatten_contribution(site.result.contribution),
        )
        try:
            return replace(site, result=self.channel.decoded_result(site.result, flat, size))
        except (KeyError, RuntimeError) as error:  # an unknown component, or a weight of another shape
            raise BadMessageError(f"the contribution does not fit ({error})") from None

    def _limited(self, now: _Round, client: int, contribution: Contribution) -> Contribution:
        """The contribution with no more than the largest share of the cohort's weight."""
        if len(now.sizes) < _FEW:
            return contribution
        others = sum(size for other, size in now.sizes.items() if other != client)
        limited, factor = limit_share(contribution, self._size(client), others, self.config.share_limit)
        if factor < 1:
            now.limited[client] = round(factor, 6)
            log.warning(
                "round %d: site %d has %d samples, the other %d sites %d: its weight is reduced to a share of %g "
                "(federation.share_limit)",
                now.plan.round + 1, client, self._size(client), len(now.sizes) - 1, others, self.config.share_limit,
            )  # fmt: skip
        return limited

    def _fail(self, now: _Round, client: int, node: int | None, why: str) -> None:
        now.problems[client] = why
        where = f"site {client}" if node is None else f"node {node} (site {client})"
        what = f"update of {where} {why}" if why.startswith("rejected") else f"{where}: {why}"
        log.warning("round %d: %s", now.plan.round + 1, what)

    def _size(self, client: int) -> int:
        return int(self.experiment.sizes[client])

    # -- versions of the client state -----------------------------------------------------------------------------
    def _read_versions(self, client: int, client_state: Callable[[int], ComponentTensors], round: int) -> None:
        """Read from the run directory which versions of its state a client has."""
        receipt = client_state(client).get(RECEIPT, {}).get("versions")
        found = [] if receipt is None else [int(version) for version in receipt.tolist()]
        self._versions[client] = self._needed_versions(found, round)

    def _needed_versions(self, versions: Sequence[int], round: int) -> tuple[int, ...]:
        """Versions that may be needed from this round on.

        A server that dies resumes from its last checkpoint and needs the sites' state as of then: so the newest version
        at the last certain checkpoint stays, and all later ones.
        """
        every = self.experiment.config.checkpoint.every
        # This checkpoint certainly exists during this round, and may be rolled back to.
        saved = max(0, (round // every - CHECKPOINTS + 1) * every)
        settled = [version for version in versions if version <= saved]
        return (*settled[-1:], *(version for version in versions if version > saved))

    # -- evaluation ---------------------------------------------------------------------------------------------
    def evaluate(
        self, model: Tensors, broadcast: ComponentTensors, client: int | None = None, on: EvaluatedOn = "test"
    ) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`: on the server's test data, on the sites' own, or on both.

        With both, the server's evaluation is returned and the sites' accuracy is added to the remarks.
        """
        if client is not None:
            return self.evaluate_each({client: model}, broadcast)[client]
        if self.config.evaluation == "server" or on == "validation":
            return self.local.evaluate(model, broadcast, on=on)
        self.registry.refresh()
        evaluations = self._site_evaluations(sorted(self.registry.connected), model, broadcast, personal=False)
        if self.config.evaluation == "sites":
            _require_any(evaluations)
        together = combine(self._bounded(evaluations)) if evaluations else None  # else the log has the reasons
        if together is not None and self.config.evaluation == "sites":
            return together
        if together is not None:
            self._remarks.setdefault("federation", {})["sites_accuracy"] = together.accuracy
        return self.local.evaluate(model, broadcast)

    def _bounded(self, evaluations: list[SiteEvaluation]) -> list[SiteEvaluation]:
        """The evaluations with bounded numbers of samples; those that stand out are logged and recorded."""
        share = self.config.share_limit if len(evaluations) >= _FEW else 1.0
        bounded = [limit_counts(one, evaluations, share) for one in evaluations]
        median = statistics.median(one.evaluation.accuracy for one in evaluations)
        for one, limited in zip(evaluations, bounded, strict=True):
            if limited is not one:
                log.warning(
                    "evaluation: site %d reports %d test samples, more than its share (federation.share_limit)",
                    one.client, sum(one.class_counts),
                )  # fmt: skip
            elif len(evaluations) >= _FEW and abs(one.evaluation.accuracy - median) > _OUTLIER:
                log.warning(
                    "evaluation: site %d reports an accuracy of %.2f %%, the median of the sites is %.2f %%",
                    one.client, 100 * one.evaluation.accuracy, 100 * median,
                )  # fmt: skip
        self._remarks.setdefault("federation", {})["site_accuracy"] = {
            str(one.client): one.evaluation.accuracy for one in evaluations
        }
        return bounded

    def evaluate_each(
        self, models: Mapping[int, Tensors], broadcast: ComponentTensors, on: EvaluatedOn = "test"
    ) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`: each site adds its own personal tensors."""
        if not models:
            return {}
        model = next(iter(models.values()))
        self.registry.refresh()
        evaluations = _require_any(self._site_evaluations(list(models), model, broadcast, personal=True))
        return {one.client: one.evaluation for one in evaluations}

    def _site_evaluations(
        self, clients: Sequence[int], model: Tensors, broadcast: ComponentTensors, personal: bool
    ) -> list[SiteEvaluation]:
        tensors = encode_tensors(model, broadcast)
        asked = {node: client for client in clients if (node := self.registry.connected.get(client)) is not None}
        requests = {
            node: RecordDict({**tensors, "plan": encode_instruction(self.instruction(client, personal))})
            for node, client in asked.items()
        }
        needed, seconds = self._quorum(len(asked)), self.config.round_seconds
        pending = self.transport.send(requests, "evaluate", "evaluation", seconds)
        found: dict[int, SiteEvaluation] = {}
        for reply in self._replies(pending, time.monotonic() + seconds, lambda: len(found) >= needed):
            client = asked[reply.node]
            try:
                if reply.content is None:
                    raise BadMessageError(reply.problem)
                site = decode_evaluation(reply.content, self.experiment.task.num_classes)
                if site.client != client:
                    raise BadMessageError(f"it is from client {site.client}")
                found[client] = site
            except BadMessageError as error:
                log.warning("evaluation of node %d (site %d) is left out: %s", reply.node, client, error)
        for node in pending.unanswered:
            log.warning("evaluation of node %d (site %d) is left out: no reply in time", node, asked[node])
        return [found[client] for client in clients if client in found]

    def instruction(self, client: int, with_state: bool = True) -> Instruction:
        """Instruction for a site."""
        return Instruction(
            run=self.run,
            client=client,
            config=self._settings_text,
            origin=self._origin,
            versions=self._versions.get(client, ()) if with_state else (),
            renew_lost_state=self.config.lost_state == "renew",
        )

    # -- the record ---------------------------------------------------------------------------------------------
    def _finish(self, now: _Round, clients: Sequence[int]) -> None:
        absent = [client for client in clients if client not in now.done]
        if not now.plan.final_pass:
            self._versions |= {client: now.versions[client] for client in now.done if client in now.versions}
        self._remarks = {
            "federation": {
                **({"absent": absent} if absent else {}),
                **({"rejected": now.rejected} if now.rejected else {}),
                **({"limited": {str(one): factor for one, factor in now.limited.items()}} if now.limited else {}),
                **({"replaced": {str(old): new for old, new in now.replaced.items()}} if now.replaced else {}),
                "seconds": {stage: round(spent, 4) for stage, spent in now.stages.items()},
            }
        }

    def remarks(self) -> dict[str, Any]:
        """Absent, rejected and replaced sites, and time by stage."""
        remarks, self._remarks = self._remarks, {}
        return remarks

    def close(self) -> None:
        """Do nothing: Flower owns the grid."""


def _require_any(evaluations: list[SiteEvaluation]) -> list[SiteEvaluation]:
    if not evaluations:
        raise FederationError(
            "no site could evaluate the model; see the warnings above. With federation.evaluation = server the "
            "server does it, if it has test data"
        )
    return evaluations
