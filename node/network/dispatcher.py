"""Receives what the links bring and passes each kind on to who minds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from node.network.membership_sync import MembershipSync
from node.pipeline.microbatch_runner import MicrobatchRunner
from protocol.codecs import Encoded
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Topic
from swarm.vocabulary.averaging_messages import RoundControl, RoundPiece, StateChunk, StateControl
from swarm.vocabulary.errors import PeerError, Rejected
from swarm.vocabulary.pipeline_messages import Backward, ControlMessage, Forward, MicrobatchControl, TensorMessage
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import ModuleId, PeerId

Answering = Callable[[Question], Awaitable[bytes]]
AnsweringAsker = Callable[[PeerId, Question], Awaitable[bytes]]
RoundTensor = RoundPiece | StateChunk


class RoundReceiver(Protocol):
    """Who minds rounds and catching up. As `protocol.interfaces.transport.LinkHandler`, for the messages of
    `swarm.vocabulary.averaging_messages`."""

    def admit(self, sender: PeerId, message: RoundTensor, tensor: TensorSpec) -> memoryview | Refusal:
        """A refusal reaches the sender as no more than "stop sending". Raises ProtocolViolation."""
        ...

    def received(self, sender: PeerId, message: RoundTensor, tensor: TensorSpec, buffer: memoryview) -> None: ...

    def broken_off(self, sender: PeerId, message: RoundTensor, buffer: memoryview, error: PeerError) -> None: ...

    def told(self, sender: PeerId, message: RoundControl | StateControl) -> None: ...

    def link_down(self, peer: PeerId, error: PeerError) -> None: ...


class LaneReceiver(Protocol):
    """Who minds what other data nodes say of their lanes (`swarm.vocabulary.routing_messages`)."""

    def told(self, sender: PeerId, message: LaneControl) -> None: ...


class Dispatcher:
    """`protocol.interfaces.transport.LinkHandler`. Before a node hosts a module there is neither carrier nor rounds,
    and tensors are refused.

    Only a data node minds lanes, and only of other data nodes; of rounds only what the other replicas of the own module
    say means anything.
    """

    def __init__(self, membership_sync: MembershipSync) -> None:
        self._membership_sync = membership_sync
        self.carrier: MicrobatchRunner | None = None
        self.rounds: RoundReceiver | None = None
        self.lanes: LaneReceiver | None = None
        self.answers: dict[QuestionAbout, Answering] = {}
        self.answers_by_asker: dict[QuestionAbout, AnsweringAsker] = {}
        """Of questions that concern the asker itself."""

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        if isinstance(message, Forward | Backward):
            if self.carrier is not None:
                return self.carrier.admit(sender, message, tensor)
        elif self.rounds is not None:
            return self.rounds.admit(sender, message, tensor)
        return Refusal(False, "no module is hosted here")

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Forward | Backward):
            if self.carrier is not None:
                self.carrier.received(message, Encoded(tensor, buffer))
        elif self.rounds is not None:
            self.rounds.received(sender, message, tensor, buffer)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        if isinstance(message, Forward | Backward):
            if self.carrier is not None:
                self.carrier.broken_off(message, buffer)
        elif self.rounds is not None:
            self.rounds.broken_off(sender, message, buffer, error)

    def serves(self, sender: PeerId) -> bool:
        return self._membership_sync.module_of(sender) is not None

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        match topic:
            case Topic.MICROBATCHES:
                return self.carrier is not None
            case Topic.STATE:  # visitors fetch it, too
                return self.rounds is not None
            case Topic.ROUNDS:
                own = self._membership_sync.own_module
                return self.rounds is not None and self._membership_sync.module_of(sender) == own
            case Topic.LANES:
                return self.lanes is not None and self._membership_sync.module_of(sender) == ModuleId(0)

    def told(self, sender: PeerId, message: ControlMessage) -> None:
        if isinstance(message, MicrobatchControl):
            if self.carrier is not None:
                self.carrier.told(sender, message)
        elif isinstance(message, LaneControl):
            if self.lanes is not None:
                self.lanes.told(sender, message)
        elif self.rounds is not None:
            self.rounds.told(sender, message)

    def announced(self, sender: PeerId, record: bytes) -> None:
        self._membership_sync.announced(sender, record)

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        personal = self.answers_by_asker.get(question.about)
        if personal is not None:
            return await personal(sender, question)
        answering = self.answers.get(question.about)
        if answering is None:
            raise Rejected(f"this peer does not answer questions about its {question.about.value}")
        return await answering(question)

    def link_up(self, peer: PeerId) -> None:
        self._membership_sync.link_up(peer)
        if self.carrier is not None:
            self.carrier.link_up(peer)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        self._membership_sync.link_down(peer, error)
        if self.carrier is not None:
            self.carrier.link_down(peer, error)
        if self.rounds is not None:
            self.rounds.link_down(peer, error)
