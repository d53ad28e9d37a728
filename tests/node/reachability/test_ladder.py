"""The ladder with attempts and routers made up: which step, which address, which advice."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from node.network.local_peer import LocalPeer
from node.network.reach_status import ReachStep, Standing
from node.observability.events import Reach
from node.reachability import monitor, witnesses
from node.reachability.port_mapping import (
    Mapping,
    NatPmp,
    NotMapped,
    Router,
    Upnp,
    default_gateway,
    description_of,
    leads_to,
    location_in,
)
from protocol.identity.keys import Identity
from protocol.interfaces.transport import FarEnd, Question, QuestionAbout
from protocol.nat.dial_back import DialBackOutcome, DialBackResult, decode_dial_back, encode_dial_back
from protocol.transport.rate_limits import MAX_REMEMBERED, TokenBuckets
from swarm.membership.membership import Membership
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import Busy, Rejected, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState, RunId
from tests.kit.events import KeptEvents
from tests.kit.waiting import LONG_S, ManualClock, until
from tests.protocol.dht.running import MODULE, RUN, announced

PORT = 4002
OUTSIDE = "25.0.0.1"
HOME = "192.168.1.10"
REACHED, CLOSED, SILENT, ANOTHER, NOT_TRIED = DialBackOutcome


def seen(outcome: DialBackOutcome, host: str = OUTSIDE, local: str | None = HOME) -> witnesses.Attempt:
    return witnesses.Attempt(PeerId("witness"), DialBackResult(host, outcome), local)


@pytest.mark.parametrize(
    ("outcomes", "step"),
    [
        ((REACHED, CLOSED), ReachStep.DIRECT),
        ((REACHED, NOT_TRIED), ReachStep.DIRECT),
        ((), ReachStep.UNKNOWN),
        ((NOT_TRIED,), ReachStep.UNKNOWN),
        ((REACHED, SILENT, CLOSED), ReachStep.UNREACHABLE),
        ((ANOTHER,), ReachStep.UNREACHABLE),
    ],
)
def test_half_of_those_who_tried_decide(outcomes: Sequence[DialBackOutcome], step: ReachStep) -> None:
    hosts = [OUTSIDE if outcome is not NOT_TRIED else "" for outcome in outcomes]
    standing = monitor.judge([seen(o, host) for o, host in zip(outcomes, hosts, strict=True)], PORT, None)
    assert standing.step is step
    assert standing.address == (f"{OUTSIDE}:{PORT}" if step is ReachStep.DIRECT else None)
    assert bool(standing.fix) == (step is ReachStep.UNREACHABLE)


def test_neither_a_neighbour_at_home_nor_one_liar_moves_the_address() -> None:
    standing = monitor.judge([seen(REACHED, HOME), seen(REACHED, HOME), seen(SILENT)], PORT, None)
    assert (standing.step, standing.translated) == (ReachStep.UNREACHABLE, True)
    at_home = monitor.judge([seen(REACHED, HOME), seen(REACHED, HOME)], PORT, None)
    assert (at_home.step, at_home.address) == (ReachStep.DIRECT, f"{HOME}:{PORT}")
    for host, address in ((OUTSIDE, f"{OUTSIDE}:{PORT}"), ("2a00::9", f"[2a00::9]:{PORT}")):
        attempts = [seen(REACHED, "6.6.6.6"), seen(REACHED, host), seen(REACHED, host)]
        assert monitor.judge(attempts, PORT, None).address == address


def test_what_a_person_has_told_is_never_replaced() -> None:
    assert monitor.judge([seen(REACHED)], PORT, "node.example").address is None
    elsewhere = monitor.judge([seen(SILENT)], PORT, "node.example")
    assert elsewhere.step is ReachStep.UNKNOWN
    assert "node.example" in elsewhere.reason
    assert monitor.judge([seen(SILENT)], PORT, OUTSIDE).step is ReachStep.UNREACHABLE


def test_the_advice_fits_the_place() -> None:
    behind = monitor.judge([seen(SILENT)], PORT, None)
    assert f"{HOME}:{PORT}" in behind.fix
    assert "router" in behind.fix
    firewall = monitor.judge([seen(SILENT, OUTSIDE, OUTSIDE)], PORT, None)
    assert not firewall.translated
    assert "firewall" in firewall.fix
    assert not monitor.judge([seen(SILENT, OUTSIDE, None)], PORT, None).translated


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
    open_ports: set[int]
    host: str = OUTSIDE
    local: str = HOME
    asked: list[int] = field(default_factory=list)

    async def __call__(self, port: int) -> list[witnesses.Attempt]:
        self.asked.append(port)
        return [seen(REACHED if port in self.open_ports else SILENT, self.host, self.local)] * 3


def mapping(external: int = PORT, host: str = OUTSIDE, lease_s: float = 600.0) -> Mapping:
    return Mapping("made up", PORT, external, host, lease_s)


async def test_who_is_reached_or_not_translated_asks_no_router_and_others_try_every_way() -> None:
    way = MadeUp([mapping()])
    assert (await monitor.climb(PORT, None, Peers({PORT}), Router((way,)))).step is ReachStep.DIRECT
    assert (await monitor.climb(PORT, None, Peers(set(), local=OUTSIDE), Router((way,)))).step is ReachStep.UNREACHABLE
    assert way.asked == []
    ways = [MadeUp([NotMapped("switched off")], how="one"), MadeUp([NotMapped("not there")], how="two")]
    standing = await monitor.climb(PORT, None, Peers(set()), Router(ways))
    assert standing.step is ReachStep.UNREACHABLE
    assert "one: switched off" in standing.reason
    assert "two: not there" in standing.reason


async def test_a_mapping_is_kept_and_advertised_with_its_own_port_while_it_works() -> None:
    way, peers = MadeUp([mapping(50_000)]), Peers({50_000})
    asked_router = Router((way,))
    standing = await monitor.climb(PORT, None, peers, asked_router)
    assert (standing.step, standing.address) == (ReachStep.MAPPED, f"{OUTSIDE}:50000")
    assert peers.asked == [PORT, 50_000]
    assert asked_router.mapping == mapping(50_000)
    assert (await monitor.climb(PORT, None, peers, asked_router)).step is ReachStep.MAPPED
    assert peers.asked == [PORT, 50_000, 50_000], "what is mapped is tested again, not mapped again"
    assert (await monitor.climb(PORT, "home.example", peers, asked_router)).address == "home.example:50000"
    peers.open_ports = {PORT}  # the mapping stops working
    assert (await monitor.climb(PORT, None, peers, asked_router)).step is ReachStep.DIRECT
    assert way.unmapped == [50_000]
    assert asked_router.mapping is None


async def test_a_mapping_in_vain_is_given_back_and_the_second_router_is_named() -> None:
    way = MadeUp([mapping(host="100.64.3.4")])
    standing = await monitor.climb(PORT, None, Peers(set()), Router((way,)))
    assert standing.step is ReachStep.UNREACHABLE
    assert "100.64.3.4" in standing.reason
    assert "second router" in standing.reason
    assert way.unmapped == [PORT]
    same = await monitor.climb(PORT, None, Peers(set()), Router((MadeUp([mapping()]),)))
    assert "second router" not in same.reason


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

    def router(self, way: Any) -> Router:
        return Router((way,), self, lambda: self.now)


@pytest.mark.parametrize(
    ("answers", "waited"),
    [
        ([mapping(), mapping(), NotMapped("busy"), mapping()], [300.0, 300.0, 150.0, 300.0, 150.0]),
        ([mapping(lease_s=float("inf"))], [300.0, 150.0]),
    ],
)
async def test_a_mapping_is_renewed_at_half_its_lease_and_lost_when_that_fails_twice(
    answers: list[Mapping | NotMapped], waited: list[float]
) -> None:
    way, waits = MadeUp([*answers, NotMapped("restarted")]), Waits(99)
    kept = waits.router(way)
    await kept.open(PORT)
    lost = await kept.keep()
    assert waits.waited == waited
    assert "restarted" in lost.reason
    assert kept.mapping is None
    assert way.asked == [(PORT, PORT)] * (len(waited) + 1)


async def test_keeping_goes_on_where_it_was_interrupted() -> None:
    way = MadeUp([mapping()])
    waits = Waits(0)
    kept = waits.router(way)
    await kept.open(PORT)
    waits.now = 200.0
    keeping = asyncio.create_task(kept.keep())
    await until(lambda: waits.waited_for is not None)
    keeping.cancel()
    assert waits.waited_for == 100.0


async def test_a_router_that_hangs_or_cannot_be_asked_gives_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    class NoSocket(MadeUp):
        def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
            raise OSError(24, "Too many open files")

    class Hangs(MadeUp):
        def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
            let_go.wait(30)
            return self.maps[0]

    answer = await Router((NoSocket([mapping()]),)).open(PORT)
    assert answer == NotMapped("made up: cannot ask the router: Too many open files")
    monkeypatch.setattr("node.reachability.port_mapping.ASK_ROUTER_S", 0.05)
    answer = await Router((Hangs([mapping()]),)).open(PORT)
    let_go.set()
    assert "no answer" in answer.reason


BEFORE = ("192.168.1.10:4002",)
DIRECT = Standing(ReachStep.DIRECT, "reached", "25.0.0.1:4002")
MAPPED = Standing(ReachStep.MAPPED, "mapped", "25.0.0.1:50000")
UNREACHABLE = Standing(ReachStep.UNREACHABLE, "silent", fix="forward it")
HELD = (PeerId("a"), PeerId("b"))
UNKNOWN = Standing(ReachStep.UNKNOWN, "nobody")


class Told(KeptEvents):
    announced = 0

    def reaches(self) -> list[Reach]:
        return [event for event in self.events if isinstance(event, Reach)]

    def announce(self) -> None:
        self.announced += 1


def adoption() -> tuple[monitor.Adoption, Told]:
    told = Told()
    own = LocalPeer(RunId("7" * 64), PeerId("me"), b"", ManualClock(), BEFORE)
    return monitor.Adoption(own, told, told.announce, BEFORE), told


@dataclass
class InTurn:
    """Answers in turn, the last one for ever: what the ladder says, or whom a node would hold on to."""

    answers: list[Any]
    asked: int = 0

    async def __call__(self) -> Any:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def watched(
    climbing: InTurn, hold: InTurn, waits: Waits, router: Router | None = None
) -> AsyncIterator[tuple[monitor.Adoption, Told]]:
    taken, told = adoption()
    watching = asyncio.create_task(monitor.watch(climbing, hold, taken, router, waits))
    try:
        yield taken, told
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
        assert watching.cancelled()


def test_the_address_follows_from_the_step() -> None:
    taken, told = adoption()
    taken.adopt(UNKNOWN)
    assert told.events == [], "that nothing is known is no news"
    for standing, address in ((DIRECT, "25.0.0.1:4002"), (MAPPED, "25.0.0.1:50000"), (UNREACHABLE, "")):
        taken.adopt(standing)
        assert ", ".join(taken.own.addresses) == address
        assert taken.own.reach is standing
        assert told.events[-1] == Reach("me", standing.step.value, address, standing.reason, standing.fix)
    assert told.announced == len(told.events) == 3


def test_who_is_held_on_to_is_announced_in_place_of_addresses_until_there_are_some() -> None:
    taken, told = adoption()
    taken.adopt(UNREACHABLE, HELD)
    assert (taken.own.addresses, taken.own.via) == ((), HELD)
    assert taken.own.reach.step is ReachStep.REVERSE
    assert taken.own.reach.fix == UNREACHABLE.fix
    assert [(event.step, event.address) for event in told.reaches()] == [("reverse", "")]
    taken.adopt(UNREACHABLE, HELD[:1])
    assert taken.own.via == HELD[:1]
    assert (told.announced, len(told.events)) == (2, 1), "others hear of it, nobody watching has to"
    taken.adopt(UNREACHABLE, HELD[:1])
    assert told.announced == 2
    taken.adopt(MAPPED)
    assert (taken.own.addresses, taken.own.via) == (("25.0.0.1:50000",), ())
    taken.adopt(UNREACHABLE)
    assert (taken.own.addresses, taken.own.via, taken.own.reach.step) == ((), (), ReachStep.UNREACHABLE)
    assert [event.step for event in told.reaches()] == ["reverse", "mapped", "unreachable"]


async def test_what_cannot_be_tested_stays() -> None:
    waits = Waits(2)
    async with watched(InTurn([MAPPED, UNKNOWN]), InTurn([()]), waits) as (taken, told):
        await until(lambda: len(waits.waited) == 2 and waits.waited_for)
        assert taken.own.reach is MAPPED
        assert taken.own.addresses == ("25.0.0.1:50000",)
        assert len(told.events) == 1
        assert waits.waited == [monitor.AGAIN_S[ReachStep.MAPPED], monitor.FIRST_PAUSE_S]


async def test_the_ladder_is_climbed_again_sooner_where_it_may_help() -> None:
    rounds = round(monitor.AGAIN_S[ReachStep.UNREACHABLE] / monitor.HOLD_S)
    waits, holding = Waits(2 + 1 + rounds + 1), InTurn([HELD])
    async with watched(InTurn([UNKNOWN, UNKNOWN, UNREACHABLE, UNREACHABLE, DIRECT]), holding, waits) as (taken, _):
        await until(lambda: taken.own.reach is DIRECT)
    assert waits.waited[:3] == [monitor.FIRST_PAUSE_S, 2 * monitor.FIRST_PAUSE_S, monitor.CONFIRM_S]
    assert waits.waited[3 : 3 + rounds] == [monitor.HOLD_S] * rounds
    assert waits.waited[3 + rounds :] == [monitor.AGAIN_S[ReachStep.DIRECT]]
    assert holding.asked == rounds


async def test_addresses_are_given_up_only_when_nobody_got_through_twice() -> None:
    waits, holding = Waits(3), InTurn([HELD])
    async with watched(InTurn([DIRECT, UNREACHABLE, DIRECT]), holding, waits) as (taken, told):
        await until(lambda: len(waits.waited) == 3)
        assert waits.waited == [monitor.AGAIN_S[ReachStep.DIRECT], monitor.CONFIRM_S, monitor.AGAIN_S[ReachStep.DIRECT]]
        assert taken.own.reach is DIRECT
        assert (holding.asked, len(told.events)) == (0, 1)


async def test_who_is_lost_is_replaced_and_while_nobody_can_be_asked_the_node_holds_on() -> None:
    rounds = round(monitor.AGAIN_S[ReachStep.UNREACHABLE] / monitor.HOLD_S)
    waits = Waits(1 + rounds)
    holding = InTurn([HELD, HELD[:1], (), (PeerId("c"),)])
    async with watched(InTurn([UNREACHABLE, UNREACHABLE, UNKNOWN]), holding, waits) as (taken, told):
        await until(lambda: holding.asked > rounds)
        assert taken.own.via == (PeerId("c"),)
        assert [event.step for event in told.reaches()] == ["reverse", "unreachable", "reverse"]
        assert told.announced == 4


@pytest.mark.parametrize("renewed", [NotMapped("restarted"), mapping(50_001)])
async def test_a_lost_mapping_has_the_ladder_climbed_at_once(renewed: Mapping | NotMapped) -> None:
    router = Waits(2).router(MadeUp([mapping(50_000), renewed]))
    await router.open(4002)
    climbing = InTurn([MAPPED, DIRECT])
    async with watched(climbing, InTurn([()]), Waits(0), router) as (taken, _):
        await until(lambda: taken.own.reach is DIRECT)
    assert climbing.asked == 2


HERE = "127.0.0.1"
OK = 0


@contextmanager
def gateway(answer: Callable[[bytes], bytes | None]) -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((HERE, 0))
        listening.settimeout(0.05)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    request, asker = listening.recvfrom(2048)
                except TimeoutError:
                    continue
                reply = answer(request)
                if reply is not None:
                    listening.sendto(reply, asker)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            serving.join()


def rfc(request: bytes, *, result: int = OK, external: int = 0, lease: int = 600) -> bytes:
    if request == b"\x00\x00":
        return struct.pack("!BBHI4s", 0, 128, result, 7, socket.inet_aton("25.0.0.1"))
    _, op, _, internal, wanted, _ = struct.unpack("!BBHHHI", request)
    return struct.pack("!BBHIHHI", 0, 128 + op, result, 7, internal, external or wanted, lease)


def test_nat_pmp_maps_renews_and_takes_back() -> None:
    asked: list[bytes] = []

    def answer(request: bytes) -> bytes:
        asked.append(request)
        return rfc(request, external=50_000)

    with gateway(answer) as port:
        way = NatPmp(lambda: HERE, port)
        mapped = way.map(PORT, PORT, 600)
        assert mapped == Mapping("NAT-PMP", PORT, 50_000, "25.0.0.1", 600)
        assert way.unmap(mapped) is None
    assert asked[0] == struct.pack("!BBHHHI", 0, 2, 0, PORT, PORT, 600)
    assert asked[-1] == struct.pack("!BBHHHI", 0, 2, 0, PORT, 0, 0), "a lifetime and a port of 0 end it"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda request: rfc(request, result=2), "refused"),
        (lambda request: rfc(request, result=99), "result 99"),
        (lambda request: b"", "unexpected answer"),
        (lambda request: b"\x00\x82\x00\x00", "4 bytes"),
        (lambda request: rfc(request)[:-4], "12 bytes"),
        (lambda request: b"\x01" + rfc(request)[1:], "unexpected answer"),
        (lambda request: rfc(request, lease=0), "nonsense"),
        (lambda request: rfc(struct.pack("!BBHHHI", 0, 2, 0, 9, 9, 9)), "nonsense"),
    ],
)
def test_nat_pmp_takes_no_other_answer(answer: Callable[[bytes], bytes], why: str) -> None:
    with gateway(answer) as port:
        mapped = NatPmp(lambda: HERE, port).map(PORT, PORT, 600)
    assert why in mapped.reason


def test_a_router_that_does_not_speak_nat_pmp(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
    assert "does not support it" in NatPmp(lambda: HERE, port).map(PORT, PORT, 600).reason
    monkeypatch.setattr("node.reachability.port_mapping.WAITS_S", (0.01, 0.01))
    asked: list[bytes] = []
    with gateway(lambda request: asked.append(request)) as silent:
        assert "did not answer" in NatPmp(lambda: HERE, silent).map(PORT, PORT, 600).reason
    assert isinstance(NatPmp(lambda: None).map(PORT, PORT, 600), NotMapped)


class Device:
    """miniupnpc's device as far as it is used; `refusals` come before it agrees."""

    lanaddr = "192.168.1.10"

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)
        self.added: list[tuple[Any, ...]] = []
        self.deleted: list[tuple[int, str]] = []

    def addportmapping(self, *arguments: Any) -> bool:
        self.added.append(arguments)
        if self.refusals:
            raise Exception(self.refusals.pop(0))
        return True

    def deleteportmapping(self, port: int, protocol: str) -> bool:
        self.deleted.append((port, protocol))
        return True

    def externalipaddress(self) -> str:
        return "25.0.0.1"


