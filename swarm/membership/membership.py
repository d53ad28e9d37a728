"""One peer's view of the swarm: newest valid announcement and failures of every other peer. Times are monotonic."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.statistics import Exclusions, ExponentialBackoff
from swarm.vocabulary.types import PROTOCOL_VERSIONS, ModuleId, PeerId, PeerState, Reasoned, RunId

MAX_PEERS = 20_000
FIRST_PAUSE_S = 1.0
REUSE_S: Final = ExponentialBackoff(1.0, 60.0, free=2)  # Pause for a peer that announces itself, after failures
HARM_PAUSE_S: Final = ExponentialBackoff(60.0, 3600.0)
STALL_PAUSE_S: Final = ExponentialBackoff(1.0, 30.0)
ENOUGH = 8  # Links to a module's replicas beyond which no more are sought, except to our own module's
KEPT_S = 60.0  # Time for which a peer is remembered after its link, in seconds


@dataclass(slots=True)
class _Member:
    announcement: Announcement
    expires: float
    heard: float
    failures: int = 0
    failed_ms: float = -math.inf  # Time of its last failure or a little before, by the clock of its announcements
    suspect_until: float = 0.0

    @property
    def is_given_up(self) -> bool:
        return self.suspect_until == math.inf

    def suspect(self, now: float, until: float) -> None:
        self.suspect_until = until
        self.failed_ms = max(self.failed_ms, self.announcement.sequence + (now - self.heard) * 1e3)


class Membership:
    """The other peers of one `run`, by their verified announcements. `own`: this peer."""

    def __init__(self, run: RunId, own: PeerId) -> None:
        self.run = run
        self.own = own
        self._members: dict[PeerId, _Member] = {}
        self.linked: set[PeerId] = set()  # Peers to which a link is open
        self._harmful = Exclusions(HARM_PAUSE_S)  # Not forgiven by a new announcement
        self._stalled = Exclusions(STALL_PAUSE_S, 60.0)
        self.outvoted: dict[ModuleId, frozenset[PeerId]] = {}  # Liars in rounds, by most replicas of the module

    def observe(self, announcement: Announcement, *, now: float, wall: float) -> bool:
        """Stores a peer's announcement. Returns False if it is expired, old, our own, or from another run."""
        remaining = announcement.expires_at - wall
        if announcement.run != self.run or announcement.peer == self.own or remaining <= 0:
            return False
        known = self._members.get(announcement.peer)
        if known is None or known.expires <= now:
            # A link's keepalive shows that its peer is alive, so its record does not expire.
            expires = math.inf if announcement.peer in self.linked else now + remaining
            self._members[announcement.peer] = _Member(announcement, expires, now)
            evicted = self._evict_one() if len(self._members) > MAX_PEERS else None
            return evicted != announcement.peer
        if announcement.sequence <= known.announcement.sequence:
            return False
        known.announcement = announcement
        known.expires = math.inf if announcement.peer in self.linked else now + remaining
        known.heard = now
        if announcement.sequence > known.failed_ms:  # otherwise it is older than the failure, and arrived late
            known.suspect_until = min(known.suspect_until, now + REUSE_S.seconds(known.failures))
        return True

    def expire(self, now: float) -> list[PeerId]:
        gone = [peer for peer, member in self._members.items() if member.expires <= now]
        for peer in gone:
            del self._members[peer]
        return gone

    def forget(self, peer: PeerId) -> None:
        self._members.pop(peer, None)

    def fail(self, peer: PeerId, now: float) -> None:
        """Suspects a failed peer: for FIRST_PAUSE_S, in case only a link broke; after a second failure, gives it up."""
        self.linked.discard(peer)
        # A failure during the suspicion belongs to the same outage. A later one gives the peer up.
        member = self._members.get(peer)
        if member is None:
            return
        member.expires = min(member.expires, now + KEPT_S)
        if member.suspect_until > now:
            return
        member.failures += 1
        member.suspect(now, now + FIRST_PAUSE_S if member.failures == 1 else math.inf)

    def give_up(self, peer: PeerId, now: float) -> None:
        """Considers a peer dead: it gets no work until its next announcement, which a dead peer does not send."""
        member = self._members.get(peer)
        if member is not None:
            member.suspect(now, math.inf)

    def leave_out(self, peer: PeerId, now: float) -> float:
        """Gives a harmful peer no work while another peer serves its module. Returns for how many seconds."""
        return self._harmful.add(peer, now)

    def stalled(self, peer: PeerId, now: float) -> None:
        """Gives a peer that may hold microbatches up no work for a moment, while another peer serves its module."""
        self._stalled.add(peer, now)

    def moved(self, peer: PeerId) -> None:
        """Uses a peer again that passed a microbatch on."""
        self._stalled.forgive(peer)

    def recover(self, peer: PeerId) -> None:
        """Clears the suspicion and failures of a peer to which a link has opened."""
        self.linked.add(peer)
        member = self._members.get(peer)
        if member is not None:
            member.failures, member.suspect_until, member.expires = 0, 0.0, math.inf

    def answered(self, peer: PeerId, now: float) -> None:
        """Uses a peer again that answers on its link, after a pause that grows with its failures."""
        self.linked.add(peer)
        member = self._members.get(peer)
        if member is not None:
            member.suspect_until = min(member.suspect_until, now + REUSE_S.seconds(member.failures))
            member.expires = math.inf

    def well_linked(self, enough: int) -> set[ModuleId | None]:
        """Returns the modules to `enough` of whose replicas we have an open link."""
        return {module for module, count in self._links().items() if count >= enough}

    def not_linked(self, modules: Iterable[ModuleId]) -> list[ModuleId]:
        """Returns the modules without any link to a replica, and those with links to fewer than 15 of 16 known ones."""
        known, linked = Counter(member.announcement.module for member in self._members.values()), self._links()
        return [module for module in modules if not linked[module] or 16 * linked[module] < 15 * known[module]]

    def _links(self) -> Counter[ModuleId | None]:
        return Counter(self._members[peer].announcement.module for peer in self.linked & self._members.keys())

    def get(self, peer: PeerId) -> Announcement | None:
        member = self._members.get(peer)
        return None if member is None else member.announcement

    def slots_of(self, peer: PeerId) -> int:
        return 0 if (known := self.get(peer)) is None else known.slots

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        announcement = self.get(peer)
        return announcement is not None and announcement.module == module

    def is_suspect(self, peer: PeerId, now: float) -> bool:
        member = self._members.get(peer)
        return member is not None and member.suspect_until > now

    def is_given_up(self, peer: PeerId) -> bool:
        member = self._members.get(peer)
        return member is not None and member.is_given_up

    def peers(self) -> Iterable[Announcement]:
        return tuple(member.announcement for member in tuple(self._members.values()))  # also called by threads

    def replicas(self, module: ModuleId, now: float) -> list[Announcement]:
        """Returns a module's replicas that may get work. Harmful and lying replicas get none, unless all are such."""
        return self.all_replicas(now).get(module, [])

    def all_replicas(self, now: float) -> dict[ModuleId, list[Announcement]]:
        """Returns the replicas that may get work, by module (see `replicas`)."""
        avoided, found = self._harmful.excluded(now) | self._stalled.excluded(now), dict[ModuleId, list[Announcement]]()
        for member in tuple(self._members.values()):  # also called by threads
            module = member.announcement.module
            if module is not None and member.suspect_until <= now and _serves(member, now):
                found.setdefault(module, []).append(member.announcement)
        if not (avoided or any(self.outvoted.values())):
            return found
        away = {module: avoided | self.outvoted.get(module, frozenset()) for module in found}
        return {module: [a for a in known if a.peer not in away[module]] or known for module, known in found.items()}

    def with_state(self, module: ModuleId) -> list[Announcement]:
        """Returns a module's replicas from which its state may be downloaded: with an anchor, and not given up."""
        return [
            member.announcement
            for peer, member in self._members.items()
            if member.announcement.module == module
            and member.announcement.state in (PeerState.SERVING, PeerState.DRAINING)
            and member.announcement.anchor is not None
            and not self.is_given_up(peer)
        ]

    def is_served(self, module: ModuleId, now: float) -> bool:
        """Whether a module has a serving peer that is not considered dead; the peer may be suspect."""
        return any(
            member.announcement.module == module and _serves(member, now) and not member.is_given_up
            for member in self._members.values()
        )

    def served(self, now: float) -> set[ModuleId | None]:
        serving = (member for member in self._members.values() if _serves(member, now) and not member.is_given_up)
        return {member.announcement.module for member in serving}

    def with_replicas(self, now: float) -> set[ModuleId | None]:
        """Returns the modules that have a serving replica that is not suspect."""
        serving = (member for member in self._members.values() if _serves(member, now))
        return {member.announcement.module for member in serving if member.suspect_until <= now}

    def reaches_somebody(self) -> bool:
        return not all(member.is_given_up for member in self._members.values())

    def _evict_one(self) -> PeerId:
        """Removes one peer to make space: visitors (peers without a module) first, then the earliest to expire."""
        worth = {peer: (m.announcement.state is not PeerState.VISITING, m.expires) for peer, m in self._members.items()}
        victim = min(worth, key=worth.__getitem__)
        del self._members[victim]
        return victim


