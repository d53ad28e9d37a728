"""The send queue of one link, with its order and its bounds.

Small frames go first, so that a receipt never waits behind a tensor; between them, the transfers under way take turns
chunk by chunk (`protocol.transport.send_queue`). Nothing piles up: a tensor's bytes stay in the caller's buffer until
their chunk's turn, the sum of the tensors under way in each lane is bounded by its budget, and small frames by
MAX_WAITING_BYTES. A peer that stops reading makes `send` and `put` wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from protocol.frames.frames import Cancel, encode
from protocol.frames.tensor_transfer import OutgoingTransfer
from protocol.transport.send_queue import ByteBudget, Lane, Turns
from swarm.vocabulary.errors import PeerError, Stalled

MAX_WAITING_BYTES: Final = 1024 * 1024
"""Of small frames. `put` waits at half of it; the rest is for what has to be said without waiting (pongs, answers)."""


@dataclass(slots=True, eq=False)
class _Sending:
    transfer: OutgoingTransfer
    lane: Lane
    done: asyncio.Future[bool]
    """Whether everything was sent."""


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
        """Queues a small frame at once.

        Raises:
            Stalled: the peer has left too much unread.
            PeerError: the outbox is closed.
        """
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
        """Sends a tensor: waits for its share of the lane's budget, then until its last chunk is handed to the stream.
        Says whether all of it was; the receiver may not have wanted the rest.

        `make` is called when the transfer's turn has come. Cancelling tells the receiver to expect no more.

        Raises:
            PeerError: the outbox was closed before the end.
        """
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
        """Closes the outbox: the small frames that wait and `last_frame` still go, `pump` ends, everything else raises
        `error`.
        """
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
