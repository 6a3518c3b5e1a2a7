"""Visits: a client downloads the model, trains, uploads its contribution; when each of these ends, in virtual seconds.

Times follow from the fleet alone: bytes over the link's speed, samples over the device's speed. Nothing is measured, so
the machine that runs the simulation has no influence on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedfa.fleet.availability import Ints
from fedfa.fleet.devices import Fleet
from fedfa.learning.context import LocalTraining

Outcome = Literal["counted", "late", "offline"]
"""How a visit ended: its contribution was aggregated; it was cut off; the device left before it was done."""


@dataclass(frozen=True)
class Visit:
    """One client's work on one version of the model."""

    client: int
    version: int
    """Round of the model that it received, counted from 0."""
    start: float
    downloaded: float
    trained: float
    end: float
    """When its contribution arrives, or when the device leaves."""
    arrives: bool = True
    steps: int | None = None
    """Local steps, where the deadline allows only so many."""

    def row(self) -> list[float]:
        """As numbers, for a checkpoint; a visit that outlives its round is never cut short by a deadline."""
        return [self.client, self.version, self.start, self.downloaded, self.trained, self.end, self.arrives]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Visit:
        """The inverse of :meth:`row`."""
        client, version, start, downloaded, trained, end, arrives = row
        return cls(int(client), int(version), start, downloaded, trained, end, bool(arrives))


@dataclass(frozen=True)
class Window:
    """What happens between two server steps."""

    end: float
    """The moment of the second one."""
    started: list[Visit]
    arrived: list[Visit]
    """Whose contributions enter the second one; visits of earlier windows in the order of arrival."""
    running: list[Visit] = field(default_factory=list)
    """Not finished at the end, in the order of their starts."""
    lost: Mapping[Outcome, list[Visit]] = field(default_factory=dict)
    draws: int = 0
    """Selections of clients since the beginning."""
    waits: bool = True
    """Whether devices wait for the end of the window, as in a synchronous round."""

    def utilisation(self) -> float | None:
        """Share of the devices' time that went into contributions that were counted; the rest was waiting, or lost."""
        used = sum(visit.end - visit.start for visit in self.arrived)
        waited = sum(self.end - visit.end for visit in self.arrived) if self.waits else 0.0
        wasted = sum(visit.end - visit.start for visits in self.lost.values() for visit in visits)
        total = used + waited + wasted
        return used / total if total > 0 else None

    def timeline(self) -> list[list[object]]:
        """Every visit that ended: client, version, start, downloaded, trained, end, outcome."""
        ended: list[tuple[Visit, Outcome]] = [(visit, "counted") for visit in self.arrived]
        ended += [(visit, outcome) for outcome, visits in self.lost.items() for visit in visits]
        ended.sort(key=lambda one: (one[0].start, one[0].end))
        return [
            [visit.client, visit.version, visit.start, visit.downloaded, visit.trained, visit.end, outcome]
            for visit, outcome in ended
        ]


@dataclass(frozen=True)
class Travel:
    """How long visits of one version of the model take.

    Args:
        fleet: The devices.
        sizes: Samples of each client.
        local: How clients train.
        down: Bytes a client receives.
        up: Bytes it sends.
    """

    fleet: Fleet
    sizes: Ints
    local: LocalTraining
    down: int
    up: int

    def visit(self, client: int, version: int, start: float, limit: float | None = None) -> Visit:
        """A client's visit.

        Args:
            client: Its number.
            version: Of the model.
            start: When the download begins.
            limit: Make only as many local steps as fit before this moment, if at least one does.
        """
        fleet, size = self.fleet, int(self.sizes[client])
        speed, upload = float(fleet.speed[client]), self.up / float(fleet.up[client])
        downloaded = start + self.down / float(fleet.down[client])
        steps, samples = None, self.local.work_on(size)[1]
        end = downloaded + samples / speed + upload
        if limit is not None and end > limit:
            fitting = steps_within(self.local, size, (limit - upload - downloaded) * speed)
            if fitting:
                steps, end = fitting, limit
                samples = self.local.model_copy(update={"steps": steps}).work_on(size)[1]
        trained = downloaded + samples / speed
        end = trained + upload if steps is None else min(trained + upload, limit or end)
        left = None if fleet.availability is None else fleet.availability.leaves(client, start, end)
        if left is None:
            return Visit(client, version, start, downloaded, trained, end, steps=steps)
        return Visit(client, version, start, min(downloaded, left), min(trained, left), left, arrives=False)


def steps_within(local: LocalTraining, size: int, samples: float) -> int:
    """The local steps of a client with ``size`` samples that process at most this many samples.

    Example:
        >>> local = LocalTraining(epochs=2, batch_size=4)  # on 10 samples: batches of 4, 4, 2, twice
        >>> [steps_within(local, 10, samples) for samples in (3.9, 4, 8, 9.9, 10, 14, 100, -1)]
        [0, 1, 2, 2, 3, 4, 6, 0]
    """
    batches = local.batches_on(size)
    if not batches or samples <= 0:
        return 0
    epoch = batches * local.batch_size if local.drop_last else size
    whole, rest = divmod(samples * (1 + 1e-12), epoch)
    return min(int(whole) * batches + int(rest // local.batch_size), local.work_on(size)[0])
