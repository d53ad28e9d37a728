"""Frames of a link, tensors included, and their encoding (link.proto). `decode` raises only ProtocolViolation."""

import enum
import re
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import xxhash

from protocol.frames.codec import (
    Around,
    Converter,
    MessageType,
    checked_version,
    converter,
    faultless,
    field_converter,
    inner_type,
    parsed,
    read_enum,
)
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import MAX_RECORD_BYTES, TOPICS, Question, QuestionAbout, Record, Topic
from swarm.vocabulary.averaging_messages import MAX_TALLIES, SignedRoster, StateChunk, WorkTally
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
    RouteInvitation,
    RouteSignature,
    Settled,
    TensorMessage,
)
from swarm.vocabulary.types import (
    MAX_HOPS,
    AnchorVersion,
    Codec,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    SignedRoute,
    VersionRange,
)

MAX_CHUNK_BYTES: Final = 1024 * 1024
MIN_CHUNK_BYTES: Final = 4096  # Except for the last chunk of a transfer
MAX_CHUNK_FRAME_BYTES: Final = MAX_CHUNK_BYTES + 64
CHUNK_TAG: Final = 0x12  # First byte of a chunk's frame: field 2, length-delimited

_TRANSFER_TAG: Final = 0x08
_INDEX_TAG: Final = 0x10
_CHECKSUM_TAG: Final = 0x19
_DATA_TAG: Final = 0x22
_FIXED64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a tensor in transfer. `data` is a view that keeps the received frame in memory."""

    transfer: int
    index: int
    checksum: int
    data: memoryview


def checksum_of(data: memoryview) -> int:
    """Returns the XXH3-64 of a chunk's data. It detects bugs and faulty memory; TLS stops attackers."""
    return xxhash.xxh3_64_intdigest(data)


# Encoded without the protobuf library, which would copy the data once more on each side. The bytes are the same:
# ascending fields, zeros omitted (https://protobuf.dev/programming-guides/encoding/).
def encode_chunk(transfer: int, index: int, data: memoryview) -> bytes:
    """Builds the frame of one chunk of a transfer. The sending side copies `data` only here."""
    fields = bytearray()
    if transfer:
        fields.append(_TRANSFER_TAG)
        _append_varint(fields, transfer)
    if index:
        fields.append(_INDEX_TAG)
        _append_varint(fields, index)
    if checksum := checksum_of(data):
        fields.append(_CHECKSUM_TAG)
        fields += _FIXED64.pack(checksum)
    fields.append(_DATA_TAG)
    _append_varint(fields, len(data))
    prefix = bytearray((CHUNK_TAG,))
    _append_varint(prefix, len(fields) + len(data))
    return b"".join((prefix, fields, data))


def decode_chunk(frame: bytes) -> Chunk:
    """Parses a chunk frame without verifying its checksum. Raises ProtocolViolation."""
    if len(frame) > MAX_CHUNK_FRAME_BYTES:
        raise ProtocolViolation(f"a chunk frame of {len(frame)} bytes is longer than {MAX_CHUNK_FRAME_BYTES}")
    try:
        return _parse(frame)
    except (IndexError, struct.error):
        raise ProtocolViolation("a chunk frame ends in the middle of a field") from None


def _parse(frame: bytes) -> Chunk:
    transfer = index = checksum = 0
    length, at = _varint(frame, 1)
    if at + length != len(frame):
        raise ProtocolViolation(f"a chunk of {length} bytes does not fill its frame of {len(frame)} bytes")
    if frame[at] == _TRANSFER_TAG:
        transfer, at = _varint(frame, at + 1)
    if frame[at] == _INDEX_TAG:
        index, at = _varint(frame, at + 1)
    if frame[at] == _CHECKSUM_TAG:
        checksum = _FIXED64.unpack_from(frame, at + 1)[0]
        at += 1 + _FIXED64.size
    if frame[at] != _DATA_TAG:
        raise ProtocolViolation(f"a chunk has the unexpected field tag {frame[at]:#04x}")
    length, at = _varint(frame, at + 1)
    if not 0 < length <= MAX_CHUNK_BYTES or at + length != len(frame):
        raise ProtocolViolation(f"a chunk states {length} bytes of data and carries {len(frame) - at}")
    return Chunk(transfer, index, checksum, memoryview(frame)[at:])


