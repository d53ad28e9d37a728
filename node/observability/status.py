"""Status of a node, which it sends to peers that ask, and of a swarm. JSON keys are never renamed or removed."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from node.observability.events import MicrobatchCounts
from node.observability.typed_json import OMITTED_IF_NONE, from_json
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import MAX_COUNT
from swarm.workload.microbatch_sizes import SizeSummary

MOST_NATS = 1e6  # Largest loss accepted from a peer, so that one lie cannot dominate the mean
MOST_POINTS = 128  # Of a curve; beyond this, every second point is dropped
MOST_COMPLETED = 16
MOST_LINKS = 64


Point = tuple[int, int, float, int]  # Step, tokens so far, nats, Unix time in seconds


@dataclass(frozen=True, slots=True)
class Curve:
    """Loss of a run by step, in at most MOST_POINTS points."""

    points: tuple[Point, ...] = ()
    stride: int = 1  # Steps from one point to the next

    def with_point(self, step: int, tokens: int, loss: float, unix_s: float) -> "Curve":
        if step % self.stride or not math.isfinite(loss):
            return self
        points = (*self.points, (step, tokens, round(loss, 4), int(unix_s)))
        return Curve(points, self.stride) if len(points) < MOST_POINTS else Curve(points[1::2], 2 * self.stride)

    @classmethod
    def together(cls, curves: Sequence["Curve"]) -> "Curve | None":
        """Combines data nodes' curves at the steps of the longest one: mean losses, summed tokens."""
        by_step: dict[int, list[Point]] = {}
        for step, tokens, loss, unix_s in (point for curve in curves for point in curve.points):
            if abs(loss) <= MOST_NATS and 0 <= min(step, tokens, unix_s) <= max(step, tokens, unix_s) <= MAX_COUNT:
                by_step.setdefault(step, []).append((step, tokens, loss, unix_s))
        longest = max(curves, key=lambda curve: curve.points[-1][0], default=cls())
        combined = cls(stride=1)
        for step, _, _, unix_s in longest.points[:MOST_POINTS]:
            if found := by_step.get(step):
                loss = math.fsum(loss for _, _, loss, _ in found) / len(found)
                combined = combined.with_point(step, sum(tokens for _, tokens, _, _ in found), loss, unix_s)
        return combined if combined.points else None


NO_CURVE: Final = Curve()


