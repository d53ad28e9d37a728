"""Frames against the protobuf library in both directions, and against bytes that nobody should send."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.codec import checked_version, converter
from protocol.frames.frames import (
    MAX_LIFETIME_MS,
    MAX_SMALL_FRAME_BYTES,
    AnnouncementFrame,
    Cancel,
    Farewell,
    FarewellReason,
    Hello,
    Ping,
    Pong,
    SmallFrame,
    decode,
    encode,
    is_chunk,
    topic_of,
)
from protocol.frames.rpc import (
    MAX_ANSWER_BYTES,
    AnswerFrame,
    HashList,
    QuestionFrame,
    decode_hash_list,
    encode_hash_list,
)
from protocol.frames.tensors import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Arrival,
    Assembly,
    Chunk,
    OutgoingTransfer,
    TensorFrame,
    checksum_of,
    chunk_bytes_for,
    chunk_count_of,
    decode_chunk,
    encode_chunk,
)
from protocol.generated import link_pb2 as wire
from protocol.identity.keys import peer_id_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Topic
from swarm.routing.negotiation.groups import group_of
from swarm.routing.negotiation.negotiation_events import Member
from swarm.vocabulary.averaging_messages import (
    MAX_ATTEMPTS,
    MAX_MEASURED,
    MAX_MEMBERS,
    MAX_RATE,
    Accepting,
    Accusation,
    AuditRefused,
    AuditRequest,
    Commit,
    Contribution,
    Declined,
    DeclineReason,
    Dissolved,
    Entry,
    Evidence,
    Invitation,
    LinkRate,
    Prepared,
    Progress,
    Pulse,
    Reduced,
    RoundId,
    SignedHash,
    SignedRoster,
    StateChunk,
    StateRefusal,
    StateRefused,
    StateRequest,
)
from swarm.vocabulary.bounds import Length, Range
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
from swarm.vocabulary.routing_messages import (
    EPOCH_BYTES,
    MAX_LANES,
    MAX_OFFER,
    MAX_OFFERED_LANES,
    MAX_OFFERED_VISITS,
    MAX_PEERS,
    MAX_TALKING,
    MAX_VERSION,
    MAX_VISITS,
    Abandon,
    Accept,
    Decline,
    Heard,
    Lane,
    LaneControl,
    Offer,
    Standing,
    Told,
)
from swarm.vocabulary.types import (
    MAX_DOCUMENT_TOKENS,
    MAX_DOCUMENTS,
    MAX_HOPS,
    MAX_ROUND,
    MAX_STAGES,
    SIGNATURE_BYTES,
    AnchorVersion,
    Codec,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    RunId,
    SignedRoute,
    VersionRange,
)
from tests.e2e.late_frames import LateFrames
from tests.protocol.transport.link_peers import forward


def peer(number: int) -> PeerId:
    """A peer that is the same in every run: its key is the number in each of its bytes, as far as that goes."""
    return peer_id_of((number * _ONES % 2**256).to_bytes(32, "big"))


_ONES: Final = int.from_bytes(b"\1" * 32, "big")
A, B, C, D = (peer(number) for number in range(4))
SIGNATURE, HASH = bytes(range(64)), bytes(range(32))
MICROBATCH, FIRST_MICROBATCH = MicrobatchId(A, 2**40 + 7), MicrobatchId(A, 0)
HOPS = (Hop(ModuleId(1, 0), B), Hop(ModuleId(300, 2), C), Hop(ModuleId(0, 0), B))
ROUTE = SignedRoute((ModuleId(1), ModuleId(300, 2), ModuleId(0)), 61.5, SIGNATURE)
PATH, SIGNED_PATH = Path(A, HOPS), Path(A, HOPS, ROUTE)
OF_DOCUMENTS = Path(A, HOPS, replace(ROUTE, documents=(1, 300, 2**20)))
OF_LABELS = Path(A, HOPS, replace(ROUTE, labels=300))
HIDDEN = TensorSpec((2, 128, 64), DType.BFLOAT16, Codec.INT8, outliers=3)
FLOATS, PLANES = TensorSpec((5000,), DType.FLOAT32), TensorSpec((5000,), DType.FLOAT32, Codec.PLANES, 0, 12345)
ROUND, FIRST_ROUND = RoundId(ModuleId(3, 1), 300, 2, B), RoundId(ModuleId(0), 1, 0, A)
BASE, INITIAL = AnchorVersion(299, 70_000, 2**45, 5, HASH), AnchorVersion(0, 0, 0, 0, HASH)
ENTRY = Entry(B, ROUND, BASE, 32, 65_536, 1.75, (LinkRate(0xABCDEF, 12), LinkRate(0, 1)), INITIAL, SIGNATURE)
EMPTY_ENTRY = Entry(C, ROUND, BASE, 0, 0, 0.0, (), None, SIGNATURE)
SIGNED = (SignedHash(A, HASH, SIGNATURE), SignedHash(A, bytes(32), bytes(64)), SignedHash(C, HASH, SIGNATURE))
EPOCH = b"\x01\x00epoch\xff"
STANDING = Standing(
    A, 17, (Lane((C, B), frozenset({300, 2}), 1.5), Lane((), frozenset({1}), 0.0), Lane((D, B), frozenset(), 0.25))
)

EXAMPLES: Final[dict[str, SmallFrame]] = {
    "hello": Hello(A, RunId("ab" * 32), VersionRange(1, 7), b"record", 2**63 + 1, 123_456),
    "hello without a record": Hello(A, RunId("0f" * 32), VersionRange(2, 2), b""),
    "ping": Ping(2**64 - 1),
    "pong": Pong(7),
    "pong of 0": Pong(0),
    "cancel": Cancel(2**32 - 1),
    "farewell": Farewell(FarewellReason.SAME_KEY, "another took the place", b"record"),
    "farewell of no reason": Farewell(FarewellReason.UNSPECIFIED),
    "announcement": AnnouncementFrame(b"record"),
    "forward": TensorFrame(Forward(MICROBATCH, SIGNED_PATH, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "forward of documents": TensorFrame(Forward(MICROBATCH, OF_DOCUMENTS, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "backward of labels": TensorFrame(Backward(MICROBATCH, OF_LABELS, 1), HIDDEN, 12, 3),
    "forward at first hop": TensorFrame(Forward(FIRST_MICROBATCH, PATH, 0, Purpose.EVALUATE, 0.0), HIDDEN, 0, 3),
    "forward unsigned": TensorFrame(Forward(MICROBATCH, PATH, 3, Purpose.TRAIN, 1.25), FLOATS, 2**32 - 1, 2),
    "backward": TensorFrame(Backward(MICROBATCH, SIGNED_PATH, -1), HIDDEN, 13, 2),
    "backward unsigned": TensorFrame(Backward(MICROBATCH, PATH, 2), FLOATS, 13, 2),
    "receipt": Receipt(
        MICROBATCH, Direction.BACKWARD, -1, ReceiptStatus.PASSED_ON, 1.5, "so it is", 0.25, 0.000001, 3.0
    ),
    "receipt of little": Receipt(FIRST_MICROBATCH, Direction.FORWARD, 0, ReceiptStatus.ACCEPTED),
    "receipt beyond bounds": Receipt(
        MICROBATCH, Direction.FORWARD, 256, ReceiptStatus.BUSY, 1e9, "x" * 300, -1.0, 5000.0, 0.0
    ),
    "stranded": Stranded(MICROBATCH, Direction.BACKWARD, 256, "nobody there", SIGNATURE),
    "stranded unsigned": Stranded(MICROBATCH, Direction.FORWARD, -1, ""),
    "close": Close(MICROBATCH, "abandoned: \u00e4"),
    "recall": Recall(MICROBATCH, SIGNED_PATH, -1),
    "recall unsigned": Recall(MICROBATCH, PATH, 1),
    "settled": Settled(MICROBATCH, PATH),
    "settled of nobody": Settled(FIRST_MICROBATCH, Path(A, ())),
    "unsettled": Unsettled(MICROBATCH),
    "question manifest": QuestionFrame(1, Question(QuestionAbout.MANIFEST)),
    "question status": QuestionFrame(0, Question(QuestionAbout.STATUS)),
    "question evaluate": QuestionFrame(2, Question(QuestionAbout.EVALUATE, 256, stages=(1, 3, 1023))),
    "question state": QuestionFrame(2**32 - 1, Question(QuestionAbout.STATE, module=ModuleId(0), digest=HASH)),
    "question dial_back": QuestionFrame(4, Question(QuestionAbout.DIAL_BACK, port=65_535)),
    "question call": QuestionFrame(5, Question(QuestionAbout.CALL, peer=B, record=b"record")),
    "question router": QuestionFrame(7, Question(QuestionAbout.ROUTER)),
    "question tokenizer": QuestionFrame(7, Question(QuestionAbout.TOKENIZER, piece=258)),
    "question called": QuestionFrame(6, Question(QuestionAbout.CALLED, record=b"record")),
    **{f"answer {about.value}": AnswerFrame(9, about, b"content") for about in QuestionAbout},
    "answer empty": AnswerFrame(9, QuestionAbout.CALLED, b""),
    "answer refused": AnswerFrame(9, None, b"not now"),
    "progress": Progress(ModuleId(3, 1), BASE, 32, 65_536),
    "progress of nothing": Progress(ModuleId(0), INITIAL, 0, 0),
    "invitation": Invitation(ROUND, BASE),
    "accepting": Accepting(FIRST_ROUND),
    "entry": ENTRY,
    "entry of nothing": EMPTY_ENTRY,
    "declined": Declined(ROUND, DeclineReason.NOT_READY, BASE),
    "roster": SignedRoster(ROUND, BASE, (ENTRY, EMPTY_ENTRY), Codec.TOP_K_4, "slow links"),
    "roster without a reason": SignedRoster(ROUND, BASE, (EMPTY_ENTRY,)),
    "contribution": TensorFrame(Contribution(ROUND, 7, 300, SIGNATURE), FLOATS, 15, 5),
    "reduced": TensorFrame(Reduced(ROUND, 1, 2), FLOATS, 16, 1),
    "reduced first": TensorFrame(Reduced(ROUND, 0, 1), FLOATS, 16, 1),
    "pulse": Pulse(ROUND, (A, B), (C,)),
    "pulse of nothing": Pulse(FIRST_ROUND),
    "prepared": Prepared(ROUND, BASE),
    "commit": Commit(ROUND, BASE, (C, A)),
    "dissolved": Dissolved(ROUND, "too few"),
    "state_request": StateRequest(ModuleId(3, 1), HASH, (5, 0, 2**20 - 1)),
    "state_chunk": TensorFrame(StateChunk(ModuleId(3, 1), HASH, 2**20 - 1), PLANES, 17, 1),
    "state_chunk first": TensorFrame(StateChunk(ModuleId(0), HASH, 0), FLOATS, 17, 1),
    "state_refused": StateRefused(ModuleId(3, 1), HASH, (1, 2), StateRefusal.GONE),
    "lane_told": Told(EPOCH, STANDING),
    "lane_told decision": Told(EPOCH, Standing(B, 0, ()), 2**48 - 1),
    "lane_told and heard": Told(EPOCH, STANDING, heard=2**48 - 1),
    "lane_heard": Heard(EPOCH, 17),
    "lane_heard of nothing": Heard(EPOCH, 0),
    "lane_offer": Offer(EPOCH, 5, (STANDING, Standing(B, 2**48 - 1, (Lane((D, A, C), frozenset({9, 3, 1023}), 2.5),)))),
    "lane_accept": Accept(EPOCH, 7),
    "lane_decline": Decline(EPOCH, 8, True, STANDING),
    "lane_decline at rest": Decline(EPOCH, 8, False, Standing(A, 0, ())),
    "lane_abandon": Abandon(EPOCH, 1),
    "audit_request": AuditRequest(ROUND, 5, 9),
    "audit_request first": AuditRequest(ROUND, 0, 1),
    "evidence": Evidence(ROUND, 7, 300, SIGNED),
    "evidence of nothing": Evidence(ROUND, 0, 1, ()),
    "audit_refused": AuditRefused(ROUND, 7, 2**20),
    "accusation": Accusation(ROUND, 7, 300, SIGNED),
}


def assert_refused_or_another_valid_frame(octets: bytes, data: st.DataObject) -> None:
    damaged = bytearray(octets)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        again = decode(bytes(damaged[:cut]))
    except ProtocolViolation:
        return
    if not isinstance(again, Chunk):
        assert decode(encode(again)) == again


PEERS = [peer(number) for number in range(8)]
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
    st.builds(Hello, peers, st.just(RunId(RUN)), st.just(VersionRange(1, 7)), st.binary(max_size=2048)),
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
    for read in (decode, decoded):
        with suppress(ProtocolViolation):
            read(data)


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
    **dict.fromkeys(
        ["lane_told", "lane_heard", "lane_offer", "lane_accept", "lane_decline", "lane_abandon"], Topic.LANES
    ),
}

PING, HEARD = encode(Ping(1)), wire.Frame(lane_heard=wire.LaneHeard(epoch=bytes(8), version=1)).SerializeToString()


@pytest.mark.parametrize(
    "frame",
    [PING + HEARD, HEARD + PING, PING + PING, PING[:-1], PING + b"\0", HEARD[:1], b"\x80\x80\x80\x01", b"\xff" * 9],
    ids=["a ping, then a lane", "a lane, then a ping", "twice", "cut", "more", "half a tag", "long tag", "no tag"],
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
    round_ = RoundId(ModuleId(1), 1, 0, PEERS[0])
    assert decode(encode(Dissolved(round_, "x" * 1000))) == Dissolved(round_, "x" * 256)
    assert decode(encode(Dissolved(round_, "\x1b[2J"))) == Dissolved(round_, "?[2J")


def test_a_path_of_the_greatest_length_fits() -> None:
    documents = (MAX_DOCUMENT_TOKENS,) * MAX_DOCUMENTS
    route = SignedRoute((ModuleId(1023, 1023),) * MAX_HOPS, 1.0, bytes(SIGNATURE_BYTES), documents)
    path = Path(PEERS[0], (Hop(ModuleId(1023, 1023), PEERS[1]),) * MAX_HOPS, route)
    message = Forward(MicrobatchId(PEERS[0], 2**48 - 1), path, MAX_HOPS, Purpose.TRAIN, 1.0)
    frame = TensorFrame(message, TensorSpec((2, 1024), DType.FLOAT32), 1, 2)
    assert decode(encode(frame)) == frame


MANY_PEERS = tuple(peer(number) for number in range(MAX_MEMBERS))
LARGEST_VERSION = AnchorVersion(MAX_ROUND, 2**48, 2**48, 63, b"\xff" * 32)
LOSSLESS = [Codec.NONE, Codec.PLANES]
OF_ANY_VECTOR = [codec for codec in Codec if codec is not Codec.PLANES]
LARGEST_ROUND = RoundId(ModuleId(1023, 1023), MAX_ROUND, MAX_ATTEMPTS, PEERS[0])

counts = st.integers(0, 2**48)
digests = st.binary(min_size=32, max_size=32)
signed = st.lists(st.builds(SignedHash, st.sampled_from(PEERS), digests, signatures), max_size=5).map(tuple)
versions = st.builds(AnchorVersion, st.integers(0, MAX_ROUND), counts, counts, st.integers(0, 63), digests)
rounds = st.builds(RoundId, modules, st.integers(1, MAX_ROUND), st.integers(0, MAX_ATTEMPTS), st.sampled_from(PEERS))
measures = st.floats(0, allow_nan=False, allow_infinity=False)
lists = st.lists(st.sampled_from(PEERS), unique=True).map(tuple)
chunk_lists = st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=64, unique=True).map(tuple)


measured = st.lists(st.builds(LinkRate, st.integers(0, 2**24 - 1), st.integers(1, MAX_RATE)), max_size=MAX_MEASURED)


@st.composite
def entries(draw: st.DrawFn, number: RoundId | None = None, base: AnchorVersion | None = None) -> Entry:
    return Entry(
        draw(st.sampled_from(PEERS)),
        number or draw(rounds),
        base or draw(versions),
        draw(counts),
        draw(counts),
        draw(measures),
        tuple(draw(measured)),
        draw(st.none() | versions),
        draw(signatures),
    )


@st.composite
def rosters(draw: st.DrawFn) -> SignedRoster:
    number, base = draw(rounds), draw(versions)
    members = draw(st.lists(entries(number, base), min_size=1, max_size=4, unique_by=lambda entry: entry.peer))
    return SignedRoster(number, base, tuple(members), draw(st.sampled_from(Codec)), draw(details))


@st.composite
def pieces(draw: st.DrawFn, kind: type, *rest: st.SearchStrategy[object]) -> object:
    first, end = sorted(draw(st.lists(st.integers(0, 2**20), min_size=2, max_size=2, unique=True)))
    return kind(draw(rounds), first, end, *(draw(strategy) for strategy in rest))


@st.composite
def vectors(draw: st.DrawFn) -> TensorFrame:
    first, end = sorted(draw(st.lists(st.integers(0, 2**20), min_size=2, max_size=2, unique=True)))
    message, codec = draw(
        st.one_of(
            st.tuples(
                st.builds(Contribution, rounds, st.just(first), st.just(end), signatures),
                st.sampled_from(OF_ANY_VECTOR),
            ),
            st.tuples(st.builds(Reduced, rounds, st.just(first), st.just(end)), st.sampled_from(OF_ANY_VECTOR)),
            st.tuples(st.builds(StateChunk, modules, digests, st.integers(0, 2**20 - 1)), st.sampled_from(LOSSLESS)),
        )
    )
    elements = draw(st.integers(1, 2**32 - 1))
    compressed = draw(st.integers(1, 4 * elements)) if codec is Codec.PLANES else 0
    spec = TensorSpec((elements,), DType.FLOAT32, codec, compressed_bytes=compressed)
    return TensorFrame(message, spec, draw(st.integers(0, 2**32 - 1)), -(-spec.byte_length // MAX_CHUNK_BYTES))


round_frames = st.one_of(
    st.builds(Progress, modules, versions, counts, counts),
    st.builds(Invitation, rounds, versions),
    st.builds(Accepting, rounds),
    entries(),
    st.builds(Declined, rounds, st.sampled_from(DeclineReason), versions),
    rosters(),
    st.builds(Pulse, rounds, lists, lists),
    st.builds(Prepared, rounds, versions),
    st.builds(Commit, rounds, versions, lists),
    st.builds(Dissolved, rounds, details),
    pieces(AuditRequest),
    pieces(AuditRefused),
    pieces(Evidence, signed),
    pieces(Accusation, signed),
    st.builds(StateRequest, modules, digests, chunk_lists),
    st.builds(StateRefused, modules, digests, chunk_lists, st.sampled_from(StateRefusal)),
    st.builds(
        QuestionFrame,
        st.integers(0, 2**32 - 1),
        st.builds(Question, st.just(QuestionAbout.STATE), module=modules, digest=digests),
    ),
    vectors(),
)


def test_the_longest_messages_are_small_frames() -> None:
    for message in (
        Pulse(LARGEST_ROUND, MANY_PEERS, MANY_PEERS),
        Commit(LARGEST_ROUND, LARGEST_VERSION, MANY_PEERS),
        StateRequest(ModuleId(1023, 1023), b"\xff" * 32, tuple(range(2**20 - 64, 2**20))),
    ):
        frame = encode(message)
        assert len(frame) <= MAX_SMALL_FRAME_BYTES // 2
        assert decode(frame) == message


def test_a_roster_of_all_members_that_have_measured_all_they_may_is_a_small_frame() -> None:
    links = tuple(LinkRate(2**24 - 1, MAX_RATE) for _ in range(MAX_MEASURED))
    figures = (2**48, 2**48, 1e300 / 3, links, LARGEST_VERSION, b"\xff" * 64)
    members = tuple(Entry(peer, LARGEST_ROUND, LARGEST_VERSION, *figures) for peer in MANY_PEERS)
    message = SignedRoster(LARGEST_ROUND, LARGEST_VERSION, members, Codec.PLANES, "x" * 256)
    frame = encode(message)
    assert len(frame) <= MAX_SMALL_FRAME_BYTES
    assert decode(frame) == message


def module() -> wire.ModuleId:
    return wire.ModuleId(stage=1)


def round_id(**changes: object) -> wire.RoundId:
    return wire.RoundId(**{"module": module(), "number": 1, "attempt": 0, "convener": PEERS[0], **changes})  # type: ignore[arg-type]


def version(**changes: object) -> wire.AnchorVersion:
    return wire.AnchorVersion(**{"round": 1, "steps": 1, "tokens": 1, "fragment": 0, "digest": bytes(32), **changes})  # type: ignore[arg-type]


def round_header(**changes: object) -> wire.TensorHeader:
    honest = {"transfer": 1, "dtype": 1, "codec": 1, "shape": [1024], "byte_length": 4096, "chunk_count": 1}
    return wire.TensorHeader(**{**honest, **changes})  # type: ignore[arg-type]


def roster(**changes: object) -> wire.Roster:
    return wire.Roster(**{"round": round_id(), "base": version(), "entries": [member()], "codec": wire.NONE, **changes})  # type: ignore[arg-type]


def member(**changes: object) -> wire.Entry:
    honest = {"peer": PEERS[0], "steps": 1, "tokens": 1, "norm": 1.0, "signature": bytes(64)}
    return wire.Entry(**{**honest, **changes})  # type: ignore[arg-type]


def entry(**changes: object) -> wire.Entry:
    return member(**{"round": round_id(), "base": version(), **changes})


def contribution(**changes: object) -> wire.Contribution:
    honest = {"round": round_id(), "first_chunk": 0, "end_chunk": 1, "tensor": round_header(), "signature": bytes(64)}
    return wire.Contribution(**{**honest, **changes})  # type: ignore[arg-type]


def signed_hash(**changes: object) -> wire.SignedHash:
    return wire.SignedHash(**{"peer": PEERS[0], "hash": bytes(32), "signature": bytes(64), **changes})  # type: ignore[arg-type]


def evidence(*signed: wire.SignedHash) -> wire.Evidence:
    return wire.Evidence(round=round_id(), end_chunk=1, signed=signed)


def reduced(**changes: object) -> wire.Reduced:
    honest = {"round": round_id(), "first_chunk": 0, "end_chunk": 1, "tensor": round_header()}
    return wire.Reduced(**{**honest, **changes})  # type: ignore[arg-type]


def request(**changes: object) -> wire.StateRequest:
    return wire.StateRequest(**{"module": module(), "digest": bytes(32), "chunks": [0], **changes})  # type: ignore[arg-type]


def refused(**changes: object) -> wire.StateRefused:
    return wire.StateRefused(**{"module": module(), "digest": bytes(32), "chunks": [0], "reason": 1, **changes})  # type: ignore[arg-type]


def chunk(**changes: object) -> wire.StateChunk:
    return wire.StateChunk(**{"module": module(), "digest": bytes(32), "tensor": round_header(), **changes})  # type: ignore[arg-type]


INT8_HEADER = round_header(codec=2, byte_length=1024 + 32)
PLANES_HEADER = round_header(codec=9, byte_length=4096, compressed_bytes=4096)

LIES: dict[str, wire.Frame] = {
    "round 0": wire.Frame(accepting=wire.Accepting(round=round_id(number=0))),
    "round beyond": wire.Frame(accepting=wire.Accepting(round=round_id(number=2**48))),
    "attempt beyond": wire.Frame(accepting=wire.Accepting(round=round_id(attempt=MAX_ATTEMPTS + 1))),
    "no convener": wire.Frame(accepting=wire.Accepting(round=round_id(convener=""))),
    "odd convener": wire.Frame(accepting=wire.Accepting(round=round_id(convener="0" * 52))),
    "no round": wire.Frame(accepting=wire.Accepting()),
    "module beyond": wire.Frame(accepting=wire.Accepting(round=round_id(module=wire.ModuleId(stage=1024)))),
    "version's round": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(round=2**48))),
    "version's steps": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(steps=2**48 + 1))),
    "version's tokens": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(tokens=2**64 - 1))),
    "version's fragment": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(fragment=64))),
    "short digest": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(digest=bytes(31)))),
    "long digest": wire.Frame(invitation=wire.Invitation(round=round_id(), base=version(digest=bytes(33)))),
    "no version": wire.Frame(prepared=wire.Prepared(round=round_id())),
    "progress' steps": wire.Frame(progress=wire.Progress(module=module(), base=version(), steps=2**48 + 1)),
    "entry's tokens": wire.Frame(entry=entry(tokens=2**48 + 1)),
    "norm is NaN": wire.Frame(entry=entry(norm=math.nan)),
    "norm is infinite": wire.Frame(entry=entry(norm=math.inf)),
    "norm is negative": wire.Frame(entry=entry(norm=-1.0)),
    "a rate of 0": wire.Frame(entry=entry(measured=[1 << 8])),
    "a rate beyond": wire.Frame(entry=entry(measured=[25])),
    "too many links": wire.Frame(entry=entry(measured=[257] * 17)),
    "no signature": wire.Frame(entry=entry(signature=b"")),
    "a long signature": wire.Frame(entry=entry(signature=bytes(65))),
    "entry of nobody": wire.Frame(entry=entry(peer="")),
    "entry without an anchor": wire.Frame(entry=entry(base=None)),
    "staged without digest": wire.Frame(entry=entry(staged=wire.AnchorVersion(round=1))),
    "no reason": wire.Frame(declined=wire.Declined(round=round_id(), version=version())),
    "unknown reason": wire.Frame(declined=wire.Declined(round=round_id(), version=version(), reason=6)),  # type: ignore[arg-type]
    "nobody": wire.Frame(roster=roster(entries=[])),
    "too many members": wire.Frame(roster=roster(entries=[member()] * (MAX_MEMBERS + 1))),
    "a member twice": wire.Frame(roster=roster(entries=[member(), member(steps=2)])),
    "odd member": wire.Frame(roster=roster(entries=[member(peer="x")])),
    "a member's round": wire.Frame(roster=roster(entries=[member(round=round_id())])),
    "a member's anchor": wire.Frame(roster=roster(entries=[member(base=version())])),
    "a member's norm": wire.Frame(roster=roster(entries=[member(norm=math.inf)])),
    "no codec": wire.Frame(roster=roster(codec=wire.CODEC_UNSPECIFIED)),
    "reason too long": wire.Frame(roster=roster(codec_reason="x" * 257)),
    "named twice": wire.Frame(pulse=wire.Pulse(round=round_id(), waiting_for=PEERS[:1] * 2)),
    "too many rejected": wire.Frame(pulse=wire.Pulse(round=round_id(), rejected=[*MANY_PEERS, PEERS[0]])),
    "odd holder": wire.Frame(commit=wire.Commit(round=round_id(), version=version(), holders=["12D3Koo"])),
    "too much detail": wire.Frame(dissolved=wire.Dissolved(round=round_id(), detail="x" * 257)),
    "piece without chunks": wire.Frame(contribution=contribution(end_chunk=0)),
    "piece backwards": wire.Frame(reduced=reduced(first_chunk=2)),
    "piece beyond": wire.Frame(reduced=reduced(end_chunk=2**20 + 1)),
    "piece without a tensor": wire.Frame(contribution=wire.Contribution(round=round_id(), end_chunk=1)),
    "piece that nobody signed": wire.Frame(contribution=contribution(signature=b"")),
    "signature too long": wire.Frame(contribution=contribution(signature=bytes(65))),
    "audit of no piece": wire.Frame(audit_request=wire.AuditRequest(round=round_id())),
    "refused of no piece": wire.Frame(audit_refused=wire.AuditRefused(round=round_id(), first_chunk=2, end_chunk=1)),
    "evidence with a short hash": wire.Frame(evidence=evidence(signed_hash(hash=bytes(31)))),
    "evidence without a signature": wire.Frame(evidence=evidence(signed_hash(signature=b""))),
    "evidence of nobody": wire.Frame(evidence=evidence(signed_hash(peer=""))),
    "too much evidence": wire.Frame(evidence=evidence(*[signed_hash()] * (MAX_MEMBERS + 1))),
    "too much is accused": wire.Frame(
        accusation=wire.Accusation(round=round_id(), end_chunk=1, signed=[signed_hash()] * (MAX_MEMBERS + 1))
    ),
    "piece of halves": wire.Frame(contribution=contribution(tensor=round_header(dtype=3, byte_length=2048))),
    "piece of two dimensions": wire.Frame(contribution=contribution(tensor=round_header(shape=[2, 512]))),
    "int8 of wrong length": wire.Frame(contribution=contribution(tensor=round_header(codec=2))),
    "int8 of halves": wire.Frame(reduced=reduced(tensor=round_header(codec=2, dtype=3, byte_length=1056))),
    "unknown codec": wire.Frame(reduced=reduced(tensor=round_header(codec=10))),  # type: ignore[arg-type]
    "no chunks asked": wire.Frame(state_request=request(chunks=[])),
    "too many asked": wire.Frame(state_request=request(chunks=range(65))),
    "chunk asked twice": wire.Frame(state_request=request(chunks=[1, 1])),
    "chunk asked beyond": wire.Frame(state_request=request(chunks=[2**20])),
    "asked without digest": wire.Frame(state_request=request(digest=b"")),
    "refused for no reason": wire.Frame(state_refused=refused(reason=0)),
    "refused beyond": wire.Frame(state_refused=refused(chunks=[2**32 - 1])),
    "chunk beyond": wire.Frame(state_chunk=chunk(chunk=2**20)),
    "chunk without digest": wire.Frame(state_chunk=chunk(digest=b"")),
    "chunk encoded": wire.Frame(state_chunk=chunk(tensor=INT8_HEADER)),
    "chunk of more than its elements": wire.Frame(
        state_chunk=chunk(tensor=round_header(codec=9, byte_length=4097, compressed_bytes=4097, chunk_count=1))
    ),
    "chunk of planes of no length": wire.Frame(state_chunk=chunk(tensor=round_header(codec=9))),
    "chunk of planes of another length": wire.Frame(
        state_chunk=chunk(tensor=round_header(codec=9, compressed_bytes=4000))
    ),
    "chunk of halves in planes": wire.Frame(
        state_chunk=chunk(tensor=round_header(codec=9, dtype=2, byte_length=1000, compressed_bytes=1000))
    ),
    "chunk of two dimensions": wire.Frame(state_chunk=chunk(tensor=round_header(shape=[2, 512]))),
    "question without digest": wire.Frame(question=wire.Question(state=wire.StateQuestion(module=module()))),
}


@pytest.mark.parametrize("frame", LIES.values(), ids=LIES.keys())
def test_what_is_out_of_bounds_in_rounds_is_refused(frame: wire.Frame) -> None:
    with pytest.raises(ProtocolViolation):
        decode(frame.SerializeToString())


@pytest.mark.parametrize(
    "make",
    [
        lambda: wire.Frame(accepting=wire.Accepting(round=round_id())),
        lambda: wire.Frame(invitation=wire.Invitation(round=round_id(), base=version())),
        lambda: wire.Frame(entry=entry(staged=version())),
        lambda: wire.Frame(declined=wire.Declined(round=round_id(), version=version(), reason=5)),  # type: ignore[arg-type]
        lambda: wire.Frame(roster=roster()),
        lambda: wire.Frame(pulse=wire.Pulse(round=round_id(), waiting_for=PEERS)),
        lambda: wire.Frame(contribution=contribution(tensor=INT8_HEADER)),
        lambda: wire.Frame(reduced=reduced()),
        lambda: wire.Frame(evidence=evidence(*[signed_hash()] * MAX_MEMBERS)),
        lambda: wire.Frame(state_request=request()),
        lambda: wire.Frame(state_refused=refused()),
        lambda: wire.Frame(state_chunk=chunk()),
        lambda: wire.Frame(state_chunk=chunk(tensor=PLANES_HEADER)),
    ],
)
def test_the_honest_frames_of_the_lies_above_are_accepted(make: Callable[[], wire.Frame]) -> None:
    decode(make().SerializeToString())


epochs = st.binary(min_size=EPOCH_BYTES, max_size=EPOCH_BYTES)
lane_versions = st.integers(0, MAX_VERSION)
numbers = st.integers(1, MAX_OFFER)
lane_routes = st.lists(st.sampled_from(PEERS), unique=True).map(tuple)
stages = st.frozensets(st.integers(1, MAX_STAGES - 1), max_size=8)
lanes = st.builds(Lane, lane_routes, stages, measures)
standings = st.builds(Standing, st.sampled_from(PEERS), lane_versions, st.lists(lanes, max_size=8).map(tuple))

messages = st.one_of(
    st.builds(Told, epochs, standings),
    st.builds(Told, epochs, standings, numbers, lane_versions),
    st.builds(Heard, epochs, lane_versions),
    st.builds(Offer, epochs, numbers, st.lists(standings, min_size=1, max_size=8).map(tuple)),
    st.builds(Accept, epochs, numbers),
    st.builds(Decline, epochs, numbers, st.booleans(), standings),
    st.builds(Abandon, epochs, numbers),
)


KINDS = pytest.mark.parametrize("kinds", [frames, round_frames, messages], ids=["of links", "of rounds", "of lanes"])


@KINDS
@given(st.data())
def test_what_is_encoded_is_decoded_to_the_same(kinds: st.SearchStrategy[object], data: st.DataObject) -> None:
    frame = data.draw(kinds)
    back = decode(encode(frame))  # type: ignore[arg-type]
    assert back == frame
    if isinstance(frame, TensorFrame) and isinstance(frame.message, Contribution):
        assert isinstance(back, TensorFrame)
        assert isinstance(back.message, Contribution)
        assert back.message.signature == frame.message.signature, "it makes no other piece, so == does not see it"


@KINDS
@given(st.data())
def test_a_damaged_frame_is_a_violation_or_another_valid_frame(
    kinds: st.SearchStrategy[object], data: st.DataObject
) -> None:
    assert_refused_or_another_valid_frame(encode(data.draw(kinds)), data)  # type: ignore[arg-type]


def largest(first: int, lengths: list[int]) -> Standing:
    """Lanes of these lengths that share no peer, by the longest numbers there are."""
    found = []
    for length in lengths:
        route, first = tuple(map(peer, range(first, first + length))), first + length
        found.append(Lane(route, frozenset(range(MAX_STAGES - length, MAX_STAGES)), 1 / 3))
    return Standing(peer(0), MAX_VERSION, tuple(found))


@pytest.mark.parametrize("count", [MAX_VISITS // MAX_HOPS, MAX_LANES])
def test_the_longest_lane_messages_are_small_frames(count: int) -> None:
    lengths = [MAX_VISITS // count] * count
    ours = largest(0, lengths)
    for message in (Told(EPOCH, ours, MAX_OFFER), Decline(EPOCH, MAX_OFFER, True, ours)):
        assert_is_a_small_frame(message)


@pytest.mark.parametrize("count", [MAX_OFFERED_VISITS // MAX_HOPS, MAX_OFFERED_LANES])
def test_the_longest_offers_are_small_frames(count: int) -> None:
    """As many peers as can be named, by the longest numbers there are, in lanes that have nothing in common."""
    length, standings = MAX_OFFERED_VISITS // count, []
    peers = [peer(number) for number in range(MAX_PEERS - MAX_TALKING)]
    for rank in range(MAX_TALKING):
        places = range(rank * count // MAX_TALKING, (rank + 1) * count // MAX_TALKING)
        lanes = [
            Lane(tuple(peers[(place * length + k) % len(peers)] for k in range(length)), WIDE[length], 1 / 3)
            for place in places
        ]
        standings.append(Standing(peer(2000 + rank), MAX_VERSION, tuple(lanes)))
    assert_is_a_small_frame(Offer(EPOCH, MAX_OFFER, tuple(standings)))


WIDE = {n: frozenset(range(MAX_STAGES - n, MAX_STAGES)) for n in (4, MAX_HOPS)}


def assert_is_a_small_frame(message: LaneControl) -> None:
    frame = encode(message)
    assert len(frame) <= MAX_SMALL_FRAME_BYTES * 31 // 32
    assert decode(frame) == message


def test_a_peer_that_many_lanes_visit_is_named_once() -> None:
    lane = Lane((PEERS[0], PEERS[1]), frozenset({1, 2}), 1.0)
    frame = encode(Offer(EPOCH, 1, (Standing(PEERS[2], 1, (lane,) * MAX_LANES), Standing(PEERS[3], 1, (lane,)))))
    assert frame.count(PEERS[0].encode()) == frame.count(PEERS[1].encode()) == 1


def test_a_lane_whose_stages_nobody_serves_can_be_told() -> None:
    message = Told(EPOCH, Standing(PEERS[0], 0, (Lane((), frozenset({1, 2}), 0.0),)))
    assert decode(encode(message)) == message


def test_the_epochs_that_groups_have_can_be_told() -> None:
    epoch = group_of(PEERS[0], frozenset(map(Member, PEERS))).epoch
    assert decode(encode(Heard(epoch, 1))) == Heard(epoch, 1)


def test_the_bytes_of_an_offer_written_out() -> None:
    """Worked out by hand from link.proto: another number of a field, or another type, makes other bytes."""
    names = b"\x12\x34" + PEERS[3].encode() + b"\x12\x34" + PEERS[1].encode()
    lane = bytes.fromhex("0a02 0001 1203 02ac02 19 000000000000f83f")
    stands = b"\x0a\x34" + PEERS[0].encode() + b"\x10\x09" + b"\x1a" + bytes([len(lane)]) + lane
    offered = b"\x0a\x08" + EPOCH + names + b"\x18\x07" + b"\x62" + bytes([len(stands)]) + stands
    lanes = (Lane((PEERS[3], PEERS[1]), frozenset({300, 2}), 1.5),)
    assert encode(Offer(EPOCH, 7, (Standing(PEERS[0], 9, lanes),))) == b"\xa2\x02\xc6\x01" + offered


def lane(**changes: object) -> wire.Lane:
    return wire.Lane(**{"route": [1, 0], "stages": [1, 2], "alone_s": 1.0, **changes})  # type: ignore[arg-type]


def standing(**changes: object) -> wire.LaneStanding:
    return wire.LaneStanding(**{"peer": PEERS[0], "version": 1, "lanes": [lane()], **changes})  # type: ignore[arg-type]


def told(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "sender": standing(), "number": 1}
    return wire.Frame(lane_told=wire.LaneTold(**{**honest, **changes}))  # type: ignore[arg-type]


def offer(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "standings": [standing(), standing(peer=PEERS[1])]}
    return wire.Frame(lane_offer=wire.LaneOffer(**{**honest, **changes}))  # type: ignore[arg-type]


def accept(**changes: object) -> wire.Frame:
    return wire.Frame(lane_accept=wire.LaneAccept(**{"epoch": EPOCH, "number": 1, **changes}))  # type: ignore[arg-type]


def decline(**changes: object) -> wire.Frame:
    honest = {"epoch": EPOCH, "peers": PEERS[:2], "number": 1, "busy": True, "sender": standing()}
    return wire.Frame(lane_decline=wire.LaneDecline(**{**honest, **changes}))  # type: ignore[arg-type]


def heard(**changes: object) -> wire.Frame:
    return wire.Frame(lane_heard=wire.LaneHeard(**{"epoch": EPOCH, "version": 1, **changes}))  # type: ignore[arg-type]


def abandon(**changes: object) -> wire.Frame:
    return wire.Frame(lane_abandon=wire.LaneAbandon(**{"epoch": EPOCH, "number": 1, **changes}))  # type: ignore[arg-type]


def sender(**changes: object) -> wire.Frame:
    return told(sender=standing(**changes))


def first_lane(**changes: object) -> wire.Frame:
    return sender(lanes=[lane(**changes)])


MANY = [peer(number) for number in range(MAX_PEERS + 1)]
HALF = MAX_HOPS // 2
FULL = [lane(route=range(HALF), stages=range(1, HALF + 1))] * (MAX_VISITS // HALF)
LONGEST = lane(route=range(MAX_HOPS), stages=range(1, MAX_HOPS + 1))

LANE_LIES: dict[str, wire.Frame] = {
    "no epoch": heard(epoch=b""),
    "short epoch": abandon(epoch=bytes(EPOCH_BYTES - 1)),
    "long epoch": told(epoch=bytes(EPOCH_BYTES + 1)),
    "offer's epoch": offer(epoch=b""),
    "acceptance's epoch": accept(epoch=b"x" * 32),
    "refusal's epoch": decline(epoch=b"x"),
    "version beyond": heard(version=MAX_VERSION + 1),
    "offer 0": abandon(number=0),
    "offer beyond": abandon(number=MAX_OFFER + 1),
    "offered as 0": offer(number=0),
    "accepted beyond": accept(number=2**64 - 1),
    "declined as 0": decline(number=0),
    "decided beyond": told(number=MAX_OFFER + 1),
    "nobody stands": told(sender=None),
    "odd data node": sender(peer="12D3Koo"),
    "decliner's version": decline(sender=standing(version=2**48)),
    "too many lanes": sender(lanes=[lane(route=[], stages=[])] * (MAX_LANES + 1)),
    "too many visits": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[0], stages=[])])),
    "too many stages together": told(peers=MANY[:HALF], sender=standing(lanes=[*FULL, lane(route=[], stages=[1])])),
    "too many peers": told(peers=MANY),
    "a peer listed twice": told(peers=PEERS[:1] * 2),
    "odd peer": told(peers=[PEERS[0], "x"]),
    "no such peer": first_lane(route=[2]),
    "no such peer at all": first_lane(route=[2**32 - 1]),
    "nobody listed": told(peers=[]),
    "a peer visited twice": first_lane(route=[1, 1]),
    "long route": told(peers=MANY[:MAX_PEERS], sender=standing(lanes=[lane(route=range(MAX_HOPS + 1))])),
    "many stages": first_lane(stages=range(1, MAX_HOPS + 2)),
    "stage 0": first_lane(stages=[0, 1]),
    "stage beyond": first_lane(stages=[MAX_STAGES]),
    "stages fall": first_lane(stages=[2, 1]),
    "a stage twice": first_lane(stages=[2, 2]),
    "round trip is NaN": first_lane(alone_s=math.nan),
    "round trip is infinite": first_lane(alone_s=math.inf),
    "offered to nobody": offer(standings=[]),
    "offered to too many": offer(standings=[standing(lanes=[])] * (MAX_TALKING + 1)),
    "offered standing's data node": offer(standings=[standing(), standing(peer="")]),
    "offered version beyond": offer(standings=[standing(version=MAX_VERSION + 1)]),
    "too many lanes of all": offer(standings=[standing(lanes=[lane()] * MAX_LANES)] * 8 + [standing()]),
    "too many visits of all": offer(peers=MANY[:HALF], standings=[standing(lanes=FULL)] * 4 + [standing()]),
    "no such peer offered": offer(standings=[standing(lanes=[lane(route=[2])])]),
    "round trip is negative": first_lane(alone_s=-1e-9),
}


@pytest.mark.parametrize("frame", LANE_LIES.values(), ids=LANE_LIES.keys())
def test_what_is_out_of_bounds_in_lanes_is_refused(frame: wire.Frame) -> None:
    with pytest.raises(ProtocolViolation, match=r"lanes:|peer id"):
        decode(frame.SerializeToString())


@pytest.mark.parametrize(
    "frame",
    [
        told(),
        told(number=0),
        told(peers=MANY[:MAX_PEERS], sender=standing(lanes=FULL)),
        offer(),
        accept(),
        told(peers=MANY[:MAX_HOPS], sender=standing(lanes=[LONGEST])),
        offer(peers=MANY[:HALF], standings=[standing(lanes=FULL)] * 4),
        offer(standings=[standing(lanes=[lane()] * MAX_LANES)] * 8),
        decline(),
        heard(),
        abandon(),
        sender(lanes=[lane(route=[], stages=[])] * MAX_LANES),
    ],
)
def test_the_honest_frames_of_the_lane_lies_above_are_accepted(frame: wire.Frame) -> None:
    decode(frame.SerializeToString())


@dataclass(frozen=True, slots=True)
class Misnamed:
    stages: int


@dataclass(frozen=True, slots=True)
class Boundless:
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundlessBytes:
    digest: bytes


@dataclass(frozen=True, slots=True)
class Strange:
    digest: Annotated[complex, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class CodecReceipt:
    position: Annotated[int, Range(-1, 3)]
    retry_after_s: Annotated[float, Range(0, 2)]
    detail: Annotated[str, Length(1, 4)]


@pytest.mark.parametrize(
    ("kind", "message", "because"),
    [
        (Misnamed, wire.ModuleId, "no field for stages"),
        (Boundless, wire.StateRequest, "has no bound"),
        (BoundlessBytes, wire.StateRequest, "has no bound"),
        (Strange, wire.StateRequest, "no way"),
    ],
)
def test_what_cannot_travel_is_noticed_when_it_is_loaded(kind: type, message: type, because: str) -> None:
    with pytest.raises(TypeError, match=because):
        converter(kind, message.DESCRIPTOR)  # type: ignore[attr-defined]


def test_units_and_texts_are_converted() -> None:
    receipt = converter(CodecReceipt, wire.Receipt.DESCRIPTOR)
    assert receipt.write(CodecReceipt(2, 1.5, "abcdef"), None) == {
        "position": 2,
        "retry_after_ms": 1500,
        "detail": "abcd",
    }
    said = wire.Receipt(position=-1, retry_after_ms=2000, detail="a\x1bb")
    assert receipt.read(said, None) == CodecReceipt(-1, 2.0, "a?b")


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (wire.Receipt(position=4, detail="a"), r"Receipt\.position 4 is out of range; -1 to 3 are allowed"),
        (wire.Receipt(position=-2, detail="a"), r"Receipt\.position -2 is"),
        (wire.Receipt(retry_after_ms=2001, detail="a"), r"Receipt\.retry_after_s 2\.001 is"),
        (wire.Receipt(), r"Receipt\.detail has a length of 0; 1 to 4 are allowed"),
        (wire.Receipt(detail="abcde"), r"Receipt\.detail has a length of 5"),
    ],
)
def test_the_field_that_is_out_of_bounds_is_named(said: wire.Receipt, because: str) -> None:
    with pytest.raises(ProtocolViolation, match=because):
        converter(CodecReceipt, wire.Receipt.DESCRIPTOR).read(said, None)


def test_a_version_from_elsewhere_is_held_against_the_same_bounds() -> None:
    assert checked_version(AnchorVersion(1, 2, 3, 4, bytes(32))) == AnchorVersion(1, 2, 3, 4, bytes(32))
    for wrong in (
        AnchorVersion(MAX_ROUND + 1, 2, 3, 4, bytes(32)),
        AnchorVersion(1, -1, 3, 4, bytes(32)),
        AnchorVersion(1, 2, 3, 64, bytes(32)),
        AnchorVersion(1, 2, 3, 4, bytes(31)),
    ):
        with pytest.raises(ProtocolViolation, match="AnchorVersion"):
            checked_version(wrong)


DIGEST = b"d" * 32
HONEST = HashList(AnchorVersion(7, 350, 10**9, 1, DIGEST), 10_000, 4096, tuple(bytes([n]) * 32 for n in range(6)))


def decoded(data: bytes, elements: int = 10_000, chunk_elements: int = 4096) -> HashList:
    return decode_hash_list(data, digest=DIGEST, elements=elements, chunk_elements=chunk_elements)


def changed(**changes: object) -> bytes:
    message = wire.HashList.FromString(encode_hash_list(HONEST))
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


def test_it_comes_back_as_it_was() -> None:
    assert decoded(encode_hash_list(HONEST)) == HONEST


@given(st.integers(1, 300_000), st.sampled_from([4096, 8192]), st.integers(0, 2**48), st.randoms(use_true_random=False))
def test_of_any_module(elements: int, chunk: int, steps: int, random: object) -> None:
    count = 2 * -(-elements // chunk)
    hashes = tuple(random.randbytes(32) for _ in range(count))  # type: ignore[attr-defined]
    honest = HashList(AnchorVersion(1, steps, 0, 63, DIGEST), elements, chunk, hashes)
    assert decoded(encode_hash_list(honest), elements, chunk) == honest


def test_the_list_of_a_module_of_a_billion_elements_fits_an_answer() -> None:
    elements, chunk = 10**9, 2**20
    count = 2 * -(-elements // chunk)
    version = AnchorVersion(MAX_ROUND, 2**48, 2**48, 63, DIGEST)
    data = encode_hash_list(HashList(version, elements, chunk, (b"h" * 32,) * count))
    assert len(data) <= MAX_ANSWER_BYTES
    assert decoded(data, elements, chunk).version == version


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        bytes(MAX_ANSWER_BYTES + 1),
        changed(elements=9_999),
        changed(chunk_elements=8192),
        changed(hashes=b""),
        changed(hashes=bytes(32 * 5)),
        changed(hashes=bytes(32 * 6 + 1)),
        changed(round=2**48),
        changed(steps=2**48 + 1),
        changed(tokens=2**64 - 1),
        changed(fragment=64),
    ],
)
def test_another_modules_list_or_none_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decoded(data)


MESSAGE = forward(PeerId("a"), PeerId("b"))


def transfer_header(elements: int, chunk_bytes: int) -> TensorFrame:
    spec = TensorSpec((elements,), DType.FLOAT16)
    return TensorFrame(MESSAGE, spec, 3, chunk_count_of(spec.byte_length, chunk_bytes))


def chunks_of(data: bytes, chunk_bytes: int) -> list[Chunk]:
    transfer = OutgoingTransfer(3, b"header", memoryview(data), chunk_bytes)
    frames = []
    while not transfer.finished:
        frames.append(transfer.next_frame())
    assert frames[0] == b"header"
    return [decode_chunk(frame) for frame in frames[1:]]


def assembly(frame: TensorFrame) -> Assembly:
    return Assembly(frame, memoryview(bytearray(frame.tensor.byte_length)), 0.0, 1.0)


@given(st.integers(1, 20_000), st.integers(MIN_CHUNK_BYTES, 3 * MIN_CHUNK_BYTES), st.randoms())
def test_what_is_cut_up_comes_together_again(elements: int, chunk_bytes: int, random: object) -> None:
    data = random.randbytes(2 * elements)  # type: ignore[attr-defined]
    whole = assembly(transfer_header(elements, chunk_bytes))
    for chunk in chunks_of(data, chunk_bytes):
        assert not whole.complete
        whole.add(chunk)
    assert whole.complete
    assert bytes(whole.buffer) == data


@given(st.lists(st.integers(0, 4), max_size=8), st.booleans())
def test_only_the_right_order_is_taken(order: list[int], keeps_data: bool) -> None:
    data = bytes(5 * MIN_CHUNK_BYTES - 10)
    chunks = chunks_of(data, MIN_CHUNK_BYTES)
    frame = transfer_header(len(data) // 2, MIN_CHUNK_BYTES)
    arrival = assembly(frame) if keeps_data else Arrival(frame)
    taken = 0
    for index in order:
        if index == taken:
            arrival.add(chunks[index])
            taken += 1
        else:
            with pytest.raises(ProtocolViolation, match="was due"):
                arrival.add(chunks[index])
            return
    assert arrival.complete == (taken == 5)


def lie(chunk: Chunk, **changes: object) -> Chunk:
    honest = {"transfer": chunk.transfer, "index": chunk.index, "checksum": chunk.checksum, "data": chunk.data}
    return Chunk(**{**honest, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("goodput", "most", "size"),
    [
        (0.0, 2**20, 2**20),
        (1e9, 2**20, 2**20),
        (1e9, 2**19, 2**19),
        (12.5e6, 2**20, 2**17),
        (2.5e6, 2**20, 2**16),
        (100.0, 2**20, 2**16),
        (1e9, 4096, 4096),
        (100.0, 4096, 4096),
        (float("inf"), 2**20, 2**20),
    ],
)
def test_chunks_are_as_large_as_the_link_carries_in_a_moment(goodput: float, most: int, size: int) -> None:
    assert chunk_bytes_for(goodput, most) == size


def test_a_wrong_checksum_is_refused() -> None:
    first = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)[0]
    with pytest.raises(ProtocolViolation, match="checksum"):
        assembly(transfer_header(5000, MIN_CHUNK_BYTES)).add(lie(first, checksum=first.checksum ^ 1))


def test_a_first_chunk_that_contradicts_the_count_is_refused() -> None:
    first = chunks_of(bytes(10_000), 5000)[0]
    with pytest.raises(ProtocolViolation, match="another number"):
        assembly(transfer_header(5000, MIN_CHUNK_BYTES)).add(first)


@pytest.mark.parametrize("size", [1, MIN_CHUNK_BYTES - 1, MIN_CHUNK_BYTES + 1, 10_000])
def test_a_later_chunk_of_another_size_is_refused(size: int) -> None:
    chunks = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)
    whole = assembly(transfer_header(5000, MIN_CHUNK_BYTES))
    whole.add(chunks[0])
    with pytest.raises(ProtocolViolation, match="were due"):
        whole.add(lie(chunks[1], data=memoryview(bytes(size))))


def test_a_refused_transfer_can_be_swallowed_from_the_middle() -> None:
    chunks = chunks_of(bytes(10_000), MIN_CHUNK_BYTES)
    whole = assembly(transfer_header(5000, MIN_CHUNK_BYTES))
    whole.add(chunks[0])
    rest = whole.swallowing_the_rest()
    rest.add(chunks[1])
    rest.add(chunks[2])
    assert rest.complete


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def ends(delay_s: float, bytes_per_s: float | None = None) -> tuple[LateFrames, LateFrames, Clock]:
    clock = Clock()
    sender, receiver = (LateFrames(bytes_per_s, delay_s, clock, clock.sleep) for _ in range(2))
    return sender, receiver, clock


async def test_a_frame_arrives_unchanged_after_the_delay() -> None:
    sender, receiver, clock = ends(0.05)
    assert await receiver.arrive(await sender.leave(b"frame")) == b"frame"
    assert clock.now == pytest.approx(100.05)


async def test_frames_under_way_share_the_delay() -> None:
    sender, receiver, clock = ends(0.05)
    sent = [await sender.leave(bytes([number])) for number in range(10)]
    assert [await receiver.arrive(frame) for frame in sent] == [bytes([number]) for number in range(10)]
    assert clock.now == pytest.approx(100.05)


async def test_what_is_read_late_is_not_held_back_again() -> None:
    sender, receiver, clock = ends(0.05)
    sent = await sender.leave(b"frame")
    clock.now += 1.0
    await receiver.arrive(sent)
    assert clock.now == pytest.approx(101.0)


async def test_a_line_takes_its_time_for_every_byte_and_then_delays() -> None:
    sender, receiver, clock = ends(0.5, bytes_per_s=100.0)
    sent = [await sender.leave(bytes(100)) for _ in range(3)]
    assert clock.now == pytest.approx(103.0)
    for frame in sent:
        await receiver.arrive(frame)
    assert clock.now == pytest.approx(103.5)


async def test_an_idle_line_saves_nothing_up() -> None:
    sender, _, clock = ends(0.0, bytes_per_s=100.0)
    clock.now += 10.0
    await sender.leave(bytes(100))
    assert clock.now == pytest.approx(111.0)


async def test_a_frame_without_a_stamp_is_noticed() -> None:
    _, receiver, _ = ends(0.05)
    with pytest.raises(ProtocolViolation):
        await receiver.arrive(b"short")


TABLE = pathlib.Path(__file__).with_name("wire_bytes.txt")
BYTES = {
    name: bytes.fromhex(octets) for octets, name in (line.split(" ", 1) for line in TABLE.read_text().splitlines())
}
CUT = {"receipt beyond bounds"}


def test_every_kind_of_small_frame_has_an_example() -> None:
    assert EXAMPLES.keys() == BYTES.keys()
    kinds = {name.partition(" ")[0] for name in EXAMPLES}
    assert kinds == {field.name for field in wire.Frame.DESCRIPTOR.fields} - {"chunk"}


def test_every_field_of_every_message_is_in_some_example() -> None:
    said = {name for octets in BYTES.values() for name in fields_said(wire.Frame.FromString(octets))}
    assert set(fields_of(wire.Frame.DESCRIPTOR)) - said == {"TensorHeader.checksum"}, "which is reserved"


def fields_said(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type:
            for inner in value if field.is_repeated else [value]:
                yield from fields_said(inner)


def fields_of(message: Any) -> Iterator[str]:
    for field in message.fields:
        if field.name != "chunk":
            yield f"{message.name}.{field.name}"
            if field.message_type:
                yield from fields_of(field.message_type)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_frame_has_the_bytes_it_always_had(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == BYTES[name].hex()
    assert wire.Frame.FromString(BYTES[name]).WhichOneof("kind") == name.partition(" ")[0]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CUT))
def test_the_bytes_are_read_as_the_frame_that_made_them(name: str) -> None:
    assert repr(decode(BYTES[name])) == repr(EXAMPLES[name])
