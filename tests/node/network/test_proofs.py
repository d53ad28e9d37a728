"""Replicas' work as invited data nodes prove it; and that a refusal is no answer."""

import json
from types import SimpleNamespace
from typing import cast

from node.context.module_context import ModuleContext
from node.network.proofs import ACCUSED_S, ASK_AGAIN_S, ASKED_AT_ONCE, Proofs
from node.network.session import NetworkSession
from node.runtime.serving import others_serve
from protocol.frames.frames import decode_tallies, encode_tallies
from protocol.identity.invitations import Guests
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySigner
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.averaging.proven_work import MARK_S, VALID_S
from swarm.membership.membership import Membership
from swarm.vocabulary.averaging_messages import WorkRow, WorkTally
from swarm.vocabulary.errors import Rejected
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId
from tests.kit.waiting import ManualClock
from tests.node.network.test_membership_sync import MODULE, Other, place
from tests.swarm.membership.announcements import RUN, announcement

IDENTITY, AUTHOR, LIAR = (Identity.generate() for _ in range(3))
OTHER = Identity.generate().peer


class Asked:
    """A presence of which only questions and the view are used; `answers` is what each peer says."""

    def __init__(self, *data_nodes: PeerId) -> None:
        self.own = SimpleNamespace(clock=ManualClock(), peer=IDENTITY.peer)
        self.membership = Membership(RUN, IDENTITY.peer)
        for name in data_nodes:
            self.membership.observe(announcement(name, 0), now=0.0, wall=0.0)
        self.answers: dict[PeerId, bytes] = {}
        self.asked: list[PeerId] = []
        self.transport = self
        signer = EntrySigner(IDENTITY, RUN, Guests(RUN, AUTHOR.peer, (), is_open=False))
        self.proofs = Proofs(cast(NetworkSession, self), MODULE, signer)

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert (question.about, question.module) == (QuestionAbout.WORK, MODULE)
        self.asked.append(peer)
        if peer not in self.answers:
            raise Rejected("no tallies for you")
        return self.answers[peer]


def says(data_node: Identity, *proven: PeerId, at: float = 1.0, module: ModuleId = MODULE) -> bytes:
    tally = WorkTally(data_node.peer, module, 1, at, 30.0, tuple(WorkRow(peer, 1, 100, 100) for peer in proven))
    return encode_tallies((EntrySigner(data_node, RUN).sign_tally(tally),))


async def test_tallies_count_if_an_invited_data_node_signed_them_whoever_carries_them() -> None:
    session = Asked(AUTHOR.peer, LIAR.peer)
    session.answers = {LIAR.peer: says(LIAR, LIAR.peer), AUTHOR.peer: b"nonsense"}
    await session.proofs.refresh()
    assert session.proofs.proven == frozenset()
    session.own.clock.now += ASK_AGAIN_S
    session.answers = {LIAR.peer: says(AUTHOR, OTHER), AUTHOR.peer: says(AUTHOR, LIAR.peer, module=ModuleId(9))}
    await session.proofs.refresh()
    assert session.proofs.proven == {OTHER}


async def test_a_shared_round_proves_work_only_without_tallies() -> None:
    session = Asked(AUTHOR.peer)
    session.proofs.in_round = frozenset({LIAR.peer})
    assert session.proofs.proven == {LIAR.peer}
    session.answers = {AUTHOR.peer: says(AUTHOR, OTHER)}
    await session.proofs.refresh()
    assert session.proofs.proven == {OTHER}
    session.own.clock.now += VALID_S + 1
    assert session.proofs.proven == {LIAR.peer}


async def test_few_are_asked_and_seldom() -> None:
    session = Asked(*(Identity.generate().peer for _ in range(20)))
    for _ in range(3):
        await session.proofs.refresh()
    assert len(session.asked) == ASKED_AT_ONCE


async def test_a_data_node_answers_with_its_own_tally() -> None:
    session = Asked()
    for second in (0.0, MARK_S):
        session.proofs.ledger.settled(MicrobatchId(IDENTITY.peer, 7), (Hop(MODULE, OTHER),), 100, second)
        session.own.clock.now += MARK_S
    [tally] = decode_tallies(await session.proofs.answer(OTHER, Question(QuestionAbout.WORK, module=MODULE)))
    assert (tally.data_node, tally.rows) == (IDENTITY.peer, (WorkRow(OTHER, 2, 200, 200),))
    assert EntrySigner(IDENTITY, RUN, Guests(RUN, IDENTITY.peer, (), is_open=False)).vouches(tally)


async def test_a_data_node_gives_no_work_to_a_replica_that_most_others_accuse() -> None:
    one, another, liar = (Identity.generate().peer for _ in range(3))
    session = Asked()
    for peer in (one, another, liar):
        session.membership.observe(announcement(peer), now=0.0, wall=0.0)
    for second in (0.0, MARK_S):
        for peer in (one, another, liar):
            session.proofs.ledger.settled(MicrobatchId(IDENTITY.peer, 7), (Hop(MODULE, peer),), 100, second)
        session.own.clock.now += MARK_S

    async def serving(asker: PeerId, *accused: PeerId) -> set[PeerId]:
        await session.proofs.answer(asker, Question(QuestionAbout.WORK, module=MODULE, accused=accused))
        return {a.peer for a in session.membership.all_replicas(0.0)[MODULE]}

    assert liar in await serving(one, liar)
    assert one in await serving(liar, one)
    assert await serving(another, liar) == {one, another}
    session.own.clock.now += 2 * ACCUSED_S
    assert liar in await serving(another, liar), "the other one has not repeated it"


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
        assert await others_serve(given, also={replica.peer})
        proofs.in_round = frozenset({replica.peer})
        assert await others_serve(given)
        assert there.links.asked == [replica.peer] * 2


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
