"""The messages among the replicas of one module about a round and about their state, as plain data (DESIGN section 5).

`protocol.frames.frames` turns it into bytes. A message that carries a tensor is sent together with it; the tensor never
appears here. The story they tell is in `swarm.averaging.round_machine`.
"""

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
"""Links that an entry tells of: with 256 members each is told of by 16 others, and the roster of all stays a small
frame."""
MAX_RATE = 24
"""Of a `LinkRate`: 280 TB/s."""
MAX_CHUNKS = 2**20
"""Of a module, and of its state; their numbers are lower."""
MAX_REQUESTED_CHUNKS = 64

Peers = Annotated[tuple[PeerId, ...], Length(0, MAX_MEMBERS), Distinct()]
ChunkNumber = Annotated[int, Range(0, MAX_CHUNKS - 1)]
ChunkNumbers = Annotated[tuple[ChunkNumber, ...], Length(1, MAX_REQUESTED_CHUNKS), Distinct()]


@dataclass(frozen=True, slots=True)
class RoundId:
    """One attempt at one round of one module, named by who convenes it. A higher attempt replaces a lower one."""

    module: ModuleId
    number: Annotated[int, Range(1, MAX_ROUND)]
    """What `AnchorVersion.round` will be when it commits."""
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

    mark: Annotated[int, Range(0, 2**24 - 1)]
    """24 bits that stand for its name (`swarm.averaging.trust.mark_of`)."""
    rate: Annotated[int, Range(1, MAX_RATE)]
    """4 to this power bytes per second, 1 to MAX_RATE: what is measured varies by a factor of two among equals."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A replica is ready: its pseudo-gradient is fixed. Signed by it, so that a convener can pass it on and cannot
    change it."""

    peer: PeerId
    """Who enters."""
    round: RoundId
    base: AnchorVersion
    """The anchor it has worked from."""
    steps: Count
    tokens: Count
    norm: NonNegative
    """Euclidean norm of the fragment's pseudo-gradient: finite, and never exceeded by what is sent later."""
    measured: Annotated[tuple[LinkRate, ...], Length(0, MAX_MEASURED)]
    """What it says of others; of itself it says nothing that counts."""
    staged: AnchorVersion | None
    """The complete result of an earlier attempt at this round that it still has, if any. Such a result is never thrown
    away: the convener settles on it, because somebody may have committed it."""
    signature: Signature = b""
    """Ed25519, over all of the above and the run (`protocol.identity.signatures`)."""


class DeclineReason(enum.Enum):
    """Why a replica does not take part."""

    OTHER_ANCHOR = 1
    """It stands on another anchor, which `Declined.version` names; whichever has to, catches up."""
    PAST = 2
    """It has committed this round or a later one already."""
    OTHER_CONVENER = 3
    """It follows a higher attempt, or a convener that comes before in hash order."""
    NOT_READY = 4
    """It is still joining, leaving, or catching up."""
    BROKEN = 5
    """Its own update is not finite; it starts again from the anchor."""


@dataclass(frozen=True, slots=True)
class Declined:
    """A replica to the convener: it does not take part."""

    round: RoundId
    reason: DeclineReason
    version: AnchorVersion
    """Of the one who declines."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a roster. It reduces the chunks from `first_chunk` up to, not including, `end_chunk` (maybe none)."""

    peer: PeerId
    first_chunk: int
    end_chunk: int
    coefficient: float
    """What its pseudo-gradient is multiplied with: its share of the tokens times the factor that clips its norm. 0 when
    it has nothing to contribute; then it sends no contributions and receives the result."""
    norm: float
    """As it declared in its entry. A reducer rejects a member whose pieces together exceed it."""
    share: float = 0.0
    """What the coefficient would be if it were not clipped."""


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """The convener fixes who takes part, and the exchange begins. All else (`Roster`) follows from the entries, and
    each member works it out for itself: there is nothing to believe."""

    round: RoundId
    base: AnchorVersion
    entries: Annotated[tuple[Entry, ...], Length(1, MAX_MEMBERS), Inherits(("round", "base"))]
    codec: Codec = Codec.NONE
    """Of contributions; that of results follows from it (`swarm.compression.round_codecs`). The convener's free choice
    among what the run allows."""
    codec_reason: Detail = ""
    """Why, for people."""

    def fault(self) -> str | None:
        """The reason why no convener may say this; None when one may. The signatures are
        `swarm.averaging.roster.objection`'s, after everything that costs less.
        """
        once = len({entry.peer for entry in self.entries}) == len(self.entries)
        return None if once else "a member is named twice"


