"""Frames of a link: what link.proto says as bytes, here as plain data, and the way between the two.

`decode` trusts nothing: every length, number, name and enum is checked here, and whatever is wrong with the bytes, the
only error is ProtocolViolation. What needs the manifest or the state of the link to be checked is checked by those who
have them. Chunks have a module of their own (`protocol.frames.chunks`); what a microbatch's life consists of is in
`protocol.frames.pipeline`, rounds are in `protocol.frames.averaging`, catching up in `protocol.frames.state`, the talk
about lanes in `protocol.frames.routing`, questions and answers in `protocol.frames.rpc`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from protocol.frames.averaging import (
    encode_piece,
    encode_round,
    read_accepting,
    read_accusation,
    read_audit_refused,
    read_audit_request,
    read_commit,
    read_contribution,
    read_declined,
    read_dissolved,
    read_entry,
    read_evidence,
    read_invitation,
    read_prepared,
    read_progress,
    read_pulse,
    read_reduced,
    read_roster,
)
from protocol.frames.chunks import CHUNK_TAG, Chunk, decode_chunk
from protocol.frames.fields import (
    DETAIL_CHARACTERS,
    TensorFrame,
    checked_peer,
    read_detail,
    read_enum,
    read_record,
    wire_number,
)
from protocol.frames.pipeline import (
    encode_control,
    encode_tensor,
    read_backward,
    read_close,
    read_forward,
    read_recall,
    read_receipt,
    read_settled,
    read_stranded,
    read_unsettled,
)
from protocol.frames.routing import LANE_READERS, encode_lanes
from protocol.frames.rpc import AnswerFrame, QuestionFrame, read_answer, read_question, wire_answer, wire_question
from protocol.frames.state import (
    encode_state,
    encode_state_chunk,
    read_state_chunk,
    read_state_refused,
    read_state_request,
)
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Topic
from swarm.vocabulary.averaging_messages import Contribution, Reduced, StateChunk, StateRefused, StateRequest
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    ControlMessage,
    Forward,
    Recall,
    Receipt,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.routing_messages import Abandon, Accept, Decline, Heard, Offer, Told
from swarm.vocabulary.types import PeerId, RunId, VersionRange

MAX_SMALL_FRAME_BYTES: Final = 72 * 1024
"""Of every frame that is not a chunk: a path of 256 hops takes about 20 KiB, a roster of 256 members about 24 KiB, the
lanes of two data nodes at most 60 KiB, an answer 64 KiB."""

MAX_AGE_MS: Final = 2**48

_RUN_ID: Final = re.compile(r"[0-9a-f]{64}")


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
    peer: PeerId
    run: RunId
    versions: VersionRange
    record: bytes
    """A SignedRecord, unchecked; empty when the peer has none yet."""
    incarnation: int = 0
    """Of the process, 64 bits at random."""
    age_ms: int = 0
    """Of the process."""


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
    reason: FarewellReason
    detail: str = ""
    record: bytes = b""
    """With SAME_KEY: a SignedRecord of the other process, unchecked."""


@dataclass(frozen=True, slots=True)
class AnnouncementFrame:
    record: bytes


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
    """The frame's bytes. What is ours to bound (details for people) is cut to its bound here."""
    data: bytes = _wire_frame(frame).SerializeToString()
    return data


def is_chunk(data: bytes) -> bool:
    """Whether what a peer sent claims to be a chunk of a tensor; else it is a small frame."""
    return data[:1] == bytes((CHUNK_TAG,))


def topic_of(data: bytes) -> Topic | None:
    """What a small frame is about, as its first bytes say; None when that concerns everybody, or when it announces a
    tensor.

    Raises:
        ProtocolViolation: it is too long, or not exactly one field of a known kind.
    """
    return _TOPICS.get(_kind_of(data))


def decode(data: bytes) -> Frame:
    """What a peer sent.

    Raises:
        ProtocolViolation: says what is wrong with it.
    """
    if is_chunk(data):
        return decode_chunk(data)
    kind = _kind_of(data)
    try:
        frame = wire.Frame.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame") from None
    return _READERS[kind](getattr(frame, kind))


