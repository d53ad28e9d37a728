"""The events and actions of the round machine, and its rules. Plain data; `swarm.averaging.round_machine` is the
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swarm.compression.round_codecs import FLOAT32, RoundCodecs, Rung
from swarm.vocabulary.averaging_messages import Entry, Roster, RoundControl, RoundId
from swarm.vocabulary.types import AnchorVersion, PeerId


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The manifest's rules of rounds, and the limits of patience in seconds."""

    inner_steps: int
    """A round of each fragment is due after so many inner steps of work by every replica on average."""
    fragments: int
    chunks: int
    """Of the whole module's state vector (parameters only)."""
    longest_s: float
    """A round is due after so long, however little has been done, provided that something has."""
    answer_s: float = 2.0
    """An invited replica from which nothing has come for so long is left out."""
    prepare_s: float = 30.0
    """One that has said it prepares gets so long (the grace for the slow)."""
    silence_s: float = 2.0
    """A member (or convener) of which nothing is heard for so long during the exchange is taken for silent."""
    pulse_s: float = 0.5
    step_tokens: int = 2**20
    """Of one inner step of one replica, about."""
    chunk_bytes: int = 4 * 2**20
    """Of one chunk on the wire at most: how long a piece may take follows from it."""
    rungs: tuple[Rung, ...] = (FLOAT32,)
    """The codecs that the run allows in rounds, mildest first, with what they make of float32."""

    @property
    def codecs(self) -> tuple[RoundCodecs, ...]:
        """The codecs that the run's rosters may name."""
        return tuple(rung.codecs for rung in self.rungs)


class Seal(Protocol):
    """Signs our entries and checks the others'; there is no cryptography here."""

    def sign(self, entry: Entry) -> Entry:
        """The entry with our signature."""
        ...

    def verify(self, entry: Entry) -> bool:
        """Whether the entry's peer has signed it."""
        ...


@dataclass(frozen=True, slots=True)
class OtherReplica:
    """A live replica of our module as the membership view has it."""

    peer: PeerId
    version: AnchorVersion
    """As announced."""
    serving: bool
    """False while it joins or drains: it gets no invitation."""


# ---- what happens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """The membership view of our module has changed; ourselves not included."""

    others: tuple[OtherReplica, ...]


@dataclass(frozen=True, slots=True)
class Worked:
    """Our replica has worked: its work since our anchor, in sum; after every inner step."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message about a round has come from another replica."""

    sender: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The snapshot that was asked for is taken: the pseudo-gradient is fixed."""

    round: RoundId
    steps: int
    tokens: int
    norm: float
    bandwidth: float = 0.0
    """Bytes per second of our own best link; 0 when not known. For our own patience and choices: nobody else believes
    it."""
    received: Mapping[PeerId, float] = field(default_factory=dict)
    """Bytes per second at which other members' pieces have come in."""


@dataclass(frozen=True, slots=True)
class SnapshotBroken:
    """The snapshot could not be taken: our own update is not finite. The replica has gone back to its anchor."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class PieceCame:
    """A piece from a member arrived and was of use."""

    round: RoundId
    sender: PeerId


@dataclass(frozen=True, slots=True)
class Owing:
    """Which members still owe us pieces that they could send now: contributions to our shard, or results for which they
    have everything. Said whenever it changes. (A reducer that itself waits for others is not listed when that is
    known.)"""

    round: RoundId
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class PieceRejected:
    """A member sent what cannot be used; why is for the log."""

    round: RoundId
    sender: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Caught:
    """A replica did what no honest one does: an audit of a round that has been committed shows it, or what it sent
    us."""

    peer: PeerId
    round: int
    why: str
    """For people."""
    proof: str = ""
    """BLAKE3 over the signed hashes behind it, hexadecimal; empty when nobody else could be shown it."""
    certain: bool = True
    """False for what may befall an honest one: it was asked several times and did not answer, or accuses others of what
    we do not see."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The whole result of the exchange is here; it would make this anchor."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a replica broke, or a message to it could not be delivered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """We stand on another anchor now: a download, or the outer step of a replica without company."""

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """The anchor could not be had; we stand where we stood."""

    wanted: AnchorVersion
    detail: str
    astray: tuple[PeerId, ...] = ()
    """Who stands there, when it is farther from ours than an honest one can be."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; comes at least ten times a second."""


Event = (
    ReplicasChanged
    | Worked
    | Arrived
    | SnapshotTaken
    | SnapshotBroken
    | PieceCame
    | Owing
    | PieceRejected
    | Caught
    | Staged
    | LinkLost
    | CaughtUp
    | CatchUpFailed
    | Tick
)

# ---- what is to be done ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message; when it cannot be delivered, LinkLost follows."""

    to: PeerId
    message: RoundControl


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Fix the pseudo-gradient of a fragment: what the replica has done since its anchor, kept for every attempt at this
    round `number`. A later TakeSnapshot for the same number and base gives the same one again ("with the same
    pseudo-gradients")."""

    round: RoundId
    fragment: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Begin the exchange with this roster; whatever exchange was under way ends without a trace (its staged result, if
    it was complete, is kept until `Release` of its number or a commit). Pieces of this attempt may have come before
    it."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Drop a complete result that will not be committed by us: it is of an attempt that is over, or a later one has
    replaced it. At most one is kept, so that there is always room to make the next.
    """

    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Release:
    """End the exchange and forget the snapshots and everything staged for rounds up to this number. A number below that
    of the attempt under way only ends the exchange: its snapshot and staged results are kept for the next attempt."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class CommitStaged:
    """Make the staged result of this version the anchor, and carry the work done since the snapshot over to it. All
    snapshots and staged results are forgotten, but pieces that others still need of this exchange go on being sent
    until the next one begins."""

    roster: Roster
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Get this anchor from those who have it. Ends with CaughtUp or CatchUpFailed. Work since our own anchor is lost,
    and counted."""

    version: AnchorVersion
    donors: tuple[PeerId, ...]
    why: str
    by_most: bool
    """Most replicas stand there. Else it is held against how far ours has come."""


@dataclass(frozen=True, slots=True)
class Accuse:
    """Tell whoever watches that a replica has sent what no honest one sends, and that less is asked of it from
    now on.
    """

    caught: Caught


Action = Tell | TakeSnapshot | Exchange | DropStaged | Release | CommitStaged | CatchUp | Accuse
