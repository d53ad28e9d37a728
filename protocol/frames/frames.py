"""Frames of a link and their encoding (link.proto). `decode` trusts nothing and raises only ProtocolViolation."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, get_args

from google.protobuf.message import DecodeError

from protocol.frames import rpc
from protocol.frames.codec import Around, Converter, checked_peer, converter, faultless, read_enum
from protocol.frames.rpc import AnswerFrame, QuestionFrame
from protocol.frames.tensors import CHUNK_TAG, Chunk, TensorFrame, decode_chunk, read_header, wire_header
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import MAX_RECORD_BYTES, Record, Topic
from swarm.vocabulary.averaging_messages import RoundControl, SignedRoster, StateControl
from swarm.vocabulary.bounds import Detail, Length, Range
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import (
    Backward,
    ControlMessage,
    Documents,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Position,
    Purpose,
    Recall,
    RouteSignature,
    Settled,
    TensorMessage,
)
from swarm.vocabulary.routing_messages import LaneControl
from swarm.vocabulary.types import MAX_HOPS, Hop, MicrobatchId, ModuleId, Path, PeerId, RunId, SignedRoute, VersionRange

MAX_LIFETIME_MS: Final = 3_600_000

_Hops = Annotated[tuple[Hop, ...], Length(0, MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class _Route:
    microbatch: MicrobatchId
    hops: _Hops
    position: Position
    modules: Annotated[tuple[ModuleId, ...], Length(0, MAX_HOPS)]
    lifetime_s: Annotated[float, Range(0, MAX_LIFETIME_MS / 1000)]
    signature: RouteSignature
    documents: Documents
    labels: Annotated[int, Range(0, 2**32 - 1)]

    def fault(self) -> str | None:
        if (self.modules or self.documents or self.labels) and not self.signature:
            what = f"{len(self.modules)} modules, {len(self.documents)} documents and {self.labels} labels"
            return f"{what} that nobody has signed"
        return None

    @property
    def path(self) -> Path:
        signed = None
        if self.signature:
            signed = SignedRoute(self.modules, self.lifetime_s, self.signature, self.documents, self.labels)
        return Path(self.microbatch.data_node, self.hops, signed)


@dataclass(frozen=True, slots=True)
class _Settled:
    microbatch: MicrobatchId
    hops: _Hops


_ROUTE: Final = converter(_Route, wire.Route.DESCRIPTOR)
_SETTLED: Final = converter(_Settled, wire.Settled.DESCRIPTOR)


def _write_route(message: MicrobatchTensor | Recall, _: Around) -> dict[str, Any]:
    path, signed = message.path, message.path.route or SignedRoute((), 0.0, b"")
    lifetime_s = message.lifetime_s if isinstance(message, Forward) else signed.lifetime_s
    route = _Route(
        message.microbatch,
        path.hops,
        message.position,
        signed.modules,
        lifetime_s,
        signed.signature,
        signed.documents,
        signed.labels,
    )
    return {"route": _ROUTE.write(route, None)}


def _write_forward(message: Forward, _: Around) -> dict[str, Any]:
    return {**_write_route(message, None), "purpose": message.purpose.value}


def _read_forward(said: wire.Forward, _: Around) -> Forward:
    route: _Route = _ROUTE.read(said.route, None)
    purpose = read_enum(Purpose, said.purpose, "purpose")
    return faultless(Forward(route.microbatch, route.path, route.position, purpose, route.lifetime_s))


def _read_routed(kind: type[Backward | Recall], said: wire.Backward | wire.Recall) -> Backward | Recall:
    route: _Route = _ROUTE.read(said.route, None)
    return faultless(kind(route.microbatch, route.path, route.position))


def _write_settled(message: Settled, _: Around) -> Any:
    return _SETTLED.write(_Settled(message.microbatch, message.path.hops), None)


def _read_settled(said: wire.Settled, _: Around) -> Settled:
    settled: _Settled = _SETTLED.read(said, None)
    return Settled(settled.microbatch, Path(settled.microbatch.data_node, settled.hops))


_ALONG_A_PATH: Final[dict[type, Converter]] = {
    Forward: Converter(_write_forward, _read_forward),
    Backward: Converter(_write_route, lambda said, _: _read_routed(Backward, said)),
    Recall: Converter(_write_route, lambda said, _: _read_routed(Recall, said)),
    Settled: Converter(_write_settled, _read_settled),
}


MAX_SMALL_FRAME_BYTES: Final = 72 * 1024
"""Every frame but a chunk: a path of 256 hops takes about 20 KiB, an offer of lanes at most 70, an answer 68."""

MAX_AGE_MS: Final = 2**48

OptionalRecord = Annotated[bytes, Length(1, MAX_RECORD_BYTES, or_none=True)]

_RUN_ID: Final = re.compile(r"[0-9a-f]{64}")
_BYTES: Final = 2  # Wire type of a length-delimited field


class FarewellReason(enum.Enum):
    UNSPECIFIED = 0
    LEAVING = 1
    DUPLICATE = 2
    WRONG_RUN = 3
    WRONG_VERSION = 4
    NOT_YOU = 5
    VIOLATION = 6
    SAME_KEY = 7


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each side: who it is, in which run, and what it speaks."""

    peer: PeerId
    run: RunId
    versions: VersionRange
    record: OptionalRecord  # Empty before the first
    incarnation: int = 0  # Random, 64 bits
    age_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ping:
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Cancel:
    transfer: int


