"""Frames of a link and their encoding (link.proto). `decode` checks all input and raises only ProtocolViolation."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

from protocol.frames.codec import (
    Around,
    Converter,
    MessageType,
    checked_peer,
    checked_version,
    converter,
    faultless,
    field_converter,
    inner_type,
    parsed,
    read_enum,
)
from protocol.frames.tensors import CHUNK_TAG, Chunk, TensorFrame, decode_chunk, read_header, wire_header
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import MAX_RECORD_BYTES, TOPICS, Question, QuestionAbout, Record, Topic
from swarm.vocabulary.averaging_messages import SignedRoster
from swarm.vocabulary.bounds import Detail, Length, Range
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import (
    Backward,
    ControlMessage,
    Documents,
    Forward,
    MicrobatchTensor,
    Position,
    Purpose,
    Recall,
    RouteSignature,
    Settled,
    TensorMessage,
)
from swarm.vocabulary.types import (
    MAX_HOPS,
    AnchorVersion,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    RunId,
    SignedRoute,
    VersionRange,
)

MAX_ANSWER_BYTES: Final = 68 * 1024

_QUESTION: Final[MessageType] = wire.Question.DESCRIPTOR
_ANSWER: Final[MessageType] = wire.Answer.DESCRIPTOR
_ANSWER_FIELDS: Final = {about: about.value for about in QuestionAbout} | {QuestionAbout.EVALUATE: "evaluation"}
_ANSWER_KINDS: Final = {field: about for about, field in _ANSWER_FIELDS.items()}


@dataclass(frozen=True, slots=True)
class QuestionFrame:
    """Frame with a question to the other peer. The frame with the answer has the same `id`."""

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """Frame with the answer to a question. A refusal has `about` None and the reason in `content`."""

    id: int
    about: QuestionAbout | None
    content: bytes


def _parts(about: QuestionAbout) -> dict[str, Converter]:
    """Returns the converters for the fields of a question on subject `about`, all required, by field name."""
    hints = get_type_hints(Question, include_extras=True)
    asked: MessageType = _QUESTION.fields_by_name[about.value].message_type
    return {
        field.name: field_converter(inner_type(hints[field.name]) or hints[field.name], field, f"Question.{field.name}")
        for field in asked.fields
    }


_ABOUT: Final = {about: _parts(about) for about in QuestionAbout}
_REFUSAL: Final = field_converter(Detail, _ANSWER.fields_by_name["refused"], "a refusal")
_CONTENT: Final = field_converter(
    Annotated[bytes, Length(0, MAX_ANSWER_BYTES)], _ANSWER.fields_by_name["status"], "an answer"
)


def _write_question(frame: QuestionFrame, _: Around) -> dict[str, Any]:
    question = frame.question
    fields = {name: part.write(getattr(question, name), None) for name, part in _ABOUT[question.about].items()}
    return {"id": frame.id, question.about.value: fields}


def _read_question(question: wire.Question, _: Around) -> QuestionFrame:
    kind = question.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("a question about an unknown subject")
    about, said = QuestionAbout(kind), getattr(question, kind)
    fields = {name: part.read(getattr(said, name), None) for name, part in _ABOUT[about].items()}
    return QuestionFrame(question.id, Question(about, **fields))


def _write_answer(answer: AnswerFrame, _: Around) -> dict[str, Any]:
    if answer.about is None:
        return {"id": answer.id, "refused": _REFUSAL.write(answer.content.decode(errors="replace"), None)}
    return {"id": answer.id, _ANSWER_FIELDS[answer.about]: answer.content}


def _read_answer(answer: wire.Answer, _: Around) -> AnswerFrame:
    kind = answer.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("an answer without content")
    if kind == "refused":
        return AnswerFrame(answer.id, None, _REFUSAL.read(answer.refused, None).encode())
    return AnswerFrame(answer.id, _ANSWER_KINDS[kind], _CONTENT.read(getattr(answer, kind), None))


CONVERTERS: Final[dict[type, Converter]] = {
    QuestionFrame: Converter(_write_question, _read_question),
    AnswerFrame: Converter(_write_answer, _read_answer),
}


HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class HashList:
    """Data from which an anchor's digest is computed: version, sizes, and a hash of each chunk of the state."""

    version: AnchorVersion
    elements: int  # Number of parameters; the outer momentum has the same number
    chunk_elements: int
    hashes: tuple[bytes, ...]  # BLAKE3 of each chunk of the parameters, then of the outer momentum


