"""Frames of a link: what link.proto says as bytes, here as plain data, and the way between the two.

`decode` trusts nothing: every length, number, name and enum is checked here, and whatever is wrong with the bytes, the
only error is ProtocolViolation. What needs the manifest or the state of the link to be checked is checked by those who
have them. Chunks have a module of their own (`protocol.chunks`); what a microbatch's life consists of is in
`protocol.microbatch_frames`, rounds are in `protocol.round_frames`, catching up in `protocol.state_frames`, the talk about lanes in
`protocol.lane_frames`, questions and answers in `protocol.question_frames`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from protocol.chunks import CHUNK_TAG, Chunk, decode_chunk
from protocol.frame_parts import (
    DETAIL_CHARACTERS,
    TensorFrame,
    checked_peer,
    read_detail,
    read_enum,
    read_record,
    wire_number,
)
from protocol.generated import link_pb2 as wire
from protocol.lane_frames import LANE_READERS, encode_lanes
from protocol.microbatch_frames import (
    encode_control,
    encode_tensor,
    read_arrival_hint,
    read_backward,
    read_close,
    read_forward,
    read_recall,
    read_receipt,
    read_settled,
    read_stranded,
    read_unsettled,
)
from protocol.question_frames import (
    AnswerFrame,
    QuestionFrame,
    read_answer,
    read_question,
    wire_answer,
    wire_question,
)
from protocol.round_frames import (
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
from protocol.state_frames import (
    encode_state,
    encode_state_chunk,
    read_state_chunk,
    read_state_refused,
    read_state_request,
)
from swarm.errors import ProtocolViolation
from swarm.lane_messages import Abandon, Accept, Decline, Heard, Offer, Told
from swarm.messages import (
    ArrivalHint,
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
from swarm.round_messages import Contribution, Reduced, StateChunk, StateRefused, StateRequest
from swarm.vocabulary import PeerId, RunId, VersionRange

MAX_SMALL_FRAME_BYTES: Final = 72 * 1024
"""Of every frame that is not a chunk: a path of 256 hops takes about 20 KiB, a roster of 256 members about 24 KiB, the lanes of two data nodes at most 60 KiB, an answer 64 KiB."""

_RUN_ID: Final = re.compile(r"[0-9a-f]{64}")


class FarewellReason(enum.Enum):
    UNSPECIFIED = 0
    LEAVING = 1
    DUPLICATE = 2
    WRONG_RUN = 3
    WRONG_VERSION = 4
    NOT_YOU = 5
    VIOLATION = 6


@dataclass(frozen=True, slots=True)
class Hello:
    peer: PeerId
    run: RunId
    versions: VersionRange
    record: bytes
    """A SignedRecord, unchecked; empty when the peer has none yet."""


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


def decode(data: bytes) -> Frame:
    """What a peer sent.

    Raises:
        ProtocolViolation: says what is wrong with it.
    """
    if data and data[0] == CHUNK_TAG:
        return decode_chunk(data)
    if len(data) > MAX_SMALL_FRAME_BYTES:
        raise ProtocolViolation(f"a frame of {len(data)} bytes that is no chunk is longer than {MAX_SMALL_FRAME_BYTES}")
    try:
        frame = wire.Frame.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame") from None
    kind = frame.WhichOneof("kind")
    read = _READERS.get(kind or "")
    if kind is None or read is None:
        raise ProtocolViolation("a frame of unknown kind, or a chunk whose fields are not in order")
    return read(getattr(frame, kind))


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
        case Farewell(reason, detail):
            return wire.Frame(farewell=wire.Farewell(reason=wire_number(reason), detail=detail[:DETAIL_CHARACTERS]))
        case QuestionFrame():
            return wire.Frame(question=wire_question(frame))
        case AnswerFrame():
            return wire.Frame(answer=wire_answer(frame))
        case AnnouncementFrame(record):
            return wire.Frame(announcement=record)
        case TensorFrame(Forward() | Backward() as message):
            return encode_tensor(message, frame)
        case Receipt() | Stranded() | Close() | ArrivalHint() | Recall() | Settled() | Unsettled():
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
    )


def _read_hello(hello: wire.Hello) -> Hello:
    if not _RUN_ID.fullmatch(hello.run):
        raise ProtocolViolation("hello: the run is not 64 hexadecimal digits")
    if not 1 <= hello.lowest_version <= hello.highest_version:
        raise ProtocolViolation(f"hello: no protocol versions from {hello.lowest_version} to {hello.highest_version}")
    return Hello(
        checked_peer(hello.peer),
        RunId(hello.run),
        VersionRange(hello.lowest_version, hello.highest_version),
        read_record(hello.announcement) if hello.announcement else b"",
    )


def _read_farewell(farewell: wire.Farewell) -> Farewell:
    return Farewell(read_enum(FarewellReason, farewell.reason, "farewell reason"), read_detail(farewell.detail))


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
    "arrival_hint": read_arrival_hint,
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