@dataclass(frozen=True, slots=True)
class Farewell:
    """The last frame of a side that ends the link, with its reason."""

    reason: FarewellReason
    detail: Detail = ""
    record: OptionalRecord = b""  # With SAME_KEY: the other process's


@dataclass(frozen=True, slots=True)
class AnnouncementFrame:
    record: Record


SmallFrame = (
    Hello
    | Ping
    | Pong
    | Cancel
    | Farewell
    | TensorFrame
    | ControlMessage
    | QuestionFrame
    | AnswerFrame
    | AnnouncementFrame
)
Frame = SmallFrame | Chunk


def encode(frame: SmallFrame) -> bytes:
    """Encodes a frame. What is ours to bound (details for people) is cut to its bound here."""
    said = frame.message if isinstance(frame, TensorFrame) else frame
    name = _FIELD_OF[type(said)]
    fields = _KINDS[name].converter.write(said, None)
    if isinstance(frame, TensorFrame):
        fields["tensor"] = wire_header(frame)
    data: bytes = wire.Frame(**{name: fields}).SerializeToString()
    return data


def is_chunk(data: bytes) -> bool:
    """Whether what a peer sent claims to be a chunk of a tensor; else it is a small frame."""
    return data[:1] == bytes((CHUNK_TAG,))


def topic_of(data: bytes) -> Topic | None:
    """The topic of a small frame by its first bytes; None if it concerns everybody. Raises ProtocolViolation."""
    return _KINDS[_name_of(data)].topic


def decode(data: bytes) -> Frame:
    """Decodes and checks a frame from a peer. Raises ProtocolViolation: says what is wrong with it."""
    if is_chunk(data):
        return decode_chunk(data)
    name = _name_of(data)
    try:
        said = getattr(wire.Frame.FromString(data), name)
    except DecodeError:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame") from None
    kind = _KINDS[name]
    try:
        message = kind.converter.read(said, None)
        return read_header(message, said.tensor) if kind.has_tensor else message
    except ProtocolViolation as violation:
        raise ProtocolViolation(f"{kind.topic.value if kind.topic else name}: {violation}") from None


