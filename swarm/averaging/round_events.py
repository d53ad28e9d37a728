"""Events and actions of the round machine, and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swarm.compression.round_codecs import FLOAT32, CodecLevel, RoundCodecs
from swarm.vocabulary.averaging_messages import Entry, Roster, RoundControl, RoundId
from swarm.vocabulary.types import AnchorVersion, PeerId


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The manifest's rules for rounds, and timeouts in seconds."""

    inner_steps: int  # Mean inner steps per replica after which every fragment has had a round
    fragments: int
    chunks: int  # Chunks of all parameters of the module
    longest_s: float  # Time since the last round after which any work makes a round due
    answer_s: float = 2.0  # Timeout of an invited replica that does not answer
    prepare_s: float = 30.0  # Timeout of a replica that has accepted and prepares its entry
    silence_s: float = 2.0  # Silence during the exchange after which a member or leader counts as lost
    pulse_s: float = 0.5
    step_tokens: int = 2**20  # Approximate tokens of one inner step of one replica
    chunk_bytes: int = 4 * 2**20
    levels: tuple[CodecLevel, ...] = (FLOAT32,)  # Codec levels that the run allows in rounds, mildest first

    @property
    def codecs(self) -> tuple[RoundCodecs, ...]:
        """Codecs that the run's rosters may name."""
        return tuple(level.codecs for level in self.levels)


class Signer(Protocol):
    """Signs our entries and verifies those of others."""

    def sign(self, entry: Entry) -> Entry: ...

    def verify(self, entry: Entry) -> bool: ...


@dataclass(frozen=True, slots=True)
class OtherReplica:
    """A live replica of our module, as membership shows it."""

    peer: PeerId
    version: AnchorVersion
    serving: bool  # False while it joins or drains; then it is not invited


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The membership of our module, without ourselves, has changed."""

    others: tuple[OtherReplica, ...]


@dataclass(frozen=True, slots=True)
class Worked:
    """Our replica's work since its anchor; sent after every inner step."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message about a round from another replica."""

    sender: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The requested snapshot is complete: the pseudo-gradient is fixed."""

    round: RoundId
    steps: int
    tokens: int
    norm: float
    bandwidth: float = 0.0  # Goodput of our best link in bytes per second; 0 if unknown. Only our own timeouts use it.
    # Measured rates of other members' pieces, in bytes per second
    received: Mapping[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotBroken:
    """Our own update is not finite. The replica has returned to its anchor."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """A member's piece arrived and is usable."""

    round: RoundId
    sender: PeerId


@dataclass(frozen=True, slots=True)
class Owing:
    """Members that could send us pieces now and have not; reported when the set changes."""

    round: RoundId
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class PieceRejected:
    """A member sent an unusable piece."""

    round: RoundId
    sender: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Caught:
    """A replica did something that no honest replica does. As an action: report it."""

    peer: PeerId
    round: int
    why: str
    proof: str = (
        ""  # BLAKE3 of the signed hashes that prove it, hexadecimal; empty without a proof that others can verify
    )
    certain: bool = True  # False if an honest replica may have done it


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of the exchange is complete and leads to this anchor."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a replica broke, or a message could not be delivered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Our anchor has changed: by a download, or by an outer step of a replica without others."""

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """The anchor could not be downloaded; ours is unchanged."""

    wanted: AnchorVersion
    detail: str
    implausible: tuple[PeerId, ...] = ()  # Peers with that anchor, if it is too far from ours to be honest


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; at least ten times a second."""


AttemptEvent = SnapshotTaken | SnapshotBroken | PieceArrived | Owing | PieceRejected | Staged
Event = ReplicasChanged | Worked | MessageArrived | AttemptEvent | Caught | LinkLost | CaughtUp | CatchUpFailed | Tick


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message. If it cannot be delivered, LinkLost follows."""

    to: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Fix the pseudo-gradient of a fragment. Attempts with the same number and base reuse it."""

    round: RoundId
    fragment: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Start the exchange of this roster and end the previous one. Keep its result until `Release` or a commit."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Drop a complete result that will not be committed. At most one is kept."""

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Release:
    """End the exchange, and forget snapshots and results of rounds up to this number."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class CommitStaged:
    """Make the staged result the anchor, and keep the work since the snapshot. Continue to send to other members."""

    roster: Roster
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Download this anchor from donors, and drop the work since our own. CaughtUp or CatchUpFailed follows."""

    version: AnchorVersion
    donors: tuple[PeerId, ...]
    why: str
    by_most: bool  # Whether most replicas have it. If not, check its distance from ours.


Action = SendMessage | TakeSnapshot | Exchange | DropStaged | Release | CommitStaged | CatchUp | Caught
