"""Entries, events and actions of custody, as plain data; `swarm.pipeline.custody` is the state machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    MicrobatchControl,
    Purpose,
    Recall,
    Receipt,
    Settled,
    Unsettled,
)
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId


class Phase(enum.Enum):
    RECEIVING = enum.auto()
    FORWARD = enum.auto()
    HANDING_ON = enum.auto()
    GUARDING = enum.auto()
    AWAITING = enum.auto()
    BACKWARD = enum.auto()
    HANDING_BACK = enum.auto()
    GUARDING_BACK = enum.auto()
    SETTLING = enum.auto()
    RECEIVING_GRADIENT = enum.auto()
    RECALLING = enum.auto()


BEFORE_BACKWARD = frozenset({Phase.RECEIVING, Phase.FORWARD, Phase.HANDING_ON, Phase.GUARDING, Phase.AWAITING})
WITHOUT_OUTPUT = frozenset({Phase.RECEIVING, Phase.FORWARD, Phase.RECEIVING_GRADIENT, Phase.RECALLING})
OFFERED = frozenset({Phase.HANDING_ON, Phase.HANDING_BACK})  # Sent to the target, not accepted yet
GUARDED = frozenset({Phase.GUARDING, Phase.GUARDING_BACK})  # Accepted by the target, not passed on yet
# The hop has added its gradient, but does not know yet whether it counts
ADDED = frozenset({Phase.HANDING_BACK, Phase.GUARDING_BACK, Phase.SETTLING})


class SlotState(enum.Enum):
    FREE = enum.auto()
    BUSY = enum.auto()
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Key of an `Entry`: a microbatch and a position on its path. A data node holds it at both ends of the path."""

    microbatch: MicrobatchId
    position: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One microbatch at one position of its path, in the custody of this node."""

    # Phase                      Fields in use, in addition to the first six, `sender` and `since`
    # RECEIVING                  -                             slot reserved, tensor in flight
    # FORWARD                    came
    # HANDING_ON, HANDING_BACK   target, handed, waited_s, computed_s, tried, busy;
    #                            retry_at, refusals            while every replica is busy
    #                            retry_at, failing_since       while the target is unreachable
    # GUARDING, GUARDING_BACK    target (None at the end of a path after its gradient was passed on), tried
    # AWAITING                   -
    # BACKWARD                   came
    # SETTLING                   retry_at, asked               uses no slot
    # RECEIVING_GRADIENT         -                             slot reserved for a substitute
    # RECALLING                  target, failing_since; retry_at until the input is announced

    key: Key
    path: Path
    purpose: Purpose
    phase: Phase
    lifetime_s: float  # Signed by the data node
    deadline: float  # Time at which it is forgotten; every progress extends it
    sender: PeerId | None = None
    since: float = 0.0  # Time of admission
    target: PeerId | None = None  # Peer that gets the output, or that owes the input
    tried: frozenset[PeerId] = frozenset()  # Replicas that failed or refused; excluded for this microbatch
    busy: frozenset[PeerId] = frozenset()  # Replicas without a slot; tried again if no other replica is left
    retry_at: float | None = None  # Time of the next offer, recall or question
    refusals: int = 0
    failing_since: float | None = None  # Time since which the target is unreachable, or owes a recalled input
    came: float = 0.0  # Time of arrival
    waited_s: float = 0.0  # Time from arrival to the start of the computation
    computed_s: float = 0.0
    handed: float = 0.0  # Time of the latest offer
    asked: int = 0  # Unsettled messages sent to the data node

    @property
    def is_end(self) -> bool:
        return self.key.position == len(self.path.hops)

    @property
    def is_start(self) -> bool:
        return self.key.position == -1

    @property
    def direction(self) -> Direction:
        return Direction.FORWARD if self.phase in BEFORE_BACKWARD else Direction.BACKWARD

    @property
    def next_position(self) -> int:
        return self.key.position + (1 if self.direction is Direction.FORWARD else -1)

    @property
    def previous_position(self) -> int:
        return self.key.position - (1 if self.direction is Direction.FORWARD else -1)

    @property
    def next_module(self) -> ModuleId | None:
        """Module of the next hop; None if the next peer is the data node."""
        position, hops = self.next_position, self.path.hops
        return hops[position].module if 0 <= position < len(hops) else None


# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """Event: a microbatch starts at this data node. Never caused by a message."""

    microbatch: MicrobatchId
    path: Path
    purpose: Purpose
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class TensorArrived:
    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """Event: the transfer of an admitted tensor broke off."""

    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class Computed:
    key: Key
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """Event: a Compute action failed (non-finite gradient, out of memory) and added no gradient."""

    key: Key
    detail: str


@dataclass(frozen=True, slots=True)
class ControlArrived:
    sender: PeerId
    message: Receipt | Close | Recall | Settled | Unsettled


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Event: the link to a peer broke, stalled, or could not be opened."""

    peer: PeerId
    detail: str


@dataclass(frozen=True, slots=True)
class PeerBack:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed."""


Event = Started | TensorArrived | BrokenOff | Computed | ComputeFailed | ControlArrived | PeerLost | PeerBack | Tick

# ---- actions ---------------------------------------------------------------------------------------------------------


class Work(enum.Enum):
    FORWARD = enum.auto()  # Input -> output; at a data node's start, tokens -> hidden states
    LOSS = enum.auto()  # At a data node's end: hidden states -> loss and its gradient
    BACKWARD = enum.auto()  # Gradient of the output -> gradient of the input; adds the parameter gradient
    REPLAY = enum.auto()  # A substitute's forward and backward pass: input and gradient of the output -> as BACKWARD


@dataclass(frozen=True, slots=True)
class Compute:
    key: Key
    work: Work
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class SendOutput:
    """Action: send the result of the last Compute with this message. PeerLost reports a failure."""

    key: Key
    to: PeerId
    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class SendControl:
    to: PeerId
    message: MicrobatchControl


@dataclass(frozen=True, slots=True)
class KeepGradient:
    """Action: keep a gradient that arrived before the input needed for the backward pass."""

    key: Key


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Action: count the visit, because its data node has confirmed the gradient added for this entry."""

    key: Key


@dataclass(frozen=True, slots=True)
class Retract:
    """Action: subtract the gradient added for this entry, recomputed from the kept input and output gradient."""

    key: Key


@dataclass(frozen=True, slots=True)
class Forget:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Action at the data node: complete a microbatch. `path`: the replicas whose gradients count."""

    microbatch: MicrobatchId
    path: Path


Action = Compute | SendOutput | SendControl | KeepGradient | Confirmed | Retract | Forget | Finished