def _append_varint(buffer: bytearray, value: int) -> None:
    while value > 0x7F:
        buffer.append(value & 0x7F | 0x80)
        value >>= 7
    buffer.append(value)


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(5):  # bytes of the longest 32-bit number
        byte = frame[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >= 2**32:
                break
            return value, at + place + 1
    raise ProtocolViolation("a frame has a number of more than 32 bits")


MAX_DIMENSIONS: Final = 4


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """Frame with a message and its tensor's header. The tensor follows in `chunk_count` chunks of the same transfer."""

    message: TensorMessage
    tensor: TensorSpec
    transfer: int
    chunk_count: int


def wire_header(frame: TensorFrame) -> dict[str, Any]:
    """Returns a tensor's type, shape, codec and sizes as fields of link.proto's TensorHeader."""
    return {
        "transfer": frame.transfer,
        "dtype": frame.tensor.dtype.value,
        "codec": frame.tensor.codec.value,
        "shape": frame.tensor.shape,
        "outliers": frame.tensor.outliers,
        "token_bytes": frame.tensor.token_bytes,
        "byte_length": frame.tensor.byte_length,
        "chunk_count": frame.chunk_count,
    }


def read_header(message: TensorMessage, header: wire.TensorHeader) -> TensorFrame:
    """Parses a tensor's header and makes all checks that need no manifest. Raises ProtocolViolation."""
    dtype = read_enum(DType, header.dtype, "element type")
    codec = read_enum(Codec, header.codec, "codec")
    if not 1 <= len(header.shape) <= MAX_DIMENSIONS or 0 in header.shape:
        raise ProtocolViolation(f"a tensor has {len(header.shape)} dimensions, or one of size 0; 1 to 4 are allowed")
    apart = header.outliers, header.token_bytes
    tensor = TensorSpec(tuple(header.shape), dtype, codec, *apart)
    fault = tensor.fault() or _misfit(message, tensor)
    if fault is not None:
        raise ProtocolViolation(fault)
    length = tensor.byte_length
    if header.byte_length != length:
        raise ProtocolViolation(f"a tensor of {length} bytes is announced as {header.byte_length} bytes")
    fewest, most = -(-length // MAX_CHUNK_BYTES), -(-length // MIN_CHUNK_BYTES)
    if not fewest <= header.chunk_count <= most:
        raise ProtocolViolation(f"{header.chunk_count} chunks for {length} bytes; {fewest} to {most} are allowed")
    return TensorFrame(message, tensor, header.transfer, header.chunk_count)


def _misfit(message: TensorMessage, tensor: TensorSpec) -> str | None:
    """Returns why `tensor` has a wrong shape, type or codec for the kind of `message`; None if it fits."""
    if tensor.token_bytes and not isinstance(message, Forward):
        return "only hidden states have token numbers"
    if isinstance(message, Forward | Backward):
        return None
    if len(tensor.shape) != 1 or tensor.dtype is not DType.FLOAT32:
        return f"a module's data is a float32 vector, not {tensor.dtype.name} {tensor.shape}"
    if isinstance(message, StateChunk) and tensor.codec is not Codec.NONE:
        return f"a chunk of state must have no codec, not {tensor.codec.name}"
    return None


CHUNK_S: Final = 0.02  # Longest wait of a small frame behind one chunk, in seconds
LEAST_CHUNK_BYTES: Final = 64 * 1024


def chunk_bytes_for(goodput_bytes_per_s: float, most: int) -> int:
    """Returns the chunk size for a transfer: bytes that the link carries in CHUNK_S, as a power of two in bounds."""
    carried = int(min(goodput_bytes_per_s * CHUNK_S, most))
    return min(most, max(LEAST_CHUNK_BYTES, 1 << max(0, carried.bit_length() - 1)))


def chunk_count_of(byte_length: int, chunk_bytes: int) -> int:
    return -(-byte_length // chunk_bytes)


class OutgoingTransfer:
    """Outgoing tensor: makes its header and chunk frames one at a time, with at most one prepared in advance."""

    __slots__ = ("_ahead", "_chunk_bytes", "_chunk_count", "_data", "_header", "_next", "number")

    def __init__(self, number: int, header: bytes, data: memoryview, chunk_bytes: int) -> None:
        self.number = number
        self._header = header
        self._data = data
        self._chunk_bytes = chunk_bytes
        self._chunk_count = chunk_count_of(len(data), chunk_bytes)
        self._next = -1
        self._ahead: bytes | None = None

    @property
    def begun(self) -> bool:
        """Whether `next_frame` has returned the header, so that the receiver may already know this transfer."""
        return self._next >= 0

    @property
    def finished(self) -> bool:
        return self._next == self._chunk_count

    def next_frame(self) -> bytes:
        frame = self._frame() if self._ahead is None else self._ahead
        self._ahead = None
        self._next += 1
        return frame

    def prepare(self) -> None:
        if self._ahead is None and not self.finished:
            self._ahead = self._frame()

    def _frame(self) -> bytes:
        if self._next < 0:
            return self._header
        start = self._next * self._chunk_bytes
        return encode_chunk(self.number, self._next, self._data[start : start + self._chunk_bytes])


@dataclass(slots=True, eq=False)
class Arrival:
    """Incoming tensor whose chunks are checked and discarded, because it was refused. `Assembly` stores its chunks."""

    frame: TensorFrame
    _received: int = 0
    _chunk_bytes: int = 0

    @property
    def complete(self) -> bool:
        return self._received == self.frame.chunk_count

    def swallowing_the_rest(self) -> "Arrival":
        """Returns an `Arrival` that discards this tensor's remaining chunks, so that the buffer can be released."""
        return Arrival(self.frame, self._received, self._chunk_bytes)

    def add(self, chunk: Chunk) -> None:
        """Checks the index and size of the next chunk and counts it as received. Raises ProtocolViolation."""
        if chunk.index != self._received:
            raise ProtocolViolation(f"transfer {chunk.transfer}: chunk {chunk.index} came instead of {self._received}")
        if chunk.index == 0:
            if chunk_count_of(self.frame.tensor.byte_length, len(chunk.data)) != self.frame.chunk_count:
                raise ProtocolViolation(
                    f"transfer {chunk.transfer}: {self.frame.chunk_count} chunks were announced,"
                    f" but chunks of {len(chunk.data)} bytes give a different number"
                )
            self._chunk_bytes = len(chunk.data)
        due = min(self._chunk_bytes, self.frame.tensor.byte_length - chunk.index * self._chunk_bytes)
        if len(chunk.data) != due:
            raise ProtocolViolation(
                f"transfer {chunk.transfer}: chunk {chunk.index} has {len(chunk.data)} bytes instead of {due}"
            )
        self._received += 1


class Assembly(Arrival):
    """Incoming tensor that was admitted and is reassembled from its chunks in `buffer`."""

    __slots__ = ("_target", "buffer", "deadline")

    def __init__(self, frame: TensorFrame, buffer: memoryview, deadline: float) -> None:
        super().__init__(frame)
        self.buffer = buffer
        self._target = buffer.cast("B")
        self.deadline = deadline

    def add(self, chunk: Chunk) -> None:
        """Stores the next chunk in the buffer. Raises ProtocolViolation if its index, size or checksum is wrong."""
        super().add(chunk)
        if checksum_of(chunk.data) != chunk.checksum:
            raise ProtocolViolation(f"transfer {chunk.transfer}: the checksum of chunk {chunk.index} does not match")
        start = chunk.index * self._chunk_bytes
        self._target[start : start + len(chunk.data)] = chunk.data


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


@dataclass(frozen=True, slots=True)
class _Tallies:
    tallies: Annotated[tuple[WorkTally, ...], Length(0, MAX_TALLIES)]


_TALLIES: Final = converter(_Tallies, wire.WorkTallies.DESCRIPTOR)


def encode_tallies(tallies: tuple[WorkTally, ...]) -> bytes:
    data: bytes = wire.WorkTallies(**_TALLIES.write(_Tallies(tallies), None)).SerializeToString()
    return data


def decode_tallies(data: bytes) -> tuple[WorkTally, ...]:
    """Parses an answer about work, without its signatures. Raises ProtocolViolation."""
    read: _Tallies = _TALLIES.read(parsed(wire.WorkTallies, data, f"{len(data)} bytes are no tallies"), None)
    return read.tallies


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
    invitation: RouteInvitation

    def fault(self) -> str | None:
        if (self.modules or self.documents or self.labels or self.invitation) and not self.signature:
            what = f"{len(self.modules)} modules, {len(self.documents)} documents and {self.labels} labels"
            return f"{what} without a signature"
        return None

    @property
    def path(self) -> Path:
        if not self.signature:
            return Path(self.microbatch.data_node, self.hops)
        more = (self.documents, self.labels, self.invitation)
        signed = SignedRoute(self.modules, self.lifetime_s, self.signature, *more)
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
        signed.invitation,
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


# Largest frame other than a chunk: a roster of 256 entries takes 60 KiB, and its tallies 40 KiB
MAX_SMALL_FRAME_BYTES: Final = 112 * 1024

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
    run: Annotated[str, Length(64, 64)]
    lowest_version: Annotated[int, Range(1, 2**32 - 1)]
    highest_version: int
    announcement: OptionalRecord  # Empty without a record
    incarnation: int = 0  # Random, 64 bits
    age_ms: Annotated[int, Range(0, MAX_AGE_MS - 1)] = 0

    @property
    def versions(self) -> VersionRange:
        return VersionRange(self.lowest_version, self.highest_version)

    def fault(self) -> str | None:
        if not _RUN_ID.fullmatch(self.run):
            return "the run is not 64 hexadecimal digits"
        if self.lowest_version > self.highest_version:
            return f"{self.lowest_version} to {self.highest_version} is not a range of protocol versions"
        return None


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


_LinkFrame = Hello | Ping | Pong | Cancel | Farewell
SmallFrame = _LinkFrame | TensorFrame | ControlMessage | QuestionFrame | AnswerFrame | AnnouncementFrame
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
    try:
        tag, at = _varint(data, 0)
        length, at = _varint(data, at)
    except IndexError:
        tag = length = -1
    if tag < 0 or tag & 7 != _BYTES:
        raise ProtocolViolation(f"{len(data)} bytes are not a frame")
    name = _BY_TAG.get(tag)
    if name is None:
        raise ProtocolViolation("a frame of unknown kind, or a chunk whose fields are not in order")
    if at + length != len(data):
        raise ProtocolViolation(f"a frame of {len(data)} bytes is not exactly one field")
    return name


def _read_record(record: bytes) -> bytes:
    if not 0 < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolViolation(f"a record of {len(record)} bytes is not from 1 to {MAX_RECORD_BYTES} bytes long")
    return record


class _Kind(NamedTuple):
    what: type
    converter: Converter
    topic: Topic | None
    has_tensor: bool


_TOPIC_OF: Final = {kind: topic for topic, kinds in TOPICS.items() for kind in kinds}
_WITH_TENSOR: Final = get_args(TensorMessage)
_BY_HAND: Final[dict[type, Converter]] = {
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
_BY_TAG: Final = {each.number << 3 | _BYTES: each.name for each in wire.Frame.DESCRIPTOR.fields if each.name in _KINDS}
