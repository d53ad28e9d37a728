"""Send capacity of a link: a byte budget, the turns of the lanes, and the queue of frames."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from protocol.frames.frames import Cancel, encode
from protocol.frames.tensors import OutgoingTransfer
from swarm.vocabulary.errors import PeerError, Stalled


class ByteBudget:
    """A byte budget that senders wait for, first come, first served. A tensor larger than all of it goes alone."""

    def __init__(self, budget_bytes: int, places: int) -> None:
        self._budget_bytes = budget_bytes
        self._places = places
        self.used_bytes = 0
        self._used_places = 0
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self._error: PeerError | None = None

    @asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits for room, and holds it within the block. Raises PeerError: the one given to `close`."""
        async with self._queue:
            while self._error is None and not self._fits(size_bytes):
                self._freed.clear()
                await self._freed.wait()
            if self._error is not None:
                raise self._error
            self.used_bytes += size_bytes
            self._used_places += 1
        try:
            yield
        finally:
            self.used_bytes -= size_bytes
            self._used_places -= 1
            self._freed.set()

    def close(self, error: PeerError) -> None:
        self._error = error
        self._freed.set()

    def _fits(self, size_bytes: int) -> bool:
        if self._used_places == 0:
            return True
        return self._used_places < self._places and self.used_bytes + size_bytes <= self._budget_bytes


Item = TypeVar("Item")


class Lane(enum.Enum):
    """A traffic class with a budget and turns of its own: a round cannot delay microbatches, nor they a round."""

    MICROBATCHES = 0
    BULK = 1  # Rounds and state


class Turns(Generic[Item]):
    """Queues of what has something to send, one for each lane, served in turn."""

    def __init__(self) -> None:
        self._queues: deque[tuple[Lane, deque[Item]]] = deque((lane, deque()) for lane in Lane)

    def __bool__(self) -> bool:
        return any(queue for _, queue in self._queues)

    def add(self, lane: Lane, item: Item) -> None:
        self._queue(lane).append(item)

    def first(self) -> Item | None:
        return next((queue[0] for _, queue in self._queues if queue), None)

    def take(self) -> Item:
        for lane, queue in self._queues:
            if queue:
                self._queues.remove((lane, queue))
                self._queues.append((lane, queue))
                return queue.popleft()
        raise IndexError("nothing has a turn")

    def remove(self, lane: Lane, item: Item) -> bool:
        queue = self._queue(lane)
        if item not in queue:
            return False
        queue.remove(item)
        return True

    def clear(self) -> None:
        for _, queue in self._queues:
            queue.clear()

    def _queue(self, lane: Lane) -> deque[Item]:
        return next(queue for own, queue in self._queues if own is lane)


MAX_WAITING_BYTES: Final = 1024 * 1024  # Of small frames. `put` waits at half of it; the rest is for pongs and answers.


@dataclass(slots=True, eq=False)
class _Sending:
    transfer: OutgoingTransfer
    lane: Lane
    done: asyncio.Future[bool]


