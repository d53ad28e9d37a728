"""Whom a replica can leave its module to, as the data nodes it has worked for tell; and that a refusal is no answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from node.context.module_context import ModuleContext
from node.network.proofs import ASK_AGAIN_S, ASKED_DATA_NODES, MAX_CONFIRMED, ConfirmedReplicas, Proofs
from node.network.session import NetworkSession
from node.runtime.serving import others_serve
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.membership.membership import Membership
from swarm.vocabulary.errors import Rejected
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.kit.waiting import ManualClock
from tests.node.network.test_membership_sync import MODULE, Other, place
from tests.swarm.membership.announcements import RUN, announcement

OTHER, LIAR = PeerId("replica"), PeerId("liar")


class Asked:
    """A presence of which only questions and the view are used; `answers` is what each peer says."""

    def __init__(self, *data_nodes: str) -> None:
        self.own = SimpleNamespace(clock=ManualClock())
        self.membership = Membership(RUN, PeerId("own"))
        for name in data_nodes:
            self.membership.observe(announcement(name, 0), now=0.0, wall=0.0)
        self.answers: dict[PeerId, bytes] = {}
        self.asked: list[PeerId] = []
        self.transport = self
        self.proofs = Proofs(cast(NetworkSession, self))

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question.about is QuestionAbout.STATUS
        self.asked.append(peer)
        if peer not in self.answers:
            raise Rejected("no status for you")
        return self.answers[peer]


def says(*measured: Any) -> bytes:
    return json.dumps({"measured": measured}).encode()


async def test_only_data_nodes_that_gave_us_work_have_a_say() -> None:
    session = Asked("d1", "d2", "sybil")
    session.answers = {PeerId("d1"): says(OTHER, 7), PeerId("sybil"): says(LIAR)}
    for data_node in ("d1", "d2", "stranger"):
        session.proofs.worked_on(MicrobatchId(PeerId(data_node), 1))
    assert session.proofs.proven == frozenset()
    await session.proofs.refresh()
    assert session.proofs.proven == {OTHER}
    assert set(session.asked) == {"d1", "d2"}, "neither one that never gave us work, nor one that hosts no stage 0"


async def test_who_was_given_no_work_yet_hears_all_data_nodes() -> None:
    """Else a replica that came just before its run stopped could never go where it stopped."""
    session = Asked("d1", "d2", "d3")
    session.answers = {PeerId("d1"): says(OTHER), PeerId("d2"): says(OTHER), PeerId("d3"): says(LIAR)}
    await session.proofs.refresh()
    assert session.proofs.proven == {OTHER}


async def test_nonsense_is_no_word_and_rounds_count_besides() -> None:
    session = Asked("d1", "d2")
    session.proofs.shared_round(frozenset({OTHER}))
    session.answers = {PeerId("d1"): b'{"measured": 5}', PeerId("d2"): b"[" * 10_000}
    for data_node in session.answers:
        session.proofs.worked_on(MicrobatchId(data_node, 1))
    await session.proofs.refresh()
    assert session.proofs.proven == {OTHER}


async def test_they_are_few_and_asked_seldom() -> None:
    names = [f"d{number}" for number in range(20)]
    session = Asked(*names)
    for name in names:
        session.proofs.worked_on(MicrobatchId(PeerId(name), 1))
    for _ in range(3):
        await session.proofs.refresh()
    assert len(session.asked) == ASKED_DATA_NODES
    session.own.clock.now += ASK_AGAIN_S
    await session.proofs.refresh()
    assert len(session.asked) == 2 * ASKED_DATA_NODES


def test_a_data_node_remembers_the_last_ones() -> None:
    confirmed = ConfirmedReplicas()
    for number in range(MAX_CONFIRMED + 5):
        confirmed.add(PeerId(f"p{number}"))
    confirmed.add(PeerId("p5"))
    assert len(confirmed.peers()) == MAX_CONFIRMED
    assert confirmed.peers()[-1] == "p5"


async def test_before_it_lets_go_a_replica_wants_an_answer_from_one_that_is_proven() -> None:
    async with place() as there:
        replica = Other(there.clock)
        there.meets(replica)
        own = SimpleNamespace(clock=there.clock, steps=1)
        session = SimpleNamespace(membership=there.membership, membership_sync=there.membership_sync, own=own)
        proofs = Asked().proofs
        given = cast(ModuleContext, SimpleNamespace(session=session, module=MODULE, proofs=proofs))
        there.links.outcome.set_result(json.dumps({"module": str(MODULE), "state": "serving"}).encode())
        assert not await others_serve(given), "it has only announced itself"
        assert there.links.asked == []
        own.steps = 0
        assert await others_serve(given), "without a state there is nothing to lose"
        own.steps = 1
        there.links.asked.clear()
        proofs.shared_round(frozenset({replica.peer}))
        assert await others_serve(given)
        assert there.links.asked == [replica.peer]


async def test_an_answer_counts_only_if_it_says_so() -> None:
    for said in ({"module": "1.0", "state": "draining"}, {"module": "2.0", "state": "serving"}, {}):
        async with place() as there:
            other = Other(there.clock)
            there.meets(other)
            there.links.outcome.set_result(json.dumps(said).encode())
            assert not await there.membership_sync.serves(other.peer, MODULE)
    async with place() as there:
        there.links.outcome.set_exception(Rejected("not for you"))
        assert not await there.membership_sync.serves(PeerId("p"), ModuleId(1))
