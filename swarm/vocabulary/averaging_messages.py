"""The messages among the replicas of one module about a round and about their state (DESIGN section 5)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated

from swarm.vocabulary.bounds import Detail, Distinct, Inherits, Length, NonNegative, Range
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion, Codec, Count, Digest, ModuleId, PeerId, Signature

MAX_ATTEMPTS = 64
MAX_MEMBERS = 256
MAX_MEASURED = 16
"""Measured links in an entry: each of 256 members appears in 16 others, and the roster stays a small frame."""
MAX_RATE = 24  # 280 TB/s
MAX_CHUNKS = 2**20  # Of a module's state
MAX_REQUESTED_CHUNKS = 64

Peers = Annotated[tuple[PeerId, ...], Length(0, MAX_MEMBERS), Distinct()]
ChunkNumber = Annotated[int, Range(0, MAX_CHUNKS - 1)]
ChunkNumbers = Annotated[tuple[ChunkNumber, ...], Length(1, MAX_REQUESTED_CHUNKS), Distinct()]


@dataclass(frozen=True, slots=True)
class RoundId:
    """One attempt at one round of one module, named by who convenes it. A higher attempt replaces a lower one."""

    module: ModuleId
    number: Annotated[int, Range(1, MAX_ROUND)]  # The `AnchorVersion.round` of its result
    attempt: Annotated[int, Range(0, MAX_ATTEMPTS)]
    convener: PeerId


# ---- before the exchange ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """A replica to those who may convene the next round: the work it has done since its anchor."""

    module: ModuleId
    base: AnchorVersion
    steps: Count
    tokens: Count


@dataclass(frozen=True, slots=True)
class Invitation:
    """The convener opens a round: "who has worked from this anchor?" """

    round: RoundId
    base: AnchorVersion


@dataclass(frozen=True, slots=True)
class Accepting:
    """ "I am here and prepare my entry": sent at once, so that a slow replica is not taken for a dead one."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The measured rate at which the tensors of another replica came in."""

    mark: Annotated[int, Range(0, 2**24 - 1)]  # Of the peer (`swarm.averaging.trust.mark_of`)
    rate: Annotated[int, Range(1, MAX_RATE)]  # 4 to this power bytes per second


@dataclass(frozen=True, slots=True)
class Entry:
    """A replica is ready: its pseudo-gradient is fixed. Signed, so that the leader cannot change it."""

    peer: PeerId
    round: RoundId
    base: AnchorVersion
    steps: Count
    tokens: Count
    norm: NonNegative  # Of the fragment's pseudo-gradient; never exceeded by what is sent later
    measured: Annotated[tuple[LinkRate, ...], Length(0, MAX_MEASURED)]  # Of others
    staged: AnchorVersion | None
    """The complete result of an earlier attempt, if any: the leader settles on it, as a peer may have committed it."""
    signature: Signature = b""  # Over all of the above and the run (`protocol.identity.signatures`)


class DeclineReason(enum.Enum):
    OTHER_ANCHOR = 1  # The one in `Declined.version`
    PAST = 2  # This round or a later one is committed already
    OTHER_CONVENER = 3  # A higher attempt, or a leader earlier in hash order
    NOT_READY = 4  # Joining, leaving, or catching up
    BROKEN = 5  # Its own update is not finite


