"""A data node's window inside the node: its inputs and local bounds."""

from __future__ import annotations

from collections.abc import Iterator

from node.observability.status import WindowStatus
from protocol.interfaces.clock import Clock
from protocol.manifest.manifest import Manifest
from swarm.membership.membership import Membership
from swarm.pipeline.in_flight import Flight, Flights, Window, least_of, room_at_hops
from swarm.vocabulary.types import ModuleId, Reasoned


class WindowFinder:
    """Adapts the number of microbatches that a data node keeps in flight to measured round trips.

    `asked`: the value of `--window`, None to adapt. `memory`: microbatches for which memory was reserved at the start
    (`node.model.memory_need`).
    """

    def __init__(
        self,
        manifest: Manifest,
        flights: Flights,
        membership: Membership,
        clock: Clock,
        *,
        asked: int | None,
        memory: int,
    ) -> None:
        self._manifest, self._flights = manifest, flights
        self._membership, self._clock = membership, clock
        self._memory = memory
        start = flights.rules.window
        # Never below the start value, which keeps every stage busy when links cost nothing. Compute times vary, and a
        # window that covers only their mean left hops idle 2 % longer.
        self._window = None if asked is not None else Window(start, start, least_of(self._bounds()))
        self._follow()

    @property
    def value(self) -> Reasoned[int]:
        """Largest number of microbatches in flight, with the reason."""
        if self._window is None:
            return Reasoned(self._flights.window, "set by --window")
        return self._window.value

    def describe(self) -> WindowStatus:
        """Describes the window for the node's status."""
        value = self.value
        return WindowStatus(value.value, len(self._flights.in_flight), value.reason)

    def completed(self, flight: Flight, now: float) -> None:
        """Notes that a microbatch has returned. Call it before `Flights.complete`."""
        if self._window is not None:
            self._window.bound(least_of(self._bounds()))
            self._window.completed(flight.started, now, len(self._flights.in_flight))
            self._follow()

    def _follow(self) -> None:
        self._flights.window = self.value.value

    def _bounds(self) -> Iterator[Reasoned[int]]:
        rules = self._flights.rules
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
