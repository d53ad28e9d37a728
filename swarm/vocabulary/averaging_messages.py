"""Messages between replicas of one module about rounds, audits and state. `proto/link.proto` explains each of them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated

from swarm.vocabulary.bounds import Detail, Distinct, Inherits, Length, NonNegative, Range
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion, Codec, Count, Digest, ModuleId, PeerId, Signature

MAX_ATTEMPTS = 64
MAX_MEMBERS = 256
# Measured links in an entry. With 256 members, each one is measured by 16 others, and the roster fits in a small frame.
MAX_MEASURED = 16
MAX_RATE = 24  # 280 TB/s
MAX_CHUNKS = 2**20  # Chunks of a module's state
MAX_REQUESTED_CHUNKS = 64

Peers = Annotated[tuple[PeerId, ...], Length(0, MAX_MEMBERS), Distinct()]
ChunkNumber = Annotated[int, Range(0, MAX_CHUNKS - 1)]
ChunkNumbers = Annotated[tuple[ChunkNumber, ...], Length(1, MAX_REQUESTED_CHUNKS), Distinct()]


@dataclass(frozen=True, slots=True)
class RoundId:
    """One attempt at a round of a module. A higher attempt replaces a lower one. `convener`: its leader."""

    module: ModuleId
    number: Annotated[int, Range(1, MAX_ROUND)]  # The `AnchorVersion.round` of its result
    attempt: Annotated[int, Range(0, MAX_ATTEMPTS)]
    convener: PeerId


# ---- before the exchange ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """From a replica to the possible leaders of the next round: its work since the anchor."""

    module: ModuleId
    base: AnchorVersion
    steps: Count
    tokens: Count


@dataclass(frozen=True, slots=True)
class Invitation:
    """From the leader: opens a round from an anchor."""

    round: RoundId
    base: AnchorVersion


@dataclass(frozen=True, slots=True)
class Accepting:
    """From a member: it prepares its entry. Sent at once, so that a slow replica does not look dead."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Measured rate at which another replica's tensors arrive."""

    mark: Annotated[int, Range(0, 2**24 - 1)]  # `swarm.averaging.trust.mark_of` the peer
    rate: Annotated[int, Range(1, MAX_RATE)]  # About 4**rate bytes per second


@dataclass(frozen=True, slots=True)
class Entry:
    """From a member: its pseudo-gradient is fixed. Signed, so that the leader cannot change the entry."""

    peer: PeerId
    round: RoundId
    base: AnchorVersion
    steps: Count
    tokens: Count
    norm: NonNegative  # Norm of the fragment's pseudo-gradient; contributions may not exceed it
    measured: Annotated[tuple[LinkRate, ...], Length(0, MAX_MEASURED)]
    # The complete result of an earlier attempt, if any. The leader prefers it, because a peer may have committed it.
    staged: AnchorVersion | None
    signature: Signature = b""  # Over the fields above and the run (`protocol.identity.signatures`)


class DeclineReason(enum.Enum):
    OTHER_ANCHOR = 1  # Has the anchor `Declined.version`
    PAST = 2  # Has committed this round or a later one
    OTHER_CONVENER = 3  # Follows a higher attempt, or a leader earlier in hash order
    NOT_READY = 4  # Joins, leaves or catches up
    BROKEN = 5  # Has an update that is not finite


