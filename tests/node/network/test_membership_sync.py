"""The membership view under a clock that is turned by hand: what links bring in, who is asked, who is given up."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from node.network.local_peer import LocalPeer, OwnRecord
from node.network.session import GROUP_S, MOST_GREETED, KnownPeers, MembershipSync
from node.observability.events import PeerChange
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from protocol.identity.signed_records import MAX_LIFETIME_S, RECORD_LIFETIME_S, decode_announced, encode_record
from protocol.interfaces.transport import Contact, Question, QuestionAbout
from protocol.transport.handshake import FORMER_LIFE_MS
from swarm.membership.membership import ENOUGH, FAR_EVERY_S, FIRST_PAUSE_S, LookUps, Membership
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import IdentityError, Stalled, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, Reasoned, RunId
from tests.kit.events import KeptEvents
from tests.kit.links import NoLinks
from tests.kit.waiting import ManualClock, until

RUN = RunId("7" * 64)
MODULE = ModuleId(1)
GONE = Unreachable("the link broke")


class Links(NoLinks):
    """`protocol.interfaces.transport.Transport` of which only questions and announcements are used."""

    def __init__(self) -> None:
        self.asked: list[PeerId] = []
        self.announced: list[bytes] = []
        self.outcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question.about is QuestionAbout.STATUS
        self.asked.append(peer)
        return await asyncio.shield(self.outcome)

    def announce(self, record: bytes) -> None:
        self.announced.append(record)


class Shelf:
    """A directory in memory."""

    def __init__(self) -> None:
        self.found: list[Announcement] = []
        self.error: Unreachable | None = None
        self.look_ups = 0
        self.modules: list[ModuleId] = []
        self.published: list[Announcement] = []

    async def publish(self, announcement: Announcement, record: bytes) -> None:
        if self.error is not None:
            raise self.error
        assert decode_announced(record, run=announcement.run, now=None) == announcement
        self.published.append(announcement)

    async def look_up(self, modules: Sequence[ModuleId], *, wide: bool) -> list[Announcement]:
        self.look_ups += 1
        self.modules = list(modules)
        if self.error is not None:
            raise self.error
        return list(self.found)


class Other:
    """Another peer of the run, which signs what it says."""

    def __init__(self, clock: ManualClock, run: RunId = RUN, identity: Identity | None = None) -> None:
        self.identity = identity or Identity.generate()
        certificate = make_credentials(self.identity, run).certificate_der
        self.state = LocalPeer(run, self.peer, certificate, clock, ("127.0.0.1:4000",), PeerState.SERVING, MODULE)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def record(self) -> bytes:
        return encode_record(self.state.announcement(), self.identity)


class Place:
    """One node's neighbourhood, with everything around it in a test's hands."""

    def __init__(self) -> None:
        self.clock, self.links, self.store, self.events = ManualClock(), Links(), Shelf(), KeptEvents()
        self.identity = identity = Identity.generate()
        self.own = own = LocalPeer(RUN, identity.peer, make_credentials(identity, RUN).certificate_der, self.clock)
        own.addresses = ("127.0.0.1:4001",)
        self.membership = Membership(RUN, identity.peer)
        self.book = KnownPeers(self.membership)
        self.membership_sync = MembershipSync(
            own, OwnRecord(own, identity), self.membership, self.events, self.store, self.links
        )

    def meets(self, other: Other) -> None:
        self.membership_sync.announced(other.peer, other.record())
        self.membership_sync.link_up(other.peer)

    async def looked_up(self) -> list[ModuleId]:
        """Has the node look up again. Returns the modules that it asked for."""
        before = self.store.look_ups
        self.membership_sync._look_now.set()
        await until(lambda: self.store.look_ups > before)
        return self.store.modules

    def may_use(self, other: Other) -> bool:
        return other.peer in [announcement.peer for announcement in self.membership.replicas(MODULE, self.clock.now)]


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    """A neighbourhood that runs, and has looked around once."""
    there = Place()
    running = asyncio.create_task(there.membership_sync.run())
    await until(lambda: there.store.look_ups and there.store.published)
    try:
        yield there
    finally:
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()


@pytest.fixture
async def there() -> AsyncIterator[Place]:
    async with place() as running:
        yield running


async def test_nodes_that_wait_for_a_run_find_it_soon(there: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely: list[bool] = []
    pause = LookUps.pause

    def seen(self: LookUps, *given: object, alone: bool) -> Reasoned[float]:
        lonely.append(alone)
        return pause(self, *given, alone=alone)  # type: ignore[arg-type]

    monkeypatch.setattr(LookUps, "pause", seen)
    waiting, serving = Other(there.clock), Other(there.clock)
    waiting.state.module, waiting.state.state = None, PeerState.VISITING
    for found, alone in (([], True), ([waiting], True), ([waiting, serving], False)):
        there.store.found = [each.state.announcement() for each in found]
        await there.membership_sync.look()
        await until(lambda: len(there.membership.peers()) == len(there.store.found))
        lonely.clear()
        await there.membership_sync.look()
        await until(lambda: lonely)
        assert lonely[-1] is alone


async def test_replicas_known_by_name_are_greeted_a_few_a_time(there: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.network.session.GREET_S", 0.01)
    monkeypatch.setattr("node.network.session.GREETED_AT_ONCE", 2)
    linked, names = Other(there.clock), [Other(there.clock) for _ in range(5)]
    there.meets(linked)
    there.store.found = [each.state.announcement() for each in names]
    there.membership_sync.watch((MODULE,))
    there.own.module = ModuleId(0)
    await until(lambda: len(there.links.asked) == 2)
    await asyncio.sleep(0.05)
    assert len(there.links.asked) == 2, "the first two have not answered"
    there.links.outcome.set_exception(Stalled("no answer"))
    await until(lambda: set(there.links.asked) == {each.peer for each in names})
    assert all(there.may_use(each) for each in (linked, *names)), "nobody is given up for silence"
    there.links.outcome = asyncio.Future()
    there.links.outcome.set_exception(GONE)  # nobody listens there: the replica ended before we knew it
    await until(lambda: not any(there.may_use(each) for each in names))


async def test_a_peer_whose_link_broke_is_asked_at_once_and_given_up_without_an_answer(there: Place) -> None:
    other = Other(there.clock)
    there.meets(other)
    assert there.may_use(other)
    there.membership_sync.link_down(other.peer, GONE)
    assert not there.may_use(other)
    assert there.membership.is_served(MODULE, there.clock.now), "it is only suspect"
    await until(lambda: there.links.asked == [other.peer])
    there.membership_sync.changed.clear()
    there.links.outcome.set_exception(Stalled("no answer"))
    await there.membership_sync.changed.wait()
    assert not there.membership.is_served(MODULE, there.clock.now)
    there.clock.now += 10 * FIRST_PAUSE_S
    assert not there.may_use(other), "time alone does not bring it back"
    there.membership_sync.announced(other.peer, other.record())
    assert there.may_use(other)


async def test_a_peer_that_answers_was_only_cut_off_and_is_asked_once_for_an_outage(there: Place) -> None:
    other = Other(there.clock)
    there.meets(other)
    for _ in range(5):
        there.membership_sync.link_down(other.peer, GONE)
    await until(lambda: there.links.asked)
    await asyncio.sleep(0)
    assert there.links.asked == [other.peer]
    there.membership_sync.link_up(other.peer)
    there.links.outcome.set_result(b"{}")
    await asyncio.sleep(0)
    assert there.may_use(other)
    assert [each.change for each in there.events.events if isinstance(each, PeerChange)] == ["up", "down", "up"]


async def test_nobody_can_speak_for_another(there: Place) -> None:
    honest, liar = Other(there.clock), Other(there.clock)
    there.membership_sync.announced(liar.peer, honest.record())
    assert there.membership.get(honest.peer) is None
    there.meets(honest)
    honest.state.state = PeerState.DRAINING
    there.membership_sync.announced(liar.peer, honest.record())
    assert there.may_use(honest)


async def test_a_record_that_is_damaged_or_of_another_run_changes_nothing(there: Place) -> None:
    other, stranger = Other(there.clock), Other(there.clock, RunId("8" * 64))
    for record in (b"", other.record()[:-1], other.record() + b"\0"):
        there.membership_sync.announced(other.peer, record)
    there.membership_sync.announced(stranger.peer, stranger.record())
    assert list(there.membership.peers()) == []


async def test_a_peer_that_is_not_known_yet_is_looked_up_at_once(there: Place) -> None:
    other = Other(there.clock)
    there.membership_sync._look_now.clear()
    there.membership_sync.link_down(other.peer, GONE)
    assert there.membership_sync._look_now.is_set()
    there.store.found = [other.state.announcement()]
    await until(lambda: there.may_use(other))
    assert (there.links.asked, there.book.contact(other.peer).addresses) == ([], other.state.addresses)


async def test_those_who_come_together_are_looked_up_though_all_known_ones_are_linked(
    there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.session.WHOLE", 0.0)
    there.membership_sync.watch((MODULE,))
    await there.membership_sync.look()
    there.meets(Other(there.clock))
    for passed, expected in ((0.0, [MODULE]), (GROUP_S + 1.0, [])):
        there.clock.now += passed
        assert await there.looked_up() == expected


async def test_in_a_large_swarm_the_end_of_a_link_does_not_begin_whole_look_ups(
    there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.session.WHOLE", 0.0)
    others = [Other(there.clock) for _ in range(ENOUGH + 2)]
    for other in others:
        there.meets(other)
    there.membership_sync.watch((MODULE,))
    await there.membership_sync.look()
    there.clock.now += GROUP_S + 1.0
    for expected in ([], [], [MODULE]):
        there.membership_sync.link_down(others.pop().peer, GONE)
        assert await there.looked_up() == expected
    there.meets(Other(there.clock))
    assert there.membership_sync._well_linked() == {MODULE}
    for own in (MODULE, ModuleId(0)):  # rounds need all replicas, data nodes choose among more
        there.own.take(own)
        assert there.membership_sync._well_linked() == set()
    there.membership_sync.watch([ModuleId(stage) for stage in range(MOST_GREETED // ENOUGH)])
    assert there.membership_sync._well_linked() == {MODULE}  # for so many modules they have no more links


async def test_stages_that_a_node_exchanges_nothing_with_are_looked_up_seldom_and_kept_in_view_meanwhile(
    there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.network.session.WHOLE", 0.0)
    far, stages = ModuleId(4), [ModuleId(stage) for stage in range(7)]
    linked = Other(there.clock)
    linked.state.module = ModuleId(5)
    there.meets(linked)
    there.clock.now += GROUP_S
    there.own.take(MODULE)
    there.membership_sync.watch(stages)
    others = [Other(there.clock) for _ in stages]
    for other, module in zip(others, stages, strict=True):
        other.state.module = module
    looked: list[list[ModuleId]] = []
    for _ in range(6):
        there.store.found = [other.state.announcement() for other in others]
        looked.append(await there.looked_up())
        there.clock.now += FAR_EVERY_S / 3
    # The first one is whole, the others have the modules with a replica to which no link is open.
    near = [ModuleId(0), MODULE, ModuleId(2)]
    assert looked == [stages, near, near, stages, near, near]
    there.store.found = []
    there.clock.now += RECORD_LIFETIME_S - FAR_EVERY_S / 3 + 1
    assert there.membership.is_served(far, there.clock.now)
    assert not there.membership.is_served(ModuleId(2), there.clock.now)
    there.membership_sync._look_now.set()
    await until(lambda: not there.membership.is_served(far, there.clock.now))
    assert there.membership.get(linked.peer) is not None, "its link shows that it is alive"
    there.own.take(ModuleId(0))
    assert await there.looked_up() == stages, "a data node works with all of them"


async def test_what_has_run_out_leaves_the_view_and_the_book(there: Place) -> None:
    other = Other(there.clock)
    there.meets(other)
    there.clock.now += 3600
    assert there.membership.expire(there.clock.now) == [], "its link shows that it is alive"
    assert there.book.contact(other.peer) is not None
    there.membership_sync.link_down(other.peer, GONE)
    there.clock.now += 3600
    there.membership_sync._look_now.set()
    await until(lambda: there.book.contact(other.peer) is None)
    assert list(there.membership.peers()) == []
    data_node = Other(there.clock)
    data_node.state.module = ModuleId(0)
    there.meets(data_node)  # it may have chosen the other for us, and then has a link to it
    assert there.book.contact(other.peer) == Contact(other.peer, (), b"", (data_node.peer,))


async def test_a_directory_that_is_out_of_reach_is_asked_again(there: Place) -> None:
    there.store.error = Unreachable("the DHT is being restarted")
    for _ in range(2):
        await there.looked_up()
    there.store.error, published = None, len(there.store.published)
    there.membership_sync.announce()
    await until(lambda: len(there.store.published) > published)


async def test_a_peer_whose_last_word_is_that_it_hosts_nothing_is_forgotten_with_its_link(there: Place) -> None:
    other = Other(there.clock)
    there.meets(other)
    other.state.state = PeerState.VISITING
    there.membership_sync.announced(other.peer, other.record())
    assert not there.may_use(other)
    there.membership_sync.link_down(other.peer, GONE)
    assert (there.membership.get(other.peer), there.book.contact(other.peer)) == (None, None)
    assert there.links.asked == [], "nobody asks whether it is still there"


async def test_proof_that_another_process_has_our_key_ends_the_node() -> None:
    there = Place()
    running = asyncio.create_task(there.membership_sync.run())
    await until(lambda: there.store.published)
    told_by, twin = Other(there.clock), Other(there.clock, identity=there.identity)
    former, stranger = twin.record(), Other(there.clock).record()
    there.clock.now += FORMER_LIFE_MS / 1000 + 1
    for record in (former, stranger, there.membership_sync.record.fresh(), b"nothing"):
        there.membership_sync.announced(told_by.peer, record)
    await asyncio.sleep(0)
    assert not running.done(), "a record of a former life, of somebody else, or our own proves nothing"
    there.membership_sync.announced(told_by.peer, twin.record())
    said = r"another node with this key .* is already in the run at 127.0.0.1:4000"
    with pytest.raises(IdentityError, match=said) as told:
        await running
    assert told.value.exit_code == 78
    assert "--identity FILE" in told.value.hint


STEPS_S = [-7200.0, -45.0, 300.0]


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_node_whose_clock_is_set_and_its_linked_peers_hear_each_other(step_s: float, there: Place) -> None:
    other = Other(ManualClock())
    there.meets(other)
    there.clock.set_by_s = step_s
    for _ in range(60):  # two minutes: no record of before holds any more
        there.clock.now += 2.0
        other.state.clock.now += 2.0  # type: ignore[attr-defined]
        there.membership_sync.announced(other.peer, other.record())
        assert there.membership.expire(there.clock.now) == []
    assert there.may_use(other)
    listening = Place()
    for _ in range(60):
        listening.clock.now += 2.0
        there.clock.now += 2.0
        listening.membership_sync.announced(there.own.peer, there.membership_sync.record.fresh())
        assert listening.membership.expire(listening.clock.now) == []
    assert listening.membership.get(there.own.peer) is not None


async def test_an_unsayable_record_warns_and_the_last_one_stays(caplog: pytest.LogCaptureFixture, there: Place) -> None:
    last, published = there.membership_sync.record.fresh(), len(there.store.published)
    there.own.steps, said = 2**48 + 1, len(there.links.announced)
    for _ in range(2):
        there.membership_sync.announce()
        await until(lambda: not there.membership_sync._publish_now.is_set())
        assert there.membership_sync.record.fresh() == last
    assert (len(there.store.published), len(there.links.announced)) == (published, said), "peers keep the last one"
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"
    assert "step 281474976710657 is out of range" in caplog.text
    there.own.steps = 3
    there.membership_sync.announce()
    await until(lambda: len(there.store.published) > published)
    assert decode_announced(there.links.announced[-1], run=RUN, now=None).steps == 3


async def test_a_clock_that_jumps_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.network.session.PUSH_S", 0.001)
    async with place() as there:
        there.clock.set_by_s = -300.0
        await until(lambda: caplog.records)
        assert "jumped by -300 s" in caplog.text


def state(clock: ManualClock) -> LocalPeer:
    return LocalPeer(RunId("7" * 64), PeerId("a"), b"", clock)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_clock_that_is_set_changes_the_expiry_and_not_the_order(step_s: float) -> None:
    clock = ManualClock()
    own, began = state(clock), int(clock.wall() * 1000)
    clock.now += 10.0
    assert own.announcement().sequence < own.announcement().sequence, "though the clock stands"
    before = own.announcement()
    clock.set_by_s = step_s
    clock.now += 2.0
    after = own.announcement()
    assert before.sequence + 1990 < after.sequence <= before.sequence + 2000
    assert before.incarnation == after.incarnation == began, "of one life; the next has another"
    assert state(clock).announcement().incarnation != began
    assert after.expires_at == clock.wall() + RECORD_LIFETIME_S
    assert 0 < after.expires_at - clock.wall() <= MAX_LIFETIME_S


def test_a_data_node_that_leaves_announces_no_visits() -> None:
    own = state(ManualClock())
    own.state, own.module, own.visits = PeerState.SERVING, ModuleId(0), lambda: (3, 4)
    assert own.announcement().visits == (3, 4)
    own.state = PeerState.VISITING
    assert own.announcement().visits == (), "only a data node launches visits"


def test_a_machine_that_thinks_it_is_1969_says_something_that_can_be_said() -> None:
    own = state(ManualClock(set_by_s=-1_000_100.0 - 86_400.0))
    assert own.incarnation == 1
    assert own.announcement().sequence >= 1
