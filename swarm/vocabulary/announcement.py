"""A peer's announcement of itself, as plain data (`protocol.identity.signed_records` signs it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, PeerState, RunId, VersionRange

MAX_VISITED_STAGES: Final = 64
"""Stages whose visits an announcement may count, so that it fits into a record."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a peer computes its module, forward and backward together."""

    tokens_per_s: float = 0.0  # 0: unknown
    quadratic_share: float = 0.0  # Attention's cost in tokens per squared token; 0 if microbatches are alike

    def seconds(self, tokens: float, squares: float) -> float:
        """Seconds for a microbatch of so many tokens with this sum of squares, for a known speed."""
        return (tokens + self.quadratic_share * squares) / self.tokens_per_s


NO_SPEED: Final = Speed()


@dataclass(frozen=True, slots=True)
class Announcement:
    """One peer's current record. The planner believes its figures only until it has its own."""

    run: RunId
    peer: PeerId
    state: PeerState
    module: ModuleId | None  # None exactly if VISITING
    addresses: tuple[str, ...]  # `host:port`, most direct first, at most 8. Empty if it cannot be dialled.
    certificate: bytes  # DER, signed by the run's authority; its libp2p extension proves `peer`
    versions: VersionRange
    tokens_per_second: float  # Forward and backward; 0 before. With documents, in tokens of cost (`quadratic_share`).
    slots: int
    free_slots: int
    steps: int  # Inner steps
    anchor: AnchorVersion | None  # None while it has none
    incarnation: int  # Start of the process, Unix time in ms, from 1
    sequence: int  # Strictly increasing, in ms from `incarnation` on
    expires_at: float  # Unix time in seconds
    via: tuple[PeerId, ...] = ()  # Peers that can call it. At most 4.
    quadratic_share: float = 0.0  # Measured; see `Speed`
    relay: str = ""  # Multiaddr at which it serves tunnels, at most 128 characters

    memory_bytes: int = 0  # For a module; 0 if every module fits, or if unknown
    device_bytes: int = 0  # Of its compute device; 0 if that is the machine's, or unknown
    visits: tuple[int, ...] = ()
    """Visits to each stage after stage 0 that a data node launched in this life. Empty with more than
    MAX_VISITED_STAGES of them, where each data node balances its own."""

    @property
    def speed(self) -> Speed:
        return Speed(self.tokens_per_second, self.quadratic_share)

    @property
    def is_reachable(self) -> bool:
        return bool(self.addresses or self.via)
