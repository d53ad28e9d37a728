"""Paths that no data node has made."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from protocol.frames.frames import Farewell, FarewellReason, Ping, Pong, TensorFrame, encode_chunk
from protocol.interfaces.transport import Contact
from swarm.pipeline.custody import STRANGER
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Backward, Direction, Forward, MicrobatchTensor, Receipt, ReceiptStatus
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, PeerState
from tests.protocol.transport.link_peers import LONG, BareStream, Persona
from tests.security.adversary import Targets
from tests.security.siege import BESIEGED, Siege

pytestmark = BESIEGED

STAGES = ModuleId(1), ModuleId(2)
SLOTS = 16
AHEAD = 60


class Stranger:
    """A stream that sends anyone's tensors, notes answers, and says PASSED_ON to what comes, so that it stays taken."""

    def __init__(self, own: PeerId, stream: BareStream, targets: Targets) -> None:
        self.own, self._stream, self._tensor = own, stream, targets.tensor
        self._next = 1
        self.receipts: list[Receipt] = []
        self.given: list[MicrobatchTensor] = []
        self.farewell: Farewell | None = None

    async def send(self, message: MicrobatchTensor, data: bytes) -> None:
        number, self._next = self._next, self._next + 2
        await self._stream.say(TensorFrame(message, self._tensor, number, 1))
        await self._stream.say(encode_chunk(number, 0, memoryview(data)))

    async def hear(self) -> None:
        """All that is said until a Ping is answered, or to the end of the stream."""
        token = 2**40 + self._next
        async with asyncio.timeout(LONG):
            await self._stream.say(Ping(token))
            while (frame := await self._stream.hear()) != Pong(token):
                match frame:
                    case None:
                        return
                    case Farewell():
                        self.farewell = frame
                        return
                    case Receipt():
                        self.receipts.append(frame)
                    case TensorFrame(Forward() | Backward() as message):
                        self.given.append(message)
                        direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
                        for status in (ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON):
                            await self._stream.say(Receipt(message.microbatch, direction, message.position, status))

    @property
    def told(self) -> Counter[ReceiptStatus]:
        first = {receipt.microbatch: receipt.status for receipt in reversed(self.receipts)}
        return Counter(first.values())


async def invented(scene: Siege, persona: Persona, record: bytes) -> Stranger:
    """Fills the stage-2 peer with microbatches of invented data nodes, as the hop before it, and hangs up."""
    targets, victim = scene.targets, scene.targets.contact(STAGES[1])
    async with targets.attack(victim, persona=persona, record=record) as (own, stream):
        stranger = Stranger(own, stream, targets)
        for _ in range(SLOTS):
            data_node = targets.persona().identity
            path = Path(data_node.peer, (Hop(STAGES[0], own), Hop(STAGES[1], victim.peer)))
            await stranger.send(targets.signed(data_node, path, 1, 1), bytes(targets.tensor.byte_length))
        await stranger.hear()
    return stranger


async def test_a_visitor_fills_no_slot_with_microbatches_of_data_nodes_that_it_has_invented(scene: Siege) -> None:
    persona = scene.targets.persona()
    stranger = await invented(scene, persona, scene.targets.record(persona))
    assert stranger.told == {ReceiptStatus.BUSY: SLOTS}
    assert {receipt.detail for receipt in stranger.receipts} == {STRANGER}
    assert stranger.farewell is None, "who has just changed its module would be refused by the same rule"


async def test_who_announces_a_module_fills_a_quarter_with_them(scene: Siege) -> None:
    """And hangs up; they are gone after 20 s, and meanwhile there is room for others."""
    taken = f"{SLOTS // 4} slots are used by data nodes without a link to this peer"
    async with asyncio.timeout(3 * LONG):
        while True:
            persona = scene.targets.persona()
            record = scene.targets.record(persona, STAGES[0], state=PeerState.JOINING)
            stranger = await invented(scene, persona, record)
            assert {r.detail for r in stranger.receipts if r.status is ReceiptStatus.BUSY} == {taken}
            if stranger.told[ReceiptStatus.ACCEPTED] > 0:
                break
            await scene.goes_on(1)  # an earlier test's data nodes have left theirs, less than 20 s ago
    assert stranger.told.total() == SLOTS
    assert stranger.told[ReceiptStatus.ACCEPTED] <= SLOTS // 4
    await scene.goes_on(5)


