"""Proven work: visits that data nodes have settled and signed. What costs nothing proves nothing."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from swarm.vocabulary.averaging_messages import MAX_MEMBERS, MAX_TALLIES, MAX_TALLY_ROWS, WorkRow, WorkTally
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId

WINDOW_S: Final = 30.0  # Least length of the window of recent work; a mark makes it up to MARK_S longer
MARK_S: Final = 5.0  # Interval between the marks from which windows are measured
SIGNED_S: Final = 2.0  # Time for which a data node gives the same tally again
VALID_S: Final = 120.0  # Age at which a tally proves nothing any more
# Least recent work that proves a replica, relative to the module's largest: a slow machine's
LEAST_SHARE: Final = 1 / 16
MAX_KEPT: Final = 64  # Data nodes whose tallies are kept
MAX_ROWS: Final = 4096  # Replicas that a data node counts, over all modules
STARTS_APART: Final = 2**32  # Least distance of the microbatch numbers of a data node's starts
MOST_CREDITED: Final = 64  # Tallies in a peer's credit; those with the least tokens are dropped


class WorkLedger:
    """A data node's counts of the visits that it has settled, by module and replica."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._rows: dict[tuple[ModuleId, PeerId], tuple[int, int]] = {}
        self._number = 0
        self._marks: deque[tuple[float, dict[tuple[ModuleId, PeerId], int]]] = deque()
        self._made: dict[ModuleId, tuple[float, WorkTally]] = {}

    def settled(self, microbatch: MicrobatchId, hops: Iterable[Hop], tokens: int, now: float) -> None:
        """Counts a completed microbatch for the replicas on its path, and for stage 0."""
        self._number = microbatch.number
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, {key: tokens for key, (_, tokens) in self._rows.items()}))
            while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW_S:
                self._marks.popleft()
        for hop in (Hop(ModuleId(0), self._own), *hops):
            key = (hop.module, hop.peer)
            visits, before = self._rows.pop(key, (0, 0))
            self._rows[key] = visits + 1, before + tokens
        while len(self._rows) > MAX_ROWS:
            del self._rows[next(iter(self._rows))]

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(dict.fromkeys(peer for _, peer in self._rows if peer != self._own))

    def tally(self, module: ModuleId, now: float, wall: float) -> WorkTally | None:
        """Returns the module's tally without its signature, at most SIGNED_S old; None without recent work."""
        if not self._marks or now - self._marks[0][0] < MARK_S:
            return None  # so that the first tally has most replicas
        made_at, made = self._made.get(module, (now, None))
        if made is not None and now - made_at < SIGNED_S:
            return made
        begun, before = self._marks[0]
        rows = [
            WorkRow(peer, visits, tokens, tokens - before.get((of, peer), 0))
            for (of, peer), (visits, tokens) in self._rows.items()
            if of == module
        ]
        rows = sorted((row for row in rows if row.recent), key=lambda row: -row.recent)[:MAX_MEMBERS]
        if not rows:
            return None
        tally = WorkTally(self._own, module, self._number, wall, now - begun, tuple(rows))
        self._made[module] = now, tally
        return tally


class Tallies:
    """Verified tallies of one module, the latest of each data node; those with the most recent work."""

    def __init__(self) -> None:
        self._latest: dict[PeerId, tuple[float, WorkTally]] = {}

    def add(self, tally: WorkTally, now: float) -> None:
        known = self._latest.get(tally.data_node)
        if known is None or tally.at > known[1].at or now - known[0] > VALID_S:
            self._latest[tally.data_node] = now, tally
        most_first = sorted(self._latest.items(), key=lambda item: -sum(row.recent for row in item[1][1].rows))
        self._latest = dict(most_first[:MAX_KEPT])

    def valid(self, now: float) -> tuple[WorkTally, ...]:
        return tuple(tally for added, tally in self._latest.values() if now - added <= VALID_S)


class Credit:
    """The work that others' tallies prove for a peer: the largest tally of each module and data node's start."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.proofs: list[tuple[WorkRow, WorkTally]] = []

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row, _ in self.proofs)

    def add(self, tally: WorkTally) -> bool:
        """Adds a verified tally. Returns whether it raises the credit."""
        row = next((row for row in tally.rows if row.peer == self.peer), None)
        if row is None or tally.data_node == self.peer:
            return False
        same = [
            (least, known)
            for least, known in self.proofs
            if (known.data_node, known.module) == (tally.data_node, tally.module)
            and abs(known.number - tally.number) < STARTS_APART  # a data node that restarts counts from 0
        ]
        if any(least.tokens >= row.tokens for least, _ in same):
            return False
        kept = [proof for proof in self.proofs if proof not in same]
        self.proofs = sorted([*kept, (row, tally)], key=lambda proof: -proof[0].tokens)[:MOST_CREDITED]
        return True


def to_carry(tallies: Iterable[WorkTally]) -> tuple[WorkTally, ...]:
    """Returns as many of the first tallies as a roster or an answer may carry."""
    found: list[WorkTally] = []
    rows = 0
    for tally in tallies:
        rows += len(tally.rows)
        if rows <= MAX_TALLY_ROWS and len(found) < MAX_TALLIES:
            found.append(tally)
    return tuple(found)


def proven_work(tallies: Iterable[WorkTally]) -> dict[PeerId, float]:
    """Returns each replica's proven tokens per second. Replicas with far less than the best have proven nothing."""
    rates: dict[PeerId, float] = {}
    for tally in tallies:
        for row in tally.rows:
            rates[row.peer] = rates.get(row.peer, 0.0) + row.recent / max(1.0, tally.window_s)
    least = LEAST_SHARE * max(rates.values(), default=0.0)
    return {peer: rate for peer, rate in rates.items() if rate >= least}


def outvoted(accusations: Mapping[PeerId, Collection[PeerId]], work: Mapping[PeerId, float]) -> frozenset[PeerId]:
    """Returns the replicas that two or more others accuse, which have done most of the module's work."""
    votes: defaultdict[PeerId, list[float]] = defaultdict(list)
    for by, named in accusations.items():
        for peer in frozenset(named) - {by} if by in work else ():
            votes[peer].append(work[by])
    most = sum(work.values()) / 2
    return frozenset(peer for peer, done in votes.items() if len(done) > 1 and sum(done) > most)


def lead(peer: PeerId, work: Mapping[PeerId, float]) -> float:
    """Returns the ratio of a replica's work to the sum of all other work; infinite if there is no other work."""
    others = sum(done for other, done in work.items() if other != peer)
    own = work.get(peer, 0.0)
    return own / others if others else float("inf") if own else 0.0
