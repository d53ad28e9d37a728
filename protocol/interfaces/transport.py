"""Interfaces of the transport and of the handler for received messages."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final, Protocol, get_args

from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.averaging_messages import RoundControl, StateControl
from swarm.vocabulary.bounds import Length, Range, Rising
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage, MicrobatchControl, TensorMessage
from swarm.vocabulary.types import MAX_STAGES, Digest, ModuleId, PeerId, Stage


@dataclass(frozen=True, slots=True)
class Contact:
    """Addresses and certificate, to dial a peer and to authenticate it."""

    peer: PeerId
    addresses: tuple[str, ...]
    certificate: bytes  # DER, verified to belong to `peer`; empty: unknown, so that it has to dial us
    via: tuple[PeerId, ...] = ()  # Peers that can ask it to dial back
    relay: str = ""  # Multiaddr at which it relays tunnels


class AddressBook(Protocol):
    """Source of addresses and certificates of peers (contacts) for the transport."""

    def contact(self, peer: PeerId) -> Contact | None:
        """Returns the peer's contact, perhaps only who can ask it to dial us; None if it cannot be reached."""


MAX_RECORD_BYTES: Final = 2048
ROUTER_PIECE_BYTES: Final = 68 * 1024  # A router of up to 16 experts is one piece, as older peers expect
TOKENIZER_PIECE_BYTES: Final = 2**16
MAX_TOKENIZER_PIECES: Final = 2**11
MAX_ACCUSED: Final = 8
MAX_EVALUATION_MICROBATCHES: Final = 256

Record = Annotated[bytes, Length(1, MAX_RECORD_BYTES)]  # A SignedRecord, unchecked


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a tensor. `busy`: only for now, so retry later or with another peer."""

    busy: bool
    detail: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a peer, as in link.proto. Most fields are for one kind of question (`about`) only."""

    about: "QuestionAbout"
    microbatches: Annotated[int, Range(1, MAX_EVALUATION_MICROBATCHES)] = 0
    module: ModuleId | None = None
    digest: Digest = b""
    # `evaluate`: stages to visit after stage 0; empty: all
    stages: Annotated[tuple[Stage, ...], Length(0, MAX_STAGES - 1), Rising()] = ()
    port: Annotated[int, Range(1, 65_535)] = 0  # `dial_back`: port of the asker
    peer: PeerId | None = None  # `call`: the peer to call
    record: Record = b""  # `call` and `called`: record of the peer that wants the link
    # `work`: replicas of the module that the asker excludes from rounds as liars
    accused: Annotated[tuple[PeerId, ...], Length(0, MAX_ACCUSED)] = ()
    # `router` and `tokenizer`: index of a piece of the file
    piece: Annotated[int, Range(0, MAX_TOKENIZER_PIECES - 1)] = 0


class QuestionAbout(enum.Enum):
    MANIFEST = "manifest"
    STATUS = "status"
    EVALUATE = "evaluate"
    STATE = "state"  # The hash list of a digest
    DIAL_BACK = "dial_back"  # Whether the asker can be dialled
    CALL = "call"  # To an intermediate peer: ask another peer to dial the asker
    CALLED = "called"  # From an intermediate peer: dial the owner of the record
    ROUTER = "router"  # A piece of the router file, as for the tokenizer
    WORK = "work"  # Tallies that prove the work of a module's replicas
    TOKENIZER = "tokenizer"  # A piece of the tokenizer file; shorter or empty at its end


Ask = Callable[[PeerId, Question, float], Awaitable[bytes]]  # `Transport.ask`


class Tunnels(Protocol):
    """Tunnels through a relay, between two peers that cannot dial each other."""

    async def way_to(self, contact: Contact) -> str:
        """Opens a tunnel to a peer through a relay. Returns the local `host:port` of the tunnel. Raises Unreachable."""


@dataclass(frozen=True, slots=True)
class FarEnd:
    """The other end of a link, authenticated by TLS."""

    host: str  # Address seen by this side; the host name if this side dialled a name
    certificate: bytes  # DER


class Topic(enum.Enum):
    MICROBATCHES = "microbatches"
    ROUNDS = "rounds"
    STATE = "state"


TOPICS: Final = {
    Topic.MICROBATCHES: frozenset(get_args(MicrobatchControl)),
    Topic.ROUNDS: frozenset(get_args(RoundControl)),
    Topic.STATE: frozenset(get_args(StateControl)),
}


class LinkHandler(Protocol):
    """Handler of messages received on links. Its methods run on the event loop and must not block it."""

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        """Returns a buffer of `tensor.byte_length` bytes for a tensor, or a refusal. Raises ProtocolViolation."""

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        """Handles an admitted tensor that has arrived completely and is verified."""

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        """Takes back the buffer of an admitted tensor whose transfer broke off."""

    def serves(self, sender: PeerId) -> bool:
        """Whether the peer is known to host a module. Such peers may send more small frames."""

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        """Whether we accept messages on the topic from `sender`. Called before a frame is decoded."""

    def received_control(self, sender: PeerId, message: ControlMessage) -> None: ...

    def announced(self, sender: PeerId, record: bytes) -> None:
        """Handles a peer's signed announcement, which is not verified yet."""

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        """Answers a peer's question. Raises PeerError to refuse; the text of this error becomes `Answer.refused`."""

    def link_up(self, peer: PeerId) -> None: ...

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        """Handles the end of the last stream to a peer. All unacknowledged messages are lost."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    round_trip_s: float  # Smoothed; 0 before the first pong
    sent_bytes: int
    received_bytes: int
    goodput_bytes_per_s: float  # From acknowledged tensors; 0 before the first


class Transport(Protocol):
    """Links to the run's peers, for tensors, small messages and questions."""

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        """Sends a tensor; only a Receipt confirms it. Raises Unreachable, Stalled, Rejected, StaleVersion."""

    async def send_control(self, peer: PeerId, message: ControlMessage) -> None:
        """Sends a small message, after dialling if necessary. Raises as `send`."""

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        """Asks a peer and returns its answer. Raises as `send`, Rejected if the peer refuses, Stalled on timeout."""

    def announce(self, record: bytes) -> None:
        """Sends our new signed announcement to every linked peer. Sends nothing if `record` is empty."""

    def figures(self) -> dict[PeerId, LinkFigures]: ...