def upnp(device: Device, control: str = f"http://{HERE}:5000/ctl") -> Upnp:
    return Upnp(lambda: HERE, lambda gateway: f"http://{gateway}:5000/root.xml", lambda location: (device, control))


def test_upnp_maps_for_everybody_and_takes_back() -> None:
    device = Device()
    way = upnp(device)
    mapped = way.map(PORT, PORT, 600)
    assert mapped == Mapping("UPnP", PORT, PORT, "25.0.0.1", 600)
    assert device.added == [(PORT, "TCP", Device.lanaddr, PORT, "skipstone", "", 600)]
    assert way.unmap(mapped) is None
    assert device.deleted == [(PORT, "TCP")]


def test_upnp_takes_another_port_or_a_mapping_without_end_when_it_has_to_or_says_why_not() -> None:
    mapped = upnp(Device("ConflictInMappingEntry")).map(PORT, PORT, 600)
    assert mapped.external_port != PORT
    for_ever = Device("OnlyPermanentLeasesSupported")
    assert upnp(for_ever).map(PORT, PORT, 600).lease_s == float("inf")
    assert for_ever.added[-1][-1] == 0
    refused = upnp(Device("Action Not Authorized")).map(PORT, PORT, 600)
    assert refused == NotMapped("the router refused: Action Not Authorized")
    crowded = Device(*["ConflictInMappingEntry"] * 9)
    assert isinstance(upnp(crowded).map(PORT, PORT, 600), NotMapped)
    assert len(crowded.added) == 3


