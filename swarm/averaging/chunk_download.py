"""Download of a module's state in chunks from several replicas (donors): which donor should send which chunks.

Fast donors get larger batches. The order starts at a random chunk. Idle donors take chunks over from slow donors. A
donor that sends a wrong chunk is excluded.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from swarm.vocabulary.averaging_messages import StateRefusal
from swarm.vocabulary.statistics import Ewma, ExponentialBackoff
from swarm.vocabulary.types import PeerId, short

LARGEST_BATCH: Final = 16
MOST_OWED: Final = LARGEST_BATCH + LARGEST_BATCH // 2
BATCH_S: Final = 1.0
DONORS_AT_ONCE: Final = 8
PATIENCE_S: Final = 60.0  # Time without any chunk after which the download fails, in seconds; longer for large chunks
# A donor rests after this many seconds without a chunk, or SILENT_CHUNKS times its seconds per chunk if that is longer
SILENCE_S: Final = 5.0
SILENT_CHUNKS: Final = 8.0
SLOWEST_BYTES_PER_S: Final = 256 * 1024  # Assumed speed of a donor before it is measured
STEAL_AFTER_S: Final = 1.0
REST_S: Final = ExponentialBackoff(0.2, 5.0)
MAX_STRIKES: Final = 5  # Consecutive broken links and silences after which a donor is given up
COPIES: Final = 2  # Donors asked for the same chunk at once


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """Event: a donor's chunk arrived. `matches`: whether the chunk has the expected hash."""

    donor: PeerId
    chunk: int
    matches: bool


@dataclass(frozen=True, slots=True)
class ChunkLost:
    donor: PeerId
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunksRefused:
    donor: PeerId
    chunks: tuple[int, ...]
    reason: StateRefusal


@dataclass(frozen=True, slots=True)
class DonorLost:
    donor: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. The first tick starts the download."""


Event = ChunkArrived | ChunkLost | ChunksRefused | DonorLost | Tick


@dataclass(frozen=True, slots=True)
class Ask:
    """Action: request these chunks from the donor by a StateRequest."""

    donor: PeerId
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Action: report a donor that sent a chunk with a wrong hash."""

    donor: PeerId
    detail: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Action: end the download, because all chunks have arrived."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Action: end the download, because no donor can send the missing chunks."""

    detail: str
    stalled: bool  # Whether donors that may have the state are unreachable or silent


Action = Ask | Report | Complete | Failed


@dataclass(slots=True, eq=False)
class _Donor:
    peer: PeerId
    owes: dict[int, None] = field(default_factory=dict)
    seconds_per_byte: Ewma = field(default_factory=lambda: Ewma(0.3))
    heard_at: float = 0.0  # Time of its last message, or of the request that ended its idleness
    rests_until: float = 0.0
    strikes: int = 0
    out: str = ""
    trouble: str = "it sent nothing"


