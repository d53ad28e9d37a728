"""The ladder with attempts and routers made up: which step, which address, which advice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from node.network.reach_status import ReachStep
from node.reachability.monitor import climb, joined, judge
from node.reachability.port_mapping import Mapping, NotMapped, PortMapper, Router
from node.reachability.reach_test import Attempt
from protocol.nat.dial_back import DialBackOutcome, DialBackResult
from swarm.vocabulary.types import PeerId

PORT = 4002
OUTSIDE = "25.0.0.1"
HOME = "192.168.1.10"
REACHED, CLOSED, SILENT, ANOTHER, NOT_TRIED = DialBackOutcome


def seen(outcome: DialBackOutcome, host: str = OUTSIDE, local: str | None = HOME) -> Attempt:
    return Attempt(PeerId("witness"), DialBackResult(host, outcome), local)


def test_without_a_witness_nothing_is_known() -> None:
    for attempts in ([], [seen(NOT_TRIED, "")]):
        assert judge(attempts, PORT, None).step is ReachStep.UNKNOWN


@pytest.mark.parametrize(
    ("outcomes", "step"),
    [
        ((REACHED, REACHED, REACHED), ReachStep.DIRECT),
        ((REACHED, REACHED, SILENT), ReachStep.DIRECT),
        ((REACHED, CLOSED), ReachStep.DIRECT),
        ((REACHED, NOT_TRIED), ReachStep.DIRECT),
        ((REACHED, SILENT, CLOSED), ReachStep.UNREACHABLE),
        ((SILENT,), ReachStep.UNREACHABLE),
        ((ANOTHER,), ReachStep.UNREACHABLE),
    ],
)
def test_half_of_those_who_tried_decide(outcomes: Sequence[DialBackOutcome], step: ReachStep) -> None:
    hosts = [OUTSIDE if outcome is not NOT_TRIED else "" for outcome in outcomes]
    standing = judge([seen(o, host) for o, host in zip(outcomes, hosts, strict=True)], PORT, None)
    assert standing.step is step
    assert standing.address == (f"{OUTSIDE}:{PORT}" if step is ReachStep.DIRECT else None)
    assert bool(standing.fix) == (step is ReachStep.UNREACHABLE)


def test_a_neighbour_at_home_proves_nothing_where_somebody_sees_us_from_outside() -> None:
    standing = judge([seen(REACHED, HOME), seen(REACHED, HOME), seen(SILENT)], PORT, None)
    assert (standing.step, standing.translated) == (ReachStep.UNREACHABLE, True)
    at_home = judge([seen(REACHED, HOME), seen(REACHED, HOME)], PORT, None)
    assert (at_home.step, at_home.address) == (ReachStep.DIRECT, f"{HOME}:{PORT}")


def test_one_liar_does_not_move_the_address() -> None:
    standing = judge([seen(REACHED, "6.6.6.6"), seen(REACHED), seen(REACHED)], PORT, None)
    assert standing.address == f"{OUTSIDE}:{PORT}"


def test_what_a_person_has_told_is_never_replaced() -> None:
    assert judge([seen(REACHED)], PORT, "node.example").address is None
    elsewhere = judge([seen(SILENT)], PORT, "node.example")
    assert elsewhere.step is ReachStep.UNKNOWN
    assert "node.example" in elsewhere.reason
    assert judge([seen(SILENT)], PORT, OUTSIDE).step is ReachStep.UNREACHABLE


def test_the_advice_fits_the_place() -> None:
    behind = judge([seen(SILENT)], PORT, None)
    assert f"{HOME}:{PORT}" in behind.fix
    assert "router" in behind.fix
    firewall = judge([seen(SILENT, OUTSIDE, OUTSIDE)], PORT, None)
    assert not firewall.translated
    assert "firewall" in firewall.fix
    assert not judge([seen(SILENT, OUTSIDE, None)], PORT, None).translated


def test_ipv6_addresses_get_their_brackets() -> None:
    assert joined("2001:db8::1", 1) == "[2001:db8::1]:1"


# ---- climbing ------------------------------------------------------------------------------------------------------


@dataclass
class MadeUp:
    """A way of mapping that does what it is told; `maps` answers in turn, the last one for ever."""

    maps: list[Mapping | NotMapped]
    how: str = "made up"
    asked: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)

    def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
        self.asked.append((port, external_port))
        return self.maps.pop(0) if len(self.maps) > 1 else self.maps[0]

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        self.unmapped.append(mapping.external_port)
        return None


@dataclass
class Peers:
    """Peers that reach some ports of ours."""

    open_ports: set[int]
    host: str = OUTSIDE
    local: str = HOME
    asked: list[int] = field(default_factory=list)

    async def __call__(self, port: int) -> list[Attempt]:
        self.asked.append(port)
        return [seen(REACHED if port in self.open_ports else SILENT, self.host, self.local)] * 3


def mapping(external: int = PORT, host: str = OUTSIDE, lease_s: float = 600.0) -> Mapping:
    return Mapping("made up", PORT, external, host, lease_s)


def router(*ways: PortMapper) -> Router:
    return Router(ways)


async def test_who_is_reached_asks_no_router() -> None:
    way = MadeUp([mapping()])
    assert (await climb(PORT, None, Peers({PORT}), router(way))).step is ReachStep.DIRECT
    assert way.asked == []


async def test_who_is_not_translated_asks_no_router() -> None:
    way = MadeUp([mapping()])
    assert (await climb(PORT, None, Peers(set(), local=OUTSIDE), router(way))).step is ReachStep.UNREACHABLE
    assert way.asked == []


async def test_a_mapping_that_works_is_kept_and_advertised_with_its_own_port() -> None:
    way, peers = MadeUp([mapping(50_000)]), Peers({50_000})
    asked_router = router(way)
    standing = await climb(PORT, None, peers, asked_router)
    assert (standing.step, standing.address) == (ReachStep.MAPPED, f"{OUTSIDE}:50000")
    assert peers.asked == [PORT, 50_000]
    assert asked_router.mapping == mapping(50_000)
    assert (await climb(PORT, None, peers, asked_router)).step is ReachStep.MAPPED
    assert peers.asked == [PORT, 50_000, 50_000], "what is mapped is tested again, not mapped again"
    told = await climb(PORT, "home.example", peers, asked_router)
    assert told.address == "home.example:50000"


async def test_a_mapping_that_stopped_working_is_given_back_and_tried_anew() -> None:
    way, peers = MadeUp([mapping(50_000)]), Peers({50_000})
    asked_router = router(way)
    await climb(PORT, None, peers, asked_router)
    peers.open_ports = {PORT}
    assert (await climb(PORT, None, peers, asked_router)).step is ReachStep.DIRECT
    assert way.unmapped == [50_000]
    assert asked_router.mapping is None


async def test_a_mapping_in_vain_is_given_back_and_the_second_router_is_named() -> None:
    way = MadeUp([mapping(host="100.64.3.4")])
    standing = await climb(PORT, None, Peers(set()), router(way))
    assert standing.step is ReachStep.UNREACHABLE
    assert "100.64.3.4" in standing.reason
    assert "second router" in standing.reason
    assert way.unmapped == [PORT]
    same = await climb(PORT, None, Peers(set()), router(MadeUp([mapping()])))
    assert "second router" not in same.reason


async def test_every_way_is_tried_and_says_why_not() -> None:
    ways = [MadeUp([NotMapped("switched off")], how="one"), MadeUp([NotMapped("not there")], how="two")]
    standing = await climb(PORT, None, Peers(set()), router(*ways))
    assert standing.step is ReachStep.UNREACHABLE
    assert "one: switched off" in standing.reason
    assert "two: not there" in standing.reason


# ---- keeping -------------------------------------------------------------------------------------------------------


class Waits:
    """Time that passes at once, for so many waits; the next one never ends."""

    def __init__(self, most: int) -> None:
        self.waited: list[float] = []
        self.now = 0.0
        self.waited_for: float | None = None
        self._most = most

    async def __call__(self, seconds: float) -> None:
        self.waited_for = seconds
        if len(self.waited) >= self._most:
            await asyncio.Event().wait()
        self.waited.append(seconds)
        self.now += seconds

    def router(self, way: PortMapper) -> Router:
        return Router((way,), self, lambda: self.now)


async def test_a_mapping_is_renewed_at_half_its_lease_and_lost_when_that_fails_twice() -> None:
    way = MadeUp([mapping(), mapping(), NotMapped("busy"), mapping(), NotMapped("restarted")])
    waits = Waits(99)
    kept = waits.router(way)
    await kept.open(PORT)
    lost = await kept.keep()
    assert waits.waited == [300.0, 300.0, 150.0, 300.0, 150.0]
    assert "restarted" in lost.reason
    assert kept.mapping is None
    assert way.asked == [(PORT, PORT)] * 6


async def test_keeping_goes_on_where_it_was_interrupted() -> None:
    way = MadeUp([mapping()])
    waits = Waits(0)
    kept = waits.router(way)
    await kept.open(PORT)
    waits.now = 200.0
    keeping = asyncio.create_task(kept.keep())
    async with asyncio.timeout(5):
        while waits.waited_for is None:
            await asyncio.sleep(0)
    keeping.cancel()
    assert waits.waited_for == 100.0


async def test_a_mapping_without_end_is_asked_for_again_all_the_same() -> None:
    waits = Waits(99)
    kept = waits.router(MadeUp([mapping(lease_s=float("inf")), NotMapped("restarted")]))
    await kept.open(PORT)
    await kept.keep()
    assert waits.waited == [300.0, 150.0]


async def test_a_machine_that_cannot_ask_has_no_mapping() -> None:
    class NoSocket(MadeUp):
        def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
            raise OSError(24, "Too many open files")

    answer = await router(NoSocket([mapping()])).open(PORT)
    assert answer == NotMapped("made up: it cannot be asked: Too many open files")


async def test_a_mapping_that_moves_is_told() -> None:
    kept = Waits(99).router(MadeUp([mapping(), mapping(50_001)]))
    await kept.open(PORT)
    assert "50001" in (await kept.keep()).reason
    assert kept.mapping == mapping(50_001)


async def test_a_router_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    let_go = threading.Event()

    class Hangs(MadeUp):
        def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
            let_go.wait(30)
            return self.maps[0]

    monkeypatch.setattr("node.reachability.port_mapping.ASK_ROUTER_S", 0.05)
    answer = await router(Hangs([mapping()])).open(PORT)
    let_go.set()
    assert isinstance(answer, NotMapped)
    assert "no answer" in answer.reason
