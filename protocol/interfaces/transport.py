"""The interfaces of the transport and of the handler of its arrivals."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Protocol, get_args

from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.averaging_messages import RoundControl, StateControl
from swarm.vocabulary.bounds import Length, Range, Rising
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.pipeline_messages import ControlMessage, MicrobatchControl, TensorMessage
from swarm.vocabulary.types import MAX_STAGES, Digest, ModuleId, PeerId, Stage


@dataclass(frozen=True, slots=True)
class Contact:
    """What it takes to dial a peer and to recognise it."""

    peer: PeerId
    addresses: tuple[str, ...]
    certificate: bytes  # DER; checked to belong to `peer`
    via: tuple[PeerId, ...] = ()  # Peers that can call it
    relay: str = ""  # Multiaddr at which it serves tunnels


class AddressBook(Protocol):
    """The contacts that the transport can dial."""

    def contact(self, peer: PeerId) -> Contact | None:
        """The peer's contact, or None when it is not known."""


class Directory(Protocol):
    """The DHT's interface to the node."""

    async def publish(self, announcement: Announcement) -> None:
        """Signs and stores our record under its module's key. Raises Unreachable; call again later."""

    async def look_up(self, modules: Sequence[ModuleId]) -> list[Announcement]:
        """All valid, unexpired records of these modules and of visitors. Raises Unreachable."""


MAX_RECORD_BYTES: Final = 2048
TOKENIZER_PIECE_BYTES: Final = 2**16
MAX_TOKENIZER_PIECES: Final = 2**11
MAX_EVALUATION_MICROBATCHES: Final = 256

Record = Annotated[bytes, Length(1, MAX_RECORD_BYTES)]  # A SignedRecord, unchecked


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a tensor. `busy` means: a free slot may come; try again or elsewhere."""

    busy: bool
    detail: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """A question of link.proto. Most fields belong to one subject only."""

    about: QuestionAbout
    microbatches: Annotated[int, Range(1, MAX_EVALUATION_MICROBATCHES)] = 0
    module: ModuleId | None = None
    digest: Digest = b""
    # `evaluate`: the stages after stage 0; none: all
    stages: Annotated[tuple[Stage, ...], Length(0, MAX_STAGES - 1), Rising()] = ()
    port: Annotated[int, Range(1, 65_535)] = 0  # `dial_back`: the asker's
    peer: PeerId | None = None  # `call`: the peer to call
    record: Record = b""  # `call` and `called`: of the peer that wants the link
    # `tokenizer`: the number of the TOKENIZER_PIECE_BYTES
    piece: Annotated[int, Range(0, MAX_TOKENIZER_PIECES - 1)] = 0


class QuestionAbout(enum.Enum):
    MANIFEST = "manifest"
    STATUS = "status"
    EVALUATE = "evaluate"
    STATE = "state"  # A digest's hash list
    DIAL_BACK = "dial_back"  # Whether the asker can be connected to
    CALL = "call"  # Pass this on: the asker wants a link to another peer
    CALLED = "called"  # Passed on: a peer wants a link that is opened from here
    ROUTER = "router"  # The run's router
    TOKENIZER = "tokenizer"  # A piece of the tokenizer file; shorter, or empty, at its end


Ask = Callable[[PeerId, Question, float], Awaitable[bytes]]  # `Transport.ask`


class Caller(Protocol):
    """Gets a peer that cannot be dialled to open a link to us (`protocol.transport.dialer.Calls`)."""

    def can_be_dialled(self) -> bool:
        """Whether a peer that is called could connect to this one."""

    async def call(self, contact: Contact, ask: Ask, patience_s: float) -> None:
        """Calls the peer; returns when it says that it has opened a link. Raises Unreachable."""


class Tunnels(Protocol):
    """Tunnels: ways between two peers of which neither can dial the other, carried by a third."""

    async def way_to(self, contact: Contact) -> str:
        """Opens a tunnel; returns the local `host:port` at which the peer answers. Raises Unreachable."""


@dataclass(frozen=True, slots=True)
class FarEnd:
    """The other end of a link, as TLS has proved it."""

    host: str  # As this side sees it; the host's name if this side dialled a name
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
    """The receiver of what arrives on links. All methods but `answer` run on the event loop and must not block it."""

    def admit(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec) -> memoryview | Refusal:
        """Admits a tensor by its header: `tensor.byte_length` bytes, or a refusal. Raises ProtocolViolation."""

    def received(self, sender: PeerId, message: TensorMessage, tensor: TensorSpec, buffer: memoryview) -> None:
        """Takes an admitted tensor that is complete and whose checksums agreed."""

    def broken_off(self, sender: PeerId, message: TensorMessage, buffer: memoryview, error: PeerError) -> None:
        """Takes back the buffer of an admitted tensor that will not be completed."""

    def serves(self, sender: PeerId) -> bool:
        """Whether the peer is known to host a module of the run; more small frames are read from those that do."""

    def minds(self, sender: PeerId, topic: Topic) -> bool:
        """Whether this peer may speak about the topic. Asked before a frame is decoded."""

    def told(self, sender: PeerId, message: ControlMessage) -> None: ...

    def announced(self, sender: PeerId, record: bytes) -> None:
        """Takes the peer's signed record (unchecked)."""

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        """Answers a question. Raises PeerError: refused; its message becomes `Answer.refused`."""

    def link_up(self, peer: PeerId) -> None: ...

    def link_down(self, peer: PeerId, error: PeerError) -> None:
        """Notes that the last stream has ended; everything unacknowledged is lost."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    round_trip_s: float  # Smoothed; 0 before the first pong
    sent_bytes: int
    received_bytes: int
    goodput_bytes_per_s: float  # Of acknowledged tensors; 0 before the first


class Transport(Protocol):
    """Links to the run's peers: sends tensors and small messages, asks questions."""

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        """Sends a tensor, dialling first; only a Receipt says that it arrived. Raises Unreachable, Stalled, Rejected,
        StaleVersion."""

    async def tell(self, peer: PeerId, message: ControlMessage) -> None:
        """Sends a small message, dialling first when there is no link. Same errors as `send`."""

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        """Asks and waits for the answer. Errors as `send`, and Rejected when the peer refuses, Stalled on timeout."""

    def announce(self, record: bytes) -> None:
        """Sends our new signed record to every linked peer; b"" when there is none yet, which nobody is told."""

    def figures(self) -> dict[PeerId, LinkFigures]: ...
