"""A node's part in tunnels follows from where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from node.network.local_peer import LocalPeer
from node.network.reach_status import ReachStep, Standing
from node.network.session import Whereabouts
from node.reachability.monitor import RelayPart, without_tunnels
from node.reachability.reach_test import Witness
from node.reachability.reverse_calls import Attachments
from protocol.identity.keys import Identity
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat.dial_back import DialBackOutcome, decode_dial_back
from swarm.membership.membership import Membership, relays_first
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId
from tests.node.network.small_swarm import ManualClock
from tests.protocol.dht.running import MODULE, RUN, announced

ME, ONE, TWO, THREE = (PeerId(name) for name in ("me", "one", "two", "three"))
RELAYS = {ONE: "/ip4/25.0.0.1/tcp/1/p2p/one", THREE: "/ip4/25.0.0.3/tcp/3/p2p/three"}


@dataclass
class Noted:
    """Stands in for the DHT and the tunnels, and notes what it is told."""

    serves_tunnels: bool = False
    port: int = 4001
    away: bool = False
    attached: list[tuple[Sequence[str], str]] = field(default_factory=list)
    client: list[bool] = field(default_factory=list)
    announced: int = 0

    def take_part(self, *, client: bool) -> None:
        if not self.client or self.client[-1] is not client:
            self.client.append(client)

    async def attach(self, relays: Sequence[str], local: str) -> None:
        self.attached.append((relays, local))
        if self.away:
            raise Unreachable("restarted")

    def announce(self) -> None:
        self.announced += 1


def part(noted: Noted, step: ReachStep, *addresses: str, via: tuple[PeerId, ...] = ()) -> RelayPart:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), addresses)
    own.reach, own.via = Standing(step, "so it is"), via
    return RelayPart(own, noted, noted, lambda peer: RELAYS.get(peer, ""), noted.announce, "127.0.0.1:4002")


@pytest.mark.parametrize("away", [False, True])
async def test_a_hidden_node_is_attached_to_the_relays_among_those_it_is_called_through(away: bool) -> None:
    noted = Noted(away=away)
    hidden = part(noted, ReachStep.REVERSE, via=(ONE, TWO))
    await hidden.follow()
    await hidden.follow()
    assert noted.attached == [([RELAYS[ONE]], "127.0.0.1:4002")], "told once"
    hidden.own.via = (TWO, THREE)
    await hidden.follow()
    hidden.own.reach, hidden.own.addresses = Standing(ReachStep.DIRECT, "opened"), ("25.0.0.9:4002",)
    await hidden.follow()
    assert [relays for relays, _ in noted.attached[1:]] == [[RELAYS[THREE]], []]
    assert noted.client == [True, False]
    assert noted.announced == 0


@pytest.mark.parametrize(
    ("step", "addresses", "relay"),
    [
        (ReachStep.DIRECT, ("25.0.0.9:4002",), "/ip4/25.0.0.9/tcp/4001/p2p/me"),
        (ReachStep.UNKNOWN, ("[2a00::9]:4002",), "/ip6/2a00::9/tcp/4001/p2p/me"),
        (ReachStep.MAPPED, ("25.0.0.9:4002",), ""),
        (ReachStep.DIRECT, (f"{'a' * 100}.example:4002",), ""),
        (ReachStep.REVERSE, (), ""),
    ],
)
async def test_a_relay_is_announced_where_tunnels_can_come_in(
    step: ReachStep, addresses: tuple[str, ...], relay: str
) -> None:
    noted = Noted(serves_tunnels=True)
    offering = part(noted, step, *addresses)
    for _ in range(2):
        await offering.follow()
    assert offering.own.announcement().relay == relay
    assert noted.announced == bool(relay)
    assert part(Noted(), step, *addresses).own.relay == ""


async def test_who_cannot_be_dialled_dials_nobody_back_at_a_tunnels_end() -> None:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), ())
    witness = Witness(without_tunnels(own, lambda _: FarEnd("127.0.0.1", b"der")), ManualClock())
    answer = decode_dial_back(await witness.answer(ONE, Question(QuestionAbout.DIAL_BACK, port=22)))
    assert (answer.host, answer.outcome) == ("", DialBackOutcome.NOT_TRIED)
    own.addresses = ("25.0.0.9:4002",)
    end = without_tunnels(own, lambda _: FarEnd("25.0.0.1", b"der"))(ONE)
    assert end == FarEnd("25.0.0.1", b"der")
    assert without_tunnels(own, lambda _: None)(ONE) is None


def test_two_relays_come_before_the_others() -> None:
    order = [PeerId(name) for name in "abcdef"]
    assert relays_first(order, {"c", "e", "f"}) == ["c", "e", "a", "b", "d", "f"]
    assert relays_first(order, set()) == order


class Anybody:
    """Links that can all be had."""

    async def connect(self, peer: PeerId) -> None:
        return


async def test_a_node_holds_on_to_relays_even_where_others_are_nearer() -> None:
    own = LocalPeer(RUN, ME, b"", ManualClock(), state=PeerState.SERVING, module=MODULE)
    membership = Membership(RUN, ME)
    relaying = Identity.generate()
    relay = f"/ip4/25.0.0.1/tcp/4001/p2p/{relaying.peer}"
    far = announced(relaying, module=ModuleId(4), relay=relay)
    for announcement in (*(announced(Identity.generate()) for _ in range(5)), far):
        membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)
    held = await Attachments(own, membership, Anybody()).hold()
    assert held[0] == relaying.peer
    assert len(held) == 3


def test_tunnels_lead_to_where_the_node_listens() -> None:
    assert Whereabouts("0.0.0.0").local(4002) == "127.0.0.1:4002"
    assert Whereabouts("25.0.0.9").local(4002) == "25.0.0.9:4002"
