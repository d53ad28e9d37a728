"""The runner of a pure state machine: feeds it events and ticks, and carries out its actions."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Generic, TypeVar

from node.concurrency.task_groups import TaskTracker, set_or_after
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Transport
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage
from swarm.vocabulary.types import PeerId

log = logging.getLogger(__name__)

Event = TypeVar("Event")
Action = TypeVar("Action")
Decide = Callable[[Event, float], Iterable[Action]]  # Actions of the state machine after an event at this time

TICK_S: Final = 0.1
REST_S: Final = 0.5  # Between ticks after QUIET ticks in which nothing happened: an idle node costs half
QUIET: Final = 50


class MachineRunner(ABC, Generic[Event, Action]):
    """Event loop of one state machine, until `run` is cancelled or `stop` is called. Drops events before and after."""

    def __init__(
        self, decide: Decide[Event, Action], tick: Event, transport: Transport, clock: Clock, most_waiting: int
    ) -> None:
        self.clock = clock
        self.transport = transport
        self._decide = decide
        self._tick = tick
        self._tasks = TaskTracker()
        self._most_waiting = most_waiting
        self._waiting: Counter[PeerId] = Counter()
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._is_stopped = False
        self._quiet = 0  # Ticks since the last other event
        self._wake = asyncio.Event()

    async def run(self) -> None:
        async with self._tasks.running():
            while not self._is_stopped:
                self._look_around()
                self._quiet += 1
                self.handle(self._tick)
                await set_or_after(self._wake, TICK_S if self._quiet < QUIET else REST_S)
            self._tasks.cancel()  # `stop` ends the tasks too

    def stop(self) -> None:
        self._is_stopped = True
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def handle(self, event: Event) -> None:
        """Passes an event to the state machine and carries out the resulting actions. Queues events during this."""
        if not self._tasks.are_running:
            return
        if event is not self._tick:
            if self._quiet >= QUIET:
                self.wake()
            self._quiet = 0
        self._events.append(event)
        if self._is_handling:  # an action may cause events; the outer call handles them
            return
        self._is_handling = True
        try:
            while self._events:
                for action in self._decide(self._events.popleft(), self.clock.monotonic()):
                    self._carry_out(action)
        finally:
            self._is_handling = False

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Starts `work` as a task that ends when `run` does; returns None if `run` is not active."""
        return self._tasks.begin(work)

    def send(self, to: PeerId, message: ControlMessage) -> bool:
        """Sends a control message in a task. Returns False if too many messages to the peer are still unsent."""
        if not self._tasks.are_running:
            return True  # after the end nothing is sent, but the peer is not to blame
        if self._waiting[to] >= self._most_waiting:
            log.debug("%s does not read: %s is not sent", to, type(message).__name__)
            return False
        self._waiting[to] += 1
        self._tasks.owe(self._send(to, message))
        return True

    async def _send(self, to: PeerId, message: ControlMessage) -> None:
        try:
            await self.transport.send_control(to, message)
        except PeerError as error:
            log.debug("cannot send %s to %s: %s", type(message).__name__, to, error)
            self._not_sent(to, error)
        finally:
            self._waiting[to] -= 1
            if not self._waiting[to]:
                del self._waiting[to]

    @abstractmethod
    def _carry_out(self, action: Action) -> None: ...

    def _look_around(self) -> None:
        """Updates the inputs that the state machine reads from the node; called before each tick."""

    def _not_sent(self, to: PeerId, error: PeerError) -> None:
        """Called if a control message to the peer `to` could not be sent."""
