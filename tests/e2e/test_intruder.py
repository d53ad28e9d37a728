"""A peer with a valid certificate of the run sends what it must not, in numbers: each time it is told why not, and the swarm goes on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.admission import hidden_tensor
from node.data_duty import NUMBERS_A_SECOND
from node.events import MicrobatchCounts
from node.local_setup import LocalSwarmOptions
from node.local_swarm import LocalSwarm
from protocol.chunks import encode_chunk
from protocol.frames import FarewellReason, Frame
from protocol.seams import Question, QuestionAbout
from protocol.tensor_spec import DType, TensorSpec
from swarm.messages import Close, ControlMessage, Direction, Receipt, ReceiptStatus, Stranded
from swarm.vocabulary import MicrobatchId, ModuleId, PeerId
from tests.e2e.intruder import Targets, find_targets, header
from tests.e2e.small_run import PATIENCE_S, Watch, small_run, write_text
from tests.protocol.link_peers import LONG, Node

pytestmark = pytest.mark.e2e

MAY_GROW_BYTES = 64 * 2**20
FORWARDS = 200
HONEST_WINDOW = 5
"""Microbatches that a data node of two further stages has under way at most."""


@dataclass(eq=False)
class Scene:
    """A swarm in full work, and what an intruder knows of it."""

    swarm: LocalSwarm
    watch: Watch
    targets: Targets
    begun: float
    """Unix time before the data node started."""
    shown: float
    """Unix time when it had taken its first steps."""

    async def goes_on(self, steps: int = 3) -> None:
        await self.watch.step(self.swarm.progress.step + steps)

    def victims_peak_bytes(self) -> int:
        """The most memory that the victim has had so far (VmHWM)."""
        index = next(peer.index for peer in self.swarm.peers if peer.peer == self.targets.victim.peer)
        status = Path(f"/proc/{self.swarm._children[index].pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def seconds_of_the_start(self) -> range:
        """One of these is the second in which the data node started, from which it counts its microbatches."""
        return range(int(self.begun), int(self.shown) + 1)

    async def to_the_end(self) -> MicrobatchCounts:
        self.swarm.request_stop()
        await self.watch.to_the_end(self.swarm)
        assert {end.exit_code for end in self.swarm.ends.values()} == {0}
        [counts] = [summary.microbatches for summary in self.watch.summaries() if summary.module == "0.0"]
        return counts


@asynccontextmanager
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    manifest, begun = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1)), time.time()
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=3, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(3)
        shown = time.time()
        targets = await find_targets(swarm.link, hidden_tensor(manifest), manifest.modules())
        yield Scene(swarm, watch, targets, begun, shown)


def forbidden(targets: Targets, own: PeerId) -> dict[str, list[Frame | bytes]]:
    """What ends the link, by the reason that is given."""
    message, tensor, honest = targets.forward(own), targets.tensor, targets.data_node.peer
    another = targets.forward(honest)
    half_gigabyte = TensorSpec((8192, 16384), DType.FLOAT32)
    half_precision = TensorSpec(tensor.shape, DType.BFLOAT16)
    piece = encode_chunk(1, 0, memoryview(bytes(4096)))
    return {
        "a tensor (1, 32, 32) FLOAT32 was announced": [header(message, TensorSpec((1, 32, 32), DType.FLOAT32))],
        "a tensor (2, 32, 32) BFLOAT16 was announced": [header(message, half_precision)],
        "a tensor (8192, 16384) FLOAT32 was announced": [header(message, half_gigabyte)],
        "module 9.0, which the manifest does not have": [header(targets.forward(own, module=ModuleId(9)), tensor)],
        "sent what only": [header(another, tensor)],
        "0 was due": [header(message, tensor, chunks=2), encode_chunk(1, 1, memoryview(bytes(4096)))],
        "1 was due": [header(message, tensor, chunks=2), piece, piece],
        "frame": [b"\xff" * 1000],
    }


async def test_what_is_forbidden_is_refused_with_the_reason_and_disturbs_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path) as there:
        targets, before = there.targets, there.victims_peak_bytes()
        for reason in forbidden(targets, PeerId("")):
            async with targets.attack() as (own, stream):
                for frame in forbidden(targets, own)[reason]:
                    await stream.say(frame)
                farewell = await stream.farewell()
                assert farewell.reason is FarewellReason.VIOLATION
                assert reason in farewell.detail
        await _break_off(targets)
        await _shout_at_the_port(targets)
        await there.goes_on()
        assert there.victims_peak_bytes() - before < MAY_GROW_BYTES
        counts = await there.to_the_end()
    assert counts.started == counts.completed
    assert (counts.abandoned, counts.duplicated) == (0, 0)


async def test_a_flood_of_microbatches_leaves_room_for_others(tmp_path: Path) -> None:
    """The intruder plays a data node that never takes its results back."""
    async with scene(tmp_path) as there:
        before = there.victims_peak_bytes()
        async with there.targets.peer() as intruder:
            receipts = await _flood(there.targets, intruder)
            told = Counter(receipt.status for receipt in receipts)
            assert told == {ReceiptStatus.ACCEPTED: 12, ReceiptStatus.BUSY: FORWARDS - 12}
            reasons = {receipt.detail for receipt in receipts} - {""}
            assert "12 slots are taken by this data node, the rest is for others" in reasons
            assert reasons <= {"12 slots are taken by this data node, the rest is for others", "all 16 slots are taken"}
            await there.goes_on(5)
        assert there.victims_peak_bytes() - before < MAY_GROW_BYTES
        async with there.targets.peer() as visitor:
            await _the_flood_is_over(visitor, there.targets.victim.peer)
        counts = await there.to_the_end()
    assert counts.started == counts.completed
    assert (counts.abandoned, counts.duplicated) == (0, 0)


async def test_forged_news_of_others_microbatches_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as there, there.targets.peer() as intruder:
        data_node, victim = there.targets.data_node.peer, there.targets.victim.peer
        for second in there.seconds_of_the_start():
            started = await _started(intruder, data_node)
            for number in range(max(0, started - 10), started + 30):
                microbatch = MicrobatchId(data_node, second * NUMBERS_A_SECOND + number)
                for lie in lies_about(microbatch):
                    await intruder.transport.tell(data_node, lie)
                    await intruder.transport.tell(victim, lie)
        await there.goes_on()
        counts = await there.to_the_end()
    assert counts.started == counts.completed
    assert (counts.abandoned, counts.duplicated) == (0, 0)


def lies_about(microbatch: MicrobatchId) -> tuple[ControlMessage, ...]:
    return (
        Stranded(microbatch, Direction.FORWARD, 0, "a lie"),
        Receipt(microbatch, Direction.FORWARD, 0, ReceiptStatus.PASSED_ON),
        Receipt(microbatch, Direction.FORWARD, 0, ReceiptStatus.REFUSED, detail="a lie"),
        Close(microbatch, "a lie"),
    )


async def _started(intruder: Node, data_node: PeerId) -> int:
    """How many microbatches have set out, as the data node tells everybody."""
    status = json.loads(await intruder.transport.ask(data_node, Question(QuestionAbout.STATUS), LONG))
    return int(status["counts"]["started"])


async def _flood(targets: Targets, intruder: Node) -> list[Receipt]:
    """Sends microbatches; the first receipt for each."""
    data = memoryview(bytearray(targets.tensor.byte_length))
    for number in range(FORWARDS):
        message = targets.forward(intruder.peer, number)
        await intruder.transport.send(targets.victim.peer, message, targets.tensor, data)
    first: dict[MicrobatchId, Receipt] = {}

    def all_answered() -> bool:
        for _, message in intruder.handler.messages:
            if isinstance(message, Receipt):
                first.setdefault(message.microbatch, message)
        return len(first) == FORWARDS

    await intruder.handler.until(all_answered)
    return list(first.values())


async def _the_flood_is_over(visitor: Node, peer: PeerId) -> None:
    """Waits until a peer says that it has hardly any work: only what the swarm itself has under way."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = json.loads(await visitor.transport.ask(peer, Question(QuestionAbout.STATUS), LONG))
            if status["slots"] - status["free_slots"] <= HONEST_WINDOW:
                return
            await asyncio.sleep(0.2)


async def _break_off(targets: Targets) -> None:
    """Ends a stream in the middle of a tensor."""
    async with targets.attack() as (own, stream):
        await stream.say(header(targets.forward(own), targets.tensor, chunks=2))
        await stream.say(encode_chunk(1, 0, memoryview(bytes(4096))))
        await stream.stream.half_close()
        while await stream.hear() is not None:
            pass


async def _shout_at_the_port(targets: Targets) -> None:
    """Speaks no TLS to the victim's port, and is hung up on."""
    host, _, port = targets.victim.addresses[0].rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70_000)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        async with asyncio.timeout(LONG):
            with suppress(ConnectionError):  # hung up on with what it sent unread
                while await reader.read(4096):
                    pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