def forged(scene: Siege, persona: Persona, path: Path, position: int, number: int) -> Iterator[Forward]:
    """A microbatch of the honest data node that it has not signed: without a signature, with one of somebody else."""
    own = scene.targets.signed(persona.identity, replace(path, data_node=persona.peer), position, number)
    microbatch = MicrobatchId(path.data_node, number)
    yield replace(own, microbatch=microbatch, path=path)
    yield replace(own, microbatch=microbatch, path=replace(path, route=own.path.route))


async def heard_out(
    scene: Siege, to: Contact, numbers: range, position: int, data: bytes, announced: bool = True
) -> AsyncIterator[Stranger]:
    """Sends forgeries as the hop before `position` (the last one). Yields strangers whose links did not end."""
    targets, data_node = scene.targets, scene.targets.data_node.peer
    for number, turn in product(numbers, range(2)):
        persona = targets.persona()
        record = targets.record(persona, STAGES[position - 1], state=PeerState.JOINING) if announced else None
        async with targets.attack(to, persona=persona, record=record) as (own, stream):
            peers = [targets.victim.peer, targets.contact(STAGES[1]).peer]
            peers[position - 1] = own
            stranger = Stranger(own, stream, targets)
            path = Path(data_node, tuple(map(Hop, STAGES, peers)))
            message = list(forged(scene, persona, path, position, number))[turn]
            with suppress(PeerError):
                await stranger.send(message, data)
                if position == 1:
                    await stranger.send(Backward(message.microbatch, message.path, 0), data)
                await stranger.hear()
                yield stranger


@pytest.mark.parametrize("announced", [False, True], ids=["visitor", "announced"])
async def test_nobody_hands_a_data_node_the_result_of_what_was_not_given_to_him(scene: Siege, announced: bool) -> None:
    """Neither garbage, nor anything whose gradient would go to him and nowhere else."""
    targets, now = scene.targets, scene.first_number() + 4 * scene.swarm.progress.step
    garbage = np.random.default_rng(1).standard_normal(targets.tensor.elements).astype(np.float32).tobytes()
    async for stranger in heard_out(scene, targets.data_node, range(now, now + AHEAD), 2, garbage, announced):
        assert stranger.farewell is not None
        assert stranger.farewell.reason is FarewellReason.VIOLATION
        assert "signed the route" in stranger.farewell.detail or "signature" in stranger.farewell.detail
        assert stranger.given == []
    await scene.goes_on()


async def test_nobody_uses_up_the_numbers_of_a_data_node(scene: Siege) -> None:
    victim, zeros = scene.targets.contact(STAGES[1]), bytes(scene.targets.tensor.byte_length)
    next_ = scene.first_number() + 4 * scene.swarm.progress.step + 20
    numbers = range(next_, next_ + 12)
    async for stranger in heard_out(scene, victim, numbers, 1, zeros):
        assert ReceiptStatus.ACCEPTED not in stranger.told
        assert stranger.given == []
    async with asyncio.timeout(60):
        while account(scene, victim.peer, numbers) != (set(numbers), set(numbers)):
            await asyncio.sleep(0.2)


def account(scene: Siege, by: PeerId, numbers: range) -> tuple[set[int], set[int]]:
    """Those of `numbers` that the data node has completed, and those whose gradients `by` has counted."""
    done: dict[str, set[int]] = {"completed": set(), "visit": set()}
    for line in scene.events().splitlines():
        event = json.loads(line)
        if event["event"] == "completed" or (event["event"] == "visit" and event["peer"] == by):
            done[event["event"]].add(int(event["microbatch"].partition("#")[2]))
    return done["completed"] & set(numbers), done["visit"] & set(numbers)
