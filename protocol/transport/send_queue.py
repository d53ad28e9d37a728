"""Send queue of a link: byte budgets, rotation between traffic classes, and queued frames."""

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
    """Limit of tensor bytes in flight, first come, first served. A tensor larger than the limit is sent alone."""

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
        """Waits until `size_bytes` fit and reserves them within the block. Raises the PeerError passed to `close`."""
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


class TrafficClass(enum.Enum):
    """Class of tensors with a separate budget and queue, so that rounds and microbatches cannot delay each other."""

    MICROBATCHES = 0
    BULK = 1  # Rounds and state


class Turns(Generic[Item]):
    """One FIFO queue per traffic class. `take` serves the classes in rotation."""

    def __init__(self) -> None:
        self._queues: deque[tuple[TrafficClass, deque[Item]]] = deque(
            (traffic_class, deque()) for traffic_class in TrafficClass
        )

    def __bool__(self) -> bool:
        return any(queue for _, queue in self._queues)

    def add(self, traffic_class: TrafficClass, item: Item) -> None:
        self._queue(traffic_class).append(item)

    def first(self) -> Item | None:
        return next((queue[0] for _, queue in self._queues if queue), None)

    def take(self) -> Item:
        for traffic_class, queue in self._queues:
            if queue:
                self._queues.remove((traffic_class, queue))
                self._queues.append((traffic_class, queue))
                return queue.popleft()
        raise IndexError("all queues are empty")

    def remove(self, traffic_class: TrafficClass, item: Item) -> bool:
        queue = self._queue(traffic_class)
        if item not in queue:
            return False
        queue.remove(item)
        return True

    def clear(self) -> None:
        for _, queue in self._queues:
            queue.clear()

    def _queue(self, traffic_class: TrafficClass) -> deque[Item]:
        return next(queue for own, queue in self._queues if own is traffic_class)


MAX_WAITING_BYTES: Final = 1024 * 1024  # Small frames. `put` waits at half of it; the rest is for pongs and answers.


@dataclass(slots=True, eq=False)
class _Sending:
    transfer: OutgoingTransfer
    traffic_class: TrafficClass
    done: asyncio.Future[bool]


class Outbox:
    """Queue of frames and tensors of one link, sent by the task that runs `pump`. `budgets`: one per traffic class."""

    def __init__(self, budgets: Mapping[TrafficClass, ByteBudget]) -> None:
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
        """Bytes of the tensors in flight. With `waiting_bytes`, all memory held for sending."""
        return sum(budget.used_bytes for budget in self._budgets.values())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of small frames not yet written to the stream."""
        return self._small_bytes

    def post(self, frame: bytes) -> None:
        """Queues a small frame. Raises Stalled if the peer reads too little, PeerError if the outbox is closed."""
        if self._closed is not None:
            raise self._closed
        if self._small_bytes + len(frame) > MAX_WAITING_BYTES:
            raise Stalled(f"the peer does not read: {self._small_bytes} bytes are queued for it")
        self._queue(frame)

    async def put(self, frame: bytes) -> None:
        """Queues a small frame once the queue has room for it. Raises PeerError if the outbox is closed."""
        async with self._queue_for_room:  # one waits for room at a time, because thousands may queue here
            while self._closed is None and not self._room.is_set():
                await self._room.wait()
            self.post(frame)

    async def send(self, traffic_class: TrafficClass, size_bytes: int, make: Callable[[], OutgoingTransfer]) -> bool:
        """Waits for budget, then sends the tensor from `make`. False if the receiver cancelled it. Raises PeerError."""
        async with self._budgets[traffic_class].share(size_bytes):
            if self._closed is not None:
                raise self._closed
            sending = _Sending(make(), traffic_class, asyncio.get_running_loop().create_future())
            self._open[sending.transfer.number] = sending
            self._turns.add(traffic_class, sending)
            self._something_to_send.set()
            try:
                return await sending.done
            except asyncio.CancelledError:
                self._withdraw(sending)
                raise
            finally:
                self._open.pop(sending.transfer.number, None)

    def stop(self, number: int) -> None:
        """Stops sending a tensor that the receiver has cancelled: its `send` returns False. Ignores ended transfers."""
        sending = self._open.get(number)
        if sending is not None:
            self._withdraw(sending)
            if not sending.done.done():
                sending.done.set_result(False)

    def finish(self, last_frame: bytes | None, error: PeerError) -> None:
        """Closes the outbox. Queued small frames and `last_frame` are still sent; everything else raises `error`."""
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
        """Writes queued frames with `write` until `finish` is called. Raises as `write`."""
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
            self._turns.add(sending.traffic_class, sending)
        # Runs while `write` waits for the stream, which takes about as long as copying and hashing a chunk.
        asyncio.get_running_loop().call_soon(self._prepare_turn)
        await write(frame)
        if sending.transfer.finished and not sending.done.done():
            sending.done.set_result(True)

    def _prepare_turn(self) -> None:
        following = self._turns.first()
        if following is not None:
            following.transfer.prepare()

    def _withdraw(self, sending: _Sending) -> None:
        """Removes a tensor from the queue. Sends Cancel if the receiver knows the transfer and expects more chunks."""
        waits = self._turns.remove(sending.traffic_class, sending)
        if waits and sending.transfer.begun and self._closed is None:
            # Not by `post`, because this frame must be sent. The number of transfers bounds these frames.
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
