"""Links between the peers of one process, which hosts several modules: a call in place of a stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import LinkHandler, Question, Refusal
from protocol.transport.link import receipt_of
from swarm.vocabulary.errors import PeerError, Rejected, Stalled
from swarm.vocabulary.pipeline_messages import Backward, ControlMessage, Forward, TensorMessage
from swarm.vocabulary.types import PeerId, short


@dataclass(frozen=True, slots=True)
class LocalLink:
    """The link of `own` to `peer`, with the handlers of both; the two are the same for a path without hops."""

    own: PeerId
    own_handler: LinkHandler
    peer: PeerId
    handler: LinkHandler

    async def send(self, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        admitted = self.handler.admit(self.own, message, tensor)
        if not isinstance(admitted, Refusal):
            admitted[:] = data.cast("B")  # The peer keeps its input longer than we keep our output
            self.handler.received(self.own, message, tensor, admitted)
        elif isinstance(message, Forward | Backward):
            self.own_handler.received_control(self.peer, receipt_of(message, admitted))

    async def send_control(self, message: ControlMessage) -> None:
        self.handler.received_control(self.own, message)

    async def ask(self, question: Question, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.handler.answer(self.own, question)
        except TimeoutError:
            raise Stalled(f"{short(self.peer)}, of this process, did not answer within {timeout_s:g} s") from None
        except PeerError as error:  # about a third peer, perhaps: this one is alive
            raise Rejected(f"{short(self.peer)} refused to answer: {error}") from None
