"""Types of runs, modules, microbatches and paths. All are immutable and hashable."""

import enum
from dataclasses import dataclass, replace
from typing import Annotated, Generic, NewType, TypeVar

from swarm.vocabulary.bounds import Length, Range
from swarm.vocabulary.errors import ProtocolViolation

PeerId = NewType("PeerId", str)  # libp2p id: base58 of the multihash of an Ed25519 key (`12D3Koo...`, 52 characters)

RunId = NewType("RunId", str)  # SHA-256 of the manifest's canonical form, in hexadecimal

MAX_STAGES = 1024
MAX_EXPERTS = 1024
MAX_MODULES = 4096  # Modules of a run; bounds the work that a node does for each module
MAX_MICROBATCH_NUMBER = 2**48 - 1
MAX_HOPS = 256
MAX_DOCUMENTS = 4096  # Documents of a microbatch
MAX_DOCUMENT_TOKENS = 2**20
MAX_FRAGMENTS = 64
MAX_VISIT_RATIO = 2.0  # Largest ratio of visits of two stages after stage 0; 1.5 has most of the gain in pace
MAX_ROUND = 2**48 - 1
MAX_COUNT = 2**48  # Largest count of inner steps or tokens; sums saturate
SIGNATURE_BYTES = 64
INVITATION_BYTES = 170

Stage = Annotated[int, Range(1, MAX_STAGES - 1)]  # Stages after stage 0
Count = Annotated[int, Range(0, MAX_COUNT)]
Signature = Annotated[bytes, Length(SIGNATURE_BYTES, SIGNATURE_BYTES)]
Digest = Annotated[bytes, Length(32, 32)]

Route = tuple[int, ...]  # The expert of each stage after stage 0 for a document. Empty if every stage has one expert.
# The router's score of each expert, for each stage after stage 0. Empty if every stage has one expert.
Affinity = tuple[tuple[int, ...], ...]

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Reasoned(Generic[Value]):
    """A decision with its reason, one sentence for people."""

    value: Value
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class ModuleId:
    """Names the weights at a stage. `expert` is 0 unless the run has several experts per stage (DiPaCo)."""

    stage: int
    expert: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.stage < MAX_STAGES and 0 <= self.expert < MAX_EXPERTS):
            raise ProtocolViolation(
                f"module {self.stage}.{self.expert} is outside 0.0 to {MAX_STAGES - 1}.{MAX_EXPERTS - 1}"
            )

    def __str__(self) -> str:
        return f"{self.stage}.{self.expert}"


@dataclass(frozen=True, slots=True, order=True)
class MicrobatchId:
    """Names a microbatch by its data node and that node's sequence number."""

    data_node: PeerId
    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MAX_MICROBATCH_NUMBER:
            raise ProtocolViolation(f"microbatch number {self.number} is outside 0 to {MAX_MICROBATCH_NUMBER}")

    def __str__(self) -> str:
        return f"{short(self.data_node)}#{self.number}"


@dataclass(frozen=True, slots=True)
class Hop:
    """One visit of a path: the module, and the peer that computes it."""

    module: ModuleId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class SignedRoute:
    """The part of a path that its data node signs. Without peers, because repair may replace them."""

    modules: tuple[ModuleId, ...]
    lifetime_s: float
    signature: bytes  # Ed25519, by the data node's identity key
    documents: tuple[int, ...] = ()  # Tokens of each document; empty for rows of one stream
    labels: int = 0  # Predicted tokens, in runs with labels; else 0
    invitation: bytes = b""  # The data node's; empty if it needs none

    def __post_init__(self) -> None:
        if len(self.modules) > MAX_HOPS:
            raise ProtocolViolation(f"a route of {len(self.modules)} modules is longer than {MAX_HOPS}")
        if len(self.documents) > MAX_DOCUMENTS:
            raise ProtocolViolation(f"a microbatch of {len(self.documents)} documents has more than {MAX_DOCUMENTS}")

    def allows(self, path: "Path") -> bool:
        """Whether the path visits these modules in this order; a repair may have removed some modules from the path."""
        left = iter(self.modules)
        return all(hop.module in left for hop in path.hops)


@dataclass(frozen=True, slots=True)
class Path:
    """The hops of a microbatch. A position is an index into `hops`; -1 and `len(hops)` are the data node (stage 0)."""

    data_node: PeerId
    hops: tuple[Hop, ...]
    route: SignedRoute | None = None

    def __post_init__(self) -> None:
        if len(self.hops) > MAX_HOPS:
            raise ProtocolViolation(f"a path of {len(self.hops)} hops is longer than {MAX_HOPS}")

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of each document of the microbatch, as signed by its data node."""
        return () if self.route is None else self.route.documents

    @property
    def labels(self) -> int:
        """Predicted tokens of the microbatch, as signed by its data node; 0 if it has signed none."""
        return 0 if self.route is None else self.route.labels

    def peer_at(self, position: int) -> PeerId:
        """Returns the peer at a position; both ends are the data node. Raises IndexError."""
        if position in (-1, len(self.hops)):
            return self.data_node
        if not 0 <= position < len(self.hops):
            raise IndexError(f"position {position} is not on a path of {len(self.hops)} hops")
        return self.hops[position].peer

    def with_peer(self, position: int, peer: PeerId) -> "Path":
        hop = self.hops[position]
        return replace(self, hops=(*self.hops[:position], Hop(hop.module, peer), *self.hops[position + 1 :]))

    def without(self, position: int) -> "Path":
        return replace(self, hops=(*self.hops[:position], *self.hops[position + 1 :]))


@dataclass(frozen=True, slots=True)
class AnchorVersion:
    """Version of a module's agreed state (anchor). Replicas compare versions to choose between two states."""

    round: Annotated[int, Range(0, MAX_ROUND)]  # 0 for the initial weights; never decreases on a peer
    steps: Count  # Sum over rounds of the mean over replicas; determines the learning rate
    tokens: Count  # Sum over all replicas
    fragment: Annotated[int, Range(0, MAX_FRAGMENTS - 1)]  # Fragment that the next round averages
    digest: Digest  # BLAKE3 over the fields above and the state's chunk hashes


class PeerState(enum.Enum):
    JOINING = 1  # Prepares its module and accepts no work yet
    SERVING = 2
    DRAINING = 3  # Finishes its work and accepts no new work
    VISITING = 4  # Hosts no module: a newcomer that has not chosen one, or a `status` or `eval` command


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The protocol versions that a peer supports, inclusive."""

    lowest: int
    highest: int

    def common(self, other: "VersionRange") -> int | None:
        highest = min(self.highest, other.highest)
        return highest if highest >= max(self.lowest, other.lowest) else None


PROTOCOL_VERSIONS = VersionRange(5, 5)
OLDEST_RUN = 2  # Lowest protocol version of a manifest; only peers must be of the newest


def short(peer: PeerId) -> str:
    return peer[-6:]


class Codec(enum.Enum):
    """Encoding of elements as bytes, with the value in link.proto. Implemented in `protocol.codecs`."""

    NONE = 1  # Row-major, little-endian
    INT8 = 2  # A byte per element, and a float32 scale per 128 elements
    BF16 = 3  # The upper half of a float32
    INT4 = 5  # Half a byte per element, and a bfloat16 scale per 64 elements
    INT2 = 10  # A quarter of a byte per element, and a bfloat16 scale per 64 elements; contributions to rounds only
