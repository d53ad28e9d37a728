"""Typed events that a node reports while it runs.

`node.observability.event_json` writes each as one JSON object per line: `event` names the kind, the other keys are the
fields below. Keys are never renamed or removed. New kinds and keys may come, so readers ignore unknown ones. JSON has
no infinity or NaN, so they become null.

Losses are nats per token, rates tokens per second, durations seconds. Tokens and steps count from the beginning of the
run, also after a resume.

Events go to standard output (with `--json`) and, with `--log-dir`, to a log file. `LogEvent`s go to the log file only,
for `skipstone check`. A microbatch is named by the last six characters of its data node's peer id and its number.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import ClassVar, Literal, Protocol

from node.observability.typed_json import OMITTED_IF_NONE
from swarm.workload.microbatch_sizes import SizeSummary


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """Numbers of microbatches by outcome, for one data node or summed over all."""

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0

    def plus(self, other: MicrobatchCounts) -> MicrobatchCounts:
        return MicrobatchCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class BusySeconds:
    """Seconds that a node spent on each activity. Activities overlap, so the sum may exceed the elapsed time."""

    compute: float = 0.0
    codec: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    idle_work: float = 0.0
    """Computed while no other job waited."""


@dataclass(frozen=True, slots=True)
class Step:
    """Training step `step` (from 1) is done at a data node, in a local swarm or in a solo run."""

    NAME: ClassVar[str] = "step"
    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    peer: str
    """The data node; `swarm` for several, empty for solo."""
    sizes: SizeSummary | None = field(default=None, metadata=OMITTED_IF_NONE)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node's state, module, address or join link has changed."""

    NAME: ClassVar[str] = "node"
    peer: str
    module: str | None
    """`stage.expert`; null before the node hosts a module."""
    state: str
    """A `PeerState` in lower case, or `stopped`."""
    address: str
    link: str


@dataclass(frozen=True, slots=True)
class Reach:
    """The way in which peers reach the node was found or has changed."""

    NAME: ClassVar[str] = "reach"
    peer: str
    step: str
    """`direct`, `mapped`, `reverse`, `unreachable` or `unknown`; more may come."""
    address: str
    """Empty if no peer can dial it."""
    reason: str
    fix: str
    """Advice for a person, or empty."""


@dataclass(frozen=True, slots=True)
class _OfModule:
    peer: str
    module: str


@dataclass(frozen=True, slots=True)
class Move(_OfModule):
    """The node moves to another module, which needs it more. It then reports draining, joining and serving."""

    NAME: ClassVar[str] = "move"
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class InnerStep(_OfModule):
    """A replica took an optimizer step with the mean gradient of `visits` microbatches."""

    NAME: ClassVar[str] = "inner_step"
    step: int
    visits: int
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Load(_OfModule):
    """Current load of a replica, sent periodically."""

    NAME: ClassVar[str] = "load"
    slots: int
    busy_slots: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """No peer serves `module`. Microbatches wait for one, or skip the stage if the run allows that."""

    NAME: ClassVar[str] = "waiting"
    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A peer serves `module` again."""

    NAME: ClassVar[str] = "resumed"
    module: str


@dataclass(frozen=True, slots=True)
class PeerChange:
    """The link to another peer has come up or gone down."""

    NAME: ClassVar[str] = "peer"
    peer: str
    change: Literal["up", "down"]
    reason: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A microbatch will not be completed."""

    NAME: ClassVar[str] = "abandoned"
    microbatch: str
    reason: str


@dataclass(frozen=True, slots=True)
class Visit(_OfModule):
    """A replica's gradient of a microbatch is confirmed, because the data node completed the microbatch."""

    NAME: ClassVar[str] = "visit"
    microbatch: str


@dataclass(frozen=True, slots=True)
class Retracted(_OfModule):
    """A replica subtracted the gradient of a microbatch, which it had added before."""

    NAME: ClassVar[str] = "retracted"
    microbatch: str


@dataclass(frozen=True, slots=True)
class Completed:
    """A microbatch has returned to its data node, which confirms the gradients."""

    NAME: ClassVar[str] = "completed"
    peer: str
    microbatch: str
    hops: tuple[str, ...]
    """`module@peer` each, including repairs, without stage 0."""
    tokens: int | None = field(default=None, metadata=OMITTED_IF_NONE)
    """Null in older logs."""
    route: tuple[int, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)
    """Experts of its documents. `hops` differs where an expert was unserved."""


