"""State of the page: a run's status, peers that left, and recent changes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from node.cli.views.text import counted, harmless, peer_name
from node.observability.status import PeerStatus, SwarmStatus

GONE_S: Final = 120.0  # Time for which a peer that has gone is shown
MOST_GONE: Final = 32
MOST_HAPPENED: Final = 40
MOST_PEERS: Final = 256

Level = Literal["good", "info", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Happening:
    unix_s: float
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer that is no longer announced."""

    peer: str
    module: str
    unix_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """A run at one moment. `own`: peers of the node that shows the page; empty for a visitor."""

    status: SwarmStatus
    unix_s: float
    own: tuple[str, ...] = ()
    gone: tuple[Gone, ...] = ()
    happened: tuple[Happening, ...] = ()  # Latest last


def next_picture(before: Picture | None, status: SwarmStatus, own: tuple[str, ...], unix_s: float) -> Picture:
    """Combines a status with the changes since the last picture."""
    status = replace(status, peers=status.peers[:MOST_PEERS])
    if before is None:
        return Picture(status, unix_s, own)
    now = {peer.peer: peer for peer in status.peers}
    lost = [Gone(p.peer, p.module or "-", unix_s) for p in before.status.peers if p.peer not in now and p.module]
    still = [gone for gone in before.gone if gone.peer not in now and unix_s - gone.unix_s < GONE_S]
    happened = [Happening(unix_s, *each) for each in _changes(before.status, status)]
    return Picture(status, unix_s, own, (*still, *lost)[-MOST_GONE:], (*before.happened, *happened)[-MOST_HAPPENED:])


def _changes(before: SwarmStatus, now: SwarmStatus) -> Iterator[tuple[Level, str]]:
    """Yields a line for each peer that came, moved, fell silent or left, and for each round and unserved module."""
    old = {peer.peer: peer for peer in before.peers}
    for peer in now.peers:
        yield from _changes_of(old.pop(peer.peer, None), peer)
    for peer in old.values():
        if peer.module is not None:
            yield "bad", f"{_name(peer)} has gone"
    for module in sorted(set(now.waiting_for) - set(before.waiting_for)):
        yield "bad", f"no peer serves module {harmless(module)}"
    for module in sorted(set(before.waiting_for) - set(now.waiting_for)):
        yield "good", f"module {harmless(module)} is served again"
    earlier = _foremost(before)
    for module, peer in _foremost(now).items():
        last = peer.said.last_round
        if last is not None and last.members > 1 and module in earlier and peer.round > earlier[module].round:
            yield "info", f"module {harmless(module)}: round {peer.round} of {counted(last.members, 'peer')}"


def _foremost(status: SwarmStatus) -> dict[str, PeerStatus]:
    """Returns the replica of each module with the latest round, so that a late one does not report it again."""
    return {p.module: p for p in sorted(status.peers, key=lambda peer: peer.round) if p.answered and p.module}


def _changes_of(before: PeerStatus | None, peer: PeerStatus) -> Iterator[tuple[Level, str]]:
    if before is None:
        yield "good", f"{_name(peer)} has joined"
        return
    if peer.module != before.module and peer.module is not None:
        yield "info", f"{peer_name(peer.peer)} serves module {harmless(peer.module)} now"
    if before.answered is not None and peer.answered is None:
        yield "bad", f"{_name(peer)} does not answer"
    if before.answered is None and peer.answered is not None:
        yield "good", f"{_name(peer)} answers again"
    for said in set(peer.said.accused) - set(before.said.accused):
        yield "warning", f"{_name(peer)} excludes {peer_name(said.peer)} from rounds: {harmless(said.why)}"


def _name(peer: PeerStatus) -> str:
    return f"{peer_name(peer.peer)} of module {harmless(peer.module or '-')}"
