"""The line in which a data node's texts wait for a path: those that set out again, then those that have been read.

Text first: each is tried by its own route, by the next-best expert where its own is not served, and so on to the next
text where a replica is out of reach for a moment. So no module keeps texts of other routes waiting, and no more than
LOOK_AHEAD texts wait. When so many do, they go where there is somebody at this moment. In a run without experts all
texts take the same way, and one at most waits.

Pure: texts come from, and are told of, what is handed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Generic, Protocol, TypeVar

from swarm.experts.routes import served_route
from swarm.routing.planner import NoReplica, Planner
from swarm.vocabulary.types import Affinity, ModuleId, Path, PeerId, Reasoned, Route

LOOK_AHEAD: Final = 8
"""Texts that wait at most. A replica is out of reach for a second before it is given up: of so many texts one is of
another route, however few routes there are."""
MAX_TURNS: Final = 4096
"""Routes of which the number of microbatches is known; one that was forgotten begins anew, which moves a few visits."""


class RoutedText(Protocol):
    """A microbatch of text as it was read."""

    @property
    def route(self) -> Route:
        """Of its documents; empty in a run without experts."""

    @property
    def affinity(self) -> Affinity:
        """Its scores, by which another expert is chosen."""


Text = TypeVar("Text", bound=RoutedText)


def taken_route(text: RoutedText, planner: Planner, is_open: Callable[[ModuleId], bool]) -> Reasoned[Route]:
    """The experts that a text visits now: its own, or the next best of those that are open; none in a run without.

    Args:
        is_open: of each stage for one module at least (`Planner.open_modules`).
    """
    if not planner.rules.has_experts:
        return Reasoned((), "one expert a stage")
    served = served_route(text.route, text.affinity, is_open)
    assert served.value is not None, "of each stage some module is open"
    return Reasoned(served.value, served.reason)


@dataclass(frozen=True, slots=True)
class Departure(Generic[Text]):
    """A text that may set out now, and its way."""

    text: Text
    path: Path
    route: Route
    """The experts whose turn it is: its own, or those that are served instead."""
    reason: str


class DepartureLine(Generic[Text]):
    """One data node's.

    Args:
        ready: the next text that has been read, None when there is none yet.
        drawn: told of each text that is taken from there, before anything becomes of it.
        first_number: of the microbatches; each route counts from there.
    """

    def __init__(
        self, planner: Planner, ready: Callable[[], Text | None], drawn: Callable[[Text], None], first_number: int
    ) -> None:
        self._planner, self._ready, self._drawn, self._first = planner, ready, drawn, first_number
        self._depth = LOOK_AHEAD if planner.rules.has_experts else 1
        self._again: deque[Text] = deque()
        self._waiting: deque[Text] = deque()
        self._turns: Counter[Route] = Counter()

    def sets_out_again(self, text: Text) -> None:
        """Puts a text whose microbatch was lost in front of those that are read."""
        self._again.append(text)

    def next(self, number: int, in_flight: Mapping[PeerId, int], now: float) -> Departure[Text] | None:
        """Takes the next text that has a path out of the line; None when none has, or there is no text.

        Args:
            number: of the microbatch that it would be.
            in_flight: see `Planner.plan`.
        """
        if self._planner.gathers(now):
            return None
        is_open = self._planner.open_modules(now)
        for text in self._texts():
            if departure := self._planned(text, is_open, number, in_flight, now):
                return self._taken(departure)
        if self._depth == 1 or len(self._again) + len(self._waiting) < self._depth:
            return None
        is_open = self._planner.open_modules(now, at_once=True)
        for text in self._texts():
            if departure := self._planned(text, is_open, number, in_flight, now):
                return self._taken(departure)
        return None

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _texts(self) -> Iterator[Text]:
        """The texts that are looked at: those that wait, then new ones, which wait from then on."""
        yield from islice(chain(tuple(self._again), tuple(self._waiting)), self._depth)
        while len(self._again) + len(self._waiting) < self._depth and (text := self._ready()) is not None:
            self._drawn(text)
            self._waiting.append(text)
            yield text

    def _planned(
        self,
        text: Text,
        is_open: Callable[[ModuleId], bool],
        number: int,
        in_flight: Mapping[PeerId, int],
        now: float,
    ) -> Departure[Text] | None:
        served = taken_route(text, self._planner, is_open)
        turn = self._first + self._turns[served.value] if served.value else number
        plan = self._planner.plan(turn, served.value, in_flight, now)
        if isinstance(plan.value, NoReplica):
            return None
        return Departure(text, plan.value, served.value, f"{served.reason}; {plan.reason}")

    def _taken(self, departure: Departure[Text]) -> Departure[Text]:
        for line in (self._again, self._waiting):
            if departure.text in line:
                line.remove(departure.text)
                break
        if departure.route:
            count = self._turns.pop(departure.route, 0) + 1
            self._turns[departure.route] = count  # the latest last
            if len(self._turns) > MAX_TURNS:
                del self._turns[next(iter(self._turns))]
        return departure