def test_upnp_speaks_to_the_gateway_alone() -> None:
    device = Device()
    assert "another host" in upnp(device, "http://10.0.0.66:5000/ctl").map(PORT, PORT, 600).reason
    assert device.added == []
    assert not leads_to(HERE, f"http://{HERE}.evil.example/")
    assert not leads_to(HERE, f"https://{HERE}/")
    assert not leads_to(HERE, f"http://{HERE}@10.0.0.66/")
    assert location_in(b"HTTP/1.1 200 OK\r\nLOCATION: http://10.0.0.66/x\r\n\r\n", HERE) is None
    assert location_in(b"\xff\xfe", HERE) is None


def test_without_miniupnpc_or_a_gateway_there_is_a_reason() -> None:
    def missing(location: str) -> tuple[Any, str]:
        raise ImportError

    assert "skipstone[nat]" in Upnp(lambda: HERE, lambda gateway: "http://x/", missing).map(PORT, PORT, 600).reason
    assert isinstance(Upnp(lambda: None).map(PORT, PORT, 600), NotMapped)
    assert isinstance(Upnp(lambda: HERE, lambda gateway: None).map(PORT, PORT, 600), NotMapped)


def test_the_search_takes_the_gateways_own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"http://{HERE}:5000/root.xml"
    with gateway(lambda request: f"HTTP/1.1 200 OK\r\nLocation: {there}\r\n\r\n".encode()) as port:
        assert description_of(HERE, [(HERE, port)]) == there
        monkeypatch.setattr("node.reachability.port_mapping.SEARCH_S", 0.1)
        assert description_of("127.0.0.9", [(HERE, port)]) is None, "somebody else answers"


