"""Queue of a data node's texts that wait for a path: retried ones first, then new ones in reading order.

A text whose replicas are unreachable for a moment does not block texts of other routes. Without IO.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Generic, Protocol, TypeVar

from swarm.experts.routes import served_route
from swarm.routing.planner import NoReplica, Planner
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import Affinity, ModuleId, Path, PeerId, Reasoned, Route

LOOK_AHEAD: Final = 8  # Largest number of waiting texts in a run with experts
MAX_TURNS: Final = 4096  # Most routes whose microbatches are counted. A forgotten one starts at the first number.


class RoutedText(Protocol):
    """Text of one microbatch, with router scores and route."""

    @property
    def route(self) -> Route:
        """Best expert of each stage for the documents; empty in a run without experts."""

    @property
    def affinity(self) -> Affinity:
        """Router's score of each expert, by which a substitute expert is chosen."""


Text = TypeVar("Text", bound=RoutedText)


def current_route(text: RoutedText, planner: Planner, is_open: Callable[[ModuleId], bool]) -> Reasoned[Route]:
    """Returns the text's route with the best open expert of each stage (`Planner.open_modules`); empty: no experts."""
    if not planner.rules.has_experts:
        return Reasoned((), "one expert a stage")
    served = served_route(text.route, text.affinity, is_open)
    assert served.value is not None, "each stage has an open module"
    return Reasoned(served.value, served.reason)


@dataclass(frozen=True, slots=True)
class Launch(Generic[Text]):
    """A text to launch, with its path and the experts that it visits."""

    text: Text
    path: Path
    route: Route
    reason: str


class LaunchQueue(Generic[Text]):
    """Queue of the texts that one data node will launch as microbatches, numbered from `first_number`.

    `ready` returns the next text that has been read, or None; `drawn` gets it before it is queued.
    """

    def __init__(
        self, planner: Planner, ready: Callable[[], Text | None], drawn: Callable[[Text], None], first_number: int
    ) -> None:
        self._planner, self._ready, self._drawn, self._first = planner, ready, drawn, first_number
        # Without experts all texts have the same route, so a second waiting text could not be launched earlier.
        self._depth = LOOK_AHEAD if planner.rules.has_experts else 1
        self._retried: deque[Text] = deque()
        self._waiting: deque[Text] = deque()
        self._turns = Latest[Route, int](MAX_TURNS)

    def retry(self, text: Text) -> None:
        self._retried.append(text)

    def next(self, number: int, in_flight: Mapping[PeerId, int], now: float) -> Launch[Text] | None:
        """Removes and returns the first text that has a path now, for microbatch `number`; None if none has a path."""
        if self._planner.gathers(now):
            return None
        if launch := self._first_launch(self._planner.open_modules(now), number, in_flight, now):
            return launch
        if self._depth == 1 or len(self._retried) + len(self._waiting) < self._depth:
            return None
        # The queue is full: use experts that are reachable now instead of waiting.
        return self._first_launch(self._planner.open_modules(now, at_once=True), number, in_flight, now)

    def _first_launch(
        self, is_open: Callable[[ModuleId], bool], number: int, in_flight: Mapping[PeerId, int], now: float
    ) -> Launch[Text] | None:
        for text in self._texts():
            served = current_route(text, self._planner, is_open)
            # A number shared by all routes could make one route skip the same stages every time.
            turn = self._first + self._turns.get(served.value, 0) if served.value else number
            # A replica on trial may be the one that lost the text.
            plan = self._planner.plan(turn, served.value, in_flight, now, proven_only=text in self._retried)
            if not isinstance(plan.value, NoReplica):
                return self._taken(Launch(text, plan.value, served.value, f"{served.reason}; {plan.reason}"))
        return None

    def _texts(self) -> Iterator[Text]:
        """Yields the queued texts, then reads and queues new texts up to the depth of the queue."""
        yield from islice(chain(tuple(self._retried), tuple(self._waiting)), self._depth)
        while len(self._retried) + len(self._waiting) < self._depth and (text := self._ready()) is not None:
            self._drawn(text)
            self._waiting.append(text)
            yield text

    def _taken(self, launch: Launch[Text]) -> Launch[Text]:
        for queue in (self._retried, self._waiting):
            if launch.text in queue:
                queue.remove(launch.text)
                break
        if launch.route:
            self._turns[launch.route] = self._turns.get(launch.route, 0) + 1
        return launch
