"""Every message goes to the one who minds it, and to nobody when there is none."""

from __future__ import annotations

from typing import Any, cast

import pytest

from node.network.dispatcher import Dispatcher
from node.network.membership_sync import MembershipSync
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal, Topic
from swarm.vocabulary.averaging_messages import (
    Accepting,
    Contribution,
    Progress,
    Reduced,
    RoundId,
    StateChunk,
    StateRequest,
)
from swarm.vocabulary.errors import Rejected, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, Close, Forward, Purpose, TensorMessage
from swarm.vocabulary.routing_messages import Heard
from swarm.vocabulary.types import AnchorVersion, Hop, MicrobatchId, ModuleId, Path, PeerId

A, B = PeerId("a"), PeerId("b")
MODULE = ModuleId(1)
MICROBATCH = MicrobatchId(A, 1)
PATH = Path(A, (Hop(MODULE, B),))
ROUND = RoundId(MODULE, 1, 0, A)
DIGEST = bytes(32)
LANE_WORD = Heard(bytes(8), 1)
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


def dispatcher() -> tuple[Dispatcher, Noted, Noted]:
    membership_sync: Any = Noted()
    receives = Dispatcher(membership_sync)
    carrier, rounds = Noted(), Noted()
    receives.carrier, receives.rounds = carrier, rounds  # type: ignore[assignment]
    return receives, carrier, rounds


@pytest.mark.parametrize("message", MICROBATCH_TENSORS)
def test_a_microbatchs_tensor_goes_to_the_carrier(message: TensorMessage) -> None:
    receives, carrier, rounds = dispatcher()
    assert receives.admit(A, message, TENSOR) is BUFFER
    receives.received(A, message, TENSOR, BUFFER)
    receives.broken_off(A, message, BUFFER, ERROR)
    assert [name for name, _ in carrier.calls] == ["admit", "received", "broken_off"]
    assert not rounds.calls


@pytest.mark.parametrize("message", ROUND_TENSORS)
def test_a_rounds_tensor_goes_to_the_rounds(message: TensorMessage) -> None:
    receives, carrier, rounds = dispatcher()
    assert receives.admit(A, message, TENSOR) is BUFFER
    receives.received(A, message, TENSOR, BUFFER)
    receives.broken_off(A, message, BUFFER, ERROR)
    assert rounds.calls == [
        ("admit", (A, message, TENSOR)),
        ("received", (A, message, TENSOR, BUFFER)),
        ("broken_off", (A, message, BUFFER, ERROR)),
    ]
    assert not carrier.calls


def test_small_messages_are_told_to_whom_they_concern() -> None:
    receives, carrier, rounds = dispatcher()
    for word in (Close(MICROBATCH, "over"), *ROUND_WORDS):
        receives.told(A, word)  # type: ignore[arg-type]
    assert carrier.calls == [("told", (A, Close(MICROBATCH, "over")))]
    assert rounds.calls == [("told", (A, word)) for word in ROUND_WORDS]


def test_words_about_lanes_go_to_who_minds_lanes() -> None:
    receives, carrier, rounds = dispatcher()
    receives.told(A, LANE_WORD)
    lanes = Noted()
    receives.lanes = lanes  # type: ignore[assignment]
    receives.told(A, LANE_WORD)
    receives.told(A, Close(MICROBATCH, "over"))
    assert lanes.calls == [("told", (A, LANE_WORD))]
    assert [name for name, _ in carrier.calls] == ["told"]
    assert not rounds.calls


async def test_a_node_is_a_witness_and_a_visitor_is_none() -> None:
    receives, _, _ = dispatcher()
    question = Question(QuestionAbout.DIAL_BACK, port=4002)
    with pytest.raises(Rejected, match="dial_back"):
        await receives.answer(A, question)

    async def bear(asker: PeerId, asked: Question) -> bytes:
        return f"{asker}: {asked.port}".encode()

    receives.answers_by_asker[QuestionAbout.DIAL_BACK] = bear
    assert await receives.answer(A, question) == f"{A}: 4002".encode()


def test_both_hear_of_a_lost_link() -> None:
    receives, carrier, rounds = dispatcher()
    receives.link_down(A, ERROR)
    assert carrier.calls == rounds.calls == [("link_down", (A, ERROR))]


@pytest.mark.parametrize("message", [*MICROBATCH_TENSORS, *ROUND_TENSORS])
def test_without_a_module_tensors_are_refused_and_the_rest_is_ignored(message: TensorMessage) -> None:
    membership_sync: Any = Noted()
    receives = Dispatcher(membership_sync)
    assert receives.admit(A, message, TENSOR) == Refusal(False, "no module is hosted here")
    receives.received(A, message, TENSOR, BUFFER)
    receives.broken_off(A, message, BUFFER, ERROR)
    receives.told(A, Close(MICROBATCH, "over"))
    receives.told(A, ROUND_WORDS[0])  # type: ignore[arg-type]
    receives.link_down(A, ERROR)


class View:
    """Stands for the neighbourhood: who hosts what."""

    own_module = MODULE

    def module_of(self, peer: PeerId) -> ModuleId | None:
        return {A: MODULE, B: ModuleId(0)}.get(peer)


def minded(receives: Dispatcher, sender: PeerId) -> set[Topic]:
    return {topic for topic in Topic if receives.minds(sender, topic)}


def test_whose_word_about_what_means_anything() -> None:
    stranger, view = PeerId("c"), cast(MembershipSync, View())
    receives = Dispatcher(view)
    assert [minded(receives, peer) for peer in (A, B, stranger)] == [set(), set(), set()], "nothing is hosted yet"
    receives.carrier, receives.rounds = Noted(), Noted()  # type: ignore[assignment]
    assert minded(receives, A) == {Topic.MICROBATCHES, Topic.STATE, Topic.ROUNDS}
    assert minded(receives, B) == minded(receives, stranger) == {Topic.MICROBATCHES, Topic.STATE}
    receives.lanes = Noted()
    assert Topic.LANES in minded(receives, B)
    assert Topic.LANES not in minded(receives, A) | minded(receives, stranger)
    assert [receives.serves(peer) for peer in (A, B, stranger)] == [True, True, False]
