"""A peer's announcement (module, addresses, speed), as plain data; `protocol.identity.signed_records` signs it."""

from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, PeerState, RunId, VersionRange

MAX_VISITED_STAGES: Final = 64  # Stages whose visits fit into an announcement


@dataclass(frozen=True, slots=True)
class Announcement:
    """Record that a peer publishes about itself. Planners use its speed only until they have measured the peer."""

    run: RunId
    peer: PeerId
    state: PeerState
    module: ModuleId | None  # None exactly if VISITING
    addresses: tuple[str, ...]  # `host:port`, most direct first, at most 8; empty if it cannot be dialled
    certificate: bytes  # DER, signed by the run's authority; the libp2p extension proves `peer`
    versions: VersionRange
    tokens_per_second: float  # Forward and backward, in tokens of cost (`VisitCost`); 0 if unknown
    slots: int
    free_slots: int
    steps: int  # Inner steps
    anchor: AnchorVersion | None
    incarnation: int  # Start of the process, Unix time in ms, from 1
    sequence: int  # Strictly increasing: `incarnation` + ms since then
    expires_at: float  # Unix time in seconds
    via: tuple[PeerId, ...] = ()  # At most 4 peers that can ask it to dial back
    relay: str = ""  # Multiaddr at which it relays, at most 128 characters

    memory_bytes: int = 0  # Memory of the machine for a module; 0 if every module fits, or if unknown
    device_bytes: int = 0  # Memory of the compute device; 0 if shared with the machine, or unknown
    # Data nodes: visits launched in this life, for each stage after stage 0. Empty if there are more than
    # MAX_VISITED_STAGES stages; then each data node balances only its own visits.
    visits: tuple[int, ...] = ()
    route: tuple[int, ...] = ()  # Data nodes with a whole path: its expert at each stage after stage 0

    @property
    def is_reachable(self) -> bool:
        return bool(self.addresses or self.via)