def test_the_gateway_is_that_of_the_default_route_with_the_lowest_metric(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\tFE01A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert default_gateway(routes) == "192.168.1.254"
    routes.write_text("Iface\tDestination\n")
    assert default_gateway(routes) is None
    assert default_gateway(tmp_path / "nothing") is None


WITNESS_PORT = Question(QuestionAbout.DIAL_BACK, port=4002)


@dataclass
class Dialled:
    """Notes what is dialled, and waits until it may answer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[str, int, bytes]] = field(default_factory=list)

    async def __call__(self, host: str, port: int, certificate: bytes) -> DialBackResult:
        self.seen.append((host, port, certificate))
        await self.gate.wait()
        return DialBackResult(host, DialBackOutcome.REACHED)


class Bench:
    """A witness with links to a few askers, each at an address of its own unless told otherwise."""

    def __init__(self) -> None:
        self.clock, self.dialled = ManualClock(), Dialled()
        self.ends: dict[PeerId, FarEnd] = {}
        self.witness = witnesses.Witness(self.ends.get, self.clock, self.dialled)

    def asker(self, name: str, host: str) -> PeerId:
        self.ends[PeerId(name)] = FarEnd(host, name.encode())
        return PeerId(name)


async def test_what_is_dialled_is_where_the_askers_link_leads() -> None:
    bench = Bench()
    bench.dialled.gate.set()
    answer = decode_dial_back(await bench.witness.answer(bench.asker("a", "25.0.0.1"), WITNESS_PORT))
    assert answer == DialBackResult("25.0.0.1", DialBackOutcome.REACHED)
    assert bench.dialled.seen == [("25.0.0.1", 4002, b"a")]
    gone = decode_dial_back(await bench.witness.answer(PeerId("nobody"), WITNESS_PORT))
    assert gone.outcome is DialBackOutcome.NOT_TRIED
    assert len(bench.dialled.seen) == 1


async def test_one_at_a_time_for_each_asker_and_few_for_all() -> None:
    bench = Bench()
    askers = [bench.asker(f"p{n}", f"25.0.0.{n}") for n in range(witnesses.MAX_AT_ONCE + 1)]
    async with asyncio.TaskGroup() as tasks:
        for asker in askers[: witnesses.MAX_AT_ONCE]:
            tasks.create_task(bench.witness.answer(asker, WITNESS_PORT))
        await until(lambda: len(bench.dialled.seen) == witnesses.MAX_AT_ONCE)
        for asker in (askers[0], askers[-1]):
            with pytest.raises(Busy):
                await bench.witness.answer(asker, WITNESS_PORT)
        bench.dialled.gate.set()
    await bench.witness.answer(askers[0], WITNESS_PORT)
    assert len(bench.dialled.seen) == witnesses.MAX_AT_ONCE + 1


async def test_an_address_cannot_be_searched_for_open_ports_by_however_many_identities() -> None:
    bench = Bench()
    bench.dialled.gate.set()
    refused = 0
    for n in range(1000):
        try:
            await bench.witness.answer(bench.asker(f"p{n}", "25.0.0.1"), replace(WITNESS_PORT, port=1 + n))
        except Busy:
            refused += 1
    assert len(bench.dialled.seen) == witnesses.BURST
    assert refused == 1000 - witnesses.BURST
    await bench.witness.answer(bench.asker("another host", "25.0.0.2"), WITNESS_PORT)
    bench.clock.now += witnesses.REFILL_S
    await bench.witness.answer(bench.asker("p0", "25.0.0.1"), WITNESS_PORT)
    with pytest.raises(Busy):
        await bench.witness.answer(bench.asker("p0", "25.0.0.1"), WITNESS_PORT)


async def test_a_dial_back_that_is_cut_short_leaves_room() -> None:
    bench = Bench()
    asker = bench.asker("a", "25.0.0.1")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.witness.answer(asker, WITNESS_PORT), 0.01)


def test_an_allowance_remembers_no_more_than_its_bound() -> None:
    allowance = TokenBuckets(1, 60.0)
    for n in range(MAX_REMEMBERED + 1):
        assert allowance.take(str(n), 0.0)
    assert not allowance.take(str(MAX_REMEMBERED), 1.0)
    assert allowance.take("0", 1.0), "the longest unseen is forgotten"


@dataclass
class Links:
    """Answers of peers, and those to which no link can be opened."""

    answers: dict[PeerId, DialBackResult | Exception | bytes]
    asked: list[PeerId] = field(default_factory=list)
    broken: set[PeerId] = field(default_factory=set)

    async def connect(self, peer: PeerId) -> None:
        self.asked.append(peer)
        if peer in self.broken:
            raise Unreachable("nobody is there")

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        assert question == WITNESS_PORT
        self.asked.append(peer)
        answer = self.answers.get(peer, Unreachable("nobody is there"))
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else encode_dial_back(answer)

    def far_end(self, peer: PeerId) -> FarEnd | None:
        return FarEnd("127.0.0.1", b"") if peer in self.answers else None


def membership_of(*hosts: str, state: PeerState = PeerState.SERVING) -> tuple[Membership, list[PeerId]]:
    membership = Membership(RUN, Identity.generate().peer)
    peers = []
    for host in hosts:
        announcement = announced(Identity.generate(), addresses=(f"{host}:4000",) if host else (), state=state)
        if state is PeerState.VISITING:
            announcement = replace(announcement, module=None)
        membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)
        peers.append(announcement.peer)
    return membership, peers


WITNESS_REACHED = DialBackResult("25.0.0.1", DialBackOutcome.REACHED)


async def test_three_are_asked_and_who_does_not_answer_is_replaced() -> None:
    membership, peers = membership_of(*(f"25.0.{n}.1" for n in range(6)))
    by_name = lambda found: found.sort(key=lambda a: peers.index(a.peer))  # noqa: E731
    links = Links(dict.fromkeys(peers, WITNESS_REACHED))
    links.answers |= {peers[0]: Rejected("not now"), peers[1]: b"\xff garbage"}
    found = await witnesses.witnesses_of(membership, links, by_name)(4002)
    assert links.asked == peers[:5]
    assert [t.witness for t in found] == peers[2:5]
    assert {(t.result, t.local_host) for t in found} == {(WITNESS_REACHED, "127.0.0.1")}
    assert len(found) == witnesses.WITNESSES


async def test_few_peers_are_asked_and_no_visitors_and_none_without_an_address() -> None:
    many = membership_of(*(f"25.0.{n}.1" for n in range(witnesses.MAX_ASKED + 5)))
    visiting = membership_of("25.0.0.1", state=PeerState.VISITING)
    for (membership, _), asked in ((many, witnesses.MAX_ASKED), (visiting, 0), (membership_of(""), 0)):
        links = Links({})
        assert await witnesses.witnesses_of(membership, links)(4002) == []
        assert len(links.asked) == asked


def test_different_networks_come_first() -> None:
    hosts = ["25.0.0.1", "25.0.0.2", "25.0.1.1", "[2001:db8::1]", "[2001:db8::2]", "name.example"]
    called = announced(Identity.generate(), addresses=(), via=(PeerId("a"),))
    found = witnesses.scattered([called, *(announced(Identity.generate(), addresses=(f"{host}:1",)) for host in hosts)])
    assert found.pop() is called, "it would have to be called, which may fail"
    order = [a.addresses[0].rpartition(":")[0] for a in found]
    assert order == ["25.0.0.1", "25.0.1.1", "[2001:db8::1]", "name.example", "25.0.0.2", "[2001:db8::2]"]
    assert witnesses.network_of("25.0.7.9:1") == "25.0.7.0/24"


class HoldingBench:
    def __init__(self, count: int, connect_s: float = witnesses.CONNECT_S) -> None:
        own = Identity.generate().peer
        self.membership, self.links, self.clock = Membership(RUN, own), Links({}), ManualClock()
        state = LocalPeer(RUN, own, b"", self.clock, state=PeerState.SERVING, module=MODULE)
        self.attachments = witnesses.Attachments(state, self.membership, self.links, connect_s)
        for _ in range(count):
            self.meets(announced(Identity.generate()))

    def meets(self, announcement: Announcement) -> None:
        self.membership.observe(announcement, now=0.0, wall=announcement.expires_at - 60)


async def test_who_is_lost_is_replaced_and_the_others_stay() -> None:
    bench = HoldingBench(12)
    held = await bench.attachments.hold()
    assert bench.links.asked == list(held)
    assert await bench.attachments.hold() == held
    bench.links.broken.add(held[1])
    now = await bench.attachments.hold()
    assert len(now) == witnesses.WANTED
    assert {held[0], held[2]} < set(now)
    assert held[1] not in now
    bench.membership.give_up(held[0], bench.clock.now)
    bench.links.asked.clear()
    assert held[0] not in await bench.attachments.hold()
    assert held[0] not in bench.links.asked, "it was given up"


async def test_who_could_not_be_had_is_tried_last_for_a_minute() -> None:
    bench = HoldingBench(witnesses.WANTED + 2)
    best = (await bench.attachments.hold())[0]
    bench.links.broken = {best}
    held = await bench.attachments.hold()
    assert best not in held
    bench.links.broken = {held[0]}
    bench.links.asked.clear()
    held = await bench.attachments.hold()
    assert len(held) == witnesses.WANTED
    assert best not in bench.links.asked, "there was another one"
    bench.clock.now += witnesses.AVOIDED_S + 1
    bench.links.broken = {held[-1]}
    assert best in await bench.attachments.hold()


async def test_not_everybody_is_tried_and_who_does_not_answer_holds_nothing_up_for_ever() -> None:
    bench = HoldingBench(12)
    bench.links.broken = {announcement.peer for announcement in bench.membership.peers()}
    assert await bench.attachments.hold() == ()
    assert len(bench.links.asked) == witnesses.MAX_TRIED
    bench = HoldingBench(1, connect_s=0.01)
    bench.links.connect = lambda peer: asyncio.Event().wait()  # type: ignore[method-assign]
    async with asyncio.timeout(LONG_S):
        assert await bench.attachments.hold() == ()


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


def part(noted: Noted, step: ReachStep, *addresses: str, via: tuple[PeerId, ...] = ()) -> monitor.RelayPart:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), addresses)
    own.reach, own.via = Standing(step, "so it is"), via
    return monitor.RelayPart(own, noted, noted, lambda peer: RELAYS.get(peer, ""), noted.announce, "127.0.0.1:4002")


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
async def test_a_relay_is_announced_if_tunnels_come_in(step: ReachStep, addresses: tuple[str, ...], relay: str) -> None:
    noted = Noted(serves_tunnels=True)
    offering = part(noted, step, *addresses)
    for _ in range(2):
        await offering.follow()
    assert offering.own.announcement().relay == relay
    assert noted.announced == bool(relay)
    assert part(Noted(), step, *addresses).own.relay == ""


async def test_who_cannot_be_dialled_dials_nobody_back_at_a_tunnels_end() -> None:
    own = LocalPeer(RunId("7" * 64), ME, b"", ManualClock(), ())
    witness = witnesses.Witness(monitor.without_tunnels(own, lambda _: FarEnd("127.0.0.1", b"der")), ManualClock())
    answer = decode_dial_back(await witness.answer(ONE, Question(QuestionAbout.DIAL_BACK, port=22)))
    assert (answer.host, answer.outcome) == ("", DialBackOutcome.NOT_TRIED)
    own.addresses = ("25.0.0.9:4002",)
    assert monitor.without_tunnels(own, lambda _: FarEnd("25.0.0.1", b"der"))(ONE) == FarEnd("25.0.0.1", b"der")
    assert monitor.without_tunnels(own, lambda _: None)(ONE) is None


async def test_a_node_holds_on_to_relays_even_where_others_are_nearer() -> None:
    bench, relaying = HoldingBench(5), Identity.generate()
    bench.meets(announced(relaying, module=ModuleId(4), relay=f"/ip4/25.0.0.1/tcp/4001/p2p/{relaying.peer}"))
    held = await bench.attachments.hold()
    assert held[0] == relaying.peer
    assert len(held) == 3
