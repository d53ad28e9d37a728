"""Frames of rounds and of catching up: there and back, at their bounds, beyond them, and damaged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import MAX_SMALL_FRAME_BYTES, decode, encode
from protocol.frames.rpc import QuestionFrame
from protocol.frames.tensors import MAX_CHUNK_BYTES, TensorFrame
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout
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
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion, Codec, ModuleId
from tests.protocol.codecs.damage import assert_refused_or_another_valid_frame
from tests.protocol.frames.frame_examples import peer

PEERS = [peer(number) for number in range(4)]
MANY_PEERS = tuple(peer(number) for number in range(MAX_MEMBERS))
LARGEST_VERSION = AnchorVersion(MAX_ROUND, 2**48, 2**48, 63, b"\xff" * 32)
LOSSLESS = [Codec.NONE, Codec.PLANES]
OF_ANY_VECTOR = [codec for codec in Codec if codec is not Codec.PLANES]
LARGEST_ROUND = RoundId(ModuleId(1023, 1023), MAX_ROUND, MAX_ATTEMPTS, PEERS[0])

modules = st.builds(ModuleId, st.integers(0, 1023), st.integers(0, 1023))
counts = st.integers(0, 2**48)
digests = st.binary(min_size=32, max_size=32)
signatures = st.binary(min_size=64, max_size=64)
signed = st.lists(st.builds(SignedHash, st.sampled_from(PEERS), digests, signatures), max_size=5).map(tuple)
versions = st.builds(AnchorVersion, st.integers(0, MAX_ROUND), counts, counts, st.integers(0, 63), digests)
rounds = st.builds(RoundId, modules, st.integers(1, MAX_ROUND), st.integers(0, MAX_ATTEMPTS), st.sampled_from(PEERS))
measures = st.floats(0, allow_nan=False, allow_infinity=False)
details = st.text(st.characters(codec="utf-8"), max_size=256).filter(str.isprintable)
lists = st.lists(st.sampled_from(PEERS), unique=True).map(tuple)
chunk_lists = st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=64, unique=True).map(tuple)


measured = st.lists(st.builds(LinkRate, st.integers(0, 2**24 - 1), st.integers(1, MAX_RATE)), max_size=MAX_MEASURED)
signatures = st.binary(min_size=64, max_size=64)


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
    """A message about one piece."""
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


frames = st.one_of(
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


@given(frames)
def test_what_is_encoded_is_decoded_to_the_same(frame: object) -> None:
    back = decode(encode(frame))  # type: ignore[arg-type]
    assert back == frame
    if isinstance(frame, TensorFrame) and isinstance(frame.message, Contribution):
        assert isinstance(back, TensorFrame)
        assert isinstance(back.message, Contribution)
        assert back.message.signature == frame.message.signature, "it makes no other piece, so == does not see it"


@given(frames, st.data())
def test_a_damaged_frame_is_a_violation_or_another_valid_frame(frame: object, data: st.DataObject) -> None:
    assert_refused_or_another_valid_frame(encode(frame), data)  # type: ignore[arg-type]


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


# ---- lies -----------------------------------------------------------------------------------------------------------


def module() -> wire.ModuleId:
    return wire.ModuleId(stage=1)


def round_id(**changes: object) -> wire.RoundId:
    return wire.RoundId(**{"module": module(), "number": 1, "attempt": 0, "convener": PEERS[0], **changes})  # type: ignore[arg-type]


def version(**changes: object) -> wire.AnchorVersion:
    return wire.AnchorVersion(**{"round": 1, "steps": 1, "tokens": 1, "fragment": 0, "digest": bytes(32), **changes})  # type: ignore[arg-type]


def header(**changes: object) -> wire.TensorHeader:
    honest = {"transfer": 1, "dtype": 1, "codec": 1, "shape": [1024], "byte_length": 4096, "chunk_count": 1}
    return wire.TensorHeader(**{**honest, **changes})  # type: ignore[arg-type]


def roster(**changes: object) -> wire.Roster:
    return wire.Roster(**{"round": round_id(), "base": version(), "entries": [member()], "codec": wire.NONE, **changes})  # type: ignore[arg-type]


def member(**changes: object) -> wire.Entry:
    """An entry as rosters have it."""
    honest = {"peer": PEERS[0], "steps": 1, "tokens": 1, "norm": 1.0, "signature": bytes(64)}
    return wire.Entry(**{**honest, **changes})  # type: ignore[arg-type]


def entry(**changes: object) -> wire.Entry:
    return member(**{"round": round_id(), "base": version(), **changes})


def contribution(**changes: object) -> wire.Contribution:
    honest = {"round": round_id(), "first_chunk": 0, "end_chunk": 1, "tensor": header(), "signature": bytes(64)}
    return wire.Contribution(**{**honest, **changes})  # type: ignore[arg-type]


def signed_hash(**changes: object) -> wire.SignedHash:
    return wire.SignedHash(**{"peer": PEERS[0], "hash": bytes(32), "signature": bytes(64), **changes})  # type: ignore[arg-type]


def evidence(*signed: wire.SignedHash) -> wire.Evidence:
    return wire.Evidence(round=round_id(), end_chunk=1, signed=signed)


def reduced(**changes: object) -> wire.Reduced:
    honest = {"round": round_id(), "first_chunk": 0, "end_chunk": 1, "tensor": header()}
    return wire.Reduced(**{**honest, **changes})  # type: ignore[arg-type]


def request(**changes: object) -> wire.StateRequest:
    return wire.StateRequest(**{"module": module(), "digest": bytes(32), "chunks": [0], **changes})  # type: ignore[arg-type]


def refused(**changes: object) -> wire.StateRefused:
    return wire.StateRefused(**{"module": module(), "digest": bytes(32), "chunks": [0], "reason": 1, **changes})  # type: ignore[arg-type]


def chunk(**changes: object) -> wire.StateChunk:
    return wire.StateChunk(**{"module": module(), "digest": bytes(32), "tensor": header(), **changes})  # type: ignore[arg-type]


INT8_HEADER = header(codec=2, byte_length=1024 + 32)
PLANES_HEADER = header(codec=9, byte_length=4096, compressed_bytes=4096)

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
    "piece of halves": wire.Frame(contribution=contribution(tensor=header(dtype=3, byte_length=2048))),
    "piece of two dimensions": wire.Frame(contribution=contribution(tensor=header(shape=[2, 512]))),
    "int8 of wrong length": wire.Frame(contribution=contribution(tensor=header(codec=2))),
    "int8 of halves": wire.Frame(reduced=reduced(tensor=header(codec=2, dtype=3, byte_length=1056))),
    "unknown codec": wire.Frame(reduced=reduced(tensor=header(codec=10))),  # type: ignore[arg-type]
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
        state_chunk=chunk(tensor=header(codec=9, byte_length=4097, compressed_bytes=4097, chunk_count=1))
    ),
    "chunk of planes of no length": wire.Frame(state_chunk=chunk(tensor=header(codec=9))),
    "chunk of planes of another length": wire.Frame(state_chunk=chunk(tensor=header(codec=9, compressed_bytes=4000))),
    "chunk of halves in planes": wire.Frame(
        state_chunk=chunk(tensor=header(codec=9, dtype=2, byte_length=1000, compressed_bytes=1000))
    ),
    "chunk of two dimensions": wire.Frame(state_chunk=chunk(tensor=header(shape=[2, 512]))),
    "question without digest": wire.Frame(question=wire.Question(state=wire.StateQuestion(module=module()))),
}


@pytest.mark.parametrize("frame", LIES.values(), ids=LIES.keys())
def test_what_is_out_of_bounds_is_refused(frame: wire.Frame) -> None:
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


def test_details_are_cut_when_sent_and_made_harmless_when_read() -> None:
    round_ = RoundId(ModuleId(1), 1, 0, PEERS[0])
    assert decode(encode(Dissolved(round_, "x" * 1000))) == Dissolved(round_, "x" * 256)
    assert decode(encode(Dissolved(round_, "\x1b[2J"))) == Dissolved(round_, "?[2J")
