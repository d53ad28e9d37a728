"""Data nodes that choose their peers by another rule than the node's, and that write down what becomes of their
microbatches.

Only the choice of a microbatch's path differs: windows, repair in flight, tries, codecs, receipts and what is measured
of peers are the node's own, whatever the rule.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Protocol

import node.runtime.data_role
import node.runtime.serving
from lab.world.arms import OURS, RulePlanner, SwarmPlanner, planner_of
from node.averaging.anchor.anchor import Anchor
from node.context.module_context import ModuleContext
from node.runtime.data_role import DataRole, data_role
from swarm.membership.membership import Membership
from swarm.pipeline.custody_events import Event, Started
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.vocabulary.pipeline_messages import Purpose, Receipt
from swarm.vocabulary.types import MicrobatchId, PeerId
from swarm.vocabulary.types import Path as HopPath
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightWriter


class Listener(Protocol):
    """Somebody who hears what becomes of a data node's microbatches."""

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None: ...

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None: ...

    def ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        """`path` is None when it is lost."""
        ...


class FlightRecord:
    """Writes what becomes of a data node's microbatches."""

    def __init__(self, writer: FlightWriter, measured: Callable[[], int], planner: RulePlanner | None) -> None:
        self._writer, self._measured, self._planner = writer, measured, planner
        self._flying: dict[MicrobatchId, HopPath] = {}

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None:
        if self._planner is not None and (self._planner.chosen is None or path.hops != self._planner.chosen.hops):
            raise RuntimeError("the data node launches without asking the rule that is to be measured")
        self._flying[microbatch] = path
        self._write(LAUNCHED, path)

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        """Nothing is written of it."""

    def ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        planned = self._flying.pop(microbatch, None)
        if planned is not None:
            self._write(LOST if path is None else HOME, path or planned)

    def _write(self, kind: str, path: HopPath) -> None:
        self._writer.write(kind, tuple(str(hop.peer) for hop in path.hops), self._measured())


class _Visits:
    """How many visits the node's own book has been told of."""

    count = 0

    @classmethod
    def so_far(cls) -> int:
        return cls.count


def count_visits() -> None:
    honestly = MeasuredTimes.visited

    def visited(self: MeasuredTimes, peer: PeerId, seconds: float, queue: int = 0) -> None:
        _Visits.count += 1
        honestly(self, peer, seconds, queue)

    MeasuredTimes.visited = visited  # type: ignore[method-assign]


def emulate_data_node(rule: str, seed: int, flights: str | None) -> None:
    """Before the node starts: its data role, if it gets one, launches by `rule` and writes its record."""
    if rule == OURS and flights is None:
        return
    count_visits()

    @asynccontextmanager
    async def emulated_role(given: ModuleContext, first: Anchor | None) -> AsyncIterator[DataRole]:
        tokens, made = given.manifest.microbatch_tokens, list[RulePlanner]()

        def by_rule(rules: PathRules, membership: Membership, times: MeasuredTimes) -> Planner:
            planner = planner_of(rule, seed, tokens, None)(rules, membership, times)
            if isinstance(planner, RulePlanner):
                made.append(planner)
            return planner

        node.runtime.data_role.Planner = by_rule  # type: ignore[assignment, misc]
        async with data_role(given, first) as role, AsyncExitStack() as stack:
            clock, planner = given.session.own.clock.monotonic, made[0] if made else None
            measured = _Visits.so_far
            if isinstance(planner, SwarmPlanner):
                tell(planner.rule, role, clock)
                measured = planner.rule.visits
            if flights is not None:
                writer = stack.enter_context(closing(FlightWriter(Path(flights))))
                tell(FlightRecord(writer, measured, planner), role, clock)
            yield role

    node.runtime.serving.data_role = emulated_role


def tell(listener: Listener, role: DataRole, now: Callable[[], float]) -> None:
    """The listener hears from now on what becomes of the data node's microbatches."""
    ends: Any = role.runner._ends
    handle, passed, finished, lost = role.runner.handle, ends.passed, ends.finished, ends.lost

    def handle_and_tell(event: Event) -> None:
        if isinstance(event, Started) and event.purpose is Purpose.TRAIN:
            listener.launched(event.microbatch, event.path, now())
        handle(event)

    def passed_and_tell(sender: PeerId, receipt: Receipt) -> None:
        listener.passed(sender, receipt, now())
        passed(sender, receipt)

    def finished_and_tell(microbatch: MicrobatchId, path: HopPath) -> None:
        listener.ended(microbatch, path)
        finished(microbatch, path)

    def lost_and_tell(microbatch: MicrobatchId, detail: str) -> None:
        listener.ended(microbatch, None)
        lost(microbatch, detail)

    role.runner.handle = handle_and_tell  # type: ignore[method-assign]
    ends.passed, ends.finished, ends.lost = passed_and_tell, finished_and_tell, lost_and_tell
