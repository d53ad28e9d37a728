"""The vocabulary of Skipstone as types: runs, modules, microbatches, paths. All are immutable and hashable."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Annotated, Generic, NewType, TypeVar

from swarm.vocabulary.bounds import Length, Range
from swarm.vocabulary.errors import ProtocolViolation

PeerId = NewType("PeerId", str)  # libp2p id: base58 of the multihash of an Ed25519 key (`12D3Koo...`, 52 characters)

RunId = NewType("RunId", str)  # SHA-256 of the manifest's canonical form, in hexadecimal

MAX_STAGES = 1024
MAX_EXPERTS = 1024
MAX_MODULES = 4096  # Of one run. It bounds everything that a node does for each module.
MAX_MICROBATCH_NUMBER = 2**48 - 1
MAX_HOPS = 256
MAX_DOCUMENTS = 4096  # Of one microbatch
MAX_DOCUMENT_TOKENS = 2**20
MAX_FRAGMENTS = 64
MAX_VISIT_RATIO = 2.0  # Between two stages after stage 0. 1.5 has most of the gain in pace (docs/PATHS.md).
MAX_ROUND = 2**48 - 1
MAX_COUNT = 2**48  # Of inner steps and of tokens. Sums end there.
SIGNATURE_BYTES = 64
DIGEST_BYTES = 32

Stage = Annotated[int, Range(1, MAX_STAGES - 1)]  # Of peers that are not data nodes
Count = Annotated[int, Range(0, MAX_COUNT)]
Signature = Annotated[bytes, Length(SIGNATURE_BYTES, SIGNATURE_BYTES)]
Digest = Annotated[bytes, Length(DIGEST_BYTES, DIGEST_BYTES)]

Route = tuple[int, ...]  # The expert of each stage after stage 0 for a document. Empty if every stage has one expert.
Affinity = tuple[tuple[int, ...], ...]
"""For each stage after stage 0 the router's score of each expert. Empty if every stage has one expert."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Reasoned(Generic[Value]):
    """A decision, and one sentence for the person who asks why."""

    value: Value
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class ModuleId:
    """The weights at a stage. `expert` is 0 unless the run has several experts a stage (DiPaCo)."""

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
    """A unit of work, named by the data node that started it and that node's running number."""

    data_node: PeerId
    number: int

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MAX_MICROBATCH_NUMBER:
            raise ProtocolViolation(f"microbatch number {self.number} is outside 0 to {MAX_MICROBATCH_NUMBER}")

    def __str__(self) -> str:
        return f"{short(self.data_node)}#{self.number}"


@dataclass(frozen=True, slots=True)
class Hop:
    """One visit of a path: which module, computed by which peer."""

    module: ModuleId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class SignedRoute:
    """The part of a path that a data node signs. It has no peers: repair may replace them."""

    modules: tuple[ModuleId, ...]
    lifetime_s: float
    signature: bytes  # By the data node's identity key
    documents: tuple[int, ...] = ()  # Tokens of each document; empty for rows of one stream
    labels: int = 0  # Predicted tokens, where known of each; 0: all, or none

    def __post_init__(self) -> None:
        if len(self.modules) > MAX_HOPS:
            raise ProtocolViolation(f"a route of {len(self.modules)} modules is longer than {MAX_HOPS}")
        if len(self.documents) > MAX_DOCUMENTS:
            raise ProtocolViolation(f"a microbatch of {len(self.documents)} documents has more than {MAX_DOCUMENTS}")

    def allows(self, path: Path) -> bool:
        """Whether the path visits these modules in this order. Repair may have left some out."""
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
        """Tokens of each document of the microbatch that takes it, as its data node has signed."""
        return () if self.route is None else self.route.documents

    @property
    def labels(self) -> int:
        """Tokens of the microbatch that are predicted, as its data node has signed; 0 where it has said nothing."""
        return 0 if self.route is None else self.route.labels

    def peer_at(self, position: int) -> PeerId:
        """The peer at a position; both ends are the data node. Raises IndexError."""
        if position in (-1, len(self.hops)):
            return self.data_node
        if not 0 <= position < len(self.hops):
            raise IndexError(f"position {position} is not on a path of {len(self.hops)} hops")
        return self.hops[position].peer

    def with_peer(self, position: int, peer: PeerId) -> Path:
        """The same path with another replica at `position` (repair)."""
        hop = self.hops[position]
        return replace(self, hops=(*self.hops[:position], Hop(hop.module, peer), *self.hops[position + 1 :]))

    def without(self, position: int) -> Path:
        """The same path with the hop at `position` skipped (repair); those after it move up by one."""
        return replace(self, hops=(*self.hops[:position], *self.hops[position + 1 :]))


@dataclass(frozen=True, slots=True)
class AnchorVersion:
    """The version of a module's agreed state. Replicas compare it to choose which of two states goes on."""

    round: Annotated[int, Range(0, MAX_ROUND)]  # 0 for the initial weights. Never goes back on any peer.
    steps: Count  # Mean over the replicas of each round. The learning rate follows from it.
    tokens: Count  # Over all replicas
    fragment: Annotated[int, Range(0, MAX_FRAGMENTS - 1)]  # Averaged by the next round
    digest: Digest  # BLAKE3 over all of the above and the state's chunk hashes


class PeerState(enum.Enum):
    JOINING = 1  # Prepares its module; takes no work yet
    SERVING = 2
    DRAINING = 3  # Finishes its work and takes nothing new
    VISITING = 4  # Hosts no module: an undecided newcomer, or a `status` or `eval` command


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The protocol versions a peer speaks, both ends included."""

    lowest: int
    highest: int

    def common(self, other: VersionRange) -> int | None:
        """The highest version that both speak, or None."""
        highest = min(self.highest, other.highest)
        return highest if highest >= max(self.lowest, other.lowest) else None


PROTOCOL_VERSIONS = VersionRange(2, 2)


def short(peer: PeerId) -> str:
    """The last six characters of a peer id: enough to tell peers apart in a table or a log line."""
    return peer[-6:]


class Codec(enum.Enum):
    """The encoding of elements as bytes. The value is the one in link.proto; `protocol.codecs` does it."""

    NONE = 1  # Row-major, little-endian
    INT8 = 2  # A signed byte each, and a float32 scale for each 128
    BF16 = 3  # The upper half of a float32
    INT4 = 5  # Half a byte each, and a bfloat16 scale for each 64
    TOP_K_4 = 6  # Of each 4096 the 192 largest, four bits each besides their place
    TOP_K_2 = 7  # Of each 4096 the 256 largest, two bits each besides their place
    PLANES = 9  # Lossless: each byte plane compressed
