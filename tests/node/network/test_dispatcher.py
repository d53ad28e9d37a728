"""Every message goes to the one who minds it, and to nobody when there is none."""

import asyncio
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.experts.router import Router
from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from node.network.peer_files import PIECES_AT_ONCE, fetch_router, fetch_tokenizer, router_given, tokenizer_given
from node.network.session import NetworkSession, first_good
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import (
    MAX_TOKENIZER_PIECES,
    ROUTER_PIECE_BYTES,
    TOKENIZER_PIECE_BYTES,
    Question,
    QuestionAbout,
    Refusal,
    Topic,
)
from swarm.membership.membership import Membership
from swarm.vocabulary import averaging_messages
from swarm.vocabulary.errors import ManifestError, Rejected, StateError, Unreachable
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Forward,
    MicrobatchControl,
    MicrobatchTensor,
    Purpose,
    TensorMessage,
)
from swarm.vocabulary.types import AnchorVersion, Hop, MicrobatchId, ModuleId, Path, PeerId
from tests.node.experts.test_router import manifest_with, some_router
from tests.node.small_manifest import small_manifest

A, B = PeerId("a"), PeerId("b")
MODULE = ModuleId(1)
MICROBATCH = MicrobatchId(A, 1)
PATH = Path(A, (Hop(MODULE, B),))
ROUND = averaging_messages.RoundId(MODULE, 1, 0, A)
DIGEST = bytes(32)
TENSOR = TensorSpec((4,), DType.FLOAT32)
BUFFER = memoryview(bytearray(16))
ERROR = Unreachable("gone")

MICROBATCH_TENSORS = [Forward(MICROBATCH, PATH, 0, Purpose.TRAIN, 1.0), Backward(MICROBATCH, PATH, 0)]
ROUND_TENSORS: list[TensorMessage] = [
    averaging_messages.Contribution(ROUND, 0, 1),
    averaging_messages.Reduced(ROUND, 0, 1),
    averaging_messages.StateChunk(MODULE, DIGEST, 0),
]
ROUND_WORDS = [
    averaging_messages.Accepting(ROUND),
    averaging_messages.Progress(MODULE, AnchorVersion(0, 0, 0, 0, DIGEST), 1, 1),
    averaging_messages.StateRequest(MODULE, DIGEST, (0,)),
]


