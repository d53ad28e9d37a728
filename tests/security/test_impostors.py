"""Peers that say they serve a stage, are given microbatches, and do not do what they say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from node.pipeline.admission import hidden_tensor
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import Backward, Direction, Forward, Receipt, ReceiptStatus, TensorMessage
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, PeerState
from tests.e2e.small_run import small_run
from tests.protocol.transport.link_peers import SETTINGS, Node, Recorder, node
from tests.security.siege import Siege, siege

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STATUS = Question(QuestionAbout.STATUS)
STAGE = ModuleId(1)
MOST_KEPT = 2

Sent = tuple[Forward | Backward, TensorSpec]


@dataclass
class FalseHop(Recorder):
    lie: Callable[[FalseHop, PeerId, Forward], None] = lambda hop, sender, message: None
    node: Node | None = None
    kept: set[MicrobatchId] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Forward):
            self.kept.add(message.microbatch)
            self.lie(self, sender, message)

    def say(self, to: PeerId, message: Receipt) -> None:
        assert self.node is not None
        self._spawn(self.node.transport.send_control(to, message))

    def send(self, to: PeerId, message: Forward | Backward, tensor: TensorSpec, data: bytes) -> None:
        assert self.node is not None
        self._spawn(self.node.transport.send(to, message, tensor, memoryview(bytearray(data))))

    def _spawn(self, work: object) -> None:
        async def carefully() -> None:
            try:
                await work  # type: ignore[misc]
            except PeerError:
                return  # it has been found out, and its link ended

        task = asyncio.create_task(carefully())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def receipt(message: Forward, status: ReceiptStatus, retry_after_s: float = 0.0) -> Receipt:
    return Receipt(message.microbatch, Direction.FORWARD, message.position, status, retry_after_s)


def swallows(hop: FalseHop, sender: PeerId, message: Forward) -> None:
    hop.say(sender, receipt(message, ReceiptStatus.ACCEPTED))


def claims(hop: FalseHop, sender: PeerId, message: Forward) -> None:
    for to in (sender, message.path.data_node):
        hop.say(to, receipt(message, ReceiptStatus.ACCEPTED))
        hop.say(to, receipt(message, ReceiptStatus.PASSED_ON))


def puts_off(hop: FalseHop, sender: PeerId, message: Forward) -> None:
    hop.say(sender, receipt(message, ReceiptStatus.BUSY, 3e8))


def poisons(hop: FalseHop, sender: PeerId, message: Forward) -> None:
    claims(hop, sender, message)
    onward = Forward(message.microbatch, message.path, message.position + 1, message.purpose, message.lifetime_s)
    hop.send(message.path.peer_at(message.position + 1), onward, HIDDEN, nothing_finite())


def returns(hop: FalseHop, sender: PeerId, message: Forward) -> None:
    """Makes up a gradient at once, and gives it to its predecessor as if the rest of the path had been walked."""
    claims(hop, sender, message)
    back = Backward(message.microbatch, message.path, message.position - 1)
    hop.send(sender, back, HIDDEN, nothing_finite())


HIDDEN = hidden_tensor(small_run(Path("text"), blocks=(0, 1, 1)))
QUICK = (puts_off, poisons, returns)


def nothing_finite() -> bytes:
    return np.full(HIDDEN.elements, np.nan, np.float32).tobytes()


@asynccontextmanager
async def impostor(here: Siege, lie: Callable[[FalseHop, PeerId, Forward], None]) -> AsyncIterator[FalseHop]:
    """Serves stage 1, faster than anybody, by its own account."""
    handler, persona = FalseHop(lie=lie), here.targets.persona()
    async with node(persona, handler=handler, settings=SETTINGS) as own:
        handler.node = own
        speaking = asyncio.create_task(speak(here, own))
        try:
            yield handler
        finally:
            speaking.cancel()
            await asyncio.wait((speaking, *handler.tasks))


async def speak(here: Siege, own: Node) -> None:
    """Tells everybody again and again, so that it is believed after each time that it was found out."""
    while True:
        record = here.targets.record(own.persona, STAGE, addresses=(f"127.0.0.1:{own.port}",), state=PeerState.SERVING)
        for target in here.targets.everybody:
            try:
                await own.transport.ask(target.peer, STATUS, 5.0)
            except PeerError:
                continue
        own.transport.announce(record)
        await asyncio.sleep(0.5)


async def test_training_goes_on_beside_hops_that_lie(tmp_path: Path) -> None:
    async with siege(tmp_path, peers=3, forked=True) as here:  # every stage has one honest peer
        for lie in QUICK:
            async with impostor(here, lie) as false_hop:
                await false_hop.until(lambda hop=false_hop: hop.kept)
                for _ in range(3):  # a lie that is not found out at once costs its step a minute
                    await here.goes_on(1)
        async with impostor(here, swallows) as false_hop:
            await false_hop.until(lambda: false_hop.kept)
            await asyncio.sleep(2.0)
            assert len(false_hop.kept) <= MOST_KEPT
        await here.goes_on()
        counts = await here.to_the_end()
        assert counts.started == counts.completed + counts.abandoned
        assert counts.duplicated == 0
        assert all(math.isfinite(loss) for loss in here.watch.losses())
