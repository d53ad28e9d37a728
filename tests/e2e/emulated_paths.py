"""Data nodes that choose their peers by another rule than the node's, and that write down what becomes of their
microbatches.

Only the choice of a microbatch's path differs: windows, repair in flight, tries, codecs, receipts and what is measured
of peers are the node's own, whatever the rule.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, Protocol

import node.runtime.serving
from benchmarks.greedy_rule import least_route
from benchmarks.swarm_rule import SwarmRule
from node.averaging.anchor.anchor import Anchor
from node.context.module_context import ModuleContext
from node.runtime.data_role import DataRole, data_role
from swarm.pipeline.custody_states import Event, Started
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.planner import NoReplica
from swarm.routing.stage_balance import ring_stages
from swarm.vocabulary.pipeline_messages import Purpose, Receipt
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId, Reasoned
from swarm.vocabulary.types import Path as HopPath
from tests.e2e.flight_record import HOME, LAUNCHED, LOST, FlightWriter

OURS, SWARM, GREEDY = "ours", "swarm", "greedy"
RULES: Final = (OURS, SWARM, GREEDY)


class Listener(Protocol):
    """Somebody who hears what becomes of a data node's microbatches."""

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None: ...

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None: ...

    def ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        """`path` is None when it is lost."""
        ...


class _Instead(ABC):
    """Stands before a data node's planner: the stages are those of the ring, the peers are chosen by `_route`. All else
    is the planner's."""

    def __init__(self, role: DataRole, given: ModuleContext) -> None:
        self._planner: Any = role._data_node._planner
        self._own, self._membership = given.session.own, given.session.membership
        self._stages = given.manifest.stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def plan(self, number: int, in_flight: Mapping[PeerId, int], now: float) -> Reasoned[HopPath | NoReplica]:
        stages = ring_stages(self._stages.count, self._stages.visited_per_path, number)
        missing = tuple(m for m in map(ModuleId, stages) if not self._membership.replicas(m, now))
        if missing:
            return Reasoned(NoReplica(missing), "no peer left")
        hops = tuple(Hop(ModuleId(s), p) for s, p in zip(stages, self._route(stages, in_flight, now), strict=True))
        return Reasoned(HopPath(self._own.peer, hops), "by another rule")

    @abstractmethod
    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        """A peer for each stage, which all have some."""


class SwarmPaths(_Instead):
    """SWARM's rule: the peer of each stage whose turn it is by virtual time."""

    def __init__(self, role: DataRole, given: ModuleContext, seed: int) -> None:
        super().__init__(role, given)
        self._tokens = given.manifest.microbatch_tokens
        self.rule = SwarmRule(random.Random(f"{seed} {self._own.peer}"))

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        return tuple(self._choose(ModuleId(stage), now) for stage in stages)

    def _choose(self, module: ModuleId, now: float) -> PeerId:
        speeds = {a.peer: a.tokens_per_second for a in self._membership.replicas(module, now)}
        announced_s = {peer: self._tokens / speed if speed else 0.0 for peer, speed in speeds.items()}
        peer = self.rule.choose(module, announced_s)
        assert peer is not None
        return peer


class GreedyPaths(_Instead):
    """The rule of three lines: the path with the least links and service times, by this data node's own measurements
    and its own microbatches under way."""

    def __init__(self, role: DataRole, given: ModuleContext) -> None:
        super().__init__(role, given)
        self._times: MeasuredTimes = self._planner._times

    def _route(self, stages: tuple[int, ...], in_flight: Mapping[PeerId, int], now: float) -> tuple[PeerId, ...]:
        replicas = [self._membership.replicas(ModuleId(stage), now) for stage in range(1, self._stages.count)]
        costs = self._times.costs([[self._own.announcement()], *replicas], in_flight=1)
        return least_route(costs, self._own.peer, stages, in_flight)


class FlightRecord:
    """Writes what becomes of a data node's microbatches.

    Args:
        measured: how many visits have been measured so far.
    """

    def __init__(self, writer: FlightWriter, measured: Callable[[], int]) -> None:
        self._writer, self._measured = writer, measured
        self._flying: dict[MicrobatchId, HopPath] = {}

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None:
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
    """Counts what `MeasuredTimes.visited` is told."""
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
        async with data_role(given, first) as role, AsyncExitStack() as stack:
            clock = given.session.own.clock.monotonic
            measured = _Visits.so_far
            if rule == SWARM:
                by_swarm = SwarmPaths(role, given, seed)
                role._data_node._planner = by_swarm  # type: ignore[assignment]
                tell(by_swarm.rule, role, clock)
                measured = by_swarm.rule.visits
            elif rule == GREEDY:
                role._data_node._planner = GreedyPaths(role, given)  # type: ignore[assignment]
            if flights is not None:
                writer = stack.enter_context(closing(FlightWriter(Path(flights))))
                tell(FlightRecord(writer, measured), role, clock)
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
