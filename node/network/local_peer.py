"""This node's current state, from which its announcements are made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from node.network.reach_status import NOT_LOOKED, Standing
from protocol.identity.keys import Identity
from protocol.identity.signed_records import RECORD_LIFETIME_S, encode_record
from protocol.interfaces.clock import Clock
from swarm.vocabulary.announcement import NO_SPEED, Announcement, Speed
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import PROTOCOL_VERSIONS, AnchorVersion, ModuleId, PeerId, PeerState, RunId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LocalPeer:
    """The mutable state of this node; read whenever an announcement is due."""

    run: RunId
    peer: PeerId
    certificate: bytes
    clock: Clock
    addresses: tuple[str, ...] = ()
    state: PeerState = PeerState.VISITING
    module: ModuleId | None = None
    slots: int = 0
    used_slots: Callable[[], int] = lambda: 0
    speed: Speed = NO_SPEED
    steps: int = 0
    anchor: AnchorVersion | None = None
    reach: Standing = NOT_LOOKED
    via: tuple[PeerId, ...] = ()  # Peers that can call it
    relay: str = ""  # Multiaddr at which it serves tunnels; or empty
    memory_bytes: int = 0  # For a module (`Room.announced`), of the machine
    device_bytes: int = 0  # Of its compute device
    visits: Callable[[], tuple[int, ...]] = tuple  # Launched by stage, of a data node
    incarnation: int = field(init=False)  # Start of this life
    _sequence: int = field(default=0, init=False)
    _began: float = field(init=False)  # Monotonic

    def __post_init__(self) -> None:
        self.incarnation = max(1, int(self.clock.wall() * 1000))
        self._began = self.clock.monotonic()

    def take(self, module: ModuleId) -> None:
        """Takes a module; what is known of its replica here is still to come."""
        self.state, self.module = PeerState.JOINING, module
        self.slots, self.used_slots, self.visits = 0, lambda: 0, tuple
        self.speed, self.steps, self.anchor = NO_SPEED, 0, None

    def announcement(self) -> Announcement:
        """A new announcement of the current state."""
        # The sequence counts lived time, so that it rises whatever is done to the wall clock, which dates only the
        # expiry.
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
            tokens_per_second=self.speed.tokens_per_s,
            quadratic_share=self.speed.quadratic_share,
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
            visits=self.visits(),
        )


class OwnRecord:
    """This node's signed record, always of the current state."""

    def __init__(self, own: LocalPeer, identity: Identity) -> None:
        self._own = own
        self._identity = identity
        self._last = b""  # The last encodable one
        self.is_encodable = True

    def fresh(self) -> bytes:
        """A new signed record, or the last one while the state cannot be encoded."""
        return self.of(self._own.announcement())

    def of(self, announcement: Announcement) -> bytes:
        """The signed record of this announcement of ours, as `fresh`."""
        try:
            self._last = encode_record(announcement, self._identity)
        except ProtocolViolation as error:
            if self.is_encodable:
                log.warning(
                    "what this node has to say of itself cannot be said; others go by the last record: %s", error
                )
            self.is_encodable = False
        else:
            self.is_encodable = True
        return self._last
