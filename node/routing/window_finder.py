"""Window of a data node: the limit of its microbatches in flight, adapted to round trips and memory."""

from __future__ import annotations

from collections.abc import Iterator

from node.observability.status import WindowStatus
from protocol.interfaces.clock import Clock
from protocol.manifest.manifest import Manifest
from swarm.membership.membership import Membership
from swarm.pipeline.in_flight import InFlight, InFlightTable, Window, least_of, room_at_hops
from swarm.vocabulary.types import ModuleId, Reasoned


class WindowFinder:
    """Limit of a data node's microbatches in flight: `asked` (--window), or adapted to round trips if None."""

    def __init__(
        self,
        manifest: Manifest,
        in_flight: InFlightTable,
        membership: Membership,
        clock: Clock,
        *,
        asked: int | None,
        memory: int,
    ) -> None:
        self._manifest, self._in_flight = manifest, in_flight
        self._membership, self._clock = membership, clock
        self._memory = memory  # Microbatches for which memory was reserved at the start (`node.model.memory_need`)
        start = in_flight.rules.window
        # Never below the start value, which keeps every stage busy when links cost nothing. Compute times vary, and a
        # window that covers only their mean left hops idle 2 % longer.
        self._window = None if asked is not None else Window(start, start, least_of(self._bounds()))
        self._follow()

    @property
    def value(self) -> Reasoned[int]:
        """Largest number of microbatches in flight, with the reason."""
        if self._window is None:
            return Reasoned(self._in_flight.window, "set by --window")
        return self._window.value

    def describe(self) -> WindowStatus:
        """Describes the limit of microbatches in flight for the node's status."""
        value = self.value
        return WindowStatus(value.value, len(self._in_flight.entries), value.reason)

    def completed(self, entry: InFlight, now: float) -> None:
        """Adapts the limit after the microbatch of `entry` completed. Call it before `InFlightTable.complete`."""
        if self._window is not None:
            self._window.bound(least_of(self._bounds()))
            self._window.completed(entry.started, now, len(self._in_flight.entries))
            self._follow()

    def _follow(self) -> None:
        self._in_flight.window = self.value.value

    def _bounds(self) -> Iterator[Reasoned[int]]:
        rules = self._in_flight.rules
        yield Reasoned(rules.most_by_staleness, f"limited by a staleness of {rules.staleness}")
        yield Reasoned(self._memory, "limited by the memory reserved for --slots")
        now, stages = self._clock.monotonic(), self._manifest.stages
        served = {module: self._membership.replicas(module, now) for module in self._manifest.modules()}
        slots: list[list[int]] = [[] for _ in range(1, stages.count)]
        for module, replicas in served.items():
            if module.stage > 0:
                slots[module.stage - 1] += [announced.slots for announced in replicas]
        others = len(served[ModuleId(0)])
        room = room_at_hops(slots, stages.visited_per_path / max(1, stages.count - 1), 1 + others)
        if room is not None:
            yield room
