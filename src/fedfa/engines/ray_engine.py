"""The engine that trains the clients of a round on a Ray cluster.

The same jobs as those of :mod:`fedfa.engines.workers`, on machines instead of processes, and **the same result, bit for
bit**: clients depend on the plan, their number and what they kept; results are handed on in the order of the cohort.
(Bits also depend on the processor: nodes that compute with other instructions than this machine are named in a
warning.)

A round's model goes into Ray's object store once and from there to each node once; see
:mod:`fedfa.engines.ray_actor` for the data. An actor that dies is replaced and its client repeated; the second time it
is that client's error. A node that is lost takes no client's chance: its clients are repeated elsewhere. Nodes that
join are used.
"""

from __future__ import annotations

from typing import ClassVar

from fedfa.engines.local import LocalEngine
from fedfa.engines.ray_cluster import ClusterError, Connection
from fedfa.engines.ray_pool import RayPool
from fedfa.engines.workers import PooledEngine


class RayEngine(PooledEngine):
    """Clients in actors of a Ray cluster, which live as long as the engine.

    Args:
        local: Does the same in one process.
        address: The cluster's; see :class:`~fedfa.engines.ray_cluster.Connection`.
        most: So many actors at most: no more than clients in a round have something to do.

    Raises:
        ClusterError: The cluster cannot be used; says why.
    """

    where: ClassVar[str] = "on the Ray cluster"

    def __init__(self, local: LocalEngine, address: str | None, most: int) -> None:
        if local.device.type != "cpu":
            raise ClusterError(
                f'the engine "ray" trains on the nodes\' processors, not on {local.device.type}: set device = "cpu"'
            )
        self._connection = Connection(address)
        try:
            self._actors = RayPool(local, self._connection, most)
        except BaseException:
            self._connection.close()
            raise
        super().__init__(local, self._actors)

    @property
    def nodes(self) -> list[str]:
        """For each actor that can work, the id of its node."""
        return self._actors.nodes

    def close(self) -> None:
        """End the actors, and let go of the cluster."""
        super().close()
        self._connection.close()
