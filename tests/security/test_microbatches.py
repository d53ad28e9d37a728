"""A peer with a valid certificate of the run sends what it must not, in numbers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from protocol.frames.frames import FarewellReason, Frame
from protocol.frames.tensors import encode_chunk
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.pipeline_messages import (
    Close,
    ControlMessage,
    Direction,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, PeerState
from tests.protocol.transport.link_peers import LONG, Node, Persona
from tests.security.adversary import Targets, header
from tests.security.siege import BESIEGED, MAY_GROW_BYTES, Siege

pytestmark = BESIEGED

FORWARDS = 200


def forbidden(targets: Targets, persona: Persona) -> dict[str, list[Frame | bytes]]:
    """What ends the link, by the reason that is given."""
    message, tensor = targets.forward(persona), targets.tensor
    another = targets.forward(targets.persona())
    unsigned = replace(message, path=replace(message.path, route=None))
    stolen = replace(message, path=replace(message.path, route=another.path.route))
    half_gigabyte = TensorSpec((8192, 16384), DType.FLOAT32)
    half_precision = TensorSpec(tensor.shape, DType.BFLOAT16)
    piece = encode_chunk(1, 0, memoryview(bytes(4096)))
    return {
        "a tensor (1, 32, 32) FLOAT32 was announced": [header(message, TensorSpec((1, 32, 32), DType.FLOAT32))],
        "a tensor (2, 32, 32) BFLOAT16 was announced": [header(message, half_precision)],
        "a tensor (8192, 16384) FLOAT32 was announced": [header(message, half_gigabyte)],
        "module 9.0, which the manifest does not have": [header(targets.forward(persona, module=ModuleId(9)), tensor)],
        "sent what only": [header(another, tensor)],
        "its data node has not signed the route": [header(unsigned, tensor)],
        "the route's signature is not its data node's": [header(stolen, tensor)],
        "0 was due": [header(message, tensor, chunks=2), encode_chunk(1, 1, memoryview(bytes(4096)))],
        "1 was due": [header(message, tensor, chunks=2), piece, piece],
        "frame": [b"\xff" * 1000],
    }


async def test_what_is_forbidden_is_refused_with_the_reason_and_disturbs_nobody(scene: Siege) -> None:
    targets, before = scene.targets, scene.peak_bytes(scene.targets.victim)
    for reason in forbidden(targets, targets.persona()):
        persona = targets.persona()
        async with targets.attack(persona=persona, record=targets.as_data_node(persona)) as (_, stream):
            for frame in forbidden(targets, persona)[reason]:
                await stream.say(frame)
            farewell = await stream.farewell()
            assert farewell.reason is FarewellReason.VIOLATION
            assert reason in farewell.detail
    await _break_off(targets)
    await _shout_at_the_port(targets)
    await scene.goes_on()
    assert scene.peak_bytes(targets.victim) - before < MAY_GROW_BYTES


async def test_a_flood_of_microbatches_leaves_room_for_others(scene: Siege) -> None:
    """The adversary plays a data node that never takes its results back."""
    targets, before = scene.targets, scene.peak_bytes(scene.targets.victim)
    async with targets.peer(ModuleId(0), state=PeerState.JOINING) as intruder:
        receipts = await _flood(targets, intruder)
        told = Counter(receipt.status for receipt in receipts)
        assert told == {ReceiptStatus.ACCEPTED: 12, ReceiptStatus.BUSY: FORWARDS - 12}
        reasons = {receipt.detail for receipt in receipts} - {""}
        assert "12 slots are taken by this data node, the rest is for others" in reasons
        assert reasons <= {"12 slots are taken by this data node, the rest is for others", "all 16 slots are taken"}
        await scene.goes_on(5)
    assert scene.peak_bytes(targets.victim) - before < MAY_GROW_BYTES


async def test_forged_news_of_others_microbatches_changes_nothing(scene: Siege) -> None:
    """What it changes would show in the data node's account at the end of the siege."""
    async with scene.targets.peer() as intruder:
        data_node, victim = scene.targets.data_node.peer, scene.targets.victim.peer
        first, started = scene.first_number(), await _started(intruder, data_node)
        for number in range(max(0, started - 10), started + 30):
            for lie in lies_about(MicrobatchId(data_node, first + number), intruder.peer):
                await intruder.transport.tell(data_node, lie)
                await intruder.transport.tell(victim, lie)
        await scene.goes_on()


def lies_about(microbatch: MicrobatchId, own: PeerId) -> tuple[ControlMessage, ...]:
    path = Path(microbatch.data_node, (Hop(ModuleId(1), own), Hop(ModuleId(2), own)))
    return (
        Stranded(microbatch, Direction.FORWARD, 0, "a lie"),
        Receipt(microbatch, Direction.FORWARD, 0, ReceiptStatus.PASSED_ON),
        Receipt(microbatch, Direction.BACKWARD, -1, ReceiptStatus.ACCEPTED),
        Receipt(microbatch, Direction.FORWARD, 0, ReceiptStatus.REFUSED, detail="a lie"),
        Recall(microbatch, path, 0),
        Settled(microbatch, path),
        Unsettled(microbatch),
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
        message = targets.forward(intruder.persona, number)
        await intruder.transport.send(targets.victim.peer, message, targets.tensor, data)
    first: dict[MicrobatchId, Receipt] = {}

    def all_answered() -> bool:
        for _, message in intruder.handler.messages:
            if isinstance(message, Receipt):
                first.setdefault(message.microbatch, message)
        return len(first) == FORWARDS

    await intruder.handler.until(all_answered)
    return list(first.values())


async def _break_off(targets: Targets) -> None:
    """Ends a stream in the middle of a tensor."""
    persona = targets.persona()
    async with targets.attack(persona=persona, record=targets.as_data_node(persona)) as (_, stream):
        await stream.say(header(targets.forward(persona), targets.tensor, chunks=2))
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
