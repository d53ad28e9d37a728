"""Current state of this node, from which its announcements are made."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from node.network.reach_status import NOT_LOOKED, Standing
from protocol.identity.keys import Identity
from protocol.identity.signed_records import RECORD_LIFETIME_S, encode_record
from protocol.interfaces.clock import Clock
from swarm.averaging.proven_work import Credit
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PROTOCOL_VERSIONS, AnchorVersion, ModuleId, PeerId, PeerState, Route, RunId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LocalPeer:
    """State that this node announces to peers: module, load, addresses, reachability. Read for each announcement."""

    run: RunId
    peer: PeerId
    certificate: bytes
    clock: Clock
    addresses: tuple[str, ...] = ()
    state: PeerState = PeerState.VISITING
    module: ModuleId | None = None
    slots: int = 0
    used_slots: Callable[[], int] = lambda: 0
    speed: float = 0.0  # In tokens of cost per second, both passes together; 0 if unknown
    share: float = 1.0  # Of the time in which the devices may compute
    steps: int = 0
    anchor: AnchorVersion | None = None
    reach: Standing = NOT_LOOKED
    via: tuple[PeerId, ...] = ()  # Peers that can pass calls on to it
    relay: str = ""  # Multiaddr at which it relays tunnels; empty if it does not
    memory_bytes: int = 0  # Main memory free for a module (`FreeMemory.announced`)
    device_bytes: int = 0  # Memory free on the compute device
    name: str = ""  # Chosen by the owner, for people
    credit: Credit | None = None  # Work that others have signed, in this run
    visits: Callable[[], tuple[int, ...]] = tuple  # Microbatches that a data node launched, by stage
    route: Route = ()  # Of a node with a whole path
    home: Mapping[ModuleId, PeerId] = field(default_factory=dict)  # Its peers on that path
    incarnation: int = field(init=False)  # Start time of this process, in Unix milliseconds
    _sequence: int = field(default=0, init=False)
    _began: float = field(init=False)  # Monotonic

    def __post_init__(self) -> None:
        self.incarnation = max(1, int(self.clock.wall() * 1000))
        self._began = self.clock.monotonic()

    def take(self, module: ModuleId) -> None:
        """Sets the hosted module and the state JOINING, and clears the figures of the previous module."""
        self.state, self.module = PeerState.JOINING, module
        self.slots, self.used_slots, self.visits = 0, lambda: 0, tuple
        self.speed, self.steps, self.anchor = 0.0, 0, None

    def announcement(self) -> Announcement:
        """Makes a new announcement of this node's current state."""
        # The sequence counts process time, so it rises even if the wall clock, which dates the expiry, is set back.
        lived_ms = int((self.clock.monotonic() - self._began) * 1000)
        self._sequence = max(self._sequence + 1, self.incarnation + lived_ms)
        return Announcement(
            run=self.run,
            peer=self.peer,
            state=self.state,
            module=None if self.state is PeerState.VISITING else self.module,
            addresses=self.addresses,
            certificate=self.certificate,
            versions=PROTOCOL_VERSIONS,
            tokens_per_second=self.share * self.speed,
            slots=self.slots,
            free_slots=max(0, self.slots - self.used_slots()),
            steps=self.steps,
            anchor=self.anchor,
            incarnation=self.incarnation,
            sequence=self._sequence,
            expires_at=self.clock.wall() + RECORD_LIFETIME_S,
            via=self.via,
            relay=self.relay,
            memory_bytes=self.memory_bytes,
            device_bytes=self.device_bytes,
            visits=() if self.state is PeerState.VISITING else self.visits(),
            route=self.route if self.state is not PeerState.VISITING and self.module == ModuleId(0) else (),
        )


class OwnRecord:
    """Signer of this node's records, which are announcements of its current state."""

    def __init__(self, own: LocalPeer, identity: Identity) -> None:
        self._own, self._identity = own, identity
        self._last = b""  # Last record that could be encoded
        self.is_encodable = True

    def fresh(self) -> bytes:
        """Signs a record of the current state; returns the last record while the state cannot be encoded."""
        return self.of(self._own.announcement())

    def of(self, announcement: Announcement) -> bytes:
        """Signs a record of this node's `announcement`; returns the last record if it cannot be encoded."""
        try:
            self._last = encode_record(announcement, self._identity)
        except ProtocolViolation as error:
            if self.is_encodable:
                log.warning("cannot encode this node's record; peers keep the last one: %s", error)
            self.is_encodable = False
        else:
            self.is_encodable = True
        return self._last