def _kind_of(data: bytes) -> str:
    """Of one field the whole frame consists of: its tag, its length, and so many bytes. protobuf would take several,
    and believe the last."""
    if len(data) > MAX_SMALL_FRAME_BYTES:
        raise ProtocolViolation(f"a frame of {len(data)} bytes that is no chunk is longer than {MAX_SMALL_FRAME_BYTES}")
    tag, at = _varint(data, 0) if data else (_BYTES, 0)
    if tag & 7 != _BYTES:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame")
    kind = _KINDS.get(tag)
    if kind is None:
        raise ProtocolViolation("a frame of unknown kind, or a chunk whose fields are not in order")
    length, at = _varint(data, at)
    if at + length != len(data):
        raise ProtocolViolation(f"a frame of {len(data)} bytes is not exactly one field")
    return kind


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, of at most three bytes, and the place behind it."""
    value = 0
    for place, octet in enumerate(data[at : at + 3]):
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ProtocolViolation(f"{len(data)} bytes are not a frame")


def _wire_frame(frame: SmallFrame) -> wire.Frame:
    match frame:
        case Hello():
            return wire.Frame(hello=_wire_hello(frame))
        case Ping(token):
            return wire.Frame(ping=wire.Ping(token=token))
        case Pong(token):
            return wire.Frame(pong=wire.Pong(token=token))
        case Cancel(transfer):
            return wire.Frame(cancel=wire.Cancel(transfer=transfer))
        case Farewell(reason, detail, record):
            said = wire.Farewell(reason=wire_number(reason), detail=detail[:DETAIL_CHARACTERS], record=record)
            return wire.Frame(farewell=said)
        case QuestionFrame():
            return wire.Frame(question=wire_question(frame))
        case AnswerFrame():
            return wire.Frame(answer=wire_answer(frame))
        case AnnouncementFrame(record):
            return wire.Frame(announcement=record)
        case TensorFrame(Forward() | Backward() as message):
            return encode_tensor(message, frame)
        case Receipt() | Stranded() | Close() | Recall() | Settled() | Unsettled():
            return encode_control(frame)
        case StateRequest() | StateRefused():
            return encode_state(frame)
        case Told() | Heard() | Offer() | Accept() | Decline() | Abandon():
            return encode_lanes(frame)
        case TensorFrame(Contribution() | Reduced() as message):
            return encode_piece(message, frame)
        case TensorFrame(StateChunk() as message):
            return encode_state_chunk(message, frame)
        case TensorFrame():
            raise TypeError(f"no tensor travels with a {type(frame.message).__name__}")
        case _:
            return encode_round(frame)


def _wire_hello(hello: Hello) -> wire.Hello:
    return wire.Hello(
        peer=hello.peer,
        run=hello.run,
        lowest_version=hello.versions.lowest,
        highest_version=hello.versions.highest,
        announcement=hello.record,
        incarnation=hello.incarnation,
        age_ms=hello.age_ms,
    )


def _read_hello(hello: wire.Hello) -> Hello:
    if not _RUN_ID.fullmatch(hello.run):
        raise ProtocolViolation("hello: the run is not 64 hexadecimal digits")
    if not 1 <= hello.lowest_version <= hello.highest_version:
        raise ProtocolViolation(f"hello: no protocol versions from {hello.lowest_version} to {hello.highest_version}")
    if hello.age_ms >= MAX_AGE_MS:
        raise ProtocolViolation(f"hello: no process is {hello.age_ms} ms old")
    return Hello(
        checked_peer(hello.peer),
        RunId(hello.run),
        VersionRange(hello.lowest_version, hello.highest_version),
        read_record(hello.announcement) if hello.announcement else b"",
        hello.incarnation,
        hello.age_ms,
    )


def _read_farewell(farewell: wire.Farewell) -> Farewell:
    record = read_record(farewell.record) if farewell.record else b""
    return Farewell(read_enum(FarewellReason, farewell.reason, "farewell reason"), read_detail(farewell.detail), record)


_READERS: Final[dict[str, Callable[[Any], SmallFrame]]] = {
    "hello": _read_hello,
    "ping": lambda ping: Ping(ping.token),
    "pong": lambda pong: Pong(pong.token),
    "cancel": lambda cancel: Cancel(cancel.transfer),
    "farewell": _read_farewell,
    "forward": read_forward,
    "backward": read_backward,
    "receipt": read_receipt,
    "stranded": read_stranded,
    "close": read_close,
    "recall": read_recall,
    "settled": read_settled,
    "unsettled": read_unsettled,
    "question": read_question,
    "answer": read_answer,
    "progress": read_progress,
    "invitation": read_invitation,
    "accepting": read_accepting,
    "entry": read_entry,
    "declined": read_declined,
    "roster": read_roster,
    "contribution": read_contribution,
    "reduced": read_reduced,
    "pulse": read_pulse,
    "prepared": read_prepared,
    "commit": read_commit,
    "dissolved": read_dissolved,
    "state_request": read_state_request,
    "state_chunk": read_state_chunk,
    "state_refused": read_state_refused,
    "audit_request": read_audit_request,
    "evidence": read_evidence,
    "audit_refused": read_audit_refused,
    "accusation": read_accusation,
    **LANE_READERS,
    "announcement": lambda record: AnnouncementFrame(read_record(record)),
}

_BYTES: Final = 2
"""The wire type of what has a length before it, as every kind has."""
_KINDS: Final = {
    field.number << 3 | _BYTES: field.name for field in wire.Frame.DESCRIPTOR.fields if field.name in _READERS
}
"""By tag."""
_TOPICS: Final = {
    **dict.fromkeys(("receipt", "stranded", "close", "recall", "settled", "unsettled"), Topic.MICROBATCHES),
    **dict.fromkeys(
        (
            "progress",
            "invitation",
            "accepting",
            "entry",
            "declined",
            "roster",
            "pulse",
            "prepared",
            "commit",
            "dissolved",
            "audit_request",
            "evidence",
            "audit_refused",
            "accusation",
        ),
        Topic.ROUNDS,
    ),
    **dict.fromkeys(("state_request", "state_refused"), Topic.STATE),
    **dict.fromkeys(LANE_READERS, Topic.LANES),
}
"""Of what only says something. Who sends a tensor is told when it is not wanted."""