def _serves(member: _Member, now: float) -> bool:
    announcement = member.announcement
    return (
        announcement.state is PeerState.SERVING
        and member.expires > now
        and announcement.versions.common(PROTOCOL_VERSIONS) is not None
    )


# Records of unlinked peers, valid for 40 to 60 s, must not expire between two look-ups.
LOOK_UP_PAUSE_S: Final = ExponentialBackoff(0.5, 30.0)
LONELY_S = 4.0  # Longest pause while no peer with a module is known: nobody who works has to answer
RESTART_S = 3.0  # Shortest time between restarts of the pauses
WIDE_AFTER_S, WIDE_EVERY_S = 60.0, 480.0  # Shortest and longest time between wide look-ups
FAR_EVERY_S = 75.0  # Shortest time between look-ups of stages that we exchange nothing with
MANY, FAR_TIMES = 8, 8  # With n times as MANY replicas of each, they are looked up so many times less often


@dataclass(slots=True)
class LookUps:
    """Schedule of a node's look-ups in the directory, whose pauses double while the same modules lack a replica."""

    missing: frozenset[ModuleId] = frozenset()  # Modules without a replica as of the last restart
    _done: int = 0  # Since the last restart
    _restarted: float = -math.inf
    _wide: float = -math.inf
    _far: float = -math.inf
    fewest_far: int = 0  # Known replicas of the far module that has the fewest

    @property
    def far_every_s(self) -> float:
        return FAR_EVERY_S * max(1, min(FAR_TIMES, self.fewest_far // MANY))

    @property
    def far_kept_s(self) -> float:
        """Time for which records of far stages' peers outlive their expiry: until the look-up after the next."""
        return 2 * self.far_every_s

    def looks_far(self, now: float, *, whole: bool) -> bool:
        """Decides whether the look-up that begins now includes far stages that have a known replica."""
        if is_due := whole or now - self._far >= self.far_every_s:
            self._far = now
        return is_due

    def begin(self, now: float) -> Reasoned[bool]:
        """Decides whether the look-up that begins now is a wide one, which no single node of the DHT can deceive."""
        since = now - self._wide
        if since < WIDE_EVERY_S:
            return Reasoned(False, f"the last wide one was {since:.0f} s ago")
        self._wide = now
        return Reasoned(True, f"no wide one for {since:.0f} s, or other modules lack a replica")

    def pause(self, missing: frozenset[ModuleId], now: float, draw: float, *, alone: bool) -> Reasoned[float]:
        """Returns the pause until the next look-up, with a jitter of 25 % by `draw`, 0 to 1."""
        # A peer that comes and goes cannot make us look up all the time.
        if missing != self.missing and now - self._restarted >= RESTART_S:
            self.missing, self._done, self._restarted = missing, 0, now
            self._wide = -math.inf if now - self._wide >= WIDE_AFTER_S else self._wide
        self._done += 1
        pause_s = min(LONELY_S if alone else math.inf, LOOK_UP_PAUSE_S.seconds(self._done)) * (0.75 + draw / 2)
        return Reasoned(pause_s, f"{len(missing)} modules lack a replica since {self._done} look-ups")


# Changes that are not worth sending: of `free_slots` relative to all slots, of measured figures to themselves
_MEASURED = ("tokens_per_second", "memory_bytes", "device_bytes")
_TOLERANCES = {"sequence": math.inf, "expires_at": math.inf, "free_slots": 1 / 8, **dict.fromkeys(_MEASURED, 0.1)}


def what_changed(before: Announcement | None, after: Announcement) -> str:
    """Returns the first field of a peer's record that changed by more than its tolerance; empty if none did."""
    if before is None:
        return "peer"
    for name in (field.name for field in fields(after)):
        old, new, tolerance = getattr(before, name), getattr(after, name), _TOLERANCES.get(name)
        if old != new and (
            tolerance is None or abs(new - old) > tolerance * (after.slots if name == "free_slots" else max(old, new))
        ):
            return name
    return ""


STAY: tuple[PeerState, ...] = (PeerState.JOINING, PeerState.SERVING)


def is_near(module: ModuleId | None, other: ModuleId | None, stages: int) -> bool:
    """Whether `other` is the same module, or one of the stage before or behind."""
    if module is None or other is None:
        return False
    return other == module or (other.stage - module.stage) % stages in (1, stages - 1)


def is_far(own: ModuleId | None, module: ModuleId | None, stages: int) -> bool:
    """Whether a peer with module `own` exchanges nothing with `module`. Data nodes work with all stages."""
    if own is None or module is None or 0 in (own.stage, module.stage):
        return False
    return not is_near(own, module, stages)


def by_worth(
    own: PeerId, module: ModuleId | None, announcements: Iterable[Announcement], kept: Collection[PeerId]
) -> list[PeerId]:
    """Ranks dialable peers to stay connected to: near stages and replicas, then peers in `kept`, then by hash."""
    fit = [a for a in announcements if a.addresses and a.module is not None and a.state in STAY and a.peer != own]
    stages = 1 + max((a.module.stage for a in fit if a.module is not None), default=0)
    if module is not None:
        stages = max(stages, module.stage + 1)

    def worth(announcement: Announcement) -> tuple[bool, bool, bytes]:
        near = is_near(module, announcement.module, stages)
        draw = hashlib.sha256(f"{own} {announcement.peer}".encode()).digest()
        return not near, announcement.peer not in kept, draw

    return [announcement.peer for announcement in sorted(fit, key=worth)]


def relays_first(order: Sequence[PeerId], relaying: Collection[PeerId], wanted: int = 2) -> list[PeerId]:
    """Moves the first `wanted` peers that relay traffic to the front of the order."""
    chosen = [peer for peer in order if peer in relaying][:wanted]
    return chosen + [peer for peer in order if peer not in chosen]