@dataclass(frozen=True, slots=True)
class Declined:
    round: RoundId
    reason: DeclineReason
    version: AnchorVersion  # The decliner's


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a roster. It reduces the chunks from `first_chunk` up to, not including, `end_chunk` (maybe none)."""

    peer: PeerId
    first_chunk: int
    end_chunk: int
    coefficient: float
    """Factor of its pseudo-gradient: token share x clipping. 0: it sends nothing and receives the result."""
    norm: float  # Declared. A reducer rejects a member whose pieces together exceed it.
    share: float = 0.0  # The coefficient without clipping


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """The leader fixes the members, and the exchange begins. Every member derives the `Roster` from the entries."""

    round: RoundId
    base: AnchorVersion
    entries: Annotated[tuple[Entry, ...], Length(1, MAX_MEMBERS), Inherits(("round", "base"))]
    codec: Codec = Codec.NONE  # Of contributions; that of results follows (`swarm.compression.round_codecs`)
    codec_reason: Detail = ""

    def fault(self) -> str | None:
        """The reason why no leader may send this. `swarm.averaging.roster.objection` checks the signatures."""
        once = len({entry.peer for entry in self.entries}) == len(self.entries)
        return None if once else "a member is named twice"


@dataclass(frozen=True, slots=True)
class Roster:
    """The members and what each reduces, as `make_roster` derives it from the signed entries."""

    round: RoundId
    base: AnchorVersion
    members: tuple[Member, ...]
    steps: int  # Of the result
    tokens: int  # Of the result
    codec: Codec = Codec.NONE
    codec_reason: str = ""

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.members)

    @property
    def largest_norm(self) -> float:
        """The largest possible norm of the weighted mean, by the triangle inequality."""
        return math.fsum(member.coefficient * member.norm for member in self.members)


# ---- the exchange ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AboutPiece:
    """What is said of one piece: the chunks from `first_chunk` up to, not including, `end_chunk`; at least one."""

    round: RoundId
    first_chunk: ChunkNumber
    end_chunk: Annotated[int, Range(1, MAX_CHUNKS)]

    def fault(self) -> str | None:
        if self.first_chunk < self.end_chunk:
            return None
        return f"there are no chunks from {self.first_chunk} to {self.end_chunk}"


@dataclass(frozen=True, slots=True)
class Contribution(_AboutPiece):
    """The sender's encoded pseudo-gradient of these chunks (1-D), to their reducer, later to auditors."""

    signature: Signature = field(default=b"", compare=False)
    """Over all this and the tensor's hash; not part of the piece's identity."""


@dataclass(frozen=True, slots=True)
class Reduced(_AboutPiece):
    """From the member that reduces these chunks, to every other: the encoded weighted mean, the same bytes to all."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A heartbeat between leader and members, twice a second and on changes."""

    round: RoundId
    waiting_for: Peers = ()  # Members whose pieces are overdue
    rejected: Peers = ()  # Members whose pieces are not finite, exceed the declared norm, or cannot be decoded


@dataclass(frozen=True, slots=True)
class Prepared:
    """A member to the convener: the whole result is here, and this is the anchor it leads to."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """A majority of the roster has the same result. Prepared members apply it, others get it from the `holders`."""

    round: RoundId
    version: AnchorVersion
    holders: Peers


@dataclass(frozen=True, slots=True)
class Dissolved:
    """The convener gives this attempt up; another one may follow."""

    round: RoundId
    detail: Detail


# ---- audits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditRequest(_AboutPiece):
    """After the commit: asks a piece's reducer for Evidence, another contributor for its Contribution."""


@dataclass(frozen=True, slots=True)
class SignedHash:
    """A member's signature that it has contributed the tensor with this hash to a piece."""

    peer: PeerId
    hash: Digest  # BLAKE3 of the encoded bytes
    signature: Signature


SignedHashes = Annotated[tuple[SignedHash, ...], Length(0, MAX_MEMBERS)]
"""A peer may be named twice: it is accused of two signatures."""


@dataclass(frozen=True, slots=True)
class Evidence(_AboutPiece):
    """From a piece's reducer: what the other contributors have signed."""

    signed: SignedHashes


@dataclass(frozen=True, slots=True)
class AuditRefused(_AboutPiece):
    """A member's refusal of an audit request: it is not kept here (any more), or too much was asked."""


@dataclass(frozen=True, slots=True)
class Accusation(_AboutPiece):
    """To all other members: audit this piece; this is what I have seen signed. Whoever hears it judges by itself."""

    signed: SignedHashes


# ---- catching up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks for chunks of a state: i of the parameters, (count of chunks) + i of the outer momentum."""

    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One chunk of a state: float32 elements, encoded without loss, checked against the hash list."""

    module: ModuleId
    digest: Digest
    chunk: ChunkNumber


class StateRefusal(enum.Enum):
    BUSY = 1  # Ask later or elsewhere
    GONE = 2  # Not kept here


@dataclass(frozen=True, slots=True)
class StateRefused:
    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers
    reason: StateRefusal


AuditControl = AuditRequest | Evidence | AuditRefused | Accusation
RoundControl = (
    Progress
    | Invitation
    | Accepting
    | Entry
    | Declined
    | SignedRoster
    | Pulse
    | Prepared
    | Commit
    | Dissolved
    | AuditControl
)
RoundPiece = Contribution | Reduced
StateControl = StateRequest | StateRefused
