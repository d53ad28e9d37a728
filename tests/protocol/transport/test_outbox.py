"""The order in which a link sends, and what bounds what it holds."""

from __future__ import annotations

import asyncio

import pytest

from protocol.frames.frames import Cancel, decode
from protocol.frames.tensors import Chunk, OutgoingTransfer
from protocol.transport.send_queue import MAX_WAITING_BYTES, ByteBudget, Lane, Outbox
from swarm.vocabulary.errors import Stalled, Unreachable

CHUNK = 4096
ERROR = Unreachable("over")


class Wire:
    """A stream that takes a frame only when the test lets it."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.gate = asyncio.Semaphore(0)
        self.grown = asyncio.Condition()

    async def write(self, frame: bytes) -> None:
        await self.gate.acquire()
        async with self.grown:
            self.frames.append(frame)
            self.grown.notify_all()

    async def let(self, frames: int) -> None:
        """Lets so many frames through."""
        wanted = len(self.frames) + frames
        for _ in range(frames):
            self.gate.release()
        async with asyncio.timeout(10), self.grown:
            await self.grown.wait_for(lambda: len(self.frames) >= wanted)

    def story(self) -> list[str]:
        """Headers and small frames as they are, chunks as `transfer.index`."""
        return [_name(frame) for frame in self.frames]


def _name(frame: bytes) -> str:
    if frame[:1] != b"\x12":
        return frame.decode()
    chunk = decode(frame)
    assert isinstance(chunk, Chunk)
    return f"{chunk.transfer}.{chunk.index}"


def outbox(budget_bytes: int = 10**9, places: int = 10) -> Outbox:
    return Outbox({lane: ByteBudget(budget_bytes, places) for lane in Lane})


def sending(box: Outbox, number: int, chunks: int, lane: Lane = Lane.MICROBATCHES) -> asyncio.Task[bool]:
    data = memoryview(bytes(chunks * CHUNK))

    def make() -> OutgoingTransfer:
        return OutgoingTransfer(number, b"h%d" % number, data, CHUNK)

    return asyncio.create_task(box.send(lane, len(data), make))


async def settled() -> None:
    """Lets every task run until all of them wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_transfers_take_turns_and_small_frames_go_first() -> None:
    box, wire = outbox(), Wire()
    sends = [sending(box, 1, 3), sending(box, 2, 1)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(3)
    box.post(b"small")
    await wire.let(4)
    assert wire.story() == ["h1", "h2", "1.0", "2.0", "small", "1.1", "1.2"]
    assert await asyncio.gather(*sends) == [True, True]
    box.finish(b"farewell", ERROR)
    await wire.let(1)
    await pump
    assert wire.story()[-1] == "farewell"
    assert box.committed_bytes == 0


async def test_the_budget_holds_later_transfers_back_in_order() -> None:
    box, wire = outbox(budget_bytes=4 * CHUNK), Wire()
    sends = [sending(box, 1, 3), sending(box, 2, 2), sending(box, 3, 1)]
    pump = asyncio.create_task(box.pump(wire.write))
    await settled()
    assert box.committed_bytes == 3 * CHUNK
    await wire.let(7)
    await settled()
    assert wire.story()[:4] == ["h1", "1.0", "1.1", "1.2"]
    assert sends[0].done()
    await wire.let(2)
    await asyncio.gather(*sends)
    pump.cancel()


async def test_lanes_take_turns_however_many_transfers_they_have() -> None:
    box, wire = outbox(), Wire()
    sends = [sending(box, number, 2, Lane.BULK) for number in (2, 4, 6)] + [sending(box, 1, 4)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(3 * 3 + 5)
    assert await asyncio.gather(*sends) == [True] * 4
    assert wire.story()[:8] == ["h1", "h2", "1.0", "h4", "1.1", "h6", "1.2", "2.0"]
    assert wire.story()[8:] == ["1.3", "4.0", "6.0", "2.1", "4.1", "6.1"]
    pump.cancel()


async def test_a_lane_that_waits_for_its_budget_holds_the_other_up_for_nothing() -> None:
    box, wire = outbox(places=1), Wire()
    bulk = [sending(box, number, 50, Lane.BULK) for number in (2, 4)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(10)
    microbatch = sending(box, 1, 1)
    await settled()
    await wire.let(5)
    assert await microbatch
    assert not any(task.done() for task in bulk)
    pump.cancel()
    box.finish(None, ERROR)
    assert await asyncio.gather(*bulk, return_exceptions=True) == [ERROR, ERROR]


async def test_what_is_larger_than_the_budget_goes_alone() -> None:
    box, wire = outbox(budget_bytes=CHUNK), Wire()
    first, large, last = sending(box, 1, 1), sending(box, 2, 5), sending(box, 3, 1)
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(2 + 6 + 2)
    assert await asyncio.gather(first, large, last) == [True, True, True]
    assert wire.story()[2:8] == ["h2", "2.0", "2.1", "2.2", "2.3", "2.4"]
    pump.cancel()


async def test_places_are_limited_too() -> None:
    box = outbox(places=2)
    sends = [sending(box, n, 1) for n in range(5)]
    await settled()
    assert box.committed_bytes == 2 * CHUNK
    for task in sends:
        task.cancel()
    await asyncio.wait(sends)
    assert box.committed_bytes == 0


async def test_a_cancelled_waiter_gives_its_turn_on() -> None:
    box, wire = outbox(places=1), Wire()
    first, second, third = (sending(box, n, 1) for n in (1, 2, 3))
    pump = asyncio.create_task(box.pump(wire.write))
    await settled()
    second.cancel()
    await wire.let(4)
    assert await asyncio.gather(first, third) == [True, True]
    assert wire.story() == ["h1", "1.0", "h3", "3.0"]
    pump.cancel()


async def test_a_waiter_cancelled_at_the_moment_of_its_turn_gives_it_back() -> None:
    budget = ByteBudget(10, 1)
    held, waits = asyncio.Event(), asyncio.Event()

    async def hold(until: asyncio.Event) -> None:
        async with budget.share(5):
            await until.wait()

    first, second = asyncio.create_task(hold(held)), asyncio.create_task(hold(waits))
    await settled()
    held.set()
    await first  # its end grants the second's turn, which has not run yet
    second.cancel()
    await asyncio.wait((second,))
    assert budget.used_bytes == 0
    waits.set()
    await hold(waits)


async def test_cancelling_before_the_header_went_out_says_nothing() -> None:
    box, wire = outbox(), Wire()
    task = sending(box, 1, 1)
    await settled()
    task.cancel()
    await settled()
    box.finish(b"farewell", ERROR)
    wire.gate.release()
    await box.pump(wire.write)
    assert wire.story() == ["farewell"]


@pytest.mark.parametrize("by_receiver", [True, False])
async def test_ending_a_transfer_in_the_middle_tells_the_receiver(by_receiver: bool) -> None:
    box, wire = outbox(), Wire()
    task = sending(box, 1, 3)
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(2)
    await settled()
    if by_receiver:
        box.stop(1)
        assert await task is False
    else:
        task.cancel()
        await asyncio.wait((task,))
    await wire.let(2)  # the chunk that was on its way to the stream, then the word
    await settled()
    assert decode(wire.frames[-1]) == Cancel(1)
    assert len(wire.frames) == 4
    pump.cancel()


async def test_closing_fails_everyone_who_waits_and_who_comes() -> None:
    box = outbox(places=1)
    under_way, waiting = sending(box, 1, 1), sending(box, 2, 1)
    box.post(bytes(MAX_WAITING_BYTES * 3 // 4))
    small = asyncio.create_task(box.put(b"x"))
    await settled()
    box.finish(None, ERROR)
    for task in (under_way, waiting, small, sending(box, 3, 1), asyncio.create_task(box.put(b"x"))):
        with pytest.raises(Unreachable):
            await task
    with pytest.raises(Unreachable):
        box.post(b"x")


async def test_small_frames_are_bounded() -> None:
    box, wire = outbox(), Wire()
    for _ in range(2):
        box.post(bytes(MAX_WAITING_BYTES // 2))
    with pytest.raises(Stalled, match="does not read"):
        box.post(b"x")
    puts = [asyncio.create_task(box.put(b"%d" % n)) for n in range(3)]
    await settled()
    assert box.waiting_bytes == MAX_WAITING_BYTES
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(5)
    await asyncio.gather(*puts)
    assert wire.frames[2:] == [b"0", b"1", b"2"]
    pump.cancel()
