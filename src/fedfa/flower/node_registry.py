"""Mapping from clients to Flower's nodes. Node ids are random; clients are numbered by the sites' ``partition-id``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import fedfa
from fedfa.errors import FederationError
from fedfa.flower.messages import Announcement, BadMessageError, decode_announcement
from fedfa.flower.transport import PendingReplies, Transport

from flwr.app import RecordDict  # isort: skip  (after telemetry is disabled)

log = logging.getLogger("fedfa")

_QUERY_SECONDS = 120.0
"""How long a node may take to announce itself (it may have to load data) before it is asked again."""
_MOST_SAMPLES = 2**40
"""Largest plausible number of samples of a site."""


class NodeRegistry:
    """Keeps track of connected sites and queries new nodes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
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

    def sites(self) -> int | None:
        """Number of sites as announced by the sites.

        Raises:
            FederationError: The announcements contradict each other.
        """
        announced = {one.sites for one in self._announced.values() if one.sites is not None}
        if len(announced) > 1:
            raise FederationError(
                f"the sites do not agree on how many they are ({', '.join(map(str, sorted(announced)))}); set the same "
                "num-partitions at all sites, or set federation.sites"
            )
        return announced.pop() if announced else None

    def doubt(self, node: int) -> None:
        """Record that a node did not answer: another node may take over its client number."""
        self._doubtful.add(node)

    def trust(self, node: int) -> None:
        """Record that a node answered."""
        self._doubtful.discard(node)

    def refresh(self) -> None:
        """Update the connected nodes, query new ones and process announcements, without waiting."""
        nodes, now = self._transport.nodes(), time.monotonic()
        self.connected = {client: node for client, node in self.connected.items() if node in nodes}
        queried = {node for node, since in self._queried.items() if now < since + _QUERY_SECONDS}
        if new := nodes - self._announced.keys() - queried:
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
                self._check(site)
            except BadMessageError as error:
                log.warning("node %d is refused: %s", reply.node, error)
                self.problems[reply.node] = str(error)
                continue
            self.problems.pop(reply.node, None)
            if (other := self.connected.get(site.site)) is not None and other not in self._doubtful:
                log.warning("nodes %d and %d both claim site %d; the first is used", other, reply.node, site.site)
            self._announced[reply.node] = site
            self._register(reply.node, site)

    def _check(self, site: Announcement) -> None:
        if site.site < 0 or (site.sites is not None and site.site >= site.sites):
            raise BadMessageError(f"it claims to be site {site.site} of {site.sites}")
        if self.limit is not None and site.site >= self.limit:
            raise BadMessageError(f"it claims to be site {site.site}, but there are {self.limit}, numbered from 0")
        if site.version != fedfa.__version__:
            raise BadMessageError(f"it has fedfa {site.version}, the server {fedfa.__version__}; install the same")
        if self._announced and site.input_shape != self.input_shape:
            raise BadMessageError(f"it has {_inputs(site.input_shape)}, others have {_inputs(self.input_shape)}")
        if (site.samples is None) != (site.input_shape is None):
            raise BadMessageError("it announces only one of samples and input_shape")
        if site.samples is not None and not 0 <= site.samples <= _MOST_SAMPLES:
            raise BadMessageError(f"it announces {site.samples} samples")

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
            self.input_shape = site.input_shape


def _inputs(shape: tuple[int, ...] | None) -> str:
    return "a partition of a known data set" if shape is None else f"inputs of shape {list(shape)}"
