"""Receives what the links bring and passes each kind on to who minds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from node.carrier import Carrier
from node.neighbourhood import Neighbourhood
from protocol.seams import Question, QuestionAbout, Refusal, TensorSpec
from swarm.errors import PeerError, Rejected
from swarm.messages import ControlMessage, TensorMessage
from swarm.vocabulary import PeerId

Answering = Callable[[Question], Awaitable[bytes]]


class Reception:
    """`protocol.seams.LinkHandler`. Before a node hosts a module there is no carrier, and tensors are refused."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood
        self.carrier: Carrier | None = None
        self.answers: dict[QuestionAbout, Answering] = {}

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        if self.carrier is None:
            return Refusal(False, "no module is hosted here")
        return self.carrier.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        if self.carrier is not None:
            self.carrier.received(message, buffer)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        if self.carrier is not None:
            self.carrier.broken_off(message, buffer)

    def told(self, sender: PeerId, message: ControlMessage) -> None:
        if self.carrier is not None:
            self.carrier.told(sender, message)

    def announced(self, sender: PeerId, record: bytes) -> None:
        self._neighbourhood.announced(sender, record)

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        answering = self.answers.get(question.about)
        if answering is None:
            raise Rejected(f"this peer does not answer questions about its {question.about.value}")
        return await answering(question)

    def link_up(self, peer: PeerId) -> None:
        self._neighbourhood.link_up(peer)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self._neighbourhood.link_down(peer, error)
        if self.carrier is not None:
            self.carrier.link_down(peer, error)
