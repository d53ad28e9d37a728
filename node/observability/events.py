"""The typed events that a node reports while it runs, which `node.observability.event_json` writes and reads as lines
of JSON.

One event is one JSON object on one line; its `event` key names the kind and the other keys are the fields below.
Keys are never renamed or removed; new kinds and new keys may come, so readers ignore what they do not know.
Numbers that are not finite travel as null, because JSON has no word for them.

Losses are nats per token, rates tokens per second, durations seconds, `tokens` and steps count from the
beginning of the run; a node that was resumed from a checkpoint goes on counting where that was.

A node writes its events to standard output (with `--json`) and, with `--log-dir`, to a log file of its own. Events
about single microbatches (`visit`, `retracted`, `completed`), `round_progress`, and `started`, `continued` and `ended`
go to the log file only; `skipstone check` reads them there. A microbatch is named by the last six characters of its
data node's peer id and its number there, as in `abandoned`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import ClassVar, Literal, Protocol

from node.observability.typed_json import LEFT_OUT
from swarm.workload.microbatch_sizes import SizeSummary


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """The fates of the microbatches of one data node, or of all."""

    started: int = 0
    completed: int = 0
    abandoned: int = 0
    duplicated: int = 0

    def plus(self, other: MicrobatchCounts) -> MicrobatchCounts:
        return MicrobatchCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class BusySeconds:
    """The account of a node's time. The parts overlap, because sending and computing do."""

    compute: float = 0.0
    codec: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    idle_work: float = 0.0
    """Computed when no job waited."""


@dataclass(frozen=True, slots=True)
class Step:
    """A data node, a local swarm or a solo run has finished step `step` (counted from 1)."""

    NAME: ClassVar[str] = "step"
    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    peer: str
    """The data node; `swarm` for several, empty for a solo run."""
    sizes: SizeSummary | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node has a new state: who it is, what it hosts, where it is reached, and the link to join through it."""

    NAME: ClassVar[str] = "node"
    peer: str
    module: str | None
    """`stage.expert`; null before the node hosts one."""
    state: str
    """A `PeerState` in lower case, or `stopped`."""
    address: str
    link: str


@dataclass(frozen=True, slots=True)
class Reach:
    """How others reach the node has changed, or was found out. docs/REACHABILITY.md has the steps."""

    NAME: ClassVar[str] = "reach"
    peer: str
    step: str
    """`direct`, `mapped`, `reverse`, `unreachable` or `unknown`; more may come."""
    address: str
    """Empty when it cannot be dialled."""
    reason: str
    fix: str
    """What a person can do; empty when there is nothing."""


@dataclass(frozen=True, slots=True)
class _OfModule:
    peer: str
    module: str


@dataclass(frozen=True, slots=True)
class Move(_OfModule):
    """The node leaves its module for another that needs it more. Statuses follow: draining, joining, serving."""

    NAME: ClassVar[str] = "move"
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class InnerStep(_OfModule):
    """A replica has taken an optimizer step with the mean gradient of `visits` microbatches."""

    NAME: ClassVar[str] = "inner_step"
    step: int
    visits: int
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Load(_OfModule):
    """How busy a replica is now; sent now and then, for whoever watches."""

    NAME: ClassVar[str] = "load"
    slots: int
    busy_slots: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """No peer serves `module`; the work waits for one, or goes round it where the run's paths skip stages."""

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
    """A replica's gradient of a microbatch counts: its data node completed it on a path that names this replica."""

    NAME: ClassVar[str] = "visit"
    microbatch: str


@dataclass(frozen=True, slots=True)
class Retracted(_OfModule):
    """A replica removed a gradient that it had added."""

    NAME: ClassVar[str] = "retracted"
    microbatch: str


@dataclass(frozen=True, slots=True)
class Completed:
    """A microbatch has come home to its data node."""

    NAME: ClassVar[str] = "completed"
    peer: str
    microbatch: str
    hops: tuple[str, ...]
    """`module@peer` each, repairs included, stage 0 left out."""
    tokens: int | None = field(default=None, metadata=LEFT_OUT)
    """Null in older logs."""
    route: tuple[int, ...] | None = field(default=None, metadata=LEFT_OUT)
    """The experts of its documents; `hops` differs where these were not served."""


