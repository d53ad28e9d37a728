"""Messages between replicas of one module about rounds, audits and state. `proto/link.proto` explains each of them."""

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated

from swarm.vocabulary.bounds import Detail, Distinct, Inherits, Length, NonNegative, Range
from swarm.vocabulary.types import (
    INVITATION_BYTES,
    MAX_MICROBATCH_NUMBER,
    MAX_ROUND,
    AnchorVersion,
    Codec,
    Count,
    Digest,
    ModuleId,
    PeerId,
    Signature,
)

MAX_ATTEMPTS = 64
MAX_MEMBERS = 256
MAX_MEASURED = 16  # Measured links in an entry: with 256 members, the roster fits in a small frame
MAX_RATE = 24  # 280 TB/s
MAX_TALLIES = 4  # Data nodes whose tallies a roster or an answer carries
MAX_TALLY_ROWS = 2 * MAX_MEMBERS  # Of all its tallies together
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


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Visits of one replica that a data node has settled, with their tokens: all of them, and those in the window."""

    peer: PeerId
    visits: Count
    tokens: Count
    recent: Count


@dataclass(frozen=True, slots=True)
class WorkTally:
    """Work of a module's replicas for one data node, signed by it, so that others can carry it."""

    data_node: PeerId
    module: ModuleId
    number: Annotated[int, Range(0, MAX_MICROBATCH_NUMBER)]  # Of the latest settled microbatch
    at: NonNegative  # Unix time at the data node, in seconds
    window_s: NonNegative  # Length of the window of `WorkRow.recent`, which ends at `at`
    rows: Annotated[tuple[WorkRow, ...], Length(1, MAX_MEMBERS)]
    invitation: Annotated[bytes, Length(INVITATION_BYTES, INVITATION_BYTES, or_none=True)] = b""
    signature: Signature = b""


@dataclass(frozen=True, slots=True)
class Progress:
    """From a replica to the possible leaders of the next round: its inner steps and tokens since the anchor."""

    module: ModuleId
    base: AnchorVersion
    steps: Count
    tokens: Count


@dataclass(frozen=True, slots=True)
class Invitation:
    """From the leader: invites a replica to a round that starts from the anchor `base`."""

    round: RoundId
    base: AnchorVersion


@dataclass(frozen=True, slots=True)
class Accepting:
    """From an invited replica: it joins the round and prepares its `Entry`. Sent at once, as a sign of life."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Rate at which another replica's tensors arrive, as measured by the sender of the entry."""

    mark: Annotated[int, Range(0, 2**24 - 1)]  # `swarm.averaging.trust.mark_of` the peer
    rate: Annotated[int, Range(1, MAX_RATE)]  # About 4**rate bytes per second


@dataclass(frozen=True, slots=True)
class Entry:
    """From a member: steps, tokens, norm of its pseudo-gradient. Signed, so that the leader cannot change them."""

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
    """A member of a round. It averages the chunks `range(first_chunk, end_chunk)`, possibly none, for all members."""

    peer: PeerId
    first_chunk: int
    end_chunk: int
    coefficient: float  # Factor of its pseudo-gradient: share x clipping. 0: it only receives the result.
    norm: float  # From its entry. A reducer rejects a member whose pieces together exceed it.
    share: float = 0.0  # Share of the tokens


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """From the leader: fixes a round's members and starts the exchange. Each derives the `Roster` from the entries."""

    round: RoundId
    base: AnchorVersion
    entries: Annotated[tuple[Entry, ...], Length(1, MAX_MEMBERS), Inherits(("round", "base"))]
    codec: Codec = Codec.NONE  # For contributions; `Codec.result` gives the codec of results
    codec_reason: Detail = ""
    tallies: Annotated[tuple[WorkTally, ...], Length(0, MAX_TALLIES)] = ()  # Prove the members' work

    def fault(self) -> str | None:
        """Returns a reason if a member is named twice. `swarm.averaging.roster.objection` makes the other checks."""
        if sum(len(tally.rows) for tally in self.tallies) > MAX_TALLY_ROWS:
            return f"its tallies have more than {MAX_TALLY_ROWS} rows"
        once = len({entry.peer for entry in self.entries}) == len(self.entries)
        return None if once else "a member is named twice"


@dataclass(frozen=True, slots=True)
class Roster:
    """A round's members, with weights and chunks to average, derived from signed entries by `make_roster`."""

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


@dataclass(frozen=True, slots=True)
class _AboutPiece:
    """Base of messages about one piece of the parameters: the chunks `range(first_chunk, end_chunk)`, at least one."""

    round: RoundId
    first_chunk: ChunkNumber
    end_chunk: Annotated[int, Range(1, MAX_CHUNKS)]

    def fault(self) -> str | None:
        if self.first_chunk < self.end_chunk:
            return None
        return f"chunks {self.first_chunk} to {self.end_chunk} are an empty range"


@dataclass(frozen=True, slots=True)
class Contribution(_AboutPiece):
    """To the reducer (it averages these chunks), later to auditors: the sender's encoded pseudo-gradient (1-D)."""

    signature: Signature = field(default=b"", compare=False)  # Over the other fields and the tensor's hash


@dataclass(frozen=True, slots=True)
class Reduced(_AboutPiece):
    """Message from a reducer to the other members: one piece's encoded weighted mean, the same bytes for all."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Heartbeat between leader and members, twice a second and after changes."""

    round: RoundId
    waiting_for: Peers = ()  # Members whose pieces are overdue
    rejected: Peers = ()  # Members whose pieces are not finite, exceed the declared norm, or cannot be decoded


@dataclass(frozen=True, slots=True)
class Prepared:
    """From a member to the leader: it has the round's complete result, which leads to this anchor version."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """From the leader: most members have this result. Prepared members apply it, others get it from `holders`."""

    round: RoundId
    version: AnchorVersion
    holders: Peers


@dataclass(frozen=True, slots=True)
class Dissolved:
    """From the leader: it gives up this attempt at the round. Another attempt may follow."""

    round: RoundId
    detail: Detail


@dataclass(frozen=True, slots=True)
class AuditRequest(_AboutPiece):
    """After a commit: asks the reducer of a piece for Evidence, or another member for its Contribution to the piece."""


@dataclass(frozen=True, slots=True)
class SignedHash:
    """Hash of a member's Contribution to a piece, with the member's signature."""

    peer: PeerId
    hash: Digest  # BLAKE3 of the encoded bytes
    signature: Signature


# A peer may appear twice, if it is accused of two different signatures
SignedHashes = Annotated[tuple[SignedHash, ...], Length(0, MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class Evidence(_AboutPiece):
    """From the reducer of a piece to an auditor: the signed hashes of the contributions that it received."""

    signed: SignedHashes


@dataclass(frozen=True, slots=True)
class AuditRefused(_AboutPiece):
    """Refuses an audit request: the piece is no longer kept, or the sender has asked too often."""


@dataclass(frozen=True, slots=True)
class Accusation(_AboutPiece):
    """To all other members: asks each of them to audit a piece. `signed`: the signed hashes that the sender has."""

    signed: SignedHashes


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks for chunks of a module's state: numbers 0 to n - 1 are parameters, n to 2n - 1 the outer momentum."""

    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One chunk of a module's state: float32, losslessly encoded. The receiver checks it against a list of hashes."""

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
_Attempt = Invitation | Accepting | Entry | Declined | SignedRoster | Pulse | Prepared | Commit | Dissolved
RoundControl = Progress | _Attempt | AuditControl
RoundPiece = Contribution | Reduced
StateControl = StateRequest | StateRefused