@dataclass(frozen=True, slots=True)
class Declined:
    round: RoundId
    reason: DeclineReason
    version: AnchorVersion  # The sender's anchor


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a roster. It reduces the chunks `range(first_chunk, end_chunk)`, possibly none."""

    peer: PeerId
    first_chunk: int
    end_chunk: int
    coefficient: float  # Factor of its pseudo-gradient: share x clipping. 0: it only receives the result.
    norm: float  # From its entry. A reducer rejects a member whose pieces together exceed it.
    share: float = 0.0  # Share of the tokens


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """From the leader: fixes the members and starts the exchange. Each member derives the `Roster` from the entries."""

    round: RoundId
    base: AnchorVersion
    entries: Annotated[tuple[Entry, ...], Length(1, MAX_MEMBERS), Inherits(("round", "base"))]
    codec: Codec = Codec.NONE  # For contributions; `RoundCodecs.result` gives the codec of results
    codec_reason: Detail = ""

    def fault(self) -> str | None:
        """Returns the reason why the roster is malformed. `swarm.averaging.roster.objection` checks the rest."""
        once = len({entry.peer for entry in self.entries}) == len(self.entries)
        return None if once else "a member is named twice"


@dataclass(frozen=True, slots=True)
class Roster:
    """The members and their shards, derived from the signed entries by `make_roster`."""

    round: RoundId
    base: AnchorVersion
    members: tuple[Member, ...]
    steps: int  # `AnchorVersion.steps` of the result
    tokens: int  # `AnchorVersion.tokens` of the result
    codec: Codec = Codec.NONE
    codec_reason: str = ""

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.members)

    @property
    def largest_norm(self) -> float:
        """Returns the largest possible norm of the weighted mean, by the triangle inequality."""
        return math.fsum(member.coefficient * member.norm for member in self.members)


# ---- the exchange ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AboutPiece:
    """A message about one piece: the chunks `range(first_chunk, end_chunk)`, at least one."""

    round: RoundId
    first_chunk: ChunkNumber
    end_chunk: Annotated[int, Range(1, MAX_CHUNKS)]

    def fault(self) -> str | None:
        if self.first_chunk < self.end_chunk:
            return None
        return f"chunks {self.first_chunk} to {self.end_chunk} are an empty range"


@dataclass(frozen=True, slots=True)
class Contribution(_AboutPiece):
    """To the reducer, later to auditors: the sender's encoded pseudo-gradient of these chunks (1-D)."""

    # Over the other fields and the tensor's hash
    signature: Signature = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class Reduced(_AboutPiece):
    """From the reducer to every other member: the encoded weighted mean, the same bytes for all."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Heartbeat between leader and members, twice a second and after changes."""

    round: RoundId
    waiting_for: Peers = ()  # Members whose pieces are overdue
    rejected: Peers = ()  # Members whose pieces are not finite, exceed the declared norm, or cannot be decoded


@dataclass(frozen=True, slots=True)
class Prepared:
    """From a member to the leader: it has the complete result, which leads to this anchor."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """A majority of the roster has the same result. Prepared members apply it, others fetch it from the `holders`."""

    round: RoundId
    version: AnchorVersion
    holders: Peers


@dataclass(frozen=True, slots=True)
class Dissolved:
    """From the leader: it gives this attempt up. Another attempt may follow."""

    round: RoundId
    detail: Detail


# ---- audits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditRequest(_AboutPiece):
    """After a commit: asks a piece's reducer for Evidence, or a contributor for its Contribution."""


@dataclass(frozen=True, slots=True)
class SignedHash:
    """A contributor's signature of its part of a piece, with the part's hash."""

    peer: PeerId
    hash: Digest  # BLAKE3 of the encoded bytes
    signature: Signature


# A peer may appear twice, if it is accused of two different signatures
SignedHashes = Annotated[tuple[SignedHash, ...], Length(0, MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class Evidence(_AboutPiece):
    """From a piece's reducer: the signed hashes of the other contributors."""

    signed: SignedHashes


@dataclass(frozen=True, slots=True)
class AuditRefused(_AboutPiece):
    """Refuses an audit request: the piece is no longer kept, or the sender has asked too often."""


@dataclass(frozen=True, slots=True)
class Accusation(_AboutPiece):
    """To all other members: asks them to audit a piece, with the signed hashes seen. Each one judges for itself."""

    signed: SignedHashes


# ---- catching up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks for chunks of a state. With n chunks of parameters, chunk i of the outer momentum has number n + i."""

    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One chunk of a state: float32 elements, losslessly encoded. The receiver checks it against the hash list."""

    module: ModuleId
    digest: Digest
    chunk: ChunkNumber


class StateRefusal(enum.Enum):
    BUSY = 1  # Ask later, or ask another replica
    GONE = 2  # The sender does not keep this state


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
