"""A peer's announcement of itself, as plain data. `protocol.identity.signed_records` turns it into signed bytes.

It stands alone because directory, links and every decision speak of announcements, and messages do not.
"""

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
    """The cost of a document's attention, in tokens for each square of its tokens; 0 where all microbatches are
    alike."""

    def seconds(self, tokens: float, squares: float) -> float:
        """For a microbatch of so many tokens, in documents whose tokens have this sum of squares. It is known how fast
        the peer is."""
        return (tokens + self.quadratic_share * squares) / self.tokens_per_s


NO_SPEED: Final = Speed()
"""Not known."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One peer's current record: which module it hosts, where it is reached, how fast it is, how far it has come.

    Figures are the peer's own claims. The planner believes them only until it has measurements of its own.
    """

    run: RunId
    peer: PeerId
    state: PeerState
    module: ModuleId | None
    """None exactly when `state` is VISITING."""
    addresses: tuple[str, ...]
    """`host:port` of its gRPC server, most direct first; at most 8. Empty for a peer that cannot be dialled; then see
    `via`."""
    certificate: bytes
    """DER of the P-256 TLS certificate that the run's authority signed and whose libp2p extension proves `peer`."""
    versions: VersionRange
    tokens_per_second: float
    """Measured forward plus backward throughput of the module on this peer; 0 when not yet measured. Where documents
    differ, of the tokens that a microbatch costs (`quadratic_share`)."""
    slots: int
    free_slots: int
    steps: int
    """Inner steps this replica has taken."""
    anchor: AnchorVersion | None
    """The agreed state of its module that it stands on; None while it has none."""
    incarnation: int
    """Unix time in milliseconds at which the announcing process started, from 1: another one is another life, which
    remembers nothing."""
    sequence: int
    """Milliseconds of this life so far, counted from `incarnation` by a clock that never goes back, strictly
    increasing: while a record holds, an older one never replaces it."""
    expires_at: float
    """Unix time in seconds."""
    via: tuple[PeerId, ...] = ()
    """Peers that a peer without addresses keeps links to: through them it can be called, and then opens a link itself.
    At most 4."""
    quadratic_share: float = 0.0
    """What this peer has measured that attention costs it; see `Speed`."""
    relay: str = ""
    """The libp2p multiaddr at which this peer serves tunnels for others, at most 128 characters; empty when it does
    not."""

    memory_bytes: int = 0
    """The memory of its machine that it has for a module, whatever it hosts now; 0 when there is room for
    every module of the run, or when it does not say."""
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