@dataclass(frozen=True, slots=True)
class RoundProgress(_OfModule):
    """A replica exchanges pseudo-gradients: at the start of an attempt and at each further tenth."""

    NAME: ClassVar[str] = "round_progress"
    round: int
    attempt: int
    convener: str
    chunks: int
    percent: int


@dataclass(frozen=True, slots=True)
class RoundCommitted(_OfModule):
    """A replica has applied a round: it holds the anchor that the digest names."""

    NAME: ClassVar[str] = "round"
    round: int
    digest: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    """Members with a pseudo-gradient."""
    tokens: int
    attempts: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    codec: str = "none"
    audit_sent_bytes: int = 0
    """Traffic of audits since the last round, not in `sent_bytes`."""
    audit_received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaAccused(_OfModule):
    """This replica saw another one send what cannot be honest, and excludes it from rounds."""

    NAME: ClassVar[str] = "accused"
    accused: str
    round: int
    why: str
    proof: str = ""
    """BLAKE3 of the signed hashes, hexadecimal; empty without proof."""


@dataclass(frozen=True, slots=True)
class CatchingUp(_OfModule):
    """A replica downloads the anchor of a round that it missed; sent once a second."""

    NAME: ClassVar[str] = "catching_up"
    round: int
    bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CaughtUp(_OfModule):
    """A replica has fetched the anchor of a round in which it had no part."""

    NAME: ClassVar[str] = "caught_up"
    round: int
    digest: str
    bytes: int
    seconds: float
    donors: tuple[str, ...]
    donor_bytes: tuple[int, ...] = ()
    """Good bytes from each of `donors`."""


@dataclass(frozen=True, slots=True)
class Restored(_OfModule):
    """A replica has loaded an anchor from a checkpoint."""

    NAME: ClassVar[str] = "restored"
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Started:
    """The first line of a log file, also after a rotation; the clock is that of this machine."""

    NAME: ClassVar[str] = "started"
    peer: str
    unix_ms: int
    part: int
    """Counts the files of a process from 1."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A data node that was resumed from a checkpoint goes on counting from here."""

    NAME: ClassVar[str] = "continued"
    peer: str
    microbatches: MicrobatchCounts


@dataclass(frozen=True, slots=True)
class Ended:
    """The last line of the log of a node that stopped in good order."""

    NAME: ClassVar[str] = "ended"
    peer: str
    unix_ms: int


@dataclass(frozen=True, slots=True)
class LastPeer(_OfModule):
    """The node stops, and nobody else serves its module."""

    NAME: ClassVar[str] = "last_peer"
    saved_in: str | None
    """The folder with the module's state; null when it is lost."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for a person."""

    NAME: ClassVar[str] = "note"
    level: Literal["info", "warning", "error"]
    message: str


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """The account of a module when its node leaves it or stops. Losses are null except for data nodes."""

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
    """One peer of a finished run. `exit_code` is 128 + n when signal n ended it, None for a solo run."""

    peer: str
    module: str | None
    steps: int
    accumulated: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event of `skipstone up` and `skipstone solo`."""

    NAME: ClassVar[str] = "summary"
    steps: int
    loss_first: float | None
    loss_last: float | None
    tokens: int
    tokens_per_s: float
    microbatches: MicrobatchCounts
    peers: tuple[PeerSummary, ...]


LogEvent = Visit | Retracted | Completed | RoundProgress | Started | Continued | Ended
"""Too many for a stream that a person watches, or about the log itself."""
RoundEvent = RoundCommitted | ReplicaAccused | CatchingUp | CaughtUp | Restored
NodeEvent = NodeStatus | Reach | Move | Load | Waiting | Resumed | PeerChange | LastPeer | NodeSummary
Event = LogEvent | RoundEvent | NodeEvent | Step | InnerStep | Abandoned | Note | Summary


class EventSink(Protocol):
    """The receiver of events. `emit` is called on the event loop: it returns at once and never raises."""

    def emit(self, event: Event) -> None: ...
