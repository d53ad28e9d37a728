"""Every message goes to the one who minds it, and to nobody when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.network.dispatcher import Dispatcher
from node.network.local_peer import LocalPeer
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Topic
from swarm.membership.membership import Membership
from swarm.vocabulary.averaging_messages import (
    Accepting,
    Contribution,
    Progress,
    Reduced,
    RoundControl,
    RoundId,
    RoundPiece,
    StateChunk,
    StateControl,
    StateRequest,
)
from swarm.vocabulary.errors import Rejected, Unreachable
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

A, B = PeerId("a"), PeerId("b")
MODULE = ModuleId(1)
MICROBATCH = MicrobatchId(A, 1)
PATH = Path(A, (Hop(MODULE, B),))
ROUND = RoundId(MODULE, 1, 0, A)
DIGEST = bytes(32)
TENSOR = TensorSpec((4,), DType.FLOAT32)
BUFFER = memoryview(bytearray(16))
ERROR = Unreachable("gone")

MICROBATCH_TENSORS: list[TensorMessage] = [
    Forward(MICROBATCH, PATH, 0, Purpose.TRAIN, 1.0),
    Backward(MICROBATCH, PATH, 0),
]
ROUND_TENSORS: list[TensorMessage] = [
    Contribution(ROUND, 0, 1),
    Reduced(ROUND, 0, 1),
    StateChunk(MODULE, DIGEST, 0),
]
ROUND_WORDS = [
    Accepting(ROUND),
    Progress(MODULE, AnchorVersion(0, 0, 0, 0, DIGEST), 1, 1),
    StateRequest(MODULE, DIGEST, (0,)),
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
    """Stands for the membership view: who hosts what."""

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
            tensors={RoundPiece: rounds, StateChunk: rounds},
            messages={RoundControl: rounds.receive, StateControl: rounds.receive},
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
            assert receives.admit(sender, piece, TENSOR) == Refusal(
                False, "only replicas of a module have a part in its rounds"
            )
        assert not rounds.calls
        assert receives.admit(sender, ROUND_TENSORS[2], TENSOR) is BUFFER


def test_small_messages_go_to_whom_they_concern() -> None:
    receives = dispatcher()
    with at_work(receives) as (microbatches, rounds):
        for word in (Close(MICROBATCH, "over"), *ROUND_WORDS):
            receives.told(A, word)  # type: ignore[arg-type]
    assert microbatches.calls == [("receive", (A, Close(MICROBATCH, "over")))]
    assert rounds.calls == [("receive", (A, word)) for word in ROUND_WORDS]


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


def test_both_hear_of_a_lost_link() -> None:
    receives = dispatcher()
    with at_work(receives) as (microbatches, rounds):
        receives.link_down(A, ERROR)
    assert microbatches.calls == rounds.calls == [("link_down", (A, ERROR))]


@pytest.mark.parametrize("message", [*MICROBATCH_TENSORS, *ROUND_TENSORS])
def test_without_a_module_tensors_are_refused_and_the_rest_is_ignored(message: TensorMessage) -> None:
    receives = dispatcher()
    with at_work(receives):
        pass
    assert receives.admit(A, message, TENSOR) == Refusal(False, "nobody takes this here")
    receives.received(A, message, TENSOR, BUFFER)
    receives.broken_off(A, message, BUFFER, ERROR)
    receives.told(A, Close(MICROBATCH, "over"))
    receives.told(A, ROUND_WORDS[0])  # type: ignore[arg-type]
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
