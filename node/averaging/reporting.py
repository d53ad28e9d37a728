"""Reports of a replica's rounds and downloads, for events and status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from node.averaging.anchor.anchor import Anchor
from node.averaging.exchange.progress import HowFar
from node.averaging.round_runner import RoundSettled
from node.observability.events import (
    CatchingUp,
    CaughtUp,
    EventSink,
    Note,
    ReplicaAccused,
    Restored,
    RoundCommitted,
    RoundProgress,
)
from node.observability.status import Accusation, DownloadStatus, RoundStatus
from protocol.interfaces.clock import Clock
from swarm.averaging.round_events import Caught
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId

ACCUSED_KEPT: Final = 8
CLIPPED: Final = 0.1
"""An update that is shortened to less than this hardly counts."""
CLIPPED_ROUNDS: Final = 3
"""So many in a row and somebody is told, once."""
PROGRESS_S: Final = 1.0
"""Between two events of one download."""


class RoundNews:
    """The reports of one replica's rounds. Times are the clock's monotonic seconds."""

    def __init__(self, peer: PeerId, module: ModuleId, clock: Clock, events: EventSink) -> None:
        self._peer = peer
        self._module = str(module)
        self._clock = clock
        self._events = events
        self._last: tuple[RoundSettled, float] | None = None
        """The last round in which we had a part, and when it was."""
        self._clipped = 0
        """Rounds in a row in which our update hardly counted."""
        self._download: CatchingUp | None = None
        self._accused: list[Caught] = []
        self._began = self._told = 0.0

    @property
    def settled(self) -> RoundSettled | None:
        """Reports a committed round, the last in which we had a part."""
        return None if self._last is None else self._last[0]

    # ---- what happens ------------------------------------------------------------------------------------------------

    def restored(self, version: AnchorVersion) -> None:
        """Reports an anchor that was restored from a checkpoint."""
        self._events.emit(Restored(self._peer, self._module, version.round, version.digest.hex()))

    def exchanging(self, how_far: HowFar) -> None:
        """Reports that another tenth of an exchange is done."""
        attempt = how_far.round
        self._events.emit(
            RoundProgress(
                self._peer,
                str(attempt.module),
                attempt.number,
                attempt.attempt,
                attempt.convener,
                how_far.reduced_chunks,
                how_far.percent,
            )
        )

    def committed(self, settled: RoundSettled) -> None:
        version = settled.version
        self._last = settled, self._clock.monotonic()
        self._tell_of_clipping(settled)
        self._events.emit(
            RoundCommitted(
                self._peer,
                self._module,
                version.round,
                version.digest.hex(),
                settled.members,
                settled.contributors,
                settled.tokens,
                settled.attempts,
                settled.seconds,
                settled.sent_bytes,
                settled.received_bytes,
                settled.codec.name.lower(),
                settled.audit_sent_bytes,
                settled.audit_received_bytes,
            )
        )

    def _tell_of_clipping(self, settled: RoundSettled) -> None:
        self._clipped = self._clipped + 1 if settled.clipping < CLIPPED else 0
        if self._clipped == CLIPPED_ROUNDS:
            text = (
                f"in {CLIPPED_ROUNDS} rounds in a row this replica's update of stage {self._module} counted "
                f"less than {CLIPPED:.0%}, because the"
                " others declare far shorter ones: either it has diverged, or they lie to slow training down"
            )
            self._events.emit(Note("warning", text))

    def accused(self, caught: Caught) -> None:
        """Reports that a replica is left out of our rounds for what it did. Once a round and peer: the first reason is
        the one to read.
        """
        if self._accused and (self._accused[-1].peer, self._accused[-1].round) == (caught.peer, caught.round):
            return
        self._accused = [*self._accused, caught][-ACCUSED_KEPT:]
        self._events.emit(ReplicaAccused(self._peer, self._module, caught.peer, caught.round, caught.why, caught.proof))

    def fetching(self, wanted: AnchorVersion) -> None:
        """Reports that a download begins; `progressed` says how far it is, and `ended` that it is over."""
        self._began = self._clock.monotonic()
        self._told = self._began - PROGRESS_S
        self._download = CatchingUp(self._peer, self._module, wanted.round, 0, 0)

    def progressed(self, done: int, total: int) -> None:
        """Reports a download's progress: bytes here and bytes in all."""
        if self._download is None:
            return
        self._download = CatchingUp(self._peer, self._module, self._download.round, done, total)
        now = self._clock.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            self._events.emit(self._download)

    def ended(self) -> None:
        """Reports that a download is over, whether it came to something or not."""
        self._download = None

    def caught_up(
        self, anchor: Anchor, known: Anchor, donors: Sequence[PeerId], received: Mapping[PeerId, int]
    ) -> None:
        """Reports an anchor that was fetched: `known` is where we stood before, `received` what came from each
        donor.
        """
        chunks = (len(anchor.chunk(n)) for n, new in enumerate(anchor.hashes) if new != known.hashes[n])
        self._events.emit(
            CaughtUp(
                self._peer,
                self._module,
                anchor.version.round,
                anchor.version.digest.hex(),
                sum(chunks),
                self._clock.monotonic() - self._began,
                tuple(donors),
                tuple(received.get(donor, 0) for donor in donors),
            )
        )

    # ---- for whoever asks --------------------------------------------------------------------------------------------

    def last_round(self) -> RoundStatus | None:
        """The last round that we had a part in."""
        if self._last is None:
            return None
        settled, at = self._last
        since = round(self._clock.monotonic() - at, 1)
        return RoundStatus(len(settled.members), since, settled.codec.name.lower(), settled.codec_reason)

    def accused_lately(self) -> tuple[Accusation, ...]:
        """The replicas left out of rounds here for what they did, the latest last."""
        return tuple(Accusation(caught.peer, caught.round, caught.why) for caught in self._accused)

    def catching_up(self) -> DownloadStatus | None:
        """The download under way."""
        download = self._download
        return None if download is None else DownloadStatus(download.round, download.bytes, download.total_bytes)
