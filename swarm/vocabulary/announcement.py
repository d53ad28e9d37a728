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

    tokens_per_s: float = 0.0
    """0 when not known."""
    quadratic_share: float = 0.0
    """Cost of a document's attention, in tokens per square of its tokens; 0 if all microbatches are alike."""

    def seconds(self, tokens: float, squares: float) -> float:
        """Seconds for a microbatch of so many tokens with this sum of squares, for a known speed."""
        return (tokens + self.quadratic_share * squares) / self.tokens_per_s


NO_SPEED: Final = Speed()
"""Not known."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One peer's current record. The planner believes its figures only until it has its own."""

    run: RunId
    peer: PeerId
    state: PeerState
    module: ModuleId | None
    """None exactly when `state` is VISITING."""
    addresses: tuple[str, ...]
    """`host:port` of its gRPC server, most direct first, at most 8. Empty if it cannot be dialled (see `via`)."""
    certificate: bytes
    """DER of the P-256 TLS certificate that the run's authority signed and whose libp2p extension proves `peer`."""
    versions: VersionRange
    tokens_per_second: float
    """Measured throughput of the module, forward and backward; 0 before. With documents, in tokens of cost
    (`quadratic_share`)."""
    slots: int
    free_slots: int
    steps: int
    """Inner steps this replica has taken."""
    anchor: AnchorVersion | None
    """The agreed state of its module that it stands on; None while it has none."""
    incarnation: int
    """Start of the announcing process, Unix time in ms, from 1. Another one remembers nothing."""
    sequence: int
    """Strictly increasing, in ms of this life from `incarnation` on: an older record never replaces a newer one."""
    expires_at: float
    """Unix time in seconds."""
    via: tuple[PeerId, ...] = ()
    """Peers through which a peer without addresses can be called. At most 4."""
    quadratic_share: float = 0.0
    """What this peer has measured that attention costs it; see `Speed`."""
    relay: str = ""
    """libp2p multiaddr at which it serves tunnels, at most 128 characters; empty if it does not."""

    memory_bytes: int = 0
    """Memory for a module, in bytes; 0 if every module fits, or if unknown."""
    device_bytes: int = 0
    """The memory that its compute device has for a module; 0 where that is the machine's, or when it does not say."""
    visits: tuple[int, ...] = ()
    """Of a data node: visits to each stage after stage 0 by the microbatches that it launched in this life. Empty in a
    run with more than MAX_VISITED_STAGES of them, where each data node balances its own."""

    @property
    def speed(self) -> Speed:
        return Speed(self.tokens_per_second, self.quadratic_share)

    @property
    def is_reachable(self) -> bool:
        """Whether it says how the peer is reached: dialled, or called."""
        return bool(self.addresses or self.via)
