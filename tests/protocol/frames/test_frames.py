"""Frames against the protobuf library in both directions, and against bytes that nobody should send."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import (
    MAX_LIFETIME_MS,
    MAX_SMALL_FRAME_BYTES,
    AnnouncementFrame,
    AnswerFrame,
    Cancel,
    Farewell,
    FarewellReason,
    Hello,
    Ping,
    Pong,
    QuestionFrame,
    decode,
    encode,
    is_chunk,
    topic_of,
)
from protocol.frames.tensors import MAX_CHUNK_BYTES, Chunk, TensorFrame, checksum_of, decode_chunk, encode_chunk
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Topic
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.types import (
    MAX_DOCUMENT_TOKENS,
    MAX_DOCUMENTS,
    MAX_HOPS,
    SIGNATURE_BYTES,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    RunId,
    SignedRoute,
    VersionRange,
)
from tests.protocol.codecs.damage import assert_refused_or_another_valid_frame
from tests.protocol.frames.frame_examples import peer

PEERS = [peer(number) for number in range(3)]
RUN = "ab" * 32

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
peers = st.sampled_from(PEERS)
details = st.text(st.characters(codec="utf-8"), max_size=256).filter(str.isprintable)
times = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1000)
short_times = st.integers(0, 2**32 - 1).map(lambda us: us / 1_000_000)
lifetimes = st.integers(0, MAX_LIFETIME_MS).map(lambda ms: ms / 1000)
microbatches = st.builds(MicrobatchId, peers, st.integers(0, 2**48 - 1))
positions = st.integers(-1, MAX_HOPS)
modules = st.builds(ModuleId, st.integers(0, 1023), st.integers(0, 1023))
paths = st.builds(Path, peers, st.lists(st.builds(Hop, modules, peers), min_size=1, max_size=6).map(tuple))


signatures = st.binary(min_size=SIGNATURE_BYTES, max_size=SIGNATURE_BYTES)
documents = st.lists(st.integers(1, MAX_DOCUMENT_TOKENS), max_size=8).map(tuple)
routes = st.one_of(
    st.none(), st.builds(SignedRoute, st.lists(modules, max_size=6).map(tuple), lifetimes, signatures, documents)
)


@st.composite
def tensor_frames(draw: st.DrawFn) -> TensorFrame:
    path = replace(draw(paths), route=draw(routes))
    microbatch = MicrobatchId(path.data_node, draw(st.integers(0, 2**48 - 1)))
    if draw(st.booleans()):
        message: Forward | Backward = Forward(
            microbatch,
            path,
            draw(st.integers(0, len(path.hops))),
            draw(st.sampled_from(Purpose)),
            draw(lifetimes) if path.route is None else path.route.lifetime_s,
        )
    else:
        message = Backward(microbatch, path, draw(st.integers(-1, len(path.hops) - 1)))
    shape = draw(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=2).map(tuple))
    spec = TensorSpec(shape, draw(st.sampled_from(DType)))
    least = -(-spec.byte_length // MAX_CHUNK_BYTES)
    if least >= 2**32 or spec.byte_length >= 2**64:
        spec, least = TensorSpec((7,), spec.dtype), 1
    return TensorFrame(message, spec, draw(uint32), least)


@st.composite
def recalls(draw: st.DrawFn) -> Recall:
    path = replace(draw(paths), route=draw(routes))
    microbatch = MicrobatchId(path.data_node, draw(st.integers(0, 2**48 - 1)))
    return Recall(microbatch, path, draw(st.integers(-1, len(path.hops) - 2)))


frames = st.one_of(
    st.builds(Ping, uint64),
    st.builds(Pong, uint64),
    st.builds(Cancel, uint32),
    st.builds(Farewell, st.sampled_from(FarewellReason), details),
    st.builds(
        Hello,
        peers,
        st.just(RunId(RUN)),
        st.just(VersionRange(1, 7)),
        st.binary(max_size=2048),
    ),
    st.builds(AnnouncementFrame, st.binary(min_size=1, max_size=2048)),
    st.builds(
        QuestionFrame,
        uint32,
        st.sampled_from(
            [
                Question(QuestionAbout.MANIFEST),
                Question(QuestionAbout.STATUS),
                Question(QuestionAbout.EVALUATE, 256),
                Question(QuestionAbout.DIAL_BACK, port=1),
                Question(QuestionAbout.DIAL_BACK, port=65535),
                Question(QuestionAbout.CALL, peer=PEERS[0], record=b"r"),
                Question(QuestionAbout.CALLED, record=bytes(2048)),
                Question(QuestionAbout.EVALUATE, 1, stages=(1, 3, 1023)),
                Question(QuestionAbout.EVALUATE, 1, stages=tuple(range(1, 1024))),
            ]
        ),
    ),
    st.builds(AnswerFrame, uint32, st.sampled_from(QuestionAbout), st.binary(max_size=65536)),
    st.builds(AnswerFrame, uint32, st.none(), details.map(str.encode)),
    st.builds(
        Receipt,
        microbatches,
        st.sampled_from(Direction),
        positions,
        st.sampled_from(ReceiptStatus),
        times,
        details,
        short_times,
        short_times,
        short_times,
    ),
    st.builds(
        Stranded, microbatches, st.sampled_from(Direction), positions, details, st.one_of(st.just(b""), signatures)
    ),
    st.builds(Close, microbatches, details),
    st.builds(lambda number, path: Settled(MicrobatchId(path.data_node, number), path), st.integers(0, 9), paths),
    st.builds(Unsettled, microbatches),
    recalls(),
    tensor_frames(),
)


@given(frames)
def test_what_is_encoded_is_decoded_to_the_same(frame: object) -> None:
    assert decode(encode(frame)) == frame  # type: ignore[arg-type]


@given(uint32, uint32, st.binary(min_size=1, max_size=5000))
def test_a_chunk_is_byte_for_byte_what_protobuf_writes(transfer: int, index: int, data: bytes) -> None:
    checksum = checksum_of(memoryview(data))
    chunk = wire.Chunk(transfer=transfer, index=index, checksum=checksum, data=data)
    assert encode_chunk(transfer, index, memoryview(data)) == wire.Frame(chunk=chunk).SerializeToString()


@given(uint32, uint32, uint64, st.binary(min_size=1, max_size=5000))
def test_a_chunk_that_protobuf_wrote_is_read(transfer: int, index: int, checksum: int, data: bytes) -> None:
    chunk = wire.Chunk(transfer=transfer, index=index, checksum=checksum, data=data)
    assert decode(wire.Frame(chunk=chunk).SerializeToString()) == Chunk(transfer, index, checksum, memoryview(data))


@pytest.mark.parametrize("size", [1, 127, 128, 4096, 16383, 16384, 2**20])
def test_chunks_of_sizes_at_which_the_prefix_grows(size: int) -> None:
    data = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    frame = encode_chunk(2**32 - 1, 2**32 - 1, data)
    assert wire.Frame.FromString(frame).chunk.data == data
    assert decode_chunk(frame) == Chunk(2**32 - 1, 2**32 - 1, checksum_of(data), data)


def test_a_chunk_is_not_copied_when_read() -> None:
    frame = encode_chunk(1, 0, memoryview(bytes(1000)))
    assert decode_chunk(frame).data.obj is frame


@given(st.binary(max_size=300))
def test_garbage_is_a_violation_and_nothing_else(data: bytes) -> None:
    with suppress(ProtocolViolation):
        decode(data)


@given(st.binary(max_size=60))
def test_what_is_read_as_a_chunk_protobuf_reads_the_same(rest: bytes) -> None:
    try:
        chunk = decode(b"\x12" + rest)
    except ProtocolViolation:
        return
    assert isinstance(chunk, Chunk)
    expected = wire.Frame.FromString(b"\x12" + rest).chunk
    assert (chunk.transfer, chunk.index, chunk.checksum, chunk.data) == (
        expected.transfer,
        expected.index,
        expected.checksum,
        expected.data,
    )


@given(frames, st.data())
def test_a_damaged_frame_is_a_violation_or_another_valid_frame(frame: object, data: st.DataObject) -> None:
    assert_refused_or_another_valid_frame(encode(frame), data)  # type: ignore[arg-type]


def route(
    position: int = 0,
    hops: int = 1,
    peer: str = PEERS[0],
    signature: bytes = b"",
    documents: Sequence[int] = (),
    signed: int = 0,
    lifetime_ms: int = 1,
    **module: int,
) -> wire.Route:
    return wire.Route(
        modules=[wire.ModuleId(stage=1)] * signed,
        signature=signature,
        documents=documents,
        lifetime_ms=lifetime_ms,
        microbatch=wire.MicrobatchId(data_node=peer, number=1),
        hops=[wire.Hop(module=wire.ModuleId(**module), peer=peer)] * hops,
        position=position,
    )


def header(**changes: object) -> wire.TensorHeader:
    honest = {"transfer": 1, "dtype": 1, "codec": 1, "shape": [2, 1024], "byte_length": 8192, "chunk_count": 1}
    return wire.TensorHeader(**{**honest, **changes})  # type: ignore[arg-type]


def forward_frame(tensor: wire.TensorHeader | None = None, path: wire.Route | None = None, purpose: int = 1) -> bytes:
    forward = wire.Forward(route=path or route(), purpose=purpose, tensor=tensor or header())  # type: ignore[arg-type]
    return wire.Frame(forward=forward).SerializeToString()


def test_the_honest_frame_of_the_lies_below_is_accepted() -> None:
    assert isinstance(decode(forward_frame()), TensorFrame)


@pytest.mark.parametrize(
    "lie",
    [
        {"dtype": 0},
        {"dtype": 4},
        {"codec": 0},
        {"codec": 2},
        {"shape": []},
        {"shape": [1, 1, 2, 32, 32]},
        {"shape": [0, 1024], "byte_length": 0, "chunk_count": 0},
        {"shape": [2**31] * 3},
        {"shape": [2**32 - 1] * 4},
        {"byte_length": 8191},
        {"byte_length": 2**64 - 1},
        {"chunk_count": 0},
        {"chunk_count": 3},
        {"chunk_count": 2**32 - 1},
    ],
)
def test_a_lying_tensor_header_is_refused(lie: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation):
        decode(forward_frame(header(**lie)))


@pytest.mark.parametrize(
    "frame",
    [
        forward_frame(path=route(position=2)),
        forward_frame(path=route(position=-1)),
        forward_frame(path=route(position=-2)),
        forward_frame(path=route(hops=257)),
        forward_frame(path=route(stage=1024)),
        forward_frame(path=route(expert=1024)),
        forward_frame(path=route(peer="12D3Koo")),
        forward_frame(path=route(peer="0" * 52)),
        forward_frame(purpose=3),
        forward_frame(path=route(signature=bytes(63))),
        forward_frame(path=route(signed=1)),
        forward_frame(path=route(signature=bytes(64), signed=257)),
        forward_frame(path=route(documents=[5])),
        forward_frame(path=route(signature=bytes(64), documents=[0])),
        forward_frame(path=route(signature=bytes(64), documents=[5, MAX_DOCUMENT_TOKENS + 1])),
        forward_frame(path=route(signature=bytes(64), documents=[1] * (MAX_DOCUMENTS + 1))),
        forward_frame(path=route(lifetime_ms=MAX_LIFETIME_MS + 1)),
        wire.Frame(backward=wire.Backward(route=route(position=1), tensor=header())).SerializeToString(),
        wire.Frame(
            hello=wire.Hello(peer=PEERS[0], run="AB" * 32, lowest_version=1, highest_version=1)
        ).SerializeToString(),
        wire.Frame(hello=wire.Hello(peer=PEERS[0], run=RUN, lowest_version=2, highest_version=1)).SerializeToString(),
        wire.Frame(hello=wire.Hello(peer=PEERS[0], run=RUN, highest_version=1)).SerializeToString(),
        wire.Frame(announcement=b"").SerializeToString(),
        wire.Frame(announcement=bytes(2049)).SerializeToString(),
        wire.Frame(farewell=wire.Farewell(detail="x" * 257)).SerializeToString(),
        wire.Frame(question=wire.Question(id=1)).SerializeToString(),
        wire.Frame(question=wire.Question(evaluate=wire.EvaluateQuestion(microbatches=257))).SerializeToString(),
        *(
            wire.Frame(
                question=wire.Question(evaluate=wire.EvaluateQuestion(microbatches=1, stages=stages))
            ).SerializeToString()
            for stages in ((0,), (1024,), (2, 2), (3, 1))
        ),
        wire.Frame(question=wire.Question(id=1, call=wire.CallQuestion(record=b"r"))).SerializeToString(),
        wire.Frame(
            question=wire.Question(id=1, call=wire.CallQuestion(peer="x" * 52, record=b"r"))
        ).SerializeToString(),
        wire.Frame(question=wire.Question(id=1, call=wire.CallQuestion(peer=PEERS[0]))).SerializeToString(),
        wire.Frame(question=wire.Question(id=1, called=wire.CalledQuestion())).SerializeToString(),
        wire.Frame(question=wire.Question(id=1, called=wire.CalledQuestion(record=bytes(2049)))).SerializeToString(),
        wire.Frame(answer=wire.Answer(id=1)).SerializeToString(),
        wire.Frame(answer=wire.Answer(id=1, status=bytes(68 * 1024 + 1))).SerializeToString(),
        wire.Frame(receipt=wire.Receipt()).SerializeToString(),
        wire.Frame(ping=wire.Ping(token=1)).SerializeToString() + bytes(MAX_SMALL_FRAME_BYTES),
        wire.Frame(chunk=wire.Chunk(transfer=1)).SerializeToString(),
        b"",
    ],
)
def test_what_is_out_of_bounds_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(frame)


def varint(number: int) -> bytes:
    return bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, *varint(number >> 7)))


@pytest.mark.parametrize("field", list(wire.Frame.DESCRIPTOR.fields), ids=lambda field: field.name)
@pytest.mark.parametrize("length", [0, 1, 127, 128, MAX_SMALL_FRAME_BYTES - 5])
def test_the_topic_is_known_before_anything_is_read(field: FieldDescriptor, length: int) -> None:
    frame = varint(field.number << 3 | 2) + varint(length) + b"\xff" * length
    if field.name == "chunk":
        assert is_chunk(frame)
        return
    assert not is_chunk(frame)
    assert topic_of(frame) is TOPICS.get(field.name)
    if length and field.name != "announcement":
        with pytest.raises(ProtocolViolation):
            decode(frame)


TOPICS = {
    **dict.fromkeys(["receipt", "stranded", "close", "recall", "settled", "unsettled"], Topic.MICROBATCHES),
    **dict.fromkeys(["progress", "invitation", "accepting", "entry", "declined", "roster", "pulse"], Topic.ROUNDS),
    **dict.fromkeys(["prepared", "commit", "dissolved"], Topic.ROUNDS),
    **dict.fromkeys(["audit_request", "evidence", "audit_refused", "accusation"], Topic.ROUNDS),
    **dict.fromkeys(["state_request", "state_refused"], Topic.STATE),
}

PING, ASKED = encode(Ping(1)), encode(Unsettled(MicrobatchId(PEERS[0], 1)))


@pytest.mark.parametrize(
    "frame",
    [PING + ASKED, ASKED + PING, PING + PING, PING[:-1], PING + b"\0", ASKED[:1], b"\x80\x80\x80\x01", b"\xff" * 9],
    ids=[
        "a ping, then a question",
        "a question, then a ping",
        "twice",
        "cut",
        "more",
        "half a tag",
        "long tag",
        "no tag",
    ],
)
def test_a_frame_is_one_field_and_nothing_else(frame: bytes) -> None:
    """protobuf would merge them and believe the last: the first bytes would not tell what it is."""
    for read in (topic_of, decode):
        with pytest.raises(ProtocolViolation):
            read(frame)


def test_details_are_cut_when_sent_and_made_harmless_when_read() -> None:
    assert decode(encode(Close(MicrobatchId(PEERS[0], 1), "x" * 1000))) == Close(MicrobatchId(PEERS[0], 1), "x" * 256)
    terminal = encode(Farewell(FarewellReason.LEAVING, "\x1b]0;owned\x07"))
    assert decode(terminal) == Farewell(FarewellReason.LEAVING, "?]0;owned?")


def test_a_path_of_the_greatest_length_fits() -> None:
    documents = (MAX_DOCUMENT_TOKENS,) * MAX_DOCUMENTS
    route = SignedRoute((ModuleId(1023, 1023),) * MAX_HOPS, 1.0, bytes(SIGNATURE_BYTES), documents)
    path = Path(PEERS[0], (Hop(ModuleId(1023, 1023), PEERS[1]),) * MAX_HOPS, route)
    message = Forward(MicrobatchId(PEERS[0], 2**48 - 1), path, MAX_HOPS, Purpose.TRAIN, 1.0)
    frame = TensorFrame(message, TensorSpec((2, 1024), DType.FLOAT32), 1, 2)
    assert decode(encode(frame)) == frame
