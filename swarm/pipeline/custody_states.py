"""The holdings, events and actions of custody. Plain data; `swarm.pipeline.custody` is the machine."""

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
    """A holding's progress."""

    RECEIVING = enum.auto()
    FORWARD = enum.auto()
    HANDING_ON = enum.auto()
    GUARDING = enum.auto()
    AWAITING = enum.auto()
    BACKWARD = enum.auto()
    HANDING_BACK = enum.auto()
    GUARDING_BACK = enum.auto()
    SETTLING = enum.auto()
    """Done with, but for the data node's word whether its gradient counts; needs no slot."""
    RECEIVING_GRADIENT = enum.auto()
    """A stand-in on the way back: the gradient is on its way here."""
    RECALLING = enum.auto()
    """A stand-in that holds the gradient and has asked the hop before it for the input."""


BEFORE_BACKWARD = frozenset({Phase.RECEIVING, Phase.FORWARD, Phase.HANDING_ON, Phase.GUARDING, Phase.AWAITING})
ON_THE_WAY_BACK = frozenset({Phase.HANDING_BACK, Phase.GUARDING_BACK})
HANDED_OVER = ON_THE_WAY_BACK | {Phase.HANDING_ON, Phase.GUARDING}
"""Offered to another peer that has not passed it on yet."""
ADDED = ON_THE_WAY_BACK | {Phase.SETTLING}
"""A hop's gradient is in its sum, and not yet known to count."""


class Place(enum.Enum):
    """The answer to an announced tensor: whether it is admitted."""

    FREE = enum.auto()
    BUSY = enum.auto()
    REFUSED = enum.auto()


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
    """As its data node has signed it."""
    deadline: float
    """When it may be forgotten if nothing happens to it any more."""
    sender: PeerId | None = None
    """By whose link it first came; None of a data node's own start."""
    since: float = 0.0
    """When it did."""
    target: PeerId | None = None
    """Whom it is being handed to."""
    tried: frozenset[PeerId] = frozenset()
    """Replicas that failed or refused; not asked again for this microbatch."""
    busy: frozenset[PeerId] = frozenset()
    """Replicas that had no slot when asked in this round of asking; asked again when nobody else is left."""
    retry_at: float | None = None
    """When to offer it again to a target that was busy or out of reach."""
    refusals: int = 0
    """How often in a row everybody was busy."""
    failing_since: float | None = None
    """Since when the target has been out of reach, with nobody to stand in for it; or has owed a recalled input."""
    came: float = 0.0
    """When the latest tensor for it was here."""
    waited_s: float = 0.0
    """Of that tensor: until its computation began."""
    computed_s: float = 0.0
    handed: float = 0.0
    """When its output was last offered to somebody."""
    asked: int = 0
    """How often the data node has been asked whether the gradient counts."""

    @property
    def is_end(self) -> bool:
        return self.key.position == len(self.path.hops)

    @property
    def is_start(self) -> bool:
        return self.key.position == -1

    @property
    def direction(self) -> Direction:
        """The direction in which it is going."""
        return Direction.FORWARD if self.phase in BEFORE_BACKWARD else Direction.BACKWARD

    @property
    def next_position(self) -> int:
        """The position of the peer that gets it from here."""
        return self.key.position + (1 if self.direction is Direction.FORWARD else -1)

    @property
    def previous_position(self) -> int:
        """The position of the peer that it came from."""
        return self.key.position - (1 if self.direction is Direction.FORWARD else -1)

    @property
    def next_module(self) -> ModuleId | None:
        """The module whose replicas it can be handed to; None: the next is its data node."""
        position, hops = self.next_position, self.path.hops
        return hops[position].module if 0 <= position < len(hops) else None


# ---- what happens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A microbatch starts at its data node: its embedding is to be computed. Made by the data node itself, not by a
    message.
    """

    microbatch: MicrobatchId
    path: Path
    purpose: Purpose
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class TensorArrived:
    """The whole tensor of an admitted message is here."""

    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """The tensor of an admitted message will not come whole."""

    message: Forward | Backward


@dataclass(frozen=True, slots=True)
class Computed:
    """The computation asked for by a Compute action is done; it took `seconds` on the device."""

    key: Key
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """The computation could not be done (non-finite gradient, out of memory); nothing was accumulated."""

    key: Key
    detail: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A small message about a microbatch has come."""

    sender: PeerId
    message: Receipt | Close | Recall | Settled | Unsettled


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to a peer broke, or stalled, or could not be made."""

    peer: PeerId
    detail: str


@dataclass(frozen=True, slots=True)
class PeerBack:
    """There is a link to a peer again, or for the first time."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Started | TensorArrived | BrokenOff | Computed | ComputeFailed | Arrived | PeerLost | PeerBack | Tick

# ---- what is to be done -------------------------------------------------------------------------------------


class Work(enum.Enum):
    """The kind of a computation."""

    FORWARD = enum.auto()
    """Input to output; the data node's start: tokens to hidden states."""
    LOSS = enum.auto()
    """The data node's end: hidden states to loss and its gradient."""
    BACKWARD = enum.auto()
    """Gradient of the output to gradient of the input; the parameter gradient is accumulated."""
    REPLAY = enum.auto()
    """A stand-in's FORWARD and BACKWARD in one: input and gradient of the output to gradient of the input."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute on the tensors of this holding."""

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
    """Send a small message."""

    to: PeerId
    message: MicrobatchControl


@dataclass(frozen=True, slots=True)
class KeepGradient:
    """Keep the gradient that has just arrived; its input comes later."""

    key: Key


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Tell the node that the gradient that was added counts."""

    key: Key


@dataclass(frozen=True, slots=True)
class Retract:
    """Take back the gradient that was added and does not count, from the input and the gradient that are kept."""

    key: Key


@dataclass(frozen=True, slots=True)
class Forget:
    """Free the slot, the buffers and the graph of a holding that is gone."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Report at the data node that the microbatch has completed. `path` is the one whose gradients count."""

    microbatch: MicrobatchId
    path: Path


Action = Compute | SendOutput | Tell | KeepGradient | Confirmed | Retract | Forget | Finished