@dataclass(frozen=True, slots=True)
class Roster:
    """The members and what each reduces, as `swarm.averaging.roster.make_roster` works it out from the signed
    entries.
    """

    round: RoundId
    base: AnchorVersion
    members: tuple[Member, ...]
    steps: int
    """What `AnchorVersion.steps` of the result will be."""
    tokens: int
    """Likewise."""
    codec: Codec = Codec.NONE
    codec_reason: str = ""

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The members' peers."""
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
        """Why there is no such piece; None when there is."""
        if self.first_chunk < self.end_chunk:
            return None
        return f"there are no chunks from {self.first_chunk} to {self.end_chunk}"


@dataclass(frozen=True, slots=True)
class Contribution(_AboutPiece):
    """To the member that reduces these chunks: the sender's encoded pseudo-gradient there. One-dimensional tensor.
    After the round also to whoever audits them and has asked for it."""

    signature: Signature = field(default=b"", compare=False)
    """The sender's, over all this and the tensor's hash (`protocol.identity.signatures`). It does not make it
    another piece."""


@dataclass(frozen=True, slots=True)
class Reduced(_AboutPiece):
    """From the member that reduces these chunks, to every other: the encoded weighted mean, the same bytes to all."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Between convener and members, both ways, twice a second and when something changes: "I am alive, and this is how
    it goes."
    """

    round: RoundId
    waiting_for: Peers = ()
    """Members whose pieces have not come for a while, though nothing else holds them up."""
    rejected: Peers = ()
    """Members that sent what is not finite, exceeds the norm they declared, or cannot be decoded."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A member to the convener: the whole result is here, and this is the anchor it leads to."""

    round: RoundId
    version: AnchorVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """The convener, or a member in its place: a majority of the roster has the same result (or an earlier attempt's has
    been found). It holds from now on.

    Who has prepared it applies it; who has not gets it from the `holders`.
    """

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
    """After the commit, about one piece. To its reducer: what did the others sign? The answer is Evidence. To another
    contributor: what was it that you signed? The answer is the Contribution, as it was sent then. Or AuditRefused."""


@dataclass(frozen=True, slots=True)
class SignedHash:
    """A member's signature that it has contributed the tensor with this hash to a piece."""

    peer: PeerId
    hash: Digest
    """BLAKE3 of the encoded bytes."""
    signature: Signature


SignedHashes = Annotated[tuple[SignedHash, ...], Length(0, MAX_MEMBERS)]
"""A peer may be named twice: that it has signed two things is what it is accused of."""


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
    """Asks for chunks of the state with this digest. Chunk i of the parameters is number i, chunk i of the outer
    momentum is number (count of chunks) + i. The answer to each is a StateChunk or a StateRefused."""

    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One chunk of a module's state; its float32 elements, in a lossless codec, are the tensor. Checked against the
    state's hash list."""

    module: ModuleId
    digest: Digest
    chunk: ChunkNumber


class StateRefusal(enum.Enum):
    """Why a donor refuses a chunk."""

    BUSY = 1
    """Too many are being served; ask again later or elsewhere."""
    GONE = 2
    """This state is not kept here (any more)."""


@dataclass(frozen=True, slots=True)
class StateRefused:
    """A donor's refusal of a chunk that was asked for."""

    module: ModuleId
    digest: Digest
    chunks: ChunkNumbers
    reason: StateRefusal


AuditControl = AuditRequest | Evidence | AuditRefused | Accusation
"""Small messages of an audit."""
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
"""Small messages of a round."""
RoundPiece = Contribution | Reduced
"""Messages of a round with a tensor."""
StateControl = StateRequest | StateRefused
