"""Frames against their fixed bytes (`wire_bytes.txt`), against the protobuf library, and against bad bytes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path as File
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames import frames
from protocol.generated import link_pb2 as wire
from protocol.identity.keys import peer_id_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Topic
from swarm.vocabulary import averaging_messages as rounds
from swarm.vocabulary import types
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


def peer(number: int) -> types.PeerId:
    """A peer that is the same in every run: its key is the number in each of its bytes, as far as that goes."""
    return peer_id_of((number * _ONES % 2**256).to_bytes(32, "big"))


_ONES: Final = int.from_bytes(b"\1" * 32, "big")
A, B, C, D = (peer(number) for number in range(4))
SIGNATURE, HASH = bytes(range(64)), bytes(range(32))
MICROBATCH, FIRST_MICROBATCH = types.MicrobatchId(A, 2**40 + 7), types.MicrobatchId(A, 0)
HOPS = (types.Hop(types.ModuleId(1, 0), B), types.Hop(types.ModuleId(300, 2), C), types.Hop(types.ModuleId(0, 0), B))
ROUTE = types.SignedRoute((types.ModuleId(1), types.ModuleId(300, 2), types.ModuleId(0)), 61.5, SIGNATURE)
PATH, SIGNED_PATH = types.Path(A, HOPS), types.Path(A, HOPS, ROUTE)
OF_DOCUMENTS = types.Path(A, HOPS, replace(ROUTE, documents=(1, 300, 2**20)))
OF_LABELS = types.Path(A, HOPS, replace(ROUTE, labels=300))
OF_A_GUEST = types.Path(A, HOPS, replace(ROUTE, invitation=bytes(range(types.INVITATION_BYTES))))
HIDDEN = TensorSpec((2, 128, 64), DType.BFLOAT16, types.Codec.INT8, outliers=3)
NUMBERED = replace(HIDDEN, token_bytes=2)
FLOATS = TensorSpec((5000,), DType.FLOAT32)
ROUND, FIRST_ROUND = rounds.RoundId(types.ModuleId(3, 1), 300, 2, B), rounds.RoundId(types.ModuleId(0), 1, 0, A)
BASE, INITIAL = types.AnchorVersion(299, 70_000, 2**45, 5, HASH), types.AnchorVersion(0, 0, 0, 0, HASH)
ENTRY = rounds.Entry(
    B, ROUND, BASE, 32, 65_536, 1.75, (rounds.LinkRate(0xABCDEF, 12), rounds.LinkRate(0, 1)), INITIAL, SIGNATURE
)
EMPTY_ENTRY = rounds.Entry(C, ROUND, BASE, 0, 0, 0.0, (), None, SIGNATURE)
TALLY = rounds.WorkTally(
    A, types.ModuleId(3, 1), 300, 1.5e9, 30.5, (rounds.WorkRow(B, 7, 9000, 300),), bytes(170), SIGNATURE
)
SIGNED = (
    rounds.SignedHash(A, HASH, SIGNATURE),
    rounds.SignedHash(A, bytes(32), bytes(64)),
    rounds.SignedHash(C, HASH, SIGNATURE),
)

EXAMPLES: Final[dict[str, frames.SmallFrame]] = {
    "hello": frames.Hello(A, types.RunId("ab" * 32), 1, 7, b"record", 2**63 + 1, 123_456),
    "hello without a record": frames.Hello(A, types.RunId("0f" * 32), 2, 2, b""),
    "ping": frames.Ping(2**64 - 1),
    "pong": frames.Pong(7),
    "pong of 0": frames.Pong(0),
    "cancel": frames.Cancel(2**32 - 1),
    "farewell": frames.Farewell(frames.FarewellReason.SAME_KEY, "another took the place", b"record"),
    "farewell of no reason": frames.Farewell(frames.FarewellReason.UNSPECIFIED),
    "announcement": frames.AnnouncementFrame(b"record"),
    "forward": frames.TensorFrame(Forward(MICROBATCH, SIGNED_PATH, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "forward of documents": frames.TensorFrame(
        Forward(MICROBATCH, OF_DOCUMENTS, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3
    ),
    "forward of tokens": frames.TensorFrame(Forward(MICROBATCH, PATH, 1, Purpose.TRAIN, 61.5), NUMBERED, 12, 3),
    "backward of labels": frames.TensorFrame(Backward(MICROBATCH, OF_LABELS, 1), HIDDEN, 12, 3),
    "forward of a guest": frames.TensorFrame(Forward(MICROBATCH, OF_A_GUEST, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "forward at first hop": frames.TensorFrame(Forward(FIRST_MICROBATCH, PATH, 0, Purpose.EVALUATE, 0.0), HIDDEN, 0, 3),
    "forward unsigned": frames.TensorFrame(Forward(MICROBATCH, PATH, 3, Purpose.TRAIN, 1.25), FLOATS, 2**32 - 1, 2),
    "backward": frames.TensorFrame(Backward(MICROBATCH, SIGNED_PATH, -1), HIDDEN, 13, 2),
    "backward unsigned": frames.TensorFrame(Backward(MICROBATCH, PATH, 2), FLOATS, 13, 2),
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
    "settled of nobody": Settled(FIRST_MICROBATCH, types.Path(A, ())),
    "unsettled": Unsettled(MICROBATCH),
    "question manifest": frames.QuestionFrame(1, Question(QuestionAbout.MANIFEST)),
    "question status": frames.QuestionFrame(0, Question(QuestionAbout.STATUS)),
    "question evaluate": frames.QuestionFrame(2, Question(QuestionAbout.EVALUATE, 256, stages=(1, 3, 1023))),
    "question state": frames.QuestionFrame(
        2**32 - 1, Question(QuestionAbout.STATE, module=types.ModuleId(0), digest=HASH)
    ),
    "question dial_back": frames.QuestionFrame(4, Question(QuestionAbout.DIAL_BACK, port=65_535)),
    "question call": frames.QuestionFrame(5, Question(QuestionAbout.CALL, peer=B, record=b"record")),
    "question router": frames.QuestionFrame(7, Question(QuestionAbout.ROUTER)),
    "question router piece": frames.QuestionFrame(7, Question(QuestionAbout.ROUTER, piece=3)),
    "question work": frames.QuestionFrame(8, Question(QuestionAbout.WORK, module=types.ModuleId(3, 1), accused=(B,))),
    "question tokenizer": frames.QuestionFrame(7, Question(QuestionAbout.TOKENIZER, piece=258)),
    "question called": frames.QuestionFrame(6, Question(QuestionAbout.CALLED, record=b"record")),
    **{f"answer {about.value}": frames.AnswerFrame(9, about, b"content") for about in QuestionAbout},
    "answer empty": frames.AnswerFrame(9, QuestionAbout.CALLED, b""),
    "answer refused": frames.AnswerFrame(9, None, b"not now"),
    "progress": rounds.Progress(types.ModuleId(3, 1), BASE, 32, 65_536),
    "progress of nothing": rounds.Progress(types.ModuleId(0), INITIAL, 0, 0),
    "invitation": rounds.Invitation(ROUND, BASE),
    "accepting": rounds.Accepting(FIRST_ROUND),
    "entry": ENTRY,
    "entry of nothing": EMPTY_ENTRY,
    "declined": rounds.Declined(ROUND, rounds.DeclineReason.NOT_READY, BASE),
    "roster": rounds.SignedRoster(ROUND, BASE, (ENTRY, EMPTY_ENTRY), types.Codec.INT4, "slow links"),
    "roster of tallies": rounds.SignedRoster(ROUND, BASE, (EMPTY_ENTRY,), tallies=(TALLY,)),
    "roster without a reason": rounds.SignedRoster(ROUND, BASE, (EMPTY_ENTRY,)),
    "contribution": frames.TensorFrame(rounds.Contribution(ROUND, 7, 300, SIGNATURE), FLOATS, 15, 5),
    "reduced": frames.TensorFrame(rounds.Reduced(ROUND, 1, 2), FLOATS, 16, 1),
    "reduced first": frames.TensorFrame(rounds.Reduced(ROUND, 0, 1), FLOATS, 16, 1),
    "pulse": rounds.Pulse(ROUND, (A, B), (C,)),
    "pulse of nothing": rounds.Pulse(FIRST_ROUND),
    "prepared": rounds.Prepared(ROUND, BASE),
    "commit": rounds.Commit(ROUND, BASE, (C, A)),
    "dissolved": rounds.Dissolved(ROUND, "too few"),
    "state_request": rounds.StateRequest(types.ModuleId(3, 1), HASH, (5, 0, 2**20 - 1)),
    "state_chunk": frames.TensorFrame(rounds.StateChunk(types.ModuleId(3, 1), HASH, 2**20 - 1), FLOATS, 17, 1),
    "state_chunk first": frames.TensorFrame(rounds.StateChunk(types.ModuleId(0), HASH, 0), FLOATS, 17, 1),
    "state_refused": rounds.StateRefused(types.ModuleId(3, 1), HASH, (1, 2), rounds.StateRefusal.GONE),
    "audit_request": rounds.AuditRequest(ROUND, 5, 9),
    "audit_request first": rounds.AuditRequest(ROUND, 0, 1),
    "evidence": rounds.Evidence(ROUND, 7, 300, SIGNED),
    "evidence of nothing": rounds.Evidence(ROUND, 0, 1, ()),
    "audit_refused": rounds.AuditRefused(ROUND, 7, 2**20),
    "accusation": rounds.Accusation(ROUND, 7, 300, SIGNED),
}

TABLE = File(__file__).with_name("wire_bytes.txt")
BYTES = {
    name: bytes.fromhex(octets) for octets, name in (line.split(" ", 1) for line in TABLE.read_text().splitlines())
}
CUT = {"receipt beyond bounds"}  # What is brought within its bounds when it is sent comes out another


def test_every_kind_of_small_frame_and_every_field_has_an_example() -> None:
    assert EXAMPLES.keys() == BYTES.keys()
    kinds = {name.partition(" ")[0] for name in EXAMPLES}
    assert kinds == {field.name for field in wire.Frame.DESCRIPTOR.fields} - {"chunk"}
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
    assert frames.encode(EXAMPLES[name]).hex() == BYTES[name].hex()
    assert wire.Frame.FromString(BYTES[name]).WhichOneof("kind") == name.partition(" ")[0]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CUT))
def test_the_bytes_are_read_as_the_frame_that_made_them(name: str) -> None:
    assert repr(frames.decode(BYTES[name])) == repr(EXAMPLES[name])


PEERS = [peer(number) for number in range(4)]
RUN = "ab" * 32

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
peers = st.sampled_from(PEERS)
times = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1000)
short_times = st.integers(0, 2**32 - 1).map(lambda us: us / 1_000_000)
lifetimes = st.integers(0, frames.MAX_LIFETIME_MS).map(lambda ms: ms / 1000)
modules = st.builds(types.ModuleId, st.integers(0, 1023), st.integers(0, 1023))
signatures = st.binary(min_size=types.SIGNATURE_BYTES, max_size=types.SIGNATURE_BYTES)
documents = st.lists(st.integers(1, types.MAX_DOCUMENT_TOKENS), max_size=8).map(tuple)
routes = st.builds(types.SignedRoute, st.lists(modules, max_size=6).map(tuple), lifetimes, signatures, documents)
paths = st.builds(
    types.Path, peers, st.lists(st.builds(types.Hop, modules, peers), min_size=1, max_size=6).map(tuple), routes
)
measured_times = st.builds(
    Receipt,
    st.just(MICROBATCH),
    st.sampled_from(Direction),
    st.integers(-1, types.MAX_HOPS),
    st.sampled_from(ReceiptStatus),
    times,
    st.just("why"),
    *[short_times] * 3,
)
recalls = paths.map(lambda path: Recall(types.MicrobatchId(path.data_node, 7), path, len(path.hops) - 2))


@given(measured_times | recalls)
def test_what_is_encoded_is_decoded_to_the_same(frame: Receipt | Recall) -> None:
    """Times to the unit of the wire, and paths of any shape; the examples have every field."""
    assert frames.decode(frames.encode(frame)) == frame


@given(uint32, uint32, uint64, st.binary(min_size=1, max_size=5000))
def test_a_chunk_is_what_protobuf_writes_and_reads(transfer: int, index: int, checksum: int, data: bytes) -> None:
    chunk = wire.Chunk(transfer=transfer, index=index, checksum=frames.checksum_of(memoryview(data)), data=data)
    assert frames.encode_chunk(transfer, index, memoryview(data)) == wire.Frame(chunk=chunk).SerializeToString()
    chunk.checksum = checksum
    assert frames.decode(wire.Frame(chunk=chunk).SerializeToString()) == frames.Chunk(
        transfer, index, checksum, memoryview(data)
    )


@pytest.mark.parametrize("size", [1, 127, 128, 4096, 16383, 16384, 2**20])
def test_chunks_of_sizes_at_which_the_prefix_grows_are_read_without_a_copy(size: int) -> None:
    data = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    frame = frames.encode_chunk(2**32 - 1, 2**32 - 1, data)
    assert wire.Frame.FromString(frame).chunk.data == data
    chunk = frames.decode_chunk(frame)
    assert chunk == frames.Chunk(2**32 - 1, 2**32 - 1, frames.checksum_of(data), data)
    assert chunk.data.obj is frame


@given(st.binary(max_size=300))
def test_garbage_is_a_violation_and_nothing_else(data: bytes) -> None:
    for read in (frames.decode, decoded):
        with suppress(ProtocolViolation):
            read(data)


@given(st.binary(max_size=60))
def test_what_is_read_as_a_chunk_protobuf_reads_the_same(rest: bytes) -> None:
    try:
        chunk = frames.decode(b"\x12" + rest)
    except ProtocolViolation:
        return
    assert isinstance(chunk, frames.Chunk)
    expected = wire.Frame.FromString(b"\x12" + rest).chunk
    assert chunk == frames.Chunk(expected.transfer, expected.index, expected.checksum, memoryview(expected.data))


@given(st.sampled_from(list(EXAMPLES.values())), st.data())
def test_a_damaged_frame_is_a_violation_or_another_valid_frame(frame: frames.SmallFrame, data: st.DataObject) -> None:
    octets = bytearray(frames.encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolViolation):
        again = frames.decode(bytes(octets[: data.draw(st.integers(0, len(octets)))]))
        if not isinstance(again, frames.Chunk):
            assert frames.decode(frames.encode(again)) == again


def but(honest: Any, **changes: Any) -> Any:
    """The message with some fields changed; without those that are changed to None."""
    return type(honest)(**{**{field.name: value for field, value in honest.ListFields()}, **changes})


def lies_of(honest: Any, **wrong: Sequence[Any]) -> list[Any]:
    """The message with one wrong value after the other, in one field at a time."""
    return [but(honest, **{name: value}) for name, values in wrong.items() for value in values]


KIND_OF = {field.message_type: field.name for field in wire.Frame.DESCRIPTOR.fields if field.message_type}


def framed(message: Any) -> bytes:
    return wire.Frame(**{KIND_OF[message.DESCRIPTOR]: message}).SerializeToString()


MODULE = wire.ModuleId(stage=1)
HEADER = wire.TensorHeader(transfer=1, dtype=1, codec=1, shape=[2, 1024], byte_length=8192, chunk_count=1)
HOP_OF_ROUTE = wire.Hop(module=wire.ModuleId(), peer=PEERS[0])
OF_DATA_NODE = wire.MicrobatchId(data_node=PEERS[0], number=1)
ROUTE_OF_ONE = wire.Route(microbatch=OF_DATA_NODE, hops=[HOP_OF_ROUTE], lifetime_ms=1)
SIGNED_ROUTE = but(ROUTE_OF_ONE, signature=bytes(64))
FORWARD = wire.Forward(route=ROUTE_OF_ONE, purpose=1, tensor=HEADER)
BACKWARD = wire.Backward(route=ROUTE_OF_ONE, tensor=HEADER)
HELLO = wire.Hello(peer=PEERS[0], run=RUN, lowest_version=1, highest_version=1)
EVALUATE = wire.EvaluateQuestion(microbatches=1)
CALL = wire.CallQuestion(peer=PEERS[0], record=b"r")
ANSWER = wire.Answer(id=1, status=b"content")

MANY_PEERS = tuple(peer(number) for number in range(rounds.MAX_MEMBERS))
ROUND_ID = wire.RoundId(module=MODULE, number=1, convener=PEERS[0])
VERSION = wire.AnchorVersion(round=1, steps=1, tokens=1, digest=bytes(32))
VECTOR = but(HEADER, shape=[1024], byte_length=4096)
OF_INT8 = but(VECTOR, codec=2, byte_length=1024 + 32)
MEMBER = wire.Entry(peer=PEERS[0], steps=1, tokens=1, norm=1.0, signature=bytes(64))
ENTRY_FRAME = but(MEMBER, round=ROUND_ID, base=VERSION)
ACCEPTING = wire.Accepting(round=ROUND_ID)
INVITATION = wire.Invitation(round=ROUND_ID, base=VERSION)
PROGRESS = wire.Progress(module=MODULE, base=VERSION)
DECLINED = wire.Declined(round=ROUND_ID, version=VERSION, reason=5)  # type: ignore[arg-type]
ROSTER = wire.Roster(round=ROUND_ID, base=VERSION, entries=[MEMBER], codec=wire.NONE)
PULSE = wire.Pulse(round=ROUND_ID, waiting_for=PEERS)
COMMIT = wire.Commit(round=ROUND_ID, version=VERSION, holders=PEERS)
CONTRIBUTION = wire.Contribution(round=ROUND_ID, end_chunk=1, tensor=VECTOR, signature=bytes(64))
REDUCED = wire.Reduced(round=ROUND_ID, end_chunk=1, tensor=VECTOR)
SIGNED_HASH = wire.SignedHash(peer=PEERS[0], hash=bytes(32), signature=bytes(64))
EVIDENCE = wire.Evidence(round=ROUND_ID, end_chunk=1, signed=[SIGNED_HASH] * rounds.MAX_MEMBERS)
ACCUSATION = wire.Accusation(round=ROUND_ID, end_chunk=1, signed=[SIGNED_HASH])
REQUEST = wire.StateRequest(module=MODULE, digest=bytes(32), chunks=[0])
REFUSED = wire.StateRefused(module=MODULE, digest=bytes(32), chunks=[0], reason=1)  # type: ignore[arg-type]
STATE = wire.StateChunk(module=MODULE, digest=bytes(32), tensor=VECTOR)

HONEST_FRAMES = [
    *(FORWARD, BACKWARD, HELLO, ANSWER, ENTRY_FRAME, but(ENTRY_FRAME, staged=VERSION), ACCEPTING, INVITATION, PROGRESS),
    *(DECLINED, ROSTER, PULSE, COMMIT, CONTRIBUTION, but(CONTRIBUTION, tensor=OF_INT8), REDUCED, EVIDENCE, ACCUSATION),
    *(REQUEST, REFUSED, STATE, but(HELLO, age_ms=frames.MAX_AGE_MS - 1)),
    but(FORWARD, tensor=but(HEADER, token_bytes=1, byte_length=8194)),
    *(wire.Question(id=1, evaluate=EVALUATE), wire.Question(id=1, call=CALL)),
]


@pytest.mark.parametrize("message", HONEST_FRAMES, ids=lambda message: KIND_OF[message.DESCRIPTOR])
def test_the_honest_frames_of_the_lies_below_are_accepted(message: Any) -> None:
    frames.decode(framed(message))


LIES = [
    *lies_of(
        FORWARD,
        purpose=[3],
        tensor=[
            *lies_of(HEADER, dtype=[0, 4], codec=[0, 2], shape=[[], [1, 1, 2, 32, 32], [2**31] * 3, [2**32 - 1] * 4]),
            *lies_of(HEADER, byte_length=[8191, 2**64 - 1], chunk_count=[0, 3, 2**32 - 1]),
            but(HEADER, shape=[0, 1024], byte_length=0, chunk_count=0),
            *lies_of(HEADER, token_bytes=[1, 4]),
            but(HEADER, token_bytes=4, byte_length=8200),
        ],
        route=[
            *lies_of(ROUTE_OF_ONE, position=[2, -1, -2], lifetime_ms=[frames.MAX_LIFETIME_MS + 1]),
            *lies_of(ROUTE_OF_ONE, signature=[bytes(63)], modules=[[MODULE]], documents=[[5]]),
            *lies_of(SIGNED_ROUTE, modules=[[MODULE] * 257], documents=[[0], [5, types.MAX_DOCUMENT_TOKENS + 1]]),
            but(SIGNED_ROUTE, documents=[1] * (types.MAX_DOCUMENTS + 1)),
            but(ROUTE_OF_ONE, hops=[HOP_OF_ROUTE] * 257),
            *(but(ROUTE_OF_ONE, microbatch=wire.MicrobatchId(data_node=odd)) for odd in ("12D3Koo", "0" * 52)),
            *(
                but(ROUTE_OF_ONE, hops=[hop])
                for hop in lies_of(
                    HOP_OF_ROUTE,
                    module=[wire.ModuleId(stage=1024), wire.ModuleId(expert=1024)],
                    peer=["12D3Koo", "0" * 52],
                )
            ),
        ],
    ),
    but(BACKWARD, route=but(ROUTE_OF_ONE, position=1)),
    but(BACKWARD, tensor=but(HEADER, token_bytes=1, byte_length=8194)),
    but(STATE, tensor=but(VECTOR, token_bytes=1, byte_length=4097)),
    *lies_of(HELLO, run=["AB" * 32], lowest_version=[2, 0], age_ms=[frames.MAX_AGE_MS]),
    wire.Farewell(detail="x" * 257),
    wire.Question(id=1),
    *(
        wire.Question(id=1, evaluate=lie)
        for lie in lies_of(EVALUATE, microbatches=[257], stages=[(0,), (1024,), (2, 2), (3, 1)])
    ),
    *(wire.Question(id=1, call=lie) for lie in lies_of(CALL, peer=["", "x" * 52], record=[b""])),
    *(wire.Question(id=1, called=wire.CalledQuestion(record=record)) for record in (b"", bytes(2049))),
    *(wire.Question(id=1, dial_back=wire.DialBackQuestion(port=port)) for port in (0, 65_536, 2**32 - 1)),
    wire.Question(state=wire.StateQuestion(module=MODULE)),
    *lies_of(ANSWER, status=[None, bytes(68 * 1024 + 1)]),
    wire.Receipt(),
    wire.Chunk(transfer=1),
    *lies_of(
        ACCEPTING,
        round=[
            None,
            *lies_of(ROUND_ID, number=[0, 2**48], attempt=[rounds.MAX_ATTEMPTS + 1], convener=["", "0" * 52]),
            but(ROUND_ID, module=wire.ModuleId(stage=1024)),
        ],
    ),
    *lies_of(
        INVITATION,
        base=[
            *lies_of(VERSION, round=[2**48], steps=[2**48 + 1], tokens=[2**64 - 1], fragment=[64]),
            *lies_of(VERSION, digest=[bytes(31), bytes(33)]),
        ],
    ),
    wire.Prepared(round=ROUND_ID),
    but(PROGRESS, steps=2**48 + 1),
    *lies_of(ENTRY_FRAME, tokens=[2**48 + 1], norm=[math.nan, math.inf, -1.0], measured=[[1 << 8], [25], [257] * 17]),
    *lies_of(ENTRY_FRAME, signature=[b"", bytes(65)], peer=[""], base=[None], staged=[wire.AnchorVersion(round=1)]),
    *lies_of(DECLINED, reason=[0, 6]),
    *lies_of(
        ROSTER,
        codec=[wire.CODEC_UNSPECIFIED],
        codec_reason=["x" * 257],
        entries=[
            [],
            [MEMBER] * (rounds.MAX_MEMBERS + 1),
            [MEMBER, but(MEMBER, steps=2)],
            *([lie] for lie in lies_of(MEMBER, peer=["x"], round=[ROUND_ID], base=[VERSION], norm=[math.inf])),
        ],
    ),
    *lies_of(PULSE, waiting_for=[PEERS[:1] * 2], rejected=[[*MANY_PEERS, PEERS[0]]]),
    but(COMMIT, holders=["12D3Koo"]),
    wire.Dissolved(round=ROUND_ID, detail="x" * 257),
    *lies_of(
        CONTRIBUTION,
        end_chunk=[0],
        signature=[b"", bytes(65)],
        tensor=[None, *lies_of(VECTOR, shape=[[2, 512]], codec=[2]), but(VECTOR, dtype=3, byte_length=2048)],
    ),
    *lies_of(REDUCED, first_chunk=[2], end_chunk=[2**20 + 1]),
    *lies_of(REDUCED, tensor=[but(VECTOR, codec=2, dtype=3, byte_length=1056), but(VECTOR, codec=10)]),
    wire.AuditRequest(round=ROUND_ID),
    wire.AuditRefused(round=ROUND_ID, first_chunk=2, end_chunk=1),
    *(but(EVIDENCE, signed=[lie]) for lie in lies_of(SIGNED_HASH, hash=[bytes(31)], signature=[b""], peer=[""])),
    *(but(message, signed=[SIGNED_HASH] * (rounds.MAX_MEMBERS + 1)) for message in (EVIDENCE, ACCUSATION)),
    *lies_of(REQUEST, chunks=[[], range(65), [1, 1], [2**20]], digest=[b""]),
    *lies_of(REFUSED, reason=[0], chunks=[[2**32 - 1]]),
    *lies_of(
        STATE, chunk=[2**20], digest=[b""], tensor=[*(OF_INT8, but(VECTOR, codec=9), but(VECTOR, shape=[2, 512]))]
    ),
]


@pytest.mark.parametrize(
    "frame",
    [
        *map(framed, LIES),
        *(wire.Frame(announcement=record).SerializeToString() for record in (b"", bytes(2049))),
        frames.encode(frames.Ping(1)) + bytes(frames.MAX_SMALL_FRAME_BYTES),
        b"",
    ],
)
def test_a_frame_that_lies_or_is_out_of_bounds_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        frames.decode(frame)


def varint(number: int) -> bytes:
    return bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, *varint(number >> 7)))


@pytest.mark.parametrize("field", list(wire.Frame.DESCRIPTOR.fields), ids=lambda field: field.name)
@pytest.mark.parametrize("length", [0, 1, 127, 128, frames.MAX_SMALL_FRAME_BYTES - 5])
def test_the_topic_is_known_before_anything_is_read(field: FieldDescriptor, length: int) -> None:
    frame = varint(field.number << 3 | 2) + varint(length) + b"\xff" * length
    if field.name == "chunk":
        assert frames.is_chunk(frame)
        return
    assert not frames.is_chunk(frame)
    assert frames.topic_of(frame) is TOPICS.get(field.name)
    if length and field.name != "announcement":
        with pytest.raises(ProtocolViolation):
            frames.decode(frame)


TOPICS = {
    **dict.fromkeys(["receipt", "stranded", "close", "recall", "settled", "unsettled"], Topic.MICROBATCHES),
    **dict.fromkeys(["progress", "invitation", "accepting", "entry", "declined", "roster", "pulse"], Topic.ROUNDS),
    **dict.fromkeys(["prepared", "commit", "dissolved"], Topic.ROUNDS),
    **dict.fromkeys(["audit_request", "evidence", "audit_refused", "accusation"], Topic.ROUNDS),
    **dict.fromkeys(["state_request", "state_refused"], Topic.STATE),
}

PING, ASKED = frames.encode(frames.Ping(1)), frames.encode(Unsettled(types.MicrobatchId(PEERS[0], 1)))


@pytest.mark.parametrize(
    "frame",
    [PING + ASKED, ASKED + PING, PING + PING, PING[:-1], PING + b"\0", ASKED[:1], b"\x80\x80\x80\x01", b"\xff" * 9],
)
def test_a_frame_is_one_field_and_nothing_else(frame: bytes) -> None:
    """protobuf would merge them and believe the last: the first bytes would not tell what it is."""
    for read in (frames.topic_of, frames.decode):
        with pytest.raises(ProtocolViolation):
            read(frame)


def test_details_are_cut_when_sent_and_made_harmless_when_read() -> None:
    assert frames.decode(frames.encode(Close(types.MicrobatchId(PEERS[0], 1), "x" * 1000))) == Close(
        types.MicrobatchId(PEERS[0], 1), "x" * 256
    )
    round_ = rounds.RoundId(types.ModuleId(1), 1, 0, PEERS[0])
    assert frames.decode(frames.encode(rounds.Dissolved(round_, "x" * 1000 + "\x1b"))) == rounds.Dissolved(
        round_, "x" * 256
    )
    terminal = frames.encode(frames.Farewell(frames.FarewellReason.LEAVING, "\x1b]0;owned\x07"))
    assert frames.decode(terminal) == frames.Farewell(frames.FarewellReason.LEAVING, "?]0;owned?")


def test_a_path_of_the_greatest_length_fits() -> None:
    documents = (types.MAX_DOCUMENT_TOKENS,) * types.MAX_DOCUMENTS
    modules, invitation = (types.ModuleId(1023, 1023),) * types.MAX_HOPS, bytes(types.INVITATION_BYTES)
    route = types.SignedRoute(modules, 1.0, bytes(types.SIGNATURE_BYTES), documents, 1, invitation)
    path = types.Path(PEERS[0], (types.Hop(types.ModuleId(1023, 1023), PEERS[1]),) * types.MAX_HOPS, route)
    message = Forward(types.MicrobatchId(PEERS[0], 2**48 - 1), path, types.MAX_HOPS, Purpose.TRAIN, 1.0)
    frame = frames.TensorFrame(message, TensorSpec((2, 1024), DType.FLOAT32), 1, 2)
    assert frames.decode(frames.encode(frame)) == frame


LARGEST_VERSION = types.AnchorVersion(types.MAX_ROUND, 2**48, 2**48, 63, b"\xff" * 32)
LARGEST_ROUND = rounds.RoundId(types.ModuleId(1023, 1023), types.MAX_ROUND, rounds.MAX_ATTEMPTS, PEERS[0])


def test_the_longest_messages_are_small_frames() -> None:
    """A roster is of all members, which have measured all that they may."""
    links = tuple(rounds.LinkRate(2**24 - 1, rounds.MAX_RATE) for _ in range(rounds.MAX_MEASURED))
    figures = (2**48, 2**48, 1e300 / 3, links, LARGEST_VERSION, b"\xff" * 64)
    members = tuple(rounds.Entry(peer, LARGEST_ROUND, LARGEST_VERSION, *figures) for peer in MANY_PEERS)
    for message in (
        rounds.Pulse(LARGEST_ROUND, MANY_PEERS, MANY_PEERS),
        rounds.Commit(LARGEST_ROUND, LARGEST_VERSION, MANY_PEERS),
        rounds.StateRequest(types.ModuleId(1023, 1023), b"\xff" * 32, tuple(range(2**20 - 64, 2**20))),
        rounds.SignedRoster(LARGEST_ROUND, LARGEST_VERSION, members, types.Codec.INT4, "x" * 256),
    ):
        frame = frames.encode(message)
        assert len(frame) <= frames.MAX_SMALL_FRAME_BYTES // (1 if isinstance(message, rounds.SignedRoster) else 2)
        assert frames.decode(frame) == message


DIGEST = b"d" * 32
HONEST = frames.HashList(
    types.AnchorVersion(7, 350, 10**9, 1, DIGEST), 10_000, 4096, tuple(bytes([n]) * 32 for n in range(6))
)


def decoded(data: bytes, elements: int = 10_000, chunk_elements: int = 4096) -> frames.HashList:
    return frames.decode_hash_list(data, digest=DIGEST, elements=elements, chunk_elements=chunk_elements)


HASH_LIST = wire.HashList.FromString(frames.encode_hash_list(HONEST))


@given(st.integers(1, 300_000), st.sampled_from([4096, 8192]), st.integers(0, 2**48), st.randoms(use_true_random=False))
def test_of_any_module(elements: int, chunk: int, steps: int, random: object) -> None:
    count = 2 * -(-elements // chunk)
    hashes = tuple(random.randbytes(32) for _ in range(count))  # type: ignore[attr-defined]
    honest = frames.HashList(types.AnchorVersion(1, steps, 0, 63, DIGEST), elements, chunk, hashes)
    assert decoded(frames.encode_hash_list(honest), elements, chunk) == honest


def test_the_list_of_a_module_of_a_billion_elements_fits_an_answer() -> None:
    elements, chunk = 10**9, 2**20
    count = 2 * -(-elements // chunk)
    version = types.AnchorVersion(types.MAX_ROUND, 2**48, 2**48, 63, DIGEST)
    data = frames.encode_hash_list(frames.HashList(version, elements, chunk, (b"h" * 32,) * count))
    assert len(data) <= frames.MAX_ANSWER_BYTES
    assert decoded(data, elements, chunk).version == version


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        bytes(frames.MAX_ANSWER_BYTES + 1),
        *(
            lie.SerializeToString()
            for lie in (
                *lies_of(HASH_LIST, elements=[9_999], chunk_elements=[8192], round=[2**48], steps=[2**48 + 1]),
                *lies_of(HASH_LIST, tokens=[2**64 - 1], fragment=[64], hashes=[b"", bytes(32 * 5), bytes(32 * 6 + 1)]),
            )
        ),
    ],
)
def test_another_modules_list_or_none_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decoded(data)
