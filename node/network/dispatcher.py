"""Dispatch of messages from links to the handlers that parts of the node registered."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType, UnionType
from typing import Any, Final, Protocol, get_args

from node.network.local_peer import LocalPeer
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import TOPICS, Question, QuestionAbout, Refusal, Topic
from swarm.membership.membership import Membership
from swarm.vocabulary.averaging_messages import RoundPiece
from swarm.vocabulary.errors import PeerError, Rejected
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import PeerId

Answer = Callable[[PeerId, Question], Awaitable[bytes]]
Receive = Callable[[PeerId, Any], None]
Kinds = type | UnionType

NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


class TensorReceiver(Protocol):
    """Receiver of tensors of some message types, with methods as in `protocol.interfaces.transport.LinkHandler`."""

    def admit(self, sender: PeerId, message: Any, tensor: TensorSpec) -> memoryview | Refusal: ...

    def received(self, sender: PeerId, message: Any, tensor: TensorSpec, buffer: memoryview) -> None: ...

    def broken_off(self, sender: PeerId, message: Any, buffer: memoryview) -> None: ...


class Dispatcher:
    """`LinkHandler` that passes each message to the handler registered for its type; refuses or drops the others."""

    def __init__(self, own: LocalPeer, membership: Membership) -> None:
        self._own, self._membership = own, membership
        self._tensors: dict[type, TensorReceiver] = {}
        self._messages: dict[type, Receive] = {}
        self._answers: dict[QuestionAbout, Answer] = {}
        self._on_announced: list[Callable[[PeerId, bytes], None]] = []
        self._on_link_up: list[Callable[[PeerId], None]] = []
        self._on_link_down: list[Callable[[PeerId, PeerError], None]] = []

    @contextmanager
    def registered(
        self,
        *,
        tensors: Mapping[Kinds, TensorReceiver] = NONE,
        messages: Mapping[Kinds, Receive] = NONE,
        answers: Mapping[QuestionAbout, Answer] = NONE,
        announced: Callable[[PeerId, bytes], None] | None = None,
        link_up: Callable[[PeerId], None] | None = None,
        link_down: Callable[[PeerId, PeerError], None] | None = None,
    ) -> Iterator[None]:
        """Registers handlers of messages and link changes within the block. A message type has one handler."""
        tables: tuple[dict[Any, Any], ...] = self._tensors, self._messages, self._answers
        entries: tuple[dict[Any, Any], ...] = _by_type(tensors), _by_type(messages), dict(answers)
        lists: tuple[list[Any], ...] = self._on_announced, self._on_link_up, self._on_link_down
        with ExitStack() as undo:
            for table, added in zip(tables, entries, strict=True):
                assert not table.keys() & added.keys(), "these types have a receiver already"
                table |= added
                for kind in added:
                    undo.callback(table.pop, kind)
            for registered, callback in zip(lists, (announced, link_up, link_down), strict=True):
                if callback is not None:
                    registered.append(callback)
                    undo.callback(registered.remove, callback)
            yield

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        receiver = self._tensors.get(type(message))
        if receiver is None:
            return Refusal(False, "this node has no receiver for this message")
        # A stranger must not make us reserve buffers of a round.
        if isinstance(message, RoundPiece) and not self._is_replica(sender):
            return Refusal(False, "only replicas of this module take part in its rounds")
        return receiver.admit(sender, message, tensor)

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        receiver = self._tensors.get(type(message))
        if receiver is not None:
            receiver.received(sender, message, tensor, buffer)

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        receiver = self._tensors.get(type(message))
        if receiver is not None:
            receiver.broken_off(sender, message, buffer)

    def serves(self, sender: PeerId) -> bool:
        known = self._membership.get(sender)
        return known is not None and known.module is not None

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        if self._messages.keys().isdisjoint(TOPICS[topic]):
            return False
        match topic:
            case Topic.MICROBATCHES | Topic.STATE:  # visitors fetch state too
                return True
            case Topic.ROUNDS:
                return self._is_replica(sender)

    def received_control(self, sender: PeerId, message: ControlMessage) -> None:
        receive = self._messages.get(type(message))
        if receive is not None:
            receive(sender, message)

    def announced(self, sender: PeerId, record: bytes) -> None:
        for tell in self._on_announced:
            tell(sender, record)

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        answer = self._answers.get(question.about)
        if answer is None:
            raise Rejected(f"this peer does not answer questions about {question.about.value}")
        return await answer(sender, question)

    def link_up(self, peer: PeerId) -> None:
        for tell in list(self._on_link_up):  # copied, because a callback may unregister itself
            tell(peer)

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        for tell in list(self._on_link_down):
            tell(peer, error)

    def _is_replica(self, peer: PeerId) -> bool:
        """Whether the peer announces that it hosts our module."""
        return self._own.module is not None and self._membership.hosts(peer, self._own.module)


def _by_type(receivers: Mapping[Kinds, Any]) -> dict[type, Any]:
    return {kind: receiver for kinds, receiver in receivers.items() for kind in get_args(kinds) or (kinds,)}
