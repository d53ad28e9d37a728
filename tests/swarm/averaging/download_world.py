"""Joiners and donors of one state in virtual time: each donor has an uplink that its askers share, and faults as a test
wishes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from swarm.averaging.chunk_download import (
    Action,
    Ask,
    ChunkCame,
    ChunkLost,
    ChunksRefused,
    Complete,
    DonorLost,
    Download,
    Event,
    Failed,
    Report,
    Tick,
)
from swarm.simulation.virtual_network import VirtualTime
from swarm.vocabulary.averaging_messages import StateRefusal
from swarm.vocabulary.types import PeerId

CHUNK_BYTES = 2**20
TICK_S = 0.2
LATENCY_S = 0.03
QUEUE_OF_ASKER = 32


@dataclass
class Donor:
    """One that serves its askers in turn, chunk by chunk. Times are when a fault sets in."""

    peer: PeerId
    bytes_per_s: float = 20e6
    wrong: float = 0.0
    """Probability that a chunk does not match."""
    freezes_at: float = float("inf")
    thaws_at: float = float("inf")
    gone_at: float = float("inf")
    dies_at: float = float("inf")
    breaks: float = 0.0
    """Probability that the link breaks in place of a chunk."""
    busy: float = 0.0
    """Probability that a request is refused as busy."""
    served: Counter[str] = field(default_factory=Counter)
    queues: dict[str, list[int]] = field(default_factory=dict)
    sending: bool = False


class Joiner:
    def __init__(self, name: str, world: World, chunks: int, here: set[int]) -> None:
        self.name = name
        self.chunks = set(here)
        self.reports: list[Report] = []
        self.end: Complete | Failed | None = None
        self._world = world
        self.plan = Download(chunks, CHUNK_BYTES, here, list(world.donors), world.random)

    def handle(self, event: Event) -> None:
        if self.end is not None:
            return
        if isinstance(event, ChunkCame) and event.matches:
            self.chunks.add(event.chunk)
        for action in self.plan.handle(event, self._world.time.now):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Ask(donor, chunks):
                assert 1 <= len(chunks) <= 16
                assert len(set(chunks)) == len(chunks)
                assert not self.chunks & set(chunks)
                self._world.after_latency(lambda: self._world.asked(self, donor, chunks))
            case Report():
                self.reports.append(action)
            case Complete() | Failed():
                self.end = action


class World:
    def __init__(self, donors: list[Donor], seed: int) -> None:
        self.time = VirtualTime()
        self.random = Random(seed)
        self.donors = {donor.peer: donor for donor in donors}
        self.joiners: dict[str, Joiner] = {}

    def join(self, chunks: int, here: set[int] | None = None) -> Joiner:
        joiner = Joiner(f"joiner {len(self.joiners)}", self, chunks, here or set())
        self.joiners[joiner.name] = joiner
        self._tick(joiner)
        return joiner

    def run(self, seconds: float) -> None:
        self.time.run_until(seconds, lambda: all(joiner.end for joiner in self.joiners.values()))

    def after_latency(self, what: Callable[[], None]) -> None:
        self.time.after(LATENCY_S * self.random.uniform(1.0, 2.0), what)

    def _tick(self, joiner: Joiner) -> None:
        joiner.handle(Tick())
        if joiner.end is None:
            self.time.after(TICK_S, lambda: self._tick(joiner))

    def asked(self, joiner: Joiner, peer: PeerId, chunks: tuple[int, ...]) -> None:
        donor = self.donors[peer]
        now = self.time.now
        if now >= donor.dies_at:
            self.after_latency(lambda: joiner.handle(DonorLost(peer)))
        elif self._frozen(donor):
            return
        elif now >= donor.gone_at:
            self.after_latency(lambda: joiner.handle(ChunksRefused(peer, chunks, StateRefusal.GONE)))
        else:
            queue = donor.queues.setdefault(joiner.name, [])
            if len(queue) + len(chunks) > QUEUE_OF_ASKER or self.random.random() < donor.busy:
                self.after_latency(lambda: joiner.handle(ChunksRefused(peer, chunks, StateRefusal.BUSY)))
                return
            queue.extend(chunks)
            self._send_next(donor)

    def _frozen(self, donor: Donor) -> bool:
        return donor.freezes_at <= self.time.now < donor.thaws_at

    def _send_next(self, donor: Donor) -> None:
        asker = next((name for name, queue in donor.queues.items() if queue), None)
        if donor.sending or asker is None or self._frozen(donor) or self.time.now >= donor.dies_at:
            return
        queue = donor.queues.pop(asker)
        donor.queues[asker] = queue  # to the end: askers take turns
        chunk = queue.pop(0)
        donor.sending = True
        self.time.after(CHUNK_BYTES / donor.bytes_per_s, lambda: self._sent(donor, self.joiners[asker], chunk))

    def _sent(self, donor: Donor, joiner: Joiner, chunk: int) -> None:
        donor.sending = False
        peer = donor.peer
        if self.time.now >= donor.dies_at:
            joiner.handle(ChunkLost(peer, chunk))
            joiner.handle(DonorLost(peer))
            return
        if self._frozen(donor):
            return
        if self.random.random() < donor.breaks:
            donor.queues[joiner.name] = []
            self.after_latency(lambda: joiner.handle(DonorLost(peer)))
        else:
            donor.served[joiner.name] += CHUNK_BYTES
            matches = self.random.random() >= donor.wrong
            self.after_latency(lambda: joiner.handle(ChunkCame(peer, chunk, matches)))
        self._send_next(donor)
