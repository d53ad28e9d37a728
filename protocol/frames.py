"""Frames of a link: what link.proto says as bytes, here as plain data, and the way between the two.

`decode` trusts nothing: every length, number, name and enum is checked here, and whatever is wrong with the bytes, the
only error is ProtocolViolation. What needs the manifest or the state of the link to be checked is checked by those who
have them. Chunks have a module of their own (`protocol.chunks`); what a microbatch's life consists of is in
`protocol.microbatch_frames`, rounds are in `protocol.round_frames`, catching up in `protocol.state_frames`, the talk about lanes in
`protocol.lane_frames`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from google.protobuf.message import DecodeError

from protocol.anchor_versions import checked_digest
from protocol.chunks import CHUNK_TAG, Chunk, decode_chunk
from protocol.frame_parts import (
    DETAIL_CHARACTERS,
    TensorFrame,
    checked_peer,
    read_detail,
    read_enum,
    read_module,
    wire_module,
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
from protocol.round_frames import (
    encode_piece,
    encode_round,
    read_accepting,
    read_commit,
    read_contribution,
    read_declined,
    read_dissolved,
    read_entry,
    read_invitation,
    read_prepared,
    read_progress,
    read_pulse,
    read_reduced,
    read_roster,
)
from protocol.seams import Question, QuestionAbout
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
from swarm.vocabulary import MAX_STAGES, PeerId, RunId, VersionRange

MAX_SMALL_FRAME_BYTES: Final = 72 * 1024
"""Of every frame that is not a chunk: a path of 256 hops takes about 20 KiB, a roster of 256 members about 24 KiB, the lanes of two data nodes at most 60 KiB, an answer 64 KiB."""
MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_RECORD_BYTES: Final = 2048
MAX_EVALUATION_MICROBATCHES: Final = 256

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
class QuestionFrame:
    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """`about` is None exactly when the question was refused; then `content` is the refusal's text in UTF-8."""

    id: int
    about: QuestionAbout | None
    content: bytes


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
            return wire.Frame(question=_wire_question(frame))
        case AnswerFrame():
            return wire.Frame(answer=_wire_answer(frame))
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
        _read_record(hello.announcement) if hello.announcement else b"",
    )


def _read_record(record: bytes) -> bytes:
    if not 0 < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolViolation(f"a record of {len(record)} bytes is not from 1 to {MAX_RECORD_BYTES} bytes long")
    return record


def _read_farewell(farewell: wire.Farewell) -> Farewell:
    return Farewell(read_enum(FarewellReason, farewell.reason, "farewell reason"), read_detail(farewell.detail))


def _wire_question(frame: QuestionFrame) -> wire.Question:
    question = frame.question
    match question.about:
        case QuestionAbout.MANIFEST:
            return wire.Question(id=frame.id, manifest=wire.ManifestQuestion())
        case QuestionAbout.STATUS:
            return wire.Question(id=frame.id, status=wire.StatusQuestion())
        case QuestionAbout.EVALUATE:
            evaluate = wire.EvaluateQuestion(microbatches=question.microbatches, stages=question.stages)
            return wire.Question(id=frame.id, evaluate=evaluate)
        case QuestionAbout.STATE:
            assert question.module is not None
            state = wire.StateQuestion(module=wire_module(question.module), digest=question.digest)
            return wire.Question(id=frame.id, state=state)
        case QuestionAbout.DIAL_BACK:
            return wire.Question(id=frame.id, dial_back=wire.DialBackQuestion(port=question.port))


def _read_question(question: wire.Question) -> QuestionFrame:
    kind = question.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("a question about nothing known")
    match QuestionAbout(kind):
        case QuestionAbout.EVALUATE:
            microbatches = _read_microbatches(question.evaluate.microbatches)
            asked = Question(QuestionAbout.EVALUATE, microbatches, stages=_read_stages(question.evaluate.stages))
        case QuestionAbout.STATE:
            module, digest = read_module(question.state.module), checked_digest(question.state.digest)
            asked = Question(QuestionAbout.STATE, module=module, digest=digest)
        case QuestionAbout.DIAL_BACK:
            asked = Question(QuestionAbout.DIAL_BACK, port=_read_port(question.dial_back.port))
        case about:
            asked = Question(about)
    return QuestionFrame(question.id, asked)


def _read_microbatches(microbatches: int) -> int:
    if not 1 <= microbatches <= MAX_EVALUATION_MICROBATCHES:
        raise ProtocolViolation(
            f"an evaluation of {microbatches} microbatches; 1 to {MAX_EVALUATION_MICROBATCHES} can be asked"
        )
    return microbatches


def _read_port(port: int) -> int:
    if not 0 < port < 65536:
        raise ProtocolViolation(f"port {port} does not exist")
    return port


def _read_stages(stages: Sequence[int]) -> tuple[int, ...]:
    """In rising order, so that none comes twice."""
    read = tuple(stages)
    if any(later <= earlier for earlier, later in pairwise((0, *read, MAX_STAGES))):
        raise ProtocolViolation(f"an evaluation's stages do not rise from at least 1 to at most {MAX_STAGES - 1}")
    return read


_ANSWER_FIELDS: Final = {
    QuestionAbout.MANIFEST: "manifest",
    QuestionAbout.STATUS: "status",
    QuestionAbout.EVALUATE: "evaluation",
    QuestionAbout.STATE: "state",
    QuestionAbout.DIAL_BACK: "dial_back",
}
_ANSWER_KINDS: Final = {field: about for about, field in _ANSWER_FIELDS.items()}


def _wire_answer(answer: AnswerFrame) -> wire.Answer:
    result = wire.Answer(id=answer.id)
    if answer.about is None:
        result.refused = answer.content.decode(errors="replace")[:DETAIL_CHARACTERS]
    else:
        setattr(result, _ANSWER_FIELDS[answer.about], answer.content)
    return result


def _read_answer(answer: wire.Answer) -> AnswerFrame:
    kind = answer.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("an answer without content")
    if kind == "refused":
        return AnswerFrame(answer.id, None, read_detail(answer.refused).encode())
    content: bytes = getattr(answer, kind)
    if len(content) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"an answer of {len(content)} bytes is longer than {MAX_ANSWER_BYTES}")
    return AnswerFrame(answer.id, _ANSWER_KINDS[kind], content)


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
    "question": _read_question,
    "answer": _read_answer,
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
    **LANE_READERS,
    "announcement": lambda record: AnnouncementFrame(_read_record(record)),
}