def _name_of(data: bytes) -> str:
    """The name of the one field that the frame consists of. protobuf would take several and believe the last."""
    if len(data) > MAX_SMALL_FRAME_BYTES:
        raise ProtocolViolation(f"a frame of {len(data)} bytes that is no chunk is longer than {MAX_SMALL_FRAME_BYTES}")
    tag, at = _varint(data, 0) if data else (_BYTES, 0)
    if tag & 7 != _BYTES:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame")
    name = _BY_TAG.get(tag)
    if name is None:
        raise ProtocolViolation("a frame of unknown kind, or a chunk whose fields are not in order")
    length, at = _varint(data, at)
    if at + length != len(data):
        raise ProtocolViolation(f"a frame of {len(data)} bytes is not exactly one field")
    return name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, of at most three bytes, and the place behind it."""
    value = 0
    for place, octet in enumerate(data[at : at + 3]):
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ProtocolViolation(f"{len(data)} bytes are not a frame")


# ---- what comes first on a link -------------------------------------------------------------------------------------


def _write_hello(hello: Hello, _: Around) -> dict[str, Any]:
    return {
        "peer": hello.peer,
        "run": hello.run,
        "lowest_version": hello.versions.lowest,
        "highest_version": hello.versions.highest,
        "announcement": hello.record,
        "incarnation": hello.incarnation,
        "age_ms": hello.age_ms,
    }


def _read_hello(hello: wire.Hello, _: Around) -> Hello:
    if not _RUN_ID.fullmatch(hello.run):
        raise ProtocolViolation("the run is not 64 hexadecimal digits")
    versions = VersionRange(hello.lowest_version, hello.highest_version)
    if not 1 <= versions.lowest <= versions.highest:
        raise ProtocolViolation(f"no protocol versions from {versions.lowest} to {versions.highest}")
    if hello.age_ms >= MAX_AGE_MS:
        raise ProtocolViolation(f"no process is {hello.age_ms} ms old")
    record = _read_record(hello.announcement) if hello.announcement else b""
    return Hello(checked_peer(hello.peer), RunId(hello.run), versions, record, hello.incarnation, hello.age_ms)


def _read_record(record: bytes) -> bytes:
    if not 0 < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolViolation(f"a record of {len(record)} bytes is not from 1 to {MAX_RECORD_BYTES} bytes long")
    return record


# ---- which class is which field of link.proto's Frame ---------------------------------------------------------------


class _Kind(NamedTuple):
    what: type
    converter: Converter
    topic: Topic | None
    has_tensor: bool


_TOPICS: Final = {
    **dict.fromkeys(get_args(MicrobatchControl), Topic.MICROBATCHES),
    **dict.fromkeys(get_args(RoundControl), Topic.ROUNDS),
    **dict.fromkeys(get_args(StateControl), Topic.STATE),
    **dict.fromkeys(get_args(LaneControl), Topic.LANES),
}
_WITH_TENSOR: Final = get_args(TensorMessage)
_BY_HAND: Final[dict[type, Converter]] = {
    Hello: Converter(_write_hello, _read_hello),
    AnnouncementFrame: Converter(lambda frame, _: frame.record, lambda said, _: AnnouncementFrame(_read_record(said))),
    **_ALONG_A_PATH,
    **rpc.CONVERTERS,
}
_NAMES: Final[dict[str, type]] = {
    **{kind.__name__: kind for kind in (Hello, Ping, Pong, Cancel, Farewell, *_WITH_TENSOR, *_TOPICS)},
    **{f"Lane{kind.__name__}": kind for kind in get_args(LaneControl)},
    "Roster": SignedRoster,
    "Question": QuestionFrame,
    "Answer": AnswerFrame,
    "announcement": AnnouncementFrame,
}
"""Names in link.proto by class."""


def _kind(field: Any) -> _Kind:
    what = _NAMES[field.message_type.name if field.message_type else field.name]
    return _Kind(
        what, _BY_HAND.get(what) or converter(what, field.message_type), _TOPICS.get(what), what in _WITH_TENSOR
    )


_KINDS: Final = {field.name: _kind(field) for field in wire.Frame.DESCRIPTOR.fields if field.name != "chunk"}
"""Kinds by field name."""
_FIELD_OF: Final = {kind.what: name for name, kind in _KINDS.items()}
_BY_TAG: Final = {
    field.number << 3 | _BYTES: field.name for field in wire.Frame.DESCRIPTOR.fields if field.name in _KINDS
}
