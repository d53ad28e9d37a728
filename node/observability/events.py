"""Typed events that a node reports while it runs.

`node.observability.event_json` writes each as one JSON object per line: `event` names the kind, the other keys are the
fields below. Keys are never renamed or removed. New kinds and keys may come, so readers ignore unknown ones. JSON has
no infinity or NaN, so they become null.
Losses are nats per token, rates tokens per second, durations seconds. Tokens and steps count from the run's beginning.
Events go to standard output (with `--json`) and, with `--log-dir`, to a log file. `LogEvent`s go to the log file only,
for `skipstone check`. A microbatch is named by the last six characters of its data node's peer id and its number.
"""

from dataclasses import astuple, dataclass, field
from typing import ClassVar, Literal, Protocol, dataclass_transform

from node.observability.typed_json import OMITTED_IF_NONE
from swarm.workload.microbatch_sizes import SizeSummary


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """Numbers of microbatches by outcome, for one data node or summed over all."""

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0

    def plus(self, other: "MicrobatchCounts") -> "MicrobatchCounts":
        return MicrobatchCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class BusySeconds:
    """Seconds that a node spent on each activity. Activities overlap, so the sum may exceed the elapsed time."""

    compute: float = 0.0
    codec: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    idle_work: float = 0.0  # Computed while no other job waited


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Kind:
    """Base of the events: makes each subclass a frozen dataclass, with `name` as its kind in JSON."""

    NAME: ClassVar[str]

    def __init_subclass__(cls, name: str = "") -> None:
        cls.NAME = name
        dataclass(frozen=True)(cls)


class Step(_Kind, name="step"):
    """Training step `step` (from 1) is done at a data node, in a local swarm or in a solo run."""

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    peer: str  # The data node; `swarm` for several, empty for solo
    sizes: SizeSummary | None = field(default=None, metadata=OMITTED_IF_NONE)


class NodeStatus(_Kind, name="node"):
    """The node's state, module, address or join link has changed."""

    peer: str
    module: str | None  # `stage.expert`; null before the node hosts a module
    state: str  # A `PeerState` in lower case, or `stopped`
    address: str
    link: str


class Reach(_Kind, name="reach"):
    """The way in which peers reach the node was found or has changed."""

    peer: str
    step: str  # `direct`, `mapped`, `reverse`, `unreachable` or `unknown`; more may come
    address: str  # Empty if no peer can dial it
    reason: str
    fix: str  # Advice for a person, or empty


class _OfModule(_Kind):
    peer: str
    module: str


class Move(_OfModule, name="move"):
    """The node moves to another module, which needs it more. It then reports draining, joining and serving."""

    target: str
    reason: str


class InnerStep(_OfModule, name="inner_step"):
    """A replica took an optimizer step with the mean gradient of `visits` microbatches."""

    step: int
    visits: int
    gradient_norm: float
    learning_rate: float


class Load(_OfModule, name="load"):
    """Current load of a replica, sent periodically."""

    slots: int
    busy_slots: int
    tokens_per_s: float


class Waiting(_Kind, name="waiting"):
    """No peer serves `module`. Microbatches wait for one, or skip the stage if the run allows that."""

    module: str
    reason: str


class Resumed(_Kind, name="resumed"):
    """A peer serves `module` again."""

    module: str


class PeerChange(_Kind, name="peer"):
    """The link to another peer has come up or gone down."""

    peer: str
    change: Literal["up", "down"]
    reason: str


class Abandoned(_Kind, name="abandoned"):
    """A microbatch will not be completed."""

    microbatch: str
    reason: str


class Visit(_OfModule, name="visit"):
    """A replica's gradient of a microbatch is confirmed, because the data node completed the microbatch."""

    microbatch: str


class Retracted(_OfModule, name="retracted"):
    """A replica subtracted the gradient of a microbatch, which it had added before."""

    microbatch: str


class Completed(_Kind, name="completed"):
    """A microbatch has returned to its data node, which confirms the gradients."""

    peer: str
    microbatch: str
    hops: tuple[str, ...]  # `module@peer` each, including repairs, without stage 0
    tokens: int | None = field(default=None, metadata=OMITTED_IF_NONE)  # Null in older logs
    # Experts of its documents. `hops` differs where an expert was unserved.
    route: tuple[int, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)


class RoundProgress(_OfModule, name="round_progress"):
    """A replica exchanges pseudo-gradients; sent at the start of an attempt at a round and at each further 10 %."""

    round: int
    attempt: int
    convener: str
    chunks: int
    percent: int


class RoundCommitted(_OfModule, name="round"):
    """A replica has applied an averaging round, and now holds the anchor with this digest."""

    round: int
    digest: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]  # Members that gave a pseudo-gradient
    tokens: int
    attempts: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    codec: str = "none"
    audit_sent_bytes: int = 0  # Audit traffic since the last round, not part of `sent_bytes`
    audit_received_bytes: int = 0


class ReplicaAccused(_OfModule, name="accused"):
    """This replica's audit of a round convicted another replica, which it excludes from further rounds."""

    accused: str
    round: int
    why: str
    proof: str = ""  # Hex BLAKE3 of the signed hashes; empty without proof


class CatchingUp(_OfModule, name="catching_up"):
    """A replica downloads the anchor of a round that it missed; sent once a second."""

    round: int
    bytes: int
    total_bytes: int


class CaughtUp(_OfModule, name="caught_up"):
    """A replica has downloaded the anchor of a round that it missed."""

    round: int
    digest: str
    bytes: int
    seconds: float
    donors: tuple[str, ...]
    donor_bytes: tuple[int, ...] = ()  # Verified bytes from each of `donors`


class Restored(_OfModule, name="restored"):
    """A replica has loaded an anchor from a checkpoint."""

    round: int
    digest: str


class Started(_Kind, name="started"):
    """First line of a log file, also after rotation. Time is this machine's clock."""

    peer: str
    unix_ms: int
    part: int  # Number of the file within this process, from 1


class Continued(_Kind, name="continued"):
    """A data node resumed from a checkpoint, with the counts of microbatches that it had reached."""

    peer: str
    microbatches: MicrobatchCounts


class Ended(_Kind, name="ended"):
    """Last line of the log of a node that stopped cleanly."""

    peer: str
    unix_ms: int


class LastPeer(_OfModule, name="last_peer"):
    """The node stops and no other peer serves its module."""

    saved_in: str | None  # Folder with the module's state; null if the state is lost


class Note(_Kind, name="note"):
    """A message for a person."""

    level: Literal["info", "warning", "error"]
    message: str


class NodeSummary(_Kind, name="node_summary"):
    """Totals of a node's work in its module, when it leaves the module or stops. Only data nodes have losses."""

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


class Summary(_Kind, name="summary"):
    """Last event of `skipstone up` and `skipstone solo`."""

    steps: int
    loss_first: float | None
    loss_last: float | None
    tokens: int
    tokens_per_s: float
    microbatches: MicrobatchCounts
    peers: tuple[PeerSummary, ...]


# Events for the log file only: too many for a terminal, or about the log itself.
LogEvent = Visit | Retracted | Completed | RoundProgress | Started | Continued | Ended
RoundEvent = RoundCommitted | ReplicaAccused | CatchingUp | CaughtUp | Restored
NodeEvent = NodeStatus | Reach | Move | Load | Waiting | Resumed | PeerChange | LastPeer | NodeSummary
Event = LogEvent | RoundEvent | NodeEvent | Step | InnerStep | Abandoned | Note | Summary


class EventSink(Protocol):
    """Receiver of events. `emit` runs on the event loop: it returns at once and never raises."""

    def emit(self, event: Event) -> None: ...