@dataclass(frozen=True, slots=True)
class RoundProgress(_OfModule):
    """A replica exchanges pseudo-gradients; sent at the start of an attempt at a round and at each further 10 %."""

    NAME: ClassVar[str] = "round_progress"
    round: int
    attempt: int
    convener: str
    chunks: int
    percent: int


@dataclass(frozen=True, slots=True)
class RoundCommitted(_OfModule):
    """A replica has applied an averaging round, and now holds the anchor with this digest."""

    NAME: ClassVar[str] = "round"
    round: int
    digest: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    """Members that gave a pseudo-gradient."""
    tokens: int
    attempts: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    codec: str = "none"
    audit_sent_bytes: int = 0
    """Audit traffic since the last round, not part of `sent_bytes`."""
    audit_received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaAccused(_OfModule):
    """This replica's audit of a round convicted another replica, which it excludes from further rounds."""

    NAME: ClassVar[str] = "accused"
    accused: str
    round: int
    why: str
    proof: str = ""
    """Hex BLAKE3 of the signed hashes; empty without proof."""


@dataclass(frozen=True, slots=True)
class CatchingUp(_OfModule):
    """A replica downloads the anchor of a round that it missed; sent once a second."""

    NAME: ClassVar[str] = "catching_up"
    round: int
    bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CaughtUp(_OfModule):
    """A replica has downloaded the anchor of a round that it missed."""

    NAME: ClassVar[str] = "caught_up"
    round: int
    digest: str
    bytes: int
    seconds: float
    donors: tuple[str, ...]
    donor_bytes: tuple[int, ...] = ()
    """Verified bytes from each of `donors`."""


@dataclass(frozen=True, slots=True)
class Restored(_OfModule):
    """A replica has loaded an anchor from a checkpoint."""

    NAME: ClassVar[str] = "restored"
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Started:
    """First line of a log file, also after rotation. Time is this machine's clock."""

    NAME: ClassVar[str] = "started"
    peer: str
    unix_ms: int
    part: int
    """Number of the file within this process, from 1."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A data node resumed from a checkpoint, with the counts of microbatches that it had reached."""

    NAME: ClassVar[str] = "continued"
    peer: str
    microbatches: MicrobatchCounts


@dataclass(frozen=True, slots=True)
class Ended:
    """Last line of the log of a node that stopped cleanly."""

    NAME: ClassVar[str] = "ended"
    peer: str
    unix_ms: int


@dataclass(frozen=True, slots=True)
class LastPeer(_OfModule):
    """The node stops and no other peer serves its module."""

    NAME: ClassVar[str] = "last_peer"
    saved_in: str | None
    """Folder with the module's state; null if the state is lost."""


@dataclass(frozen=True, slots=True)
class Note:
    """A message for a person."""

    NAME: ClassVar[str] = "note"
    level: Literal["info", "warning", "error"]
    message: str


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """Totals of a node's work in its module, when it leaves the module or stops. Only data nodes have losses."""

    NAME: ClassVar[str] = "node_summary"
    peer: str
    module: str | None
    steps: int
    loss_first: float | None
    loss_last: float | None
    tokens: int
    tokens_per_s: float
    microbatches: MicrobatchCounts
    accumulated: int
    busy_s: BusySeconds


@dataclass(frozen=True, slots=True)
class PeerSummary:
    """One peer of a finished run. `exit_code` is 128 + n if signal n ended it, None for a solo run."""

    peer: str
    module: str | None
    steps: int
    accumulated: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Last event of `skipstone up` and `skipstone solo`."""

    NAME: ClassVar[str] = "summary"
    steps: int
    loss_first: float | None
    loss_last: float | None
    tokens: int
    tokens_per_s: float
    microbatches: MicrobatchCounts
    peers: tuple[PeerSummary, ...]


LogEvent = Visit | Retracted | Completed | RoundProgress | Started | Continued | Ended
"""Events for the log file only: too many for a terminal, or about the log itself."""
RoundEvent = RoundCommitted | ReplicaAccused | CatchingUp | CaughtUp | Restored
NodeEvent = NodeStatus | Reach | Move | Load | Waiting | Resumed | PeerChange | LastPeer | NodeSummary
Event = LogEvent | RoundEvent | NodeEvent | Step | InnerStep | Abandoned | Note | Summary


class EventSink(Protocol):
    """Receiver of events. `emit` runs on the event loop: it returns at once and never raises."""

    def emit(self, event: Event) -> None: ...
