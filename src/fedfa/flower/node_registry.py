"""Mapping from clients to Flower's nodes. Node ids are random; clients are numbered by the sites' ``partition-id``."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import fedfa
from fedfa.flower.messages import MOST_SAMPLES, Announcement, BadMessageError, decode_announcement
from fedfa.flower.transport import PendingReplies, Transport

from flwr.app import RecordDict  # isort: skip  (after telemetry is disabled)

log = logging.getLogger("fedfa")

_QUERY_SECONDS = 120.0
"""How long a node may take to announce itself (it may have to load data) before it is asked again."""
ValueT = TypeVar("ValueT")


class NodeRegistry:
    """Keeps track of connected sites and queries new nodes.

    A node whose announcement is invalid, or contradicts that of most nodes, is left out; the others go on.

    Args:
        transport: Reaches the nodes.
        keys: Public key of each site; a node with another key is refused. Empty: whoever claims a number first has it.
    """

    def __init__(self, transport: Transport, keys: Mapping[int, bytes] | None = None) -> None:
        self._transport, self._keys = transport, keys or {}
        self._nodes: Mapping[int, bytes] = {}
        self._announced: dict[int, Announcement] = {}
        self._queried: dict[int, float] = {}
        self._pending = PendingReplies(transport, {}, [])
        self._doubtful: set[int] = set()
        self.problems: dict[int, str] = {}
        """Why nodes were refused; they are asked again later."""
        self.connected: dict[int, int] = {}
        """Node by client, for the sites that are connected now."""
        self.samples: dict[int, int] = {}
        """Announced number of samples by client."""
        self.limit: int | None = None
        """Number of sites, once known; larger client numbers are refused."""
        self.input_shape: tuple[int, ...] | None = None
        """Shape of an input if sites bring their own data; None if they hold partitions of a known data set."""
        self.integer_inputs = False
        """Whether such inputs are integers."""

    def sites(self) -> int | None:
        """Number of sites that most nodes announce; None if none does, or equally many announce different ones."""
        return _most_common(one.sites for one in self._announced.values() if one.sites is not None)

    def counts(self, sites: int) -> int:
        """Number of connected sites whose announcement fits this number of sites."""
        return sum(self._misfit(self._announced[node], sites) is None for node in self.connected.values())

    def settle(self, sites: int) -> None:
        """Fix the number of sites and the shape of inputs; refuse the nodes that announce others, now and later."""
        self.limit = sites
        fitting = [one for one in self._announced.values() if self._misfit(one, sites) is None]
        self.input_shape = _most_common(one.input_shape for one in fitting)
        self.integer_inputs = bool(_most_common(one.integer_inputs for one in fitting))
        for node, site in list(self._announced.items()):
            why = self._misfit(site, sites) or self._wrong_inputs(site)
            if why is not None:
                self._refuse(node, why)
        self.refresh()

    def _refuse(self, node: int, why: str) -> None:
        log.warning("node %d is refused: %s", node, why)
        self.problems[node] = why
        site = self._announced.pop(node, None)
        if site is not None and self.connected.get(site.site) == node:
            del self.connected[site.site]
            self.samples.pop(site.site, None)

    def doubt(self, node: int) -> None:
        """Record that a node did not answer: another node may take over its client number."""
        self._doubtful.add(node)

    def trust(self, node: int) -> None:
        """Record that a node answered."""
        self._doubtful.discard(node)

    def refresh(self) -> None:
        """Update the connected nodes, query new ones and process announcements, without waiting."""
        nodes, now = self._transport.nodes(), time.monotonic()
        self._nodes = nodes
        self.connected = {client: node for client, node in self.connected.items() if node in nodes}
        queried = {node for node, since in self._queried.items() if now < since + _QUERY_SECONDS}
        if new := nodes.keys() - self._announced.keys() - queried:
            requests = {node: RecordDict() for node in sorted(new)}
            self._pending.add(self._transport.send(requests, "query.site", "sites", _QUERY_SECONDS))
            self._queried |= dict.fromkeys(new, now)
        self._read_announcements()
        # A node that reconnects has announced itself before.
        for node, site in self._announced.items():
            if node in nodes:
                self._register(node, site)

    def wait_for(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Refresh until enough sites are connected; return False if time is up before."""
        deadline = time.monotonic() + seconds
        while True:
            self.refresh()
            if enough():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(max(self._transport.poll_seconds, 0.01), 1.0))

    def _read_announcements(self) -> None:
        for reply in self._pending.replies(deadline=time.monotonic()):
            if reply is None:
                continue
            try:
                if reply.content is None:
                    raise BadMessageError(reply.problem)
                site = decode_announcement(reply.content)
                self._check(reply.node, site)
            except BadMessageError as error:
                self._refuse(reply.node, str(error))
                continue
            self.problems.pop(reply.node, None)
            if (other := self.connected.get(site.site)) is not None and other not in self._doubtful:
                log.warning("nodes %d and %d both claim site %d; the first is used", other, reply.node, site.site)
            self._announced[reply.node] = site
            self._register(reply.node, site)

    def _check(self, node: int, site: Announcement) -> None:
        if site.site < 0 or (site.sites is not None and site.site >= site.sites):
            raise BadMessageError(f"it claims to be site {site.site} of {site.sites}")
        if self._keys and self._nodes.get(node) != self._keys.get(site.site):
            raise BadMessageError(f"it claims to be site {site.site}, whose key is another (federation.site_keys)")
        if site.version != fedfa.__version__:
            raise BadMessageError(f"it has fedfa {site.version}, the server {fedfa.__version__}; install the same")
        if (site.samples is None) != (site.input_shape is None):
            raise BadMessageError("it announces only one of samples and input_shape")
        if site.samples is not None and not 0 <= site.samples <= MOST_SAMPLES:
            raise BadMessageError(f"it announces {site.samples} samples")
        if self.limit is not None and (why := self._misfit(site, self.limit) or self._wrong_inputs(site)) is not None:
            raise BadMessageError(why)

    def _misfit(self, site: Announcement, sites: int) -> str | None:
        if site.site >= sites:
            return f"it claims to be site {site.site}, but there are {sites}, numbered from 0"
        if site.sites not in (None, sites):
            return f"it says there are {site.sites} sites (num-partitions), but there are {sites}"
        return None

    def _wrong_inputs(self, site: Announcement) -> str | None:
        if site.input_shape == self.input_shape:
            if site.integer_inputs == self.integer_inputs:
                return None
            return f"its inputs are {'integers' if site.integer_inputs else 'no integers'}, unlike those of others"
        return f"it has {_inputs(site.input_shape)}, others have {_inputs(self.input_shape)}"

    def _register(self, node: int, site: Announcement) -> None:
        other = self.connected.get(site.site)
        if other is not None and other != node:
            if other not in self._doubtful or node in self._doubtful:
                return
            log.warning("node %d replaces node %d as site %d", node, other, site.site)
        if other != node:
            log.info("site %d is node %d", site.site, node)
        self.connected[site.site] = node
        if site.samples is not None:
            self.samples[site.site] = site.samples


def _most_common(values: Iterable[ValueT]) -> ValueT | None:
    """The value that occurs most often; None if there is no such value, or more than one."""
    ranked = Counter(values).most_common(2)
    tied = len(ranked) == 2 and ranked[0][1] == ranked[1][1]
    return None if tied or not ranked else ranked[0][0]


def _inputs(shape: tuple[int, ...] | None) -> str:
    return "a partition of a known data set" if shape is None else f"inputs of shape {list(shape)}"