def encode_hash_list(hash_list: HashList) -> bytes:
    """Serialises a hash list, at most 64 KiB for up to 10^9 elements."""
    version = hash_list.version
    data: bytes = wire.HashList(
        round=version.round,
        steps=version.steps,
        tokens=version.tokens,
        fragment=version.fragment,
        elements=hash_list.elements,
        chunk_elements=hash_list.chunk_elements,
        hashes=b"".join(hash_list.hashes),
    ).SerializeToString()
    return data


def decode_hash_list(data: bytes, *, digest: bytes, elements: int, chunk_elements: int) -> HashList:
    """Parses a peer's hash list and checks its sizes, but not yet against `digest`. Raises ProtocolViolation."""
    if len(data) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"hash list: {len(data)} bytes are more than {MAX_ANSWER_BYTES}")
    said = parsed(wire.HashList, data, f"hash list: {len(data)} bytes are not a hash list")
    if (said.elements, said.chunk_elements) != (elements, chunk_elements):
        raise ProtocolViolation(
            f"hash list: {said.elements} elements in chunks of {said.chunk_elements};"
            f" this module has {elements} in chunks of {chunk_elements}"
        )
    count = 2 * -(-elements // chunk_elements)
    if len(said.hashes) != count * HASH_BYTES:
        raise ProtocolViolation(f"hash list: {len(said.hashes)} bytes are not {count} hashes of {HASH_BYTES} bytes")
    version = checked_version(AnchorVersion(said.round, said.steps, said.tokens, said.fragment, digest))
    hashes = tuple(said.hashes[at : at + HASH_BYTES] for at in range(0, len(said.hashes), HASH_BYTES))
    return HashList(version, elements, chunk_elements, hashes)


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
            return f"{what} without a signature"
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


def _read_forward(said: wire.Forward, _: Around) -> Forward:
    route: _Route = _ROUTE.read(said.route, None)
    purpose = read_enum(Purpose, said.purpose, "purpose")
    return faultless(Forward(route.microbatch, route.path, route.position, purpose, route.lifetime_s))


def _read_routed(kind: type[Backward | Recall], said: wire.Backward | wire.Recall) -> Backward | Recall:
    route: _Route = _ROUTE.read(said.route, None)
    return faultless(kind(route.microbatch, route.path, route.position))


def _read_settled(said: wire.Settled, _: Around) -> Settled:
    settled: _Settled = _SETTLED.read(said, None)
    return Settled(settled.microbatch, Path(settled.microbatch.data_node, settled.hops))


_ALONG_A_PATH: Final[dict[type, Converter]] = {
    Forward: Converter(lambda sent, _: {**_write_route(sent, None), "purpose": sent.purpose.value}, _read_forward),
    Backward: Converter(_write_route, lambda said, _: _read_routed(Backward, said)),
    Recall: Converter(_write_route, lambda said, _: _read_routed(Recall, said)),
    Settled: Converter(lambda sent, _: _SETTLED.write(_Settled(sent.microbatch, sent.path.hops), None), _read_settled),
}


# Largest frame other than a chunk: a path of 256 hops takes about 20 KiB, an answer up to 68 KiB
MAX_SMALL_FRAME_BYTES: Final = 72 * 1024

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
    """First frame that each side of a link sends: its peer id, run and protocol versions."""

    peer: PeerId
    run: RunId
    versions: VersionRange
    record: OptionalRecord  # Empty without a record
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
    """Last frame from the side that ends a link, with the reason."""

    reason: FarewellReason
    detail: Detail = ""
    record: OptionalRecord = b""  # With SAME_KEY: record of the other process


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
    """Serialises a frame. Text for people is truncated to its bound."""
    said = frame.message if isinstance(frame, TensorFrame) else frame
    name = _FIELD_OF[type(said)]
    fields = _KINDS[name].converter.write(said, None)
    if isinstance(frame, TensorFrame):
        fields["tensor"] = wire_header(frame)
    data: bytes = wire.Frame(**{name: fields}).SerializeToString()
    return data


def is_chunk(data: bytes) -> bool:
    """Whether a frame begins like a chunk of a tensor. All other frames are small frames."""
    return data[:1] == bytes((CHUNK_TAG,))


def topic_of(data: bytes) -> Topic | None:
    """Returns a small frame's topic, such as rounds; None if every peer may send it. Raises ProtocolViolation."""
    return _KINDS[_name_of(data)].topic


def decode(data: bytes) -> Frame:
    """Decodes and checks a frame from a peer. Raises ProtocolViolation."""
    if is_chunk(data):
        return decode_chunk(data)
    name = _name_of(data)
    said = getattr(parsed(wire.Frame, data, f"{len(data)} bytes are not a frame"), name)
    kind = _KINDS[name]
    try:
        message = kind.converter.read(said, None)
        return read_header(message, said.tensor) if kind.has_tensor else message
    except ProtocolViolation as violation:
        raise ProtocolViolation(f"{kind.topic.value if kind.topic else name}: {violation}") from None


def _name_of(data: bytes) -> str:
    """Returns the name of a small frame's only field. Rejects several fields; protobuf would use the last one."""
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
    """Reads a varint of at most three bytes at position `at`. Returns its value and the position after it."""
    value = 0
    for place, octet in enumerate(data[at : at + 3]):
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ProtocolViolation(f"{len(data)} bytes are not a frame")


# ---- the first frame of a link --------------------------------------------------------------------------------------


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
        raise ProtocolViolation(f"{versions.lowest} to {versions.highest} is not a range of protocol versions")
    if hello.age_ms >= MAX_AGE_MS:
        raise ProtocolViolation(f"the process cannot be {hello.age_ms} ms old")
    record = _read_record(hello.announcement) if hello.announcement else b""
    return Hello(checked_peer(hello.peer), RunId(hello.run), versions, record, hello.incarnation, hello.age_ms)


def _read_record(record: bytes) -> bytes:
    if not 0 < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolViolation(f"a record of {len(record)} bytes is not from 1 to {MAX_RECORD_BYTES} bytes long")
    return record


# ---- fields of link.proto's Frame by class ---------------------------------------------------------------------------


class _Kind(NamedTuple):
    what: type
    converter: Converter
    topic: Topic | None
    has_tensor: bool


_TOPIC_OF: Final = {kind: topic for topic, kinds in TOPICS.items() for kind in kinds}
_WITH_TENSOR: Final = get_args(TensorMessage)
_BY_HAND: Final[dict[type, Converter]] = {
    Hello: Converter(_write_hello, _read_hello),
    AnnouncementFrame: Converter(lambda frame, _: frame.record, lambda said, _: AnnouncementFrame(_read_record(said))),
    **_ALONG_A_PATH,
    **CONVERTERS,
}
# Names in link.proto by class
_NAMES: Final[dict[str, type]] = {
    **{kind.__name__: kind for kind in (Hello, Ping, Pong, Cancel, Farewell, *_WITH_TENSOR, *_TOPIC_OF)},
    "Roster": SignedRoster,
    "Question": QuestionFrame,
    "Answer": AnswerFrame,
    "announcement": AnnouncementFrame,
}


def _kind(field: Any) -> _Kind:
    what = _NAMES[field.message_type.name if field.message_type else field.name]
    return _Kind(
        what, _BY_HAND.get(what) or converter(what, field.message_type), _TOPIC_OF.get(what), what in _WITH_TENSOR
    )


# Kinds by field name
_KINDS: Final = {field.name: _kind(field) for field in wire.Frame.DESCRIPTOR.fields if field.name != "chunk"}
_FIELD_OF: Final = {kind.what: name for name, kind in _KINDS.items()}
_BY_TAG: Final = {
    field.number << 3 | _BYTES: field.name for field in wire.Frame.DESCRIPTOR.fields if field.name in _KINDS
}