@dataclass(frozen=True, slots=True)
class CompletedPath:
    """A completed microbatch: `module@peer` of each hop, without stage 0, and its duration in seconds."""

    microbatch: str
    hops: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Bytes that a link has carried so far, and its round trip in seconds."""

    sent_bytes: int = 0
    received_bytes: int = 0
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReachStatus:
    step: str = "unknown"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    at: str = ""
    carried_bytes: int = 0
    left_bytes: int = 0
    attached: int = 0
    tunnels: int = 0
    opened: int = 0
    refused: int = 0
    cut_off: int = 0


@dataclass(frozen=True, slots=True)
class AttachmentStatus:
    relay: str
    standing: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundStatus:
    members: int = 0
    seconds_ago: float = 0.0
    codec: str = ""
    codec_reason: str = ""


@dataclass(frozen=True, slots=True)
class Accusation:
    peer: str
    round: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class LeftAnchor:
    """Anchor that a replica replaced by other replicas' one. `kept`: a snapshot of it is in the checkpoint's `left`."""

    round: int = 0
    seconds_ago: float = 0.0
    kept: bool = False
    followed: int = 0  # Round of the other anchor; 0 from older nodes


@dataclass(frozen=True, slots=True)
class DownloadStatus:
    round: int = 0
    bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CodecChoice:
    codec: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """Codecs of the link to one peer; None if nothing was sent yet."""

    bytes_per_s: float = 0.0
    activations: CodecChoice | None = field(default=None, metadata=OMITTED_IF_NONE)
    gradients: CodecChoice | None = field(default=None, metadata=OMITTED_IF_NONE)


@dataclass(frozen=True, slots=True)
class CodecStatus:
    allowed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # By kind of traffic
    too_coarse: tuple[str, ...] = ()
    links: dict[str, LinkStatus] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagePrice:
    """A data node's use of one stage: launched microbatches, wanted share, and the planner's price."""

    launched: int = 0
    share: float = 0.0  # Share of the microbatches that should visit the stage
    ahead: float = 0.0  # Visits beyond the stage's share, from all data nodes as far as known
    price_s: float = 0.0  # Price of a visit beyond links and computing, in seconds


@dataclass(frozen=True, slots=True)
class PathStatus:
    stages: dict[str, StagePrice] = field(default_factory=dict)  # By stage after stage 0
    waiting_s: dict[str, float] = field(default_factory=dict)  # Mean wait before computing, by peer


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """Microbatches of one route at a data node since its start. Empty `experts`: all routes beyond the limit."""

    experts: tuple[int, ...]
    share: float = 0.0
    visits: int = 0
    rerouted: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class WindowStatus:
    microbatches: int = 0
    under_way: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ComputeStatus:
    """Seconds that a node's compute thread computed, did idle work or waited, since its start."""

    busy_s: float = 0.0
    idle_work_s: float = 0.0
    idle_s: float = 0.0
    idle_waiting: int = 0


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """Weight gradients of a stage peer: computed at once, or deferred to idle time."""

    put_off: bool = False
    reason: str = ""
    visits: int = 0
    waiting: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MomentsStatus:
    """Number format and memory of the moments in a replica's inner optimizer."""

    form: str = ""
    reason: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """Totals of a node's work in its module, such as steps, tokens and losses, for summaries and status."""

    steps: int = 0
    accumulated: int = 0
    recomputed: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    codec_s: float = 0.0
    counts: MicrobatchCounts = field(default_factory=MicrobatchCounts)
    loss_first: float | None = None
    loss_last: float | None = None
    waiting_for: tuple[str, ...] = ()
    visits: dict[str, int] = field(default_factory=dict)
    curve: Curve | None = field(default=None, metadata=OMITTED_IF_NONE)
    # A data node's last microbatches.
    completed: tuple[CompletedPath, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)
    measured: tuple[str, ...] = ()  # Peers whose visits this data node completed recently
    paths: PathStatus | None = None
    sizes: SizeSummary | None = field(default=None, metadata=OMITTED_IF_NONE)
    window: WindowStatus | None = field(default=None, metadata=OMITTED_IF_NONE)
    # Completed visits by module, in a run with experts.
    module_visits: dict[str, int] | None = field(default=None, metadata=OMITTED_IF_NONE)
    # Visits that went to another expert, by the replaced module.
    rerouted: dict[str, int] | None = field(default=None, metadata=OMITTED_IF_NONE)
    routes: tuple[RouteStatus, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)
    weights: WeightsStatus | None = field(default=None, metadata=OMITTED_IF_NONE)
    moments: MomentsStatus | None = field(default=None, metadata=OMITTED_IF_NONE)
    # Data nodes' shares of the tokens in a replica's last inner steps.
    data_nodes: dict[str, float] | None = field(default=None, metadata=OMITTED_IF_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Account):
    """A node's status, with which it answers a STATUS question."""

    peer: str = ""
    name: str | None = field(default=None, metadata=OMITTED_IF_NONE)  # Chosen by the owner: any peer may have any
    module: str = ""
    state: str = ""
    addresses: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    reach: ReachStatus = ReachStatus()
    relay: RelayStatus = RelayStatus()
    relays: tuple[AttachmentStatus, ...] = ()
    unix_ms: int = 0
    slots: int = 0
    free_slots: int = 0
    round: int = 0
    digest: str = ""
    rounds: str = ""
    last_round: RoundStatus | None = None
    accused: tuple[Accusation, ...] = ()
    catching_up: DownloadStatus | None = None
    left: LeftAnchor | None = field(default=None, metadata=OMITTED_IF_NONE)
    credited: int | None = field(default=None, metadata=OMITTED_IF_NONE)  # Tokens of work that others have signed
    codecs: CodecStatus = field(default_factory=CodecStatus)
    traffic: dict[str, LinkTraffic] | None = field(default=None, metadata=OMITTED_IF_NONE)  # By peer
    compute: ComputeStatus | None = field(default=None, metadata=OMITTED_IF_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer of a run: its announcement, and its status if it answered."""

    peer: str
    module: str | None
    state: str
    addresses: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    tokens_per_s: float = 0.0
    slots: int = 0
    free_slots: int = 0
    steps: int = 0
    round: int = 0
    digest: str = ""
    answered: Status | None = None

    @property
    def said(self) -> Status:
        return self.answered or Status()

    def hosts(self, stage: int) -> bool:
        return self.module is not None and self.module.partition(".")[0] == str(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """Status of a run, as reported by its peers. Figures sum over all data nodes."""

    run: str
    name: str
    stages: int
    step: int | None = None
    loss: float | None = None
    tokens: int = 0
    tokens_per_s: float = 0.0
    microbatches: MicrobatchCounts = field(default_factory=MicrobatchCounts)
    waiting_for: tuple[str, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    modules: tuple[str, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)
    routes: tuple[RouteStatus, ...] | None = field(default=None, metadata=OMITTED_IF_NONE)
    curve: Curve | None = field(default=None, metadata=OMITTED_IF_NONE)

    @property
    def too_few_peers(self) -> str | None:
        """Reason why some experts are unserved: fewer peers than modules. None if there are enough."""
        hosting = sum(peer.module is not None for peer in self.peers)
        if self.modules is None or hosting >= len(self.modules):
            return None
        return f"{hosting} peers for {len(self.modules)} modules: documents of an unserved expert go to the next best"

    @classmethod
    def of(
        cls, run: str, name: str, stages: int, peers: tuple[PeerStatus, ...], modules: tuple[str, ...] | None = None
    ) -> "SwarmStatus":
        """Combines the statuses of all peers. `modules` lists all modules of a run with experts."""
        data = [peer.answered for peer in peers if peer.answered is not None and peer.hosts(0)]
        # Peers report these figures, so they are bounded before they enter a mean.
        losses = [each.loss_last for each in data if each.loss_last is not None and abs(each.loss_last) <= MOST_NATS]
        return cls(
            run=run,
            name=name,
            stages=stages,
            # Each data node counts its own steps; the foremost one shows the progress.
            step=max((each.steps for each in data), default=None),
            loss=math.fsum(losses) / len(losses) if losses else None,
            tokens=sum(each.tokens for each in data),
            tokens_per_s=sum(each.tokens_per_s for each in data),
            microbatches=reduce(MicrobatchCounts.plus, (each.counts for each in data), MicrobatchCounts()),
            waiting_for=tuple(sorted({module for each in data for module in each.waiting_for})),
            peers=peers,
            modules=modules,
            routes=None if modules is None else _routes_together(data),
            curve=Curve.together([each.curve for each in data if each.curve is not None and each.curve.points]),
        )


def _routes_together(answers: Iterable[Status]) -> tuple[RouteStatus, ...]:
    by_experts: dict[tuple[int, ...], list[RouteStatus]] = {}
    for answer in answers:
        for route in answer.routes or ():
            by_experts.setdefault(route.experts, []).append(route)
    completed = max(1, sum(route.visits for routes in by_experts.values() for route in routes))
    return tuple(_one_route(experts, routes, completed) for experts, routes in sorted(by_experts.items()))


def _one_route(experts: tuple[int, ...], routes: Sequence[RouteStatus], completed: int) -> RouteStatus:
    visits, rerouted = sum(route.visits for route in routes), sum(route.rerouted for route in routes)
    known = [
        (route.loss, route.visits)
        for route in routes
        if route.loss is not None and abs(route.loss) <= MOST_NATS and 0 < route.visits <= MAX_COUNT
    ]
    # Weighted by visits, so that a rarely used data node does not distort the mean.
    weight = sum(count for _, count in known)
    loss = math.fsum(loss * count for loss, count in known) / weight if weight else None
    return RouteStatus(experts, round(visits / completed, 4), visits, rerouted, loss)


def parse_answer(text: bytes) -> dict[str, Any]:
    """Parses a peer's JSON answer. Raises ProtocolViolation if it is not a JSON object."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolViolation("the answer is not JSON") from None
    if not isinstance(table, dict):
        raise ProtocolViolation("the answer is not a JSON object")
    return table


def parse_status(text: bytes) -> Status:
    """Parses a peer's status; malformed fields get defaults. Raises ProtocolViolation if it is not a JSON object."""
    return from_json(Status, parse_answer(text), "status", lenient=True)