class Download:
    """State machine of one download. `here`: chunks that we have; `most`: most chunks in flight from one donor."""

    def __init__(
        self, chunks: int, chunk_bytes: int, here: Collection[int], donors: Sequence[PeerId], random: Random, most: int
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._largest_batch = max(1, min(LARGEST_BATCH, 2 * most // 3))
        self._random = random
        self._missing = set(range(chunks)) - set(here)
        start = random.randrange(chunks)
        self._waiting = deque(c for c in [*range(start, chunks), *range(start)] if c in self._missing)
        self._donors = {peer: _Donor(peer) for peer in random.sample(list(dict.fromkeys(donors)), len(set(donors)))}
        self._progressed_at: float | None = None
        self._over = False

    @property
    def missing(self) -> int:
        return len(self._missing)

    def expects(self, donor: PeerId, chunk: int) -> bool:
        asked = self._donors.get(donor)
        return not self._over and chunk in self._missing and asked is not None and chunk in asked.owes

    def handle(self, event: Event, now: float) -> list[Action]:
        """Updates the download by an event and returns the actions to take. Ignores unknown chunks and donors."""
        if self._over:
            return []
        if self._progressed_at is None:
            self._progressed_at = now
        actions: list[Action] = []
        match event:
            case ChunkArrived(peer, chunk, matches):
                actions += self._came(peer, chunk, matches, now)
            case ChunkLost(peer, chunk):
                self._lost(peer, chunk, now)
            case ChunksRefused(peer, chunks, reason):
                self._refused(peer, chunks, reason, now)
            case DonorLost(peer):
                if (donor := self._donors.get(peer)) is not None:
                    self._strike(donor, "its link broke", now)
            case Tick():
                for donor in self._donors.values():
                    if donor.owes and now - donor.heard_at > self._silence_s(donor):
                        self._strike(donor, "it is silent", now)
        return actions + self._go_on(now)

    def _came(self, peer: PeerId, chunk: int, matches: bool, now: float) -> list[Action]:
        donor = self._donors.get(peer)
        if donor is None:
            return []
        owed = chunk in donor.owes
        donor.owes.pop(chunk, None)
        if not matches:
            self._put_back(chunk)
            if donor.out:
                return []
            self._exclude(donor, f"its chunk {chunk} does not match its hash")
            return [Report(peer, donor.out)]
        if owed:
            # Time per byte, not bytes per time: chunks that arrive in pairs would make a donor look fast.
            donor.seconds_per_byte.add(max(now - donor.heard_at, 1e-6) / self._chunk_bytes)
        donor.strikes, donor.trouble, donor.heard_at = 0, "it stopped sending", now
        if chunk in self._missing:  # also accept it from a donor that counts as silent
            self._missing.discard(chunk)
            self._progressed_at = now
        return []

    def _lost(self, peer: PeerId, chunk: int, now: float) -> None:
        donor = self._donors.get(peer)
        if donor is not None and chunk in donor.owes:
            del donor.owes[chunk]
            self._put_back(chunk)
            self._strike(donor, "it broke off in the middle of a chunk", now)

    def _refused(self, peer: PeerId, chunks: tuple[int, ...], reason: StateRefusal, now: float) -> None:
        donor = self._donors.get(peer)
        if donor is None or not any(chunk in donor.owes for chunk in chunks):
            return
        if reason is StateRefusal.GONE:
            self._exclude(donor, "it no longer has this state")
            return
        for chunk in chunks:
            if chunk in donor.owes:
                del donor.owes[chunk]
                self._put_back(chunk)
        donor.heard_at = now
        donor.trouble = "it is busy"
        self._rest(donor, now, donor.strikes + 3)

    def _strike(self, donor: _Donor, why: str, now: float) -> None:
        if donor.out:
            return
        if donor.rests_until > now and not donor.owes:
            return  # the donor already rests because of the same fault
        donor.strikes += 1
        donor.trouble = why
        if donor.strikes >= MAX_STRIKES:
            self._exclude(donor, f"{why}, for the {donor.strikes}th time in a row")
            return
        self._take_back(donor)
        self._rest(donor, now, donor.strikes + 1)

    def _rest(self, donor: _Donor, now: float, times: int) -> None:
        donor.rests_until = now + self._random.uniform(0.5, 1.0) * REST_S.seconds(times)

    def _exclude(self, donor: _Donor, why: str) -> None:
        donor.out = donor.out or why
        self._take_back(donor)

    def _take_back(self, donor: _Donor) -> None:
        owed, donor.owes = list(donor.owes), {}
        for chunk in reversed(owed):
            self._put_back(chunk)

    def _put_back(self, chunk: int) -> None:
        if chunk in self._missing and not self._askers(chunk) and chunk not in self._waiting:
            self._waiting.appendleft(chunk)

    def _askers(self, chunk: int) -> int:
        return sum(chunk in donor.owes for donor in self._donors.values())

    def _chunk_s(self, donor: _Donor) -> float | None:
        return donor.seconds_per_byte.mean * self._chunk_bytes if donor.seconds_per_byte.samples else None

    def _silence_s(self, donor: _Donor) -> float:
        chunk_s = self._chunk_s(donor)
        if chunk_s is None:
            others = [s for other in self._donors.values() if (s := self._chunk_s(other)) is not None]
            chunk_s = max(others, default=self._chunk_bytes / SLOWEST_BYTES_PER_S)
        return max(SILENCE_S, SILENT_CHUNKS * chunk_s)

    def _go_on(self, now: float) -> list[Action]:
        if not self._missing:
            self._over = True
            return [Complete()]
        alive = [donor for donor in self._donors.values() if not donor.out]
        if not alive:
            silent = any(donor.strikes >= MAX_STRIKES for donor in self._donors.values())
            return self._fail(silent)
        assert self._progressed_at is not None
        if now - self._progressed_at > max(PATIENCE_S, 2 * SILENT_CHUNKS * self._chunk_bytes / SLOWEST_BYTES_PER_S):
            return self._fail(True)
        actions: list[Action] = []
        active = sum(bool(donor.owes) for donor in alive)
        for donor in sorted(alive, key=lambda each: each.strikes):  # the untried before those that failed
            if donor.rests_until > now or (not donor.owes and active >= DONORS_AT_ONCE):
                continue
            chunks = self._batch(donor, now)
            if chunks:
                active += not donor.owes
                if not donor.owes:
                    donor.heard_at = now
                donor.owes.update(dict.fromkeys(chunks))
                actions.append(Ask(donor.peer, chunks))
        return actions

    def _batch(self, donor: _Donor, now: float) -> tuple[int, ...]:
        chunk_s = self._chunk_s(donor)
        size = 2 if chunk_s is None else min(self._largest_batch, max(1, math.floor(BATCH_S / chunk_s)))
        if len(donor.owes) > size // 2:
            return ()
        # Smaller batches towards the end, so that all donors finish at about the same time.
        size = min(size, max(1, len(self._waiting) // (2 * len(self._donors))))
        chunks: list[int] = []
        while self._waiting and len(chunks) < size:
            chunk = self._waiting.popleft()
            if chunk in self._missing:
                chunks.append(chunk)
        if chunks or donor.owes:
            return tuple(chunks)
        return self._stolen(donor, now)

    def _stolen(self, thief: _Donor, now: float) -> tuple[int, ...]:
        """Picks the last chunk owed by the slowest donor, if the idle donor `thief` should deliver the chunk sooner."""
        own_s = self._chunk_s(thief) or 0.0
        best, longest = None, 0.0
        for holder in self._donors.values():
            owed = [c for c in holder.owes if c in self._missing and self._askers(c) < COPIES]
            if holder is thief or not owed:
                continue
            chunk_s = self._chunk_s(holder)
            silent_s = now - holder.heard_at
            expected_s = silent_s if chunk_s is None else max(len(holder.owes) * chunk_s, silent_s)
            if expected_s > max(longest, 2 * own_s, STEAL_AFTER_S):
                best, longest = owed[-1], expected_s
        return () if best is None else (best,)

    def _fail(self, stalled: bool) -> list[Action]:
        self._over = True
        failures = "; ".join(f"{short(d.peer)}: {d.out or d.trouble}" for d in self._donors.values())
        return [Failed(failures or "there are no donors", stalled)]
