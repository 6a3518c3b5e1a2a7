"""Which node is which client. Node ids are random numbers; clients are numbered by the sites' ``partition-id``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import fedfa
from fedfa.errors import FederationError
from fedfa.flower.messages import Announcement, BadMessageError, read_announcement
from fedfa.flower.post import Mailing, Post

from flwr.app import RecordDict  # isort: skip  (after what hushes it)

log = logging.getLogger("fedfa")

_ASK_SECONDS = 120.0
"""How long a node may take to say who it is (it may have to open its data); then it is asked again."""


class Directory:
    """Knows the sites that are there, and learns of new ones.

    Args:
        post: For asking nodes who they are.
        most_samples: More than this nobody is believed.
    """

    def __init__(self, post: Post, *, most_samples: int = 2**40) -> None:
        self._post, self._most_samples = post, most_samples
        self._known: dict[int, Announcement] = {}
        self._asked: dict[int, float] = {}
        self._open = Mailing(post, {}, [])
        self._doubtful: set[int] = set()
        self.problems: dict[int, str] = {}
        """Why nodes were not taken in; they are asked again after a while."""
        self.here: dict[int, int] = {}
        """Node by client, of those that are connected now."""
        self.samples: dict[int, int] = {}
        """Samples by client, as far as sites said."""
        self.limit: int | None = None
        """Numbers from here on are nobody's; set once it is known how many sites there are."""
        self.input_shape: tuple[int, ...] | None = None
        """Shape of an input, where the sites bring their own data; None where they hold parts of a known set."""

    def sites(self) -> int | None:
        """How many sites there are, as they say themselves.

        Raises:
            FederationError: They do not agree.
        """
        said = {one.sites for one in self._known.values() if one.sites is not None}
        if len(said) > 1:
            raise FederationError(
                f"the sites do not agree on how many they are ({', '.join(map(str, sorted(said)))}); give all the same "
                "num-partitions, or set federation.sites"
            )
        return said.pop() if said else None

    def node_of(self, client: int) -> int | None:
        """The node that is this client, if it is connected."""
        return self.here.get(client)

    def doubt(self, node: int) -> None:
        """Remember that a node did not answer: another one that claims its number is then believed."""
        self._doubtful.add(node)

    def trust(self, node: int) -> None:
        """Remember that a node answered."""
        self._doubtful.discard(node)

    def refresh(self) -> None:
        """Look who is there, ask those who are new, and hear who answered; waits for nobody."""
        connected, now = self._post.nodes(), time.monotonic()
        self.here = {client: node for client, node in self.here.items() if node in connected}
        asked = {node for node, since in self._asked.items() if now < since + _ASK_SECONDS}
        new = connected - self._known.keys() - asked
        if new:
            letters = {node: RecordDict() for node in sorted(new)}
            self._open.add(self._post.send(letters, "query.site", "sites", _ASK_SECONDS))
            self._asked |= dict.fromkeys(new, now)
        self._hear()
        # A node that went away and came back is known already.
        for node, site in self._known.items():
            if node in connected:
                self._enter(node, site)

    def wait_for(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Look again and again until enough sites are there; False if the time is over before."""
        until = time.monotonic() + seconds
        while True:
            self.refresh()
            if enough():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(min(max(self._post.poll_seconds, 0.01), 1.0))

    def _hear(self) -> None:
        for reply in self._open.replies(until=time.monotonic()):
            if reply is None:
                continue
            try:
                if reply.content is None:
                    raise BadMessageError(reply.problem)
                site = read_announcement(reply.content)
                self._check(site)
            except BadMessageError as error:
                log.warning("node %d is not taken in: %s", reply.node, error)
                self.problems[reply.node] = str(error)
                continue
            self.problems.pop(reply.node, None)
            if (other := self.here.get(site.site)) is not None and other not in self._doubtful:
                log.warning("nodes %d and %d both say they are site %d; the first counts", other, reply.node, site.site)
            self._known[reply.node] = site
            self._enter(reply.node, site)

    def _check(self, site: Announcement) -> None:
        if site.site < 0 or (site.sites is not None and site.site >= site.sites):
            raise BadMessageError(f"it calls itself site {site.site} of {site.sites}")
        if self.limit is not None and site.site >= self.limit:
            raise BadMessageError(f"it calls itself site {site.site}, but there are {self.limit}, numbered from 0")
        if site.version != fedfa.__version__:
            raise BadMessageError(f"it has fedfa {site.version}, the server {fedfa.__version__}; install the same")
        if self._known and site.input_shape != self.input_shape:
            raise BadMessageError(f"it has {_inputs(site.input_shape)}, others have {_inputs(self.input_shape)}")
        if (site.samples is None) != (site.input_shape is None):
            raise BadMessageError("it says only half of what data it has")
        if site.samples is not None and not 0 <= site.samples <= self._most_samples:
            raise BadMessageError(f"it says it holds {site.samples} samples")

    def _enter(self, node: int, site: Announcement) -> None:
        other = self.here.get(site.site)
        if other is not None and other != node:
            if other not in self._doubtful or node in self._doubtful:
                return
            log.warning("node %d takes the place of node %d as site %d", node, other, site.site)
        if other != node:
            log.info("site %d is node %d", site.site, node)
        self.here[site.site] = node
        if site.samples is not None:
            self.samples[site.site] = site.samples
            self.input_shape = site.input_shape


def _inputs(shape: tuple[int, ...] | None) -> str:
    return "part of a known data set" if shape is None else f"inputs of the shape {list(shape)}"
