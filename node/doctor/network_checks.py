"""Checks by the run's peers: whether they are there, what time they have, and whether they reach this machine."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from node.doctor.finding import Finding, Level, bounded_async
from node.network.reach_status import ReachMode, ReachStep, Standing, held_by
from node.network.session import NetworkSession, visit
from node.observability.status import parse_status
from node.reachability.monitor import climb, ways_to_map
from node.reachability.port_mapping import Router
from node.reachability.reach_test import witnesses_of
from node.reachability.reverse_calls import Attachments
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.types import PeerId

PATIENCE_S: Final = 20.0
CLOCK_LIMIT_S: Final = 10.0
REACH_LIMIT_S: Final = 120.0
"""Three rounds of questions, a silent router, and three rounds again."""
ENTER_LIMIT_S: Final = 60.0
CLOCKS: Final = 5
ASK_TIMEOUT_S: Final = 5.0
WRONG_CLOCK_S: Final = 60.0
"""Records of a peer whose clock is further off are refused (`protocol.identity.signed_records`)."""
ODD_CLOCK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Doorway:
    """The address where this machine would listen, and the one that it would advertise."""

    listen: str
    port: int
    advertise: str | None
    mode: ReachMode


Tell = Callable[[Sequence[Finding]], None]


async def look_in_the_run(
    link: JoinLink, doorway: Doorway, fits: Callable[[Manifest], Sequence[Finding]], tell: Tell
) -> None:
    """Visits the run: makes the findings `run`, `fits`, `clock` and `reach`. Contacts only its peers and our router."""

    async def enter() -> Sequence[Finding]:
        async with visit(link, doorway.listen, doorway.port) as session:
            tell(await bounded_async("run", lambda: _find_peers(session, fits), PATIENCE_S + 10))
            if not _peers(session):
                return [Finding("reach", Level.SKIP, "no peer is there to connect to this machine")]
            tell(await bounded_async("clock", lambda: _compare_clocks(session), CLOCK_LIMIT_S))
            return await bounded_async("reach", lambda: _climb(session, doorway), REACH_LIMIT_S)

    limit_s = ENTER_LIMIT_S + PATIENCE_S + CLOCK_LIMIT_S + REACH_LIMIT_S
    tell(await bounded_async("reach", enter, limit_s))


async def _find_peers(session: NetworkSession, fits: Callable[[Manifest], Sequence[Finding]]) -> Sequence[Finding]:
    try:
        signed = await session.fetch_manifest(PATIENCE_S)
    except Unreachable as error:
        fix = f"{error.hint} This machine's clock has to be right within {WRONG_CLOCK_S:.0f} s."
        return [Finding("run", Level.FAIL, str(error), fix)]
    await session.look_around(signed.manifest)
    hosting = sum(seen.module is not None for seen in session.others())
    return [
        Finding("run", Level.OK, f"{len(_peers(session))} peers of {signed.manifest.name!r} seen"),
        *experts_findings(hosting, len(signed.manifest.modules()), several=signed.manifest.stages.has_experts),
        *await asyncio.to_thread(fits, signed.manifest),
    ]


def experts_findings(hosting: int, modules: int, *, several: bool) -> list[Finding]:
    """Checks that a run with `several` experts in a stage has a peer for each module; `hosting` peers have one."""
    if not several or hosting >= modules:
        return []
    found = f"{hosting} peers for {modules} modules: documents of an expert that nobody serves go to the next best"
    fix = f"Let {modules - hosting} more join; a newcomer takes a module that nobody serves."
    return [Finding("experts", Level.WARN, found, fix)]


def _peers(session: NetworkSession) -> list[PeerId]:
    return [seen.peer for seen in session.others() if seen.is_reachable]


async def _compare_clocks(session: NetworkSession) -> Sequence[Finding]:
    async def offset(peer: PeerId) -> float | None:
        return await clock_offset(lambda: _status(session, peer), session.own.clock)

    found = await asyncio.gather(*(offset(peer) for peer in _peers(session)[:CLOCKS]))
    return [clock_finding([seconds for seconds in found if seconds is not None])]


async def _status(session: NetworkSession, peer: PeerId) -> bytes:
    return await session.transport.ask(peer, Question(QuestionAbout.STATUS), ASK_TIMEOUT_S)


async def clock_offset(ask: Callable[[], Awaitable[bytes]], clock: Clock) -> float | None:
    """Measures how far a peer's clock is ahead of ours, in seconds, at half the round trip. None without an answer."""
    before, began = clock.wall(), clock.monotonic()
    try:
        said = parse_status(await ask()).unix_ms
    except PeerError:
        return None
    took = clock.monotonic() - began
    return said / 1000 - (before + took / 2) if said else None


def clock_finding(offsets: Sequence[float]) -> Finding:
    """Judges our clock by the median of the peers, so that one wrong peer says nothing."""
    if not offsets:
        return Finding("clock", Level.SKIP, "no peer has told its time")
    ahead = -statistics.median(offsets)
    found = f"{abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} the median of {len(offsets)} peers"
    if abs(ahead) < ODD_CLOCK_S:
        return Finding("clock", Level.OK, found)
    level = Level.FAIL if abs(ahead) >= WRONG_CLOCK_S else Level.WARN
    fix = "Set it by the network: `timedatectl set-ntp true`, or your system's settings."
    return Finding("clock", level, found, fix)


async def _climb(session: NetworkSession, doorway: Doorway) -> Sequence[Finding]:
    router = Router(ways_to_map()) if doorway.mode is ReachMode.AUTO else None
    ask = witnesses_of(session.membership, session.transport)
    try:
        standing = await climb(session.transport.port, doorway.advertise, ask, router)
        if standing.step is ReachStep.UNREACHABLE:
            hold = Attachments(session.own, session.membership, session.transport).hold
            standing = held_by(standing, await hold())
        return [reach_finding(standing)]
    finally:
        if router is not None:
            await router.close()


def reach_finding(standing: Standing) -> Finding:
    """Judges reachability. A node that others cannot dial is still of use to those that it can."""
    levels = {
        ReachStep.DIRECT: Level.OK,
        ReachStep.MAPPED: Level.OK,
        ReachStep.REVERSE: Level.WARN,
        ReachStep.UNKNOWN: Level.WARN,
        ReachStep.UNREACHABLE: Level.FAIL,
    }
    fix = standing.fix
    if standing.step is ReachStep.UNKNOWN:
        fix = "Try again while other peers of the run are there."
    return Finding("reach", levels[standing.step], f"{standing.step.value}: {standing.reason}", fix)
