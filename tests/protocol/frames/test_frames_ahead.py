"""The next chunk is made while the stream is busy with the one before, and nothing else changes by it."""

from __future__ import annotations

import asyncio

import pytest

from protocol.frames import tensors as transfers
from protocol.frames.tensors import OutgoingTransfer
from protocol.transport.send_queue import ByteBudget, Lane, Outbox
from swarm.vocabulary.errors import Unreachable

DATA = memoryview(bytes(range(256)) * 100)
CHUNK = 10_000


def transfer(number: int = 1) -> OutgoingTransfer:
    return OutgoingTransfer(number, b"header", DATA, CHUNK)


def frames_of(outgoing: OutgoingTransfer, *, ahead: bool) -> list[bytes]:
    frames = []
    while not outgoing.finished:
        if ahead:
            outgoing.prepare()
            outgoing.prepare()
        frames.append(outgoing.next_frame())
    return frames


def test_frames_made_ahead_are_the_same_frames() -> None:
    assert frames_of(transfer(), ahead=True) == frames_of(transfer(), ahead=False)


def test_preparing_does_not_begin_a_transfer_nor_go_past_its_end() -> None:
    outgoing = transfer()
    outgoing.prepare()
    assert not outgoing.begun
    frames_of(outgoing, ahead=False)
    outgoing.prepare()
    assert outgoing.finished


async def test_the_outbox_makes_a_frame_while_the_stream_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    encode_chunk = transfers.encode_chunk

    def noted(number: int, index: int, data: memoryview) -> bytes:
        log.append(f"made {index}")
        return encode_chunk(number, index, data)

    async def slow_write(frame: bytes) -> None:
        log.append("write begins")
        for _ in range(3):
            await asyncio.sleep(0)
        log.append("write ends")

    monkeypatch.setattr(transfers, "encode_chunk", noted)
    outbox = Outbox({Lane.BULK: ByteBudget(2**20, 4)})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.pump(slow_write))
        assert await outbox.send(Lane.BULK, len(DATA), transfer)
        outbox.finish(None, Unreachable("the test is over"))
    made = [f"made {index}" for index in range(3)]
    assert [entry for entry in log if entry in made] == made
    for entry in made:
        assert log[log.index(entry) - 1] == "write begins"
