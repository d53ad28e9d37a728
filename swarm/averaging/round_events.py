"""Events, actions and rules of `RoundMachine`, the state machine of averaging rounds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swarm.vocabulary.averaging_messages import Entry, Roster, RoundControl, RoundId, WorkTally
from swarm.vocabulary.types import AnchorVersion, Codec, PeerId

ASSUMED_BANDWIDTH = 2.0**20  # Bytes per second of an unmeasured link
LONGEST_PIECE_S = 16.0  # Of 4 MiB at 2 Mbit/s: a member that is slow on purpose must not hold up rounds for long


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
    piece_bytes: int = 4 * 2**20  # Largest piece, as float32
    codecs: tuple[Codec, ...] = (Codec.NONE,)  # Codecs that the run allows in rounds, mildest first

    def piece_s(self, bandwidth: float) -> float:
        """Returns the seconds in which a piece, and a short message behind it, arrive. Bandwidth 0: unknown."""
        return min(LONGEST_PIECE_S, self.piece_bytes / (bandwidth or ASSUMED_BANDWIDTH))


class Signer(Protocol):
    """Signs our entries in rounds, and verifies entries of other replicas."""

    def sign(self, entry: Entry) -> Entry: ...

    def verify(self, entry: Entry) -> bool: ...

    def vouches(self, tally: WorkTally) -> bool: ...


@dataclass(frozen=True, slots=True)
class OtherReplica:
    """Another live replica of our module, as seen in the membership."""

    peer: PeerId
    version: AnchorVersion
    serving: bool  # False while it joins or drains; then it is not invited
    proven: bool = False  # Whether data nodes, or our last round, prove its work


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """Event: the other live replicas of our module have changed, or the tallies that prove their work."""

    others: tuple[OtherReplica, ...]
    tallies: tuple[WorkTally, ...] = ()
    leaving: bool = False  # Whether our own replica is leaving the module


@dataclass(frozen=True, slots=True)
class Worked:
    """Event, after every inner step: steps and tokens of our replica since its anchor."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MessageArrived:
    sender: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Event: the snapshot requested by `TakeSnapshot` is complete, so our pseudo-gradient is fixed."""

    round: RoundId
    steps: int
    tokens: int
    norm: float
    bandwidth: float = 0.0  # Goodput of our best link in bytes per second; 0 if unknown. Only our own timeouts use it.
    received: Mapping[PeerId, float] = field(default_factory=dict)  # Rate of each peer's pieces, in bytes per second
    longest: float = math.inf  # Largest credible norm of this round's mean

    def slowest(self, peers: Iterable[PeerId]) -> float:
        """Returns the bytes per second of our best link, or of one of these peers; one not measured may be slow."""
        rates = (self.received.get(peer, ASSUMED_BANDWIDTH) for peer in peers)
        return min([self.bandwidth or ASSUMED_BANDWIDTH, *rates])


@dataclass(frozen=True, slots=True)
class SnapshotBroken:
    """Event: our own pseudo-gradient is not finite, so this replica has returned to its anchor."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """Event: a usable piece (range of chunks) arrived from a member of the round."""

    round: RoundId
    sender: PeerId


@dataclass(frozen=True, slots=True)
class Owing:
    """Event: the set of members that could send us pieces now, and have not, has changed."""

    round: RoundId
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class PieceRejected:
    round: RoundId
    sender: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Caught:
    """Event, then action: report a replica that did something that no honest replica does."""

    peer: PeerId
    round: int
    why: str
    proof: str = ""  # Hexadecimal BLAKE3 of the signed hashes that prove it; empty if others cannot verify it
    certain: bool = True  # False if an honest replica may have done it


@dataclass(frozen=True, slots=True)
class Staged:
    """Event: the result of the exchange is complete (staged) and leads to this anchor version."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Event: the link to a replica broke, or a message to this replica could not be delivered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Event: our anchor has changed by a download, or by an outer step without a round, as the only replica."""

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """Event: the wanted anchor could not be downloaded, so our anchor is unchanged."""

    wanted: AnchorVersion
    detail: str
    implausible: tuple[PeerId, ...] = ()  # Peers with that anchor, if it is too far from ours to be honest


@dataclass(frozen=True, slots=True)
class Tick:
    """Event, at least ten times a second: time has passed."""


AttemptEvent = SnapshotTaken | SnapshotBroken | PieceArrived | Owing | PieceRejected | Staged
Event = ReplicasChanged | Worked | MessageArrived | AttemptEvent | Caught | LinkLost | CaughtUp | CatchUpFailed | Tick


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Action: send a message. If the message cannot be delivered, LinkLost follows."""

    to: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Action: fix our pseudo-gradient of one parameter fragment. Later attempts at this round reuse the snapshot."""

    round: RoundId
    fragment: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Action: end any earlier exchange and start this roster's. Keep the result until `Release` or a commit."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Action: drop the complete result of an exchange that will not be committed. At most one result is kept."""

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Release:
    """Action: end the exchange, and free the snapshots and results of rounds up to this number."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class CommitStaged:
    """Action: make the staged result the anchor, keeping work since the snapshot. Go on sending pieces to others."""

    roster: Roster
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Action: download this anchor from donors, and drop work since our anchor. CaughtUp or CatchUpFailed follows."""

    version: AnchorVersion
    donors: tuple[PeerId, ...]
    why: str
    by_most: bool  # Whether most replicas have it. If not, its distance from ours is limited by our own rounds.


Action = SendMessage | TakeSnapshot | Exchange | DropStaged | Release | CommitStaged | CatchUp | Caught
