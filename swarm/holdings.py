"""What custody speaks of: holdings, the events that befall them and the actions that follow. Plain data; `swarm.custody` is the machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.messages import Backward, Close, Forward, MicrobatchControl, Purpose, Receipt
from swarm.vocabulary import MicrobatchId, Path, PeerId


class Phase(enum.Enum):
    RECEIVING = enum.auto()
    FORWARD = enum.auto()
    HANDING_ON = enum.auto()
    GUARDING = enum.auto()
    AWAITING = enum.auto()
    BACKWARD = enum.auto()
    HANDING_BACK = enum.auto()
    GUARDING_BACK = enum.auto()


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One microbatch at one position of its path. A data node holds the same microbatch at both ends."""

    microbatch: MicrobatchId
    position: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One microbatch at one position of its path, in the custody of this node."""

    key: Key
    path: Path
    purpose: Purpose
    phase: Phase
    lifetime_s: float
    deadline: float
    """When it may be forgotten if nothing happens to it any more."""
    target: PeerId | None = None
    """Whom it is being handed to."""
    tried: frozenset[PeerId] = frozenset()
    """Replicas that failed or refused; not asked again for this microbatch."""
    busy: frozenset[PeerId] = frozenset()
    """Replicas that had no slot when asked in this round of asking; asked again when nobody else is left."""
    retry_at: float | None = None
    """When to offer it again to a target that was busy or out of reach."""
    failing_since: float | None = None
    """Since when the target has been out of reach, with nobody to stand in for it."""

    @property
    def is_end(self) -> bool:
        return self.key.position == len(self.path.hops)

    @property
    def is_start(self) -> bool:
        return self.key.position == -1


# ---- what happens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The data node sets out: its embedding is to be computed. Made by the data node itself, not by a message."""

    microbatch: MicrobatchId
    path: Path
    purpose: Purpose
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class ForwardArrived:
    """The whole tensor of a Forward that `admit_forward` let in is here."""

    message: Forward


@dataclass(frozen=True, slots=True)
class BackwardArrived:
    message: Backward


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """The tensor of an admitted Forward will not come whole."""

    key: Key


@dataclass(frozen=True, slots=True)
class Computed:
    """The computation asked for by a Compute action is done."""

    key: Key


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """It could not be done (non-finite gradient, out of memory); nothing was accumulated."""

    key: Key
    detail: str


@dataclass(frozen=True, slots=True)
class ReceiptArrived:
    sender: PeerId
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to a peer broke, or stalled, or could not be made."""

    peer: PeerId
    detail: str


@dataclass(frozen=True, slots=True)
class CloseArrived:
    sender: PeerId
    message: Close


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Started
    | ForwardArrived
    | BackwardArrived
    | BrokenOff
    | Computed
    | ComputeFailed
    | ReceiptArrived
    | PeerLost
    | CloseArrived
    | Tick
)

# ---- what is to be done -------------------------------------------------------------------------------------


class Work(enum.Enum):
    FORWARD = enum.auto()
    """Input to output; the data node's start: tokens to hidden states."""
    LOSS = enum.auto()
    """The data node's end: hidden states to loss and its gradient."""
    BACKWARD = enum.auto()
    """Gradient of the output to gradient of the input; the parameter gradient is accumulated."""


@dataclass(frozen=True, slots=True)
class Compute:
    key: Key
    work: Work
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class SendOutput:
    """Send what the last Compute gave, with this message. Failure is reported as PeerLost."""

    key: Key
    to: PeerId
    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class Tell:
    to: PeerId
    message: MicrobatchControl


@dataclass(frozen=True, slots=True)
class Forget:
    """The holding is gone: its slot, buffers and graph are free."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Only at the data node's start: the microbatch has completed."""

    microbatch: MicrobatchId


Action = Compute | SendOutput | Tell | Forget | Finished