class Outbox:
    """Queues frames and tensors for one link, which the task in `pump` sends. `budgets` has one for every lane."""

    def __init__(self, budgets: Mapping[Lane, ByteBudget]) -> None:
        self._budgets = dict(budgets)
        self._small: deque[bytes] = deque()
        self._small_bytes = 0
        self._turns: Turns[_Sending] = Turns()
        self._open: dict[int, _Sending] = {}
        self._something_to_send = asyncio.Event()
        self._queue_for_room = asyncio.Lock()
        self._room = asyncio.Event()
        self._room.set()
        self._closed: PeerError | None = None

    @property
    def committed_bytes(self) -> int:
        """The bytes of the tensors under way; all that is held of what is sent, with `waiting_bytes`."""
        return sum(budget.used_bytes for budget in self._budgets.values())

    @property
    def waiting_bytes(self) -> int:
        """The bytes of small frames not yet handed to the stream."""
        return self._small_bytes

    def post(self, frame: bytes) -> None:
        """Queues a small frame. Raises Stalled if the peer reads too little, PeerError if closed."""
        if self._closed is not None:
            raise self._closed
        if self._small_bytes + len(frame) > MAX_WAITING_BYTES:
            raise Stalled(f"the peer asks but does not read: {self._small_bytes} bytes wait for it")
        self._queue(frame)

    async def put(self, frame: bytes) -> None:
        """Queues a small frame as soon as there is room. Raises PeerError when the outbox is closed."""
        async with self._queue_for_room:  # one at a time: thousands may wait
            while self._closed is None and not self._room.is_set():
                await self._room.wait()
            self.post(frame)

    async def send(self, lane: Lane, size_bytes: int, make: Callable[[], OutgoingTransfer]) -> bool:
        """Sends a tensor in turn, made by `make` then; returns whether the receiver wanted all of it. Raises
        PeerError."""
        async with self._budgets[lane].share(size_bytes):
            if self._closed is not None:
                raise self._closed
            sending = _Sending(make(), lane, asyncio.get_running_loop().create_future())
            self._open[sending.transfer.number] = sending
            self._turns.add(lane, sending)
            self._something_to_send.set()
            try:
                return await sending.done
            except asyncio.CancelledError:
                self._withdraw(sending)
                raise
            finally:
                self._open.pop(sending.transfer.number, None)

    def stop(self, number: int) -> None:
        """Stops a transfer whose rest the receiver does not want: its `send` returns. Unknown ones have ended."""
        sending = self._open.get(number)
        if sending is not None:
            self._withdraw(sending)
            if not sending.done.done():
                sending.done.set_result(False)

    def finish(self, last_frame: bytes | None, error: PeerError) -> None:
        """Closes the outbox: waiting small frames and `last_frame` still go, everything else raises `error`."""
        if self._closed is not None:
            return
        if last_frame is not None:
            self._queue(last_frame)
        self._closed = error
        self._turns.clear()
        for sending in self._open.values():
            if not sending.done.done():
                sending.done.set_exception(error)
        for budget in self._budgets.values():
            budget.close(error)
        self._room.set()
        self._something_to_send.set()

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Hands frame after frame to the stream until `finish`. Errors are those of `write`."""
        while True:
            if self._small:
                await write(self._take_small())
            elif self._closed is not None:
                return
            elif self._turns:
                await self._write_turn(write)
            else:
                self._something_to_send.clear()
                await self._something_to_send.wait()

    async def _write_turn(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        sending = self._turns.take()
        frame = sending.transfer.next_frame()
        if not sending.transfer.finished:
            self._turns.add(sending.lane, sending)
        # Runs while `write` waits for the stream, which takes about as long as a chunk takes to copy and sum up.
        asyncio.get_running_loop().call_soon(self._prepare_turn)
        await write(frame)
        if sending.transfer.finished and not sending.done.done():
            sending.done.set_result(True)

    def _prepare_turn(self) -> None:
        following = self._turns.first()
        if following is not None:
            following.transfer.prepare()

    def _withdraw(self, sending: _Sending) -> None:
        """Takes a transfer out of the turns. The receiver is told when it knows of it and waits for more."""
        waits = self._turns.remove(sending.lane, sending)
        if waits and sending.transfer.begun and self._closed is None:
            # Not `post`: the number of transfers bounds these, and the receiver has to get them.
            self._queue(encode(Cancel(sending.transfer.number)))

    def _queue(self, frame: bytes) -> None:
        self._small.append(frame)
        self._small_bytes += len(frame)
        if self._small_bytes > MAX_WAITING_BYTES // 2:
            self._room.clear()
        self._something_to_send.set()

    def _take_small(self) -> bytes:
        frame = self._small.popleft()
        self._small_bytes -= len(frame)
        if self._small_bytes <= MAX_WAITING_BYTES // 2:
            self._room.set()
        return frame
