"""Progress of a swarm, computed from its nodes' events."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from node.observability import events
from node.observability.events import Event
from node.observability.status import NO_CURVE, Curve

MAX_LAG = 8  # A step is done once no data node within this many steps of the foremost still has to report it
MAX_NOTES = 8
RATE_WINDOW = 16


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """Progress of one node, from its events and its process."""

    stage: int
    peer: str
    module: str | None = None
    state: str = "starting"  # The node's own report; after its end `finished` or `failed`
    inner_steps: int = 0
    tokens_per_s: float | None = None
    reported_steps: int = 0  # Last step of the swarm that this data node reported
    came_after: int = 0  # Steps of the swarm before this data node's first one: the offset of its count
    reported_tokens: int = 0
    round: int = 0
    exit_code: int | None = None
    summary: events.NodeSummary | None = None

    @property
    def is_live_data_node(self) -> bool:
        return self.stage == 0 and self.exit_code is None


@dataclass(frozen=True, slots=True)
class Moment:
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SwarmProgress:
    """Progress of a swarm for its views. Peers are keyed by the order in which they were started."""

    stages: int
    target: int | None = None
    peers: Mapping[int, PeerProgress] = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    curve: Curve = NO_CURVE
    first: Moment | None = None
    recent: tuple[Moment, ...] = ()
    pending: Mapping[int, tuple[events.Step, ...]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[tuple[float, events.Note], ...] = ()  # Each with its time in monotonic seconds
    lost: frozenset[str] = frozenset()  # Modules whose state is lost
    modules: tuple[str, ...] = ()

    @property
    def starting(self) -> str | None:
        """How many stages or modules are served; None after the first step."""
        if self.step or not self.peers:
            return None
        everyone = [peer for peer in self.peers.values() if peer.state == "serving"]
        if self.modules:
            return f"starting: {len({peer.module for peer in everyone})} of {len(self.modules)} modules are served"
        return f"starting: {len({peer.stage for peer in everyone})} of {self.stages} stages are served"

    @property
    def is_over(self) -> bool:
        if self.target is not None and self.step >= self.target:
            return True
        return bool(self.peers) and not any(peer.is_live_data_node for peer in self.peers.values())


@dataclass(frozen=True, slots=True)
class Progressed:
    state: SwarmProgress
    events: tuple[Event, ...]


def peer_started(state: SwarmProgress, index: int, stage: int, peer: str) -> SwarmProgress:
    """Updates the progress by the start of a node in `stage`. A restarted node keeps its counts."""
    starting, before = PeerProgress(stage, peer), state.peers.get(index)
    if before is not None:
        steps, tokens = before.reported_steps, before.reported_tokens
        starting = replace(starting, reported_steps=steps, reported_tokens=tokens, came_after=before.came_after)
    return replace(state, peers={**state.peers, index: starting})


def peer_exited(state: SwarmProgress, index: int, exit_code: int) -> Progressed:
    """Updates the progress by the end of a node, and completes steps that waited only for that node."""
    ended = replace(state.peers[index], exit_code=exit_code, state="failed" if exit_code else "finished")
    return _settle(_with_peer(state, index, ended), state.recent[-1].at if state.recent else 0.0)


def apply(state: SwarmProgress, index: int, event: Event, now: float) -> Progressed:
    """Updates the progress by an event of peer `index` at `now` (monotonic seconds)."""
    peer = state.peers[index]
    match event:
        case events.Step():
            return _step_reported(state, index, event, now)
        case events.NodeStatus():
            name = (event.module or "").partition(".")[0]
            stage = int(name) if name.isdecimal() else peer.stage
            peer = replace(peer, stage=stage, peer=event.peer, module=event.module, state=event.state)
        case events.InnerStep():
            peer = replace(peer, inner_steps=event.step)
        case events.Load():
            peer = replace(peer, tokens_per_s=_finite(event.tokens_per_s))
        case events.RoundCommitted() | events.CaughtUp() | events.Restored():
            peer = replace(peer, round=event.round)
        case events.NodeSummary():
            peer = replace(peer, summary=event, module=event.module, inner_steps=event.steps)
        case events.LastPeer(saved_in=None):
            state = replace(state, lost=state.lost | {event.module})
        case events.Waiting():
            updates = () if event.module in state.waiting else (event,)
            return Progressed(replace(state, waiting={**state.waiting, event.module: event.reason}), updates)
        case events.Resumed():
            waiting = {module: why for module, why in state.waiting.items() if module != event.module}
            return Progressed(replace(state, waiting=waiting), (event,) if event.module in state.waiting else ())
        case events.Note():
            return noted(state, event, now)
        case events.Reach():
            return Progressed(state, ())  # all nodes are on this machine
    return Progressed(_with_peer(state, index, peer), (event,))


def noted(state: SwarmProgress, note: events.Note, now: float) -> Progressed:
    """Adds a message for the person who watches."""
    return Progressed(replace(state, notes=(*state.notes, (now, note))[-MAX_NOTES:]), (note,))


def summarize(state: SwarmProgress) -> events.Summary:
    """Sums up a run. A killed node counts with the events that it sent."""
    last = state.recent[-1] if state.recent else None
    rate = state.tokens_per_s
    if last is not None and state.first is not None and last.at > state.first.at:
        rate = (last.tokens - state.first.tokens) / (last.at - state.first.at)
    summaries = (peer.summary.microbatches for peer in state.peers.values() if peer.summary is not None)
    counts = reduce(events.MicrobatchCounts.plus, summaries, events.MicrobatchCounts())
    peers = tuple(
        events.PeerSummary(
            each.peer, each.module, each.inner_steps, each.summary.accumulated if each.summary else 0, each.exit_code
        )
        for _, each in sorted(state.peers.items())
    )
    return events.Summary(state.step, state.loss_first, state.loss_last, state.tokens, rate, counts, peers)


def _step_reported(state: SwarmProgress, index: int, event: events.Step, now: float) -> Progressed:
    peer = state.peers[index]
    tokens = max(0, event.tokens - peer.reported_tokens)
    # A node that restarts without a checkpoint counts its steps from 1 again.
    came_after = _came_after(state, index, event.step)
    step = event.step + came_after
    share = replace(event, peer=peer.peer, tokens=tokens)  # this node's part of the step
    reported = replace(
        peer,
        reported_steps=max(peer.reported_steps, step),
        came_after=came_after,
        reported_tokens=max(peer.reported_tokens, event.tokens),
        tokens_per_s=_finite(event.tokens_per_s),
    )
    state = _with_peer(state, index, reported)
    if step <= state.step:  # the step is closed already; its tokens still count
        return Progressed(replace(state, tokens=state.tokens + tokens), ())
    pending = {**state.pending, step: (*state.pending.get(step, ()), share)}
    return _settle(replace(state, pending=pending), now)


def _came_after(state: SwarmProgress, index: int, step: int) -> int:
    """Returns the number to add to a data node's own step count, to get the swarm's step."""
    before = state.peers[index].came_after
    others = (peer for other, peer in state.peers.items() if other != index and peer.is_live_data_node)
    # The node itself or another data node is at the swarm's step, so the counts agree.
    if step + before > state.step or any(peer.reported_steps >= state.step for peer in others):
        return before
    return state.step + 1 - step


def _settle(state: SwarmProgress, now: float) -> Progressed:
    """Completes steps that no data node still has to report, not counting those over `MAX_LAG` steps behind."""
    steps: list[Event] = []
    # After a gap the first pending step may not be the next one.
    while (step := min(state.pending, default=None)) is not None and _is_done(state, step):
        state, done = _close_step(state, step, now)
        steps.append(done)
    return Progressed(state, tuple(steps))


def _is_done(state: SwarmProgress, step: int) -> bool:
    foremost = max((peer.reported_steps for peer in state.peers.values()), default=0)
    live = (peer.reported_steps for peer in state.peers.values() if peer.is_live_data_node)
    return not any(max(state.step, foremost - MAX_LAG) <= reported < step for reported in live)


def _close_step(state: SwarmProgress, step: int, now: float) -> tuple[SwarmProgress, events.Step]:
    shares = state.pending[step]
    new_tokens = sum(share.tokens for share in shares)
    weights = [share.tokens or 1 for share in shares]  # nodes without a token count weigh equally
    loss = sum(share.loss * weight for share, weight in zip(shares, weights, strict=True)) / sum(weights)
    tokens = state.tokens + new_tokens
    recent = (*state.recent, Moment(now, tokens))[-RATE_WINDOW:]
    rate, seconds = sum(share.tokens_per_s for share in shares), now - recent[0].at
    if seconds > 0:
        rate = (tokens - recent[0].tokens) / seconds
    peer = shares[0].peer if len({share.peer for share in shares}) == 1 else "swarm"
    state = replace(
        state,
        step=step,
        tokens=tokens,
        tokens_per_s=rate,
        loss_first=loss if state.loss_first is None else state.loss_first,
        loss_last=loss,
        curve=state.curve.with_point(step, tokens, loss, now),
        first=state.first or recent[-1],
        recent=recent,
        pending={later: parts for later, parts in state.pending.items() if later > step},
    )
    return state, events.Step(step, loss, tokens, rate, peer)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _with_peer(state: SwarmProgress, index: int, peer: PeerProgress) -> SwarmProgress:
    return replace(state, peers={**state.peers, index: peer})