class Noted:
    """Stands for whoever is told: notes the name and the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> memoryview:
            self.calls.append((name, arguments))
            return BUFFER

        return call


class Peers:
    def get(self, peer: PeerId) -> SimpleNamespace | None:
        module = {A: MODULE, B: ModuleId(0)}.get(peer)
        return None if module is None else SimpleNamespace(module=module)

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        known = self.get(peer)
        return known is not None and known.module == module


def dispatcher() -> Dispatcher:
    return Dispatcher(cast(LocalPeer, SimpleNamespace(module=MODULE)), cast(Membership, Peers()))


@contextmanager
def at_work(receives: Dispatcher) -> Iterator[tuple[Noted, Noted]]:
    """Within the block, somebody takes microbatches, and somebody rounds and state."""
    microbatches, rounds = Noted(), Noted()
    with (
        receives.registered(
            tensors={MicrobatchTensor: microbatches},
            messages={MicrobatchControl: microbatches.receive},
            link_down=microbatches.link_down,
        ),
        receives.registered(
            tensors={averaging_messages.RoundPiece: rounds, averaging_messages.StateChunk: rounds},
            messages={averaging_messages.RoundControl: rounds.receive, averaging_messages.StateControl: rounds.receive},
            link_down=rounds.link_down,
        ),
    ):
        yield microbatches, rounds


@pytest.mark.parametrize("message", [*MICROBATCH_TENSORS, *ROUND_TENSORS])
def test_a_tensor_goes_to_whoever_takes_its_kind(message: TensorMessage) -> None:
    receives = dispatcher()
    with at_work(receives) as (microbatches, rounds):
        assert receives.admit(A, message, TENSOR) is BUFFER
        receives.received(A, message, TENSOR, BUFFER)
        receives.broken_off(A, message, BUFFER, ERROR)
    for_rounds = message in ROUND_TENSORS
    assert (rounds if for_rounds else microbatches).calls == [
        ("admit", (A, message, TENSOR)),
        ("received", (A, message, TENSOR, BUFFER)),
        ("broken_off", (A, message, BUFFER)),
    ]
    assert not (microbatches if for_rounds else rounds).calls


@pytest.mark.parametrize("sender", [B, PeerId("stranger")])
def test_pieces_of_rounds_are_taken_from_replicas_only_and_state_from_anybody(sender: PeerId) -> None:
    receives = dispatcher()
    with at_work(receives) as (_, rounds):
        for piece in ROUND_TENSORS[:2]:
            refused = Refusal(False, "only replicas of this module take part in its rounds")
            assert receives.admit(sender, piece, TENSOR) == refused
        assert not rounds.calls
        assert receives.admit(sender, ROUND_TENSORS[2], TENSOR) is BUFFER


def test_small_messages_go_to_whom_they_concern() -> None:
    receives = dispatcher()
    with at_work(receives) as (microbatches, rounds):
        for word in (Close(MICROBATCH, "over"), *ROUND_WORDS):
            receives.received_control(A, word)  # type: ignore[arg-type]
        receives.link_down(A, ERROR)
    lost = ("link_down", (A, ERROR))
    assert microbatches.calls == [("receive", (A, Close(MICROBATCH, "over"))), lost]
    assert rounds.calls == [*(("receive", (A, word)) for word in ROUND_WORDS), lost]


def test_nobody_takes_what_another_takes_already() -> None:
    receives = dispatcher()
    with at_work(receives), pytest.raises(AssertionError), receives.registered(tensors={Forward: Noted()}):
        pass


async def test_a_node_is_a_witness_and_a_visitor_is_none() -> None:
    receives = dispatcher()
    question = Question(QuestionAbout.DIAL_BACK, port=4002)
    with pytest.raises(Rejected, match="dial_back"):
        await receives.answer(A, question)

    async def bear(asker: PeerId, asked: Question) -> bytes:
        return f"{asker}: {asked.port}".encode()

    with receives.registered(answers={QuestionAbout.DIAL_BACK: bear}):
        assert await receives.answer(A, question) == f"{A}: 4002".encode()
    with pytest.raises(Rejected, match="dial_back"):
        await receives.answer(A, question)


@pytest.mark.parametrize("message", [*MICROBATCH_TENSORS, *ROUND_TENSORS])
def test_without_a_module_tensors_are_refused_and_the_rest_is_ignored(message: TensorMessage) -> None:
    receives = dispatcher()
    with at_work(receives):
        pass
    assert receives.admit(A, message, TENSOR) == Refusal(False, "this node has no receiver for this message")
    receives.received(A, message, TENSOR, BUFFER)
    receives.broken_off(A, message, BUFFER, ERROR)
    receives.received_control(A, Close(MICROBATCH, "over"))
    receives.received_control(A, ROUND_WORDS[0])  # type: ignore[arg-type]
    receives.link_down(A, ERROR)


def minded(receives: Dispatcher, sender: PeerId) -> set[Topic]:
    return {topic for topic in Topic if receives.minds(sender, topic)}


def test_whose_word_about_what_means_anything() -> None:
    stranger, receives = PeerId("c"), dispatcher()
    assert [minded(receives, peer) for peer in (A, B, stranger)] == [set(), set(), set()], "nothing is hosted yet"
    with at_work(receives):
        assert minded(receives, A) == {Topic.MICROBATCHES, Topic.STATE, Topic.ROUNDS}
        assert minded(receives, B) == minded(receives, stranger) == {Topic.MICROBATCHES, Topic.STATE}
    assert minded(receives, A) == set()
    assert [receives.serves(peer) for peer in (A, B, stranger)] == [True, True, False]


FILE = random.Random(1).randbytes(6 * TOKENIZER_PIECE_BYTES + 1000)
ROUTER = some_router()
MANIFEST = manifest_with(ROUTER)
SHA256 = hashlib.sha256(FILE).hexdigest()


class Seen:
    is_reachable = True

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer


class FilePeers:
    """A session whose peers give these files; None has none, and a number is the length of each of its pieces."""

    introduced: frozenset[PeerId] = frozenset()
    first_answer = NetworkSession.first_answer

    def __init__(self, files: Mapping[str, bytes | Router | int | None]) -> None:
        self._files = files
        self.asked = Counter[str]()
        self.open = self.most_open = 0
        self.answers: dict[QuestionAbout, Any] = {}
        self.transport = self.dispatcher = self

    def others(self) -> list[Seen]:
        return [Seen(PeerId(peer)) for peer in self._files]

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        self.asked[peer] += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await asyncio.sleep(0)
        self.open -= 1
        file = self._files[peer]
        if file is None:
            raise Rejected("it has none")
        if isinstance(file, int):
            return bytes(file)
        if question.about is QuestionAbout.ROUTER and isinstance(file, bytes):
            return file
        giving = FilePeers({})
        with router_given(giving, file) if isinstance(file, Router) else tokenizer_given(giving, file):
            answer: bytes = await giving.answers[question.about](PeerId("asker"), question)
        return answer

    @contextmanager
    def registered(self, answers: dict[QuestionAbout, Any]) -> Iterator[None]:
        self.answers |= answers
        yield
        self.answers.clear()


@pytest.mark.parametrize("length", [0, 1, TOKENIZER_PIECE_BYTES, 4 * TOKENIZER_PIECE_BYTES, len(FILE)])
async def test_a_file_of_any_length_arrives_whole(length: int) -> None:
    file = FILE[:length]
    peers = FilePeers({"good": file})
    assert await fetch_tokenizer(peers, hashlib.sha256(file).hexdigest(), 0.0) == file
    assert peers.most_open <= PIECES_AT_ONCE


async def test_the_one_whose_hash_is_right_is_taken_and_who_lies_is_asked_once() -> None:
    lie = FILE[:-1] + b"?"
    peers = FilePeers({"none": None, "lie": lie, "too long": TOKENIZER_PIECE_BYTES + 1, "shorter": FILE[:-1]})
    with pytest.raises(Unreachable, match="no peer gave this run's tokenizer"):
        await fetch_tokenizer(peers, SHA256, 0.4)
    assert peers.asked["none"] > PIECES_AT_ONCE, "it may have it later"
    assert peers.asked["lie"] == peers.asked["shorter"] == 2 * PIECES_AT_ONCE
    assert await fetch_tokenizer(FilePeers({"none": None, "lie": lie, "other": b"", "good": FILE}), SHA256, 0.0) == FILE


async def test_a_file_without_an_end_is_not_read_for_ever() -> None:
    peers = FilePeers({"endless": TOKENIZER_PIECE_BYTES})
    with pytest.raises(Unreachable, match="a tokenizer other than"):
        await fetch_tokenizer(peers, SHA256, 0.0)
    assert peers.asked["endless"] == MAX_TOKENIZER_PIECES


async def test_the_one_whose_hash_is_right_is_taken() -> None:
    wrong = {"none": None, "other": some_router(seed=4).to_bytes(), "long": bytes(10**5)}
    peers = FilePeers({**wrong, "good": ROUTER.to_bytes()})
    assert (await fetch_router(peers, MANIFEST, 0.0)).to_bytes() == ROUTER.to_bytes()
    assert peers.asked["good"] == 1
    with pytest.raises(Unreachable, match="no peer gave this run's router"):
        await fetch_router(FilePeers(wrong), MANIFEST, 0.0)


async def test_a_router_of_more_experts_arrives_in_pieces() -> None:
    large = some_router((1, 32, 32))
    peers = FilePeers({"old": large.to_bytes()[:ROUTER_PIECE_BYTES], "short": ROUTER, "good": large})
    assert (await fetch_router(peers, manifest_with(large), 0.0)).to_bytes() == large.to_bytes()
    assert peers.asked["good"] == math.ceil(len(large.to_bytes()) / ROUTER_PIECE_BYTES) == 4
    peers = FilePeers({"good": large})
    with pytest.raises(StateError, match="is for 65 experts, and this version reads routers for at most 64"):
        await fetch_router(peers, manifest_with(some_router((1, 33, 32))), 0.0)
    assert not peers.asked


async def test_a_run_without_a_router_asks_nobody_and_a_peer_with_one_gives_it() -> None:
    session = FilePeers({"good": ROUTER.to_bytes()})
    assert await fetch_router(session, small_manifest(), 1.0) is None
    assert not session.asked
    with router_given(session, None), tokenizer_given(session, None):
        assert session.answers == {}
    with router_given(session, ROUTER):
        answer = session.answers[QuestionAbout.ROUTER]
        assert await answer(PeerId("asker"), Question(QuestionAbout.ROUTER)) == ROUTER.to_bytes()
    assert session.answers == {}


SILENT, LIAR, REFUSING, HONEST = PeerId("silent"), PeerId("a-liar"), PeerId("refusing"), PeerId("honest")


class Asked:
    def __init__(self) -> None:
        self.let_go: list[PeerId] = []

    async def __call__(self, peer: PeerId) -> str:
        if peer == LIAR:
            raise ManifestError("another run's manifest")
        if peer == REFUSING:
            raise Rejected("no")
        if peer == SILENT:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.let_go.append(peer)
        return "the manifest"


async def test_one_honest_peer_is_enough_and_without_one_the_reason_is_known() -> None:
    ask = Asked()
    assert await first_good((SILENT, LIAR, REFUSING, HONEST), ask) == "the manifest"
    assert ask.let_go == [SILENT]
    for peers, why in (((LIAR,), "a-liar: another run's manifest"), ((), "no peer was asked")):
        with pytest.raises(Unreachable, match=why):
            await first_good(peers, Asked())
