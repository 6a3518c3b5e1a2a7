"""Round policies: which contributions enter which server step, decided in virtual time.

A policy turns the moment of one server step into a :class:`~fedfa.fleet.visits.Window` up to the next one. It only
computes times; clients are trained afterwards, in any physical order.

**Synchronous** (``wait``, ``deadline``): a cohort starts together. The round ends when as many contributions as the
cohort has clients have arrived, or no more can come, or at the deadline. With ``over_selection`` 1.3 a cohort of 10 is
drawn as 13 and the first ten count (Bonawitz et al., *Towards Federated Learning at Scale*, MLSys 2019). Who is late is
cut off; or goes on and counts in the round in which it arrives; or makes only as many local steps as fit (Li et al.,
*Federated Optimization in Heterogeneous Networks*, MLSys 2020, allow such partial work, and FedNova corrects it).

**Asynchronous** (``fedbuff``, ``fedasync``): ``concurrency`` clients train at a time. Whenever one ends, another starts
with the newest model; the server steps when ``buffer`` contributions have arrived (Nguyen et al., *Federated Learning
with Buffered Asynchronous Aggregation*, AISTATS 2022), with FedAsync after each one. Events of one moment are handled
in the order of their starts, arrivals before new starts.

The event queue is ``heapq``. simpy would describe a client as a generator, and generators cannot be written to a
checkpoint; here the queue is a table of numbers, so that a run that was killed continues with the same bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from itertools import count as counter

from fedfa.errors import RunError
from fedfa.fleet.config import FleetConfig
from fedfa.fleet.visits import Outcome, Visit, Window

RETRY = 60.0
"""Virtual seconds until the server looks for clients again, where too few are available."""
_PATIENCE = 7 * 86_400.0


@dataclass(frozen=True)
class Moment:
    """The server right after a step.

    Args:
        time: In virtual seconds.
        version: Round of the model, counted from 0.
        running: Visits that are not finished, in the order of their starts.
        draws: Selections of clients so far.
        select: Draws clients: how many, when, number of the draw, who is busy.
        visit: Makes a visit: client, version, start, moment until which local steps must fit.
    """

    time: float
    version: int
    running: list[Visit]
    draws: int
    select: Callable[[int, float, int, Set[int]], list[int]]
    visit: Callable[[int, int, float, float | None], Visit]


def synchronous(now: Moment, config: FleetConfig, cohort: int) -> Window:
    """A round of a cohort that starts together."""
    wanted = math.ceil(cohort * config.over_selection - 1e-9)
    start, chosen = _wait_for_clients(now, wanted)
    limit = None if config.deadline is None else start + config.deadline
    visits = [now.visit(c, now.version, start, limit if config.late == "partial" else None) for c in chosen]
    arrivals = sorted((visit.end, place) for place, visit in enumerate(visits) if visit.arrives)[:cohort]
    end = arrivals[-1][0] if len(arrivals) == cohort else max(visit.end for visit in visits)
    end = end if limit is None else min(end, limit)
    on_time = {place for when, place in arrivals if when <= end}
    arrived, running, lost = _ended([*now.running], end)
    for place, visit in enumerate(visits):
        if place in on_time:
            arrived.append(visit)
        elif not visit.arrives and visit.end <= end:
            lost["offline"].append(visit)
        elif config.late == "next":
            running.append(visit)
        else:
            lost["late"].append(_cut(visit, end))
    return Window(end, visits, arrived, running, lost, now.draws + 1)


def asynchronous(now: Moment, buffer: int, concurrency: int) -> Window:
    """Until the buffer is full."""
    time, draws, order = now.time, now.draws, counter()
    queue = [(visit.end, next(order), visit) for visit in now.running]
    heapq.heapify(queue)
    busy = {visit.client for visit in now.running}
    started: list[Visit] = []
    arrived: list[Visit] = []
    offline: list[Visit] = []
    idle_since = time
    while len(arrived) < buffer:
        if (free := concurrency - len(queue)) > 0:
            chosen = now.select(free, time, draws, busy)
            draws += bool(chosen)
            for client in chosen:
                visit = now.visit(client, now.version, time, None)
                started.append(visit)
                busy.add(client)
                heapq.heappush(queue, (visit.end, next(order), visit))
        if queue:
            idle_since = time
        if len(queue) < concurrency and (not queue or queue[0][0] > time + RETRY):
            time += RETRY
            _check_patience(time - idle_since)
            continue
        time = queue[0][0]
        while queue and queue[0][0] == time and len(arrived) < buffer:
            visit = heapq.heappop(queue)[2]
            (arrived if visit.arrives else offline).append(visit)
            # A client trains a version of the model at most once; one that left before it was done may start again.
            if not visit.arrives or visit.version < now.version:
                busy.discard(visit.client)
    running = [visit for _, _, visit in sorted(queue, key=lambda entry: entry[1])]
    return Window(time, started, arrived, running, {"offline": offline}, draws, waits=False)


def _wait_for_clients(now: Moment, wanted: int) -> tuple[float, list[int]]:
    """The first moment at which enough clients are available, and the clients."""
    time = now.time
    while True:
        busy = {visit.client for visit in now.running if visit.end > time}
        chosen = now.select(wanted, time, now.version, busy)
        if len(chosen) == wanted:
            return time, chosen
        time += RETRY
        _check_patience(time - now.time)


def _check_patience(waited: float) -> None:
    if waited > _PATIENCE:
        raise RunError(
            "for a week of virtual time too few clients were available; raise fleet.available, or lower cohort.clients "
            "(or fleet.concurrency)"
        )


def _ended(running: list[Visit], end: float) -> tuple[list[Visit], list[Visit], dict[Outcome, list[Visit]]]:
    """Visits of earlier rounds: those that arrive until the end, those that go on, those that are lost."""
    over = sorted((visit for visit in running if visit.end <= end), key=lambda visit: visit.end)
    lost: dict[Outcome, list[Visit]] = {"late": [], "offline": [visit for visit in over if not visit.arrives]}
    return [visit for visit in over if visit.arrives], [visit for visit in running if visit.end > end], lost


def _cut(visit: Visit, end: float) -> Visit:
    """The visit as it is when the server cuts it off."""
    times = {name: min(getattr(visit, name), end) for name in ("downloaded", "trained", "end")}
    return replace(visit, **times, arrives=False)
