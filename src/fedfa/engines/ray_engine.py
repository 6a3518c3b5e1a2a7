"""The engine that trains the clients of a round on a Ray cluster.

It runs the same jobs as :mod:`fedfa.engines.process_engine`, with **the same result, bit for bit**: clients depend on
the plan, their number and their client state, and results are yielded in the order of the cohort. (Bits also depend on
the processor: a warning names nodes with other vector instructions than this machine.)

A round's model goes into Ray's object store once, and from there to each node once; see :mod:`fedfa.engines.ray_actor`
for the data. An actor that dies is replaced and its client repeated; the second death is an error of that client. A
lost node does not count as a client's death: its clients are repeated on other nodes. Nodes that join are used.
"""

from __future__ import annotations

from typing import ClassVar

from fedfa.engines.local import LocalEngine
from fedfa.engines.process_engine import PooledEngine
from fedfa.engines.ray_cluster import ClusterError, Connection
from fedfa.engines.ray_pool import RayPool


class RayEngine(PooledEngine):
    """Clients in actors of a Ray cluster, which live as long as the engine.

    Args:
        local: Does the same in one process.
        address: Address of the cluster; see :class:`~fedfa.engines.ray_cluster.Connection`.
        most: Largest number of actors; a round has no use for more than its clients.

    Raises:
        ClusterError: The cluster cannot be used.
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
        """Node id of each actor that is ready."""
        return self._actors.nodes

    def close(self) -> None:
        """End the actors and disconnect from the cluster."""
        super().close()
        self._connection.close()
