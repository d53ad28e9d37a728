"""Custody of microbatches: entries, events, actions, and the state machine of every peer on a path.

A peer that sends a microbatch keeps it in custody until the receiver reports PASSED_ON. At any moment exactly one live
peer is responsible for acting when another one dies. One `Entry` is one microbatch at one position of its path:

    RECEIVING -> FORWARD -> HANDING_ON -> GUARDING -> AWAITING -> BACKWARD -> HANDING_BACK -> GUARDING_BACK -> SETTLING
    RECEIVING_GRADIENT -> RECALLING (a substitute) ------------------^

* Position -1 is the data node at the start. It skips RECEIVING, and its BACKWARD completes the microbatch.
* Position len(hops) is the data node at the end. Its FORWARD computes the loss, then follows HANDING_BACK. It stays in
  GUARDING_BACK until the microbatch is complete: a later copy starts no second backward pass.
* An evaluated microbatch is dropped as soon as the next peer has accepted it.

A substitute replaces a hop that is lost in the backward pass. It gets the gradient from the next hop, recalls the input
from the previous hop, and computes both passes. Then two replicas may have added a gradient for one microbatch. Each
peer accepts one gradient only, so a single chain reaches the data node, which names the replicas of that chain
(Settled). Hops keep input and gradient until then. The gradients of named hops count; all others take theirs back.

`Custody.handle` does no IO: it takes an event and the time, and returns the actions to carry out, in order.
"""

import enum
import math
import zlib
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    MicrobatchControl,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import MicrobatchId, ModuleId, Path, PeerId, Reasoned


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


KEPT_FOR_OTHERS = 4  # Share of slots (1/4) that a single data node, or a single link, cannot use
KEPT_FOR_HELD = 2  # Share of slots (1/2) that a data node cannot use while others' microbatches are held
UNLINKED_SHARE = 4  # Share of slots (1/4) for all data nodes without a link: invented ones cannot fill us
RECEIVED_PER_SLOT = 3  # Receive buffers per slot: for input and gradient, and for unsettled gradients; the rest waits

PATIENCE_S = 5.0  # Time for retries to an unreachable peer without a replacement, in seconds
RETRY_S = 0.3
SUBSTITUTE_AFTER_S = 1.0  # Outage of a peer before it is replaced in the backward pass; 0 if it is known to be dead
MOST_DOUBLINGS = 3
BUSY_JITTER = 0.5

DATA_NODE_GRACE_S = 20.0  # Seconds without a link to the data node; every progress restarts them
LONGEST_LIFETIME_S = 900.0
SHORTEST_LIFETIME_S = 60.0
# Longest lifetime of a microbatch, in mean residence times of its data node's microbatches, within the bounds above
LIFETIME_IN_RESIDENCES = 20
MAX_TIMED = 256

RECALL_AGAIN_S = 1.0
RECALL_PATIENCE_S = 8.0  # Time for which a substitute asks for its input before it returns the gradient, in seconds
GRADIENT_LIFETIME_S = 60.0  # Lifetime of a substitute's gradient before its input arrives, in seconds

ASK_S = 3.0
MAX_ASKS = 20  # Unanswered questions after which a gradient is taken back. A count, not a time: the machine may sleep.
REMEMBERED = 16_384  # Completed microbatches for which a data node can still answer questions

OTHER_ROUTE = "this microbatch is held here on another route"
STRANGER = "its sender does not announce the neighbouring module"
_NOT_HELD = "this microbatch is not, or no longer, held here"

_OFFERED_IN = {Direction.FORWARD: Phase.HANDING_ON, Direction.BACKWARD: Phase.HANDING_BACK}


class Replicas(Protocol):
    """Custody's view of membership and planner: which replicas can take a microbatch over."""

    @property
    def fewest_hops(self) -> int:
        """Fewest hops of a path. Repair may skip a lost hop of a longer path; at MAX_HOPS it never skips one."""

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        """Returns the best replica of a module not in `without`, if any, and unless waiting for `busy` is better."""

    def link_took(self, peer: PeerId, since: float) -> None:
        """Notes that a tensor for a peer, sent at `since`, has arrived or is given up."""

    def hosts(self, peer: PeerId, module: ModuleId) -> bool: ...

    def is_given_up(self, peer: PeerId) -> bool:
        """Whether the peer is considered dead, not just its link."""

    def is_linked(self, peer: PeerId) -> bool: ...

    def goes_round(self, module: ModuleId) -> bool:
        """Whether new paths avoid the module because all its replicas are unreachable."""

    def has_other_expert(self, module: ModuleId) -> bool:
        """Whether another expert of the same stage is served. Then no path skips the stage."""


class ResidenceTimes:
    """Mean time, by data node, that microbatches stay here. It bounds how long a lost microbatch is kept."""

    def __init__(self) -> None:
        self._mean_s = Latest[PeerId, float](MAX_TIMED)

    def note(self, data_node: PeerId, seconds: float) -> None:
        known = self._mean_s.get(data_node, seconds)
        self._mean_s[data_node] = known + (seconds - known) / 8

    def longest_s(self, data_node: PeerId) -> float:
        if not self._mean_s:
            return LONGEST_LIFETIME_S
        # An unknown data node may be as slow as the slowest known one. Known ones keep their own bound.
        usual_s = self._mean_s.get(data_node) or max(self._mean_s.values())
        return min(LONGEST_LIFETIME_S, max(SHORTEST_LIFETIME_S, LIFETIME_IN_RESIDENCES * usual_s))


class Custody:
    """State machine of the microbatches that one peer holds. `slots`: most microbatches of other data nodes."""

    def __init__(self, own: PeerId, slots: int, replicas: Replicas) -> None:
        self.own = own
        self.slots = slots
        self._replicas = replicas
        self._entries: dict[Key, Entry] = {}
        self._unlinked: set[PeerId] = set()  # Data nodes of entries without a link to them
        self._residence_times = ResidenceTimes()
        self._completed = Latest[MicrobatchId, Path](REMEMBERED)  # Own completed microbatches

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    @property
    def used_slots(self) -> int:
        return sum(e.path.data_node != self.own and e.phase is not Phase.SETTLING for e in self._entries.values())

    def touch(self, key: Key, now: float) -> None:
        entry = self.get(key)
        if entry is not None:
            self._renew(entry, now)

    def _of(self, microbatch: MicrobatchId) -> list[Entry]:
        return [entry for entry in self.entries() if entry.key.microbatch == microbatch]

    def _put(self, entry: Entry) -> None:
        self._entries[entry.key] = entry

    def _renew(self, entry: Entry, now: float) -> None:
        data_node, allowed_s = entry.path.data_node, entry.lifetime_s
        if data_node == self.own:
            pass
        elif data_node in self._unlinked:
            allowed_s = min(allowed_s, DATA_NODE_GRACE_S)
        elif entry.purpose is Purpose.EVALUATE:  # evaluations are never repaired
            allowed_s = min(allowed_s, SHORTEST_LIFETIME_S)
        else:
            allowed_s = min(allowed_s, self._residence_times.longest_s(data_node))
        self._put(replace(entry, deadline=now + allowed_s))

    def _sent(self, entry: Entry) -> None:
        # An output that is given up under way shows how slow its link is. While a busy target is awaited none is.
        if entry.phase in OFFERED and entry.target is not None and entry.retry_at is None:
            self._replicas.link_took(entry.target, entry.handed)

    def _drop(self, entry: Entry, reason: str) -> Forget:
        del self._entries[entry.key]
        return Forget(entry.key, reason)

    def _strand(self, entry: Entry, position: int, detail: str) -> list[Action]:
        """Drops a microbatch that cannot reach `position`, and notifies its data node, which abandons it everywhere."""
        return [self._drop(entry, detail), _stranded(entry, position, detail)]

    def admit_forward(self, message: Forward, now: float) -> Reasoned[SlotState]:
        """Decides whether to accept hidden states; reserves a slot. The caller has checked manifest and signature."""
        entry = self.get(Key(message.microbatch, message.position))
        if entry is not None and entry.path.route != message.path.route:
            return Reasoned(SlotState.REFUSED, OTHER_ROUTE)
        if not self._is_from_neighbour(message):
            return Reasoned(SlotState.BUSY, STRANGER)
        if entry is None:
            return self._reserve(_received(message, now), now)
        if entry.phase is Phase.RECALLING:  # the input is in flight, so do not ask again
            self._put(replace(entry, retry_at=None))
        return Reasoned(SlotState.FREE, "it has a slot")

    def admit_backward(self, message: Backward, now: float) -> Reasoned[SlotState]:
        """Decides whether to accept a gradient. An unexpected one may make this peer the substitute of a lost hop."""
        key = Key(message.microbatch, message.position)
        entry = self.get(key)
        if entry is not None and entry.path.route != message.path.route:
            return Reasoned(SlotState.REFUSED, OTHER_ROUTE)
        if entry is not None:
            return self._wants(entry, message)
        if not 0 <= message.position < len(message.path.hops):  # data nodes have no substitutes
            return Reasoned(SlotState.REFUSED, _NOT_HELD)
        if not self._is_from_neighbour(message):
            return Reasoned(SlotState.BUSY, STRANGER)
        phase, sender = Phase.RECEIVING_GRADIENT, _sender(message)
        return self._reserve(Entry(key, message.path, Purpose.TRAIN, phase, GRADIENT_LIFETIME_S, now, sender), now)

    def _is_from_neighbour(self, message: Forward | Backward) -> bool:
        """Whether the sender announces the neighbouring module of the path. If not, our view may be old: say BUSY."""
        hops, position = message.path.hops, message.position + (-1 if isinstance(message, Forward) else 1)
        module = hops[position].module if 0 <= position < len(hops) else ModuleId(0)
        sender = _sender(message)
        return sender == self.own or self._replicas.hosts(sender, module)

    def _reserve(self, entry: Entry, now: float) -> Reasoned[SlotState]:
        objection = self._objection(entry.path.data_node, entry.sender)
        if objection is not None:
            return Reasoned(SlotState.BUSY, objection)
        self._add(entry, now)
        return Reasoned(SlotState.FREE, "a slot is free")

    def _add(self, entry: Entry, now: float) -> None:
        self._put(entry)
        if self._is_unlinked(entry.path.data_node):
            # Without a link we cannot tell whether the data node exists, so its grace period starts now.
            self._note_unlinked(entry.path.data_node)
        self._renew(replace(entry, since=now), now)

    def _objection(self, data_node: PeerId, sender: PeerId | None) -> str | None:
        """Returns the reason to admit no further microbatch of this data node or from this sender, if any."""
        if data_node == self.own:
            return None
        others = [entry for entry in self.entries() if entry.path.data_node != self.own]
        share, unlinked = self.slots - self.slots // KEPT_FOR_OTHERS, max(1, self.slots // UNLINKED_SHARE)
        unlinked_held = sum(e.path.data_node in self._unlinked and e.phase is not Phase.SETTLING for e in others)
        if self._is_unlinked(data_node) and unlinked_held >= unlinked:
            return f"{unlinked} slots are used by data nodes without a link to this peer"
        for unsettled, what in ((False, "slots"), (True, "places for unsettled gradients")):
            held = [entry for entry in others if (entry.phase is Phase.SETTLING) is unsettled]
            if len(held) >= self.slots:
                return f"all {self.slots} {what} are used"
            its = sum(entry.path.data_node == data_node for entry in held)
            most = self.slots - self.slots // (KEPT_FOR_HELD if its < len(held) else KEPT_FOR_OTHERS)
            if its >= most:
                return f"this data node uses {most} {what}, the rest is for others"
            if sum(entry.sender == sender for entry in held) >= share:
                return f"this link uses {share} {what}, the rest is for others"
        return None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Updates held microbatches by an event and returns the actions to take. Answers or ignores unknown ones."""
        match event:
            case Started(microbatch, path, purpose, lifetime_s):
                key = Key(microbatch, -1)
                self._put(Entry(key, path, purpose, Phase.FORWARD, lifetime_s, now + lifetime_s, came=now))
                return [Compute(key, Work.FORWARD, purpose)]
            case TensorArrived(message):
                entry = self.get(Key(message.microbatch, message.position))
                if entry is None:
                    return [_answer(message, ReceiptStatus.REFUSED, "not held here, or no longer")]
                if isinstance(message, Forward):
                    return self._input_arrived(entry, message, now)
                return self._gradient_arrived(entry, message, now)
            case BrokenOff(message):
                return self._broken_off(message, now)
            case Computed(key, seconds):
                entry = self.get(key)
                return [] if entry is None else self._computed(entry, seconds, now)
            case ComputeFailed(key, detail):
                entry = self.get(key)
                return [] if entry is None else self._strand(entry, key.position, detail)
            case ControlArrived(sender, message):
                return self._received_control(sender, message, now)
            case PeerLost(peer, detail):
                return self._peer_lost(peer, detail, now)
            case PeerBack(peer):
                self._relink(peer, now)
                return self._ask_again(peer, now)
            case Tick():
                return [action for entry in self.entries() for action in self._tick(entry, now)]

    def _received_control(
        self, sender: PeerId, message: Receipt | Close | Recall | Settled | Unsettled, now: float
    ) -> list[Action]:
        self._relink(sender, now)
        match message:
            case Receipt():
                return self._receipt(sender, message, now)
            case Recall():
                return self._recalled(sender, message, now)
            case Unsettled(microbatch):
                return self._asked(sender, microbatch)
            case Close(microbatch) | Settled(microbatch) if microbatch.data_node != sender:
                return []  # only the data node may close or settle its microbatches
            case Close():
                return self._close(message)
            case Settled():
                return self._settle(message)

    def _broken_off(self, message: Forward | Backward, now: float) -> list[Action]:
        entry = self.get(Key(message.microbatch, message.position))
        reserved = Phase.RECEIVING if isinstance(message, Forward) else Phase.RECEIVING_GRADIENT
        if entry is not None and entry.phase is reserved:
            return [self._drop(entry, "broken off")]
        if entry is not None and entry.phase is Phase.RECALLING and isinstance(message, Forward):
            self._put(replace(entry, retry_at=now))  # ask for the input again
        return []

    def _peer_lost(self, peer: PeerId, detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in self.entries():
            if entry.target == peer and entry.phase in OFFERED | GUARDED:  # RECALLING asks again by its timer
                actions += self._target_failed(entry, detail, now)
        self._note_unlinked(peer)
        for entry in self._moving(peer):
            self._put(replace(entry, deadline=min(entry.deadline, now + DATA_NODE_GRACE_S)))
        return actions

    def _tick(self, entry: Entry, now: float) -> list[Action]:
        if entry.deadline <= now and entry.phase is not Phase.BACKWARD:
            # A running computation must not add a gradient for a forgotten entry. It ends, even if the machine slept.
            return self._overdue(entry, now)
        if entry.retry_at is None or entry.retry_at > now:
            return []
        if entry.phase is Phase.SETTLING:
            return self._ask(entry, now)
        if entry.target is None:
            return []
        if entry.phase is Phase.RECALLING:
            return self._recall_again(entry, entry.target, now)
        return self._offer_again(entry, entry.target, now)

    def _overdue(self, entry: Entry, now: float) -> list[Action]:
        if entry.phase in ADDED and not entry.is_end:
            self._await_settlement(entry, now)
            return []
        self._sent(entry)
        gone = self._drop(entry, f"no progress for {entry.lifetime_s:.0f} s")
        if entry.path.data_node != self.own:
            return [gone]
        position = entry.key.position
        return [gone, SendControl(self.own, Stranded(entry.key.microbatch, Direction.FORWARD, position, "it was lost"))]

    def _is_unlinked(self, data_node: PeerId) -> bool:
        return data_node != self.own and not self._replicas.is_linked(data_node)

    def _note_unlinked(self, data_node: PeerId) -> None:
        # Keep only data nodes of entries, so that the set is bounded.
        self._unlinked = (self._unlinked | {data_node}) & {entry.path.data_node for entry in self.entries()}

    def _relink(self, peer: PeerId, now: float) -> None:
        if peer in self._unlinked:
            self._unlinked.remove(peer)
            for entry in self._moving(peer):
                self._renew(entry, now)

    def _moving(self, data_node: PeerId) -> list[Entry]:
        """Returns a data node's entries that are still in work. Entries that wait for its decision are left out."""
        return [e for e in self.entries() if e.path.data_node == data_node and e.phase is not Phase.SETTLING]

    def _input_arrived(self, entry: Entry, message: Forward, now: float) -> list[Action]:
        accepted, passed_on = _answer(message, ReceiptStatus.ACCEPTED), _answer(message, ReceiptStatus.PASSED_ON)
        if entry.phase is Phase.RECALLING:
            path = _joined(message.path, entry.path, message.position + 1)
            ready = replace(entry, path=path, phase=Phase.BACKWARD, lifetime_s=message.lifetime_s, came=now)
            self._renew(replace(ready, target=None, retry_at=None, failing_since=None), now)
            # PASSED_ON at once, because the next hop has already received this microbatch's output.
            return [accepted, passed_on, Compute(entry.key, Work.REPLAY, Purpose.TRAIN)]
        if entry.phase is Phase.RECEIVING and entry.is_end and self._has_turned(entry):
            # Two copies with paths of different length: one skipped a hop that was only temporarily unreachable.
            return [self._drop(entry, "another copy arrived first"), accepted, passed_on]
        if entry.phase in (Phase.RECEIVING, Phase.RECEIVING_GRADIENT):
            return self._take(message, now)
        # A second copy: the sender lost its link to us, or a repaired path arrives through another replica.
        if entry.path.hops[: message.position + 1] == message.path.hops[: message.position + 1]:
            return [accepted] if entry.phase in (Phase.FORWARD, Phase.HANDING_ON) else [accepted, passed_on]
        if entry.phase in BEFORE_BACKWARD and not entry.is_end:
            return [self._drop(entry, "replaced by a repaired path"), *self._take(message, now)]
        if entry.phase is Phase.SETTLING or (entry.phase is Phase.GUARDING_BACK and entry.target is None):
            # The gradient has already passed the position of the replaced peer.
            return [_answer(message, ReceiptStatus.REFUSED, "another copy arrived first")]
        # The previous peer was replaced and may lack the gradient, so its substitute gets it.
        path = _joined(message.path, entry.path, message.position)
        adopted = replace(entry, path=path, tried=frozenset(), busy=frozenset())
        self._renew(adopted, now)
        return [accepted, passed_on, *(self._offer(adopted, now) if entry.phase in ADDED else ())]

    def _has_turned(self, end: Entry) -> bool:
        """Whether another copy of this microbatch has already returned to the data node for its loss."""
        others = [other for other in self._of(end.key.microbatch) if other.key != end.key]
        return any(other.is_end and other.phase is not Phase.RECEIVING for other in others)

    def _take(self, message: Forward, now: float) -> list[Action]:
        self._add(replace(_received(message, now), phase=Phase.FORWARD, came=now), now)
        accepted, data_node = _answer(message, ReceiptStatus.ACCEPTED), message.path.data_node
        receipts = [accepted]
        if data_node in self._unlinked:  # sending opens a link, which proves that the data node exists
            receipts.append(replace(accepted, to=data_node))
        work = Work.LOSS if message.position == len(message.path.hops) else Work.FORWARD
        return [*receipts, Compute(Key(message.microbatch, message.position), work, message.purpose)]

    def _wants(self, entry: Entry, message: Backward) -> Reasoned[SlotState]:
        """Decides whether a held microbatch accepts this gradient. Any replica of the next module may send it."""
        sender = _sender(message)
        if entry.purpose is Purpose.EVALUATE:
            return Reasoned(SlotState.REFUSED, "this microbatch is only evaluated")
        if not _same_modules(entry.path, message.path, message.position + 1):
            return Reasoned(SlotState.REFUSED, "this microbatch is held here on another path")
        if entry.path.peer_at(message.position + 1) == sender:
            is_early = entry.phase in (Phase.RECEIVING, Phase.FORWARD)
        elif self._replicas.hosts(sender, message.path.hops[message.position + 1].module):
            is_early = entry.phase in WITHOUT_OUTPUT
        else:
            return Reasoned(SlotState.REFUSED, "its sender does not host the next module")
        return Reasoned(SlotState.BUSY, "it is not that far yet") if is_early else Reasoned(SlotState.FREE, "awaited")

    def _gradient_arrived(self, entry: Entry, message: Backward, now: float) -> list[Action]:
        accepted = _answer(message, ReceiptStatus.ACCEPTED)
        if entry.phase is Phase.RECEIVING_GRADIENT:
            before = message.path.peer_at(message.position - 1)
            recalling = replace(entry, path=message.path, phase=Phase.RECALLING, target=before, failing_since=now)
            self._renew(replace(recalling, retry_at=now + RECALL_AGAIN_S), now)
            return [KeepGradient(entry.key), accepted, _recall(recalling, before)]
        wanted = self._wants(entry, message)
        if wanted.value is not SlotState.FREE:
            status = ReceiptStatus.BUSY if wanted.value is SlotState.BUSY else ReceiptStatus.REFUSED
            return [_answer(message, status, wanted.reason, RETRY_S)]
        if entry.phase in BEFORE_BACKWARD:
            path = _joined(entry.path, message.path, message.position + 1)
            # The replicas tried in the forward pass host another module, so none is excluded for the backward pass.
            fresh = replace(entry, path=path, target=None, tried=frozenset(), busy=frozenset(), came=now)
            self._renew(replace(fresh, phase=Phase.BACKWARD, retry_at=None, failing_since=None), now)
            return [accepted, Compute(entry.key, Work.BACKWARD, entry.purpose)]
        # Release the sender of a second gradient: the microbatch has already passed it.
        answers = [accepted] if entry.path.peer_at(message.position + 1) == _sender(message) else []
        if not answers or entry.phase in (Phase.GUARDING_BACK, Phase.SETTLING):
            answers.append(_answer(message, ReceiptStatus.PASSED_ON))
        return [*answers]

    def _computed(self, entry: Entry, seconds: float, now: float) -> list[Action]:
        entry = replace(entry, waited_s=max(0.0, now - entry.came - seconds), computed_s=seconds)
        if entry.is_start and entry.phase is Phase.BACKWARD:
            return self._complete(entry)
        if not entry.is_end:
            return self._offer(entry, now)
        if entry.purpose is Purpose.EVALUATE:
            return [self._drop(entry, "evaluated")]
        return self._offer(replace(entry, phase=Phase.BACKWARD), now)

    # Handover to the next holder:
    #     FORWARD -> HANDING_ON -> GUARDING -> AWAITING            to the hop after
    #     BACKWARD -> HANDING_BACK -> GUARDING_BACK -> SETTLING    to the hop before
    #
    # Another replica of the module replaces a lost, busy or refusing peer and gets the kept output. Without one, the
    # same peer is retried for PATIENCE_S. Forward, any replica will do and is tried at once; without one, the hop is
    # skipped if the run allows it and no other expert of its stage is served. Else the data node launches the text
    # again on its next best route, as a signed route names its modules. Backward, only the original peer has the input:
    # we wait for it before a substitute computes the visit again.

    def _offer(self, entry: Entry, now: float) -> list[Action]:
        """Sends a microbatch's output to the next peer on its path, which becomes the target of the entry."""
        phase, target = _OFFERED_IN[entry.direction], entry.path.peer_at(entry.next_position)
        offered = replace(_timed(entry, now), phase=phase, target=target, retry_at=None, failing_since=None)
        if entry.phase is phase:  # a different replica after a busy one is no progress, so keep the deadline
            self._put(offered)
        else:
            self._renew(offered, now)
        return [_sending(offered, target)]

    def _offer_to(self, replica: PeerId, entry: Entry, now: float) -> list[Action]:
        return self._offer(replace(entry, path=entry.path.with_peer(entry.next_position, replica)), now)

    def _offer_again(self, entry: Entry, target: PeerId, now: float) -> list[Action]:
        since, unserved = entry.failing_since, "no peer serves its module"
        if since is not None and (actions := self._instead_of_waiting(entry, since, unserved, now)):
            return actions
        offered = replace(_timed(entry, now), retry_at=None)
        self._put(offered)
        return [_sending(offered, target)]

    def _receipt(self, sender: PeerId, receipt: Receipt, now: float) -> list[Action]:
        before = -1 if receipt.direction is Direction.FORWARD else 1
        entry = self.get(Key(receipt.microbatch, receipt.position + before))
        if entry is None or entry.target != sender or entry.direction is not receipt.direction:
            return []
        if entry.phase is Phase.RECALLING:
            return self._recall_answered(entry, receipt)
        match receipt.status:
            case ReceiptStatus.ACCEPTED:
                return self._accepted(entry, now)
            case ReceiptStatus.PASSED_ON:
                actions = self._accepted(entry, now)  # ACCEPTED may be lost or reordered
                current = self.get(entry.key)
                if current is not None and current.phase in GUARDED:
                    self._release(current, now)
                return actions
            case ReceiptStatus.BUSY:
                return self._busy(entry, receipt.retry_after_s, now)
            case ReceiptStatus.REFUSED:
                refused = f"refused: {receipt.detail}"
                return self._offer_elsewhere(entry, now) or self._give_up(entry, refused, now)

    def _accepted(self, entry: Entry, now: float) -> list[Action]:
        if entry.phase not in OFFERED:
            return []
        receipts = _passed_on(entry, now)
        self._sent(entry)
        if entry.purpose is Purpose.EVALUATE:
            return [*receipts, self._drop(entry, "passed on")]
        phase = Phase.GUARDING if entry.direction is Direction.FORWARD else Phase.GUARDING_BACK
        guarded = replace(entry, phase=phase, retry_at=None, failing_since=None, refusals=0)
        self._renew(guarded, now)
        if entry.next_module is None:  # a data node cannot be replaced, so there is nothing to guard
            self._release(guarded, now)
        return receipts

    def _release(self, guarded: Entry, now: float) -> None:
        """Ends our custody of a microbatch: the target has passed it on, or the target is the data node."""
        if guarded.direction is Direction.FORWARD:
            self._renew(replace(guarded, phase=Phase.AWAITING, target=None), now)
        elif guarded.is_end:
            # Keep it until the microbatch is completed or abandoned, so that no later copy starts a backward pass.
            self._put(replace(guarded, target=None, deadline=math.inf))
        else:
            self._await_settlement(guarded, now)

    def _busy(self, entry: Entry, asked_s: float, now: float) -> list[Action]:
        module, target = entry.next_module, entry.target
        if entry.phase not in OFFERED or target is None:
            return []
        # Backward, wait for the original peer. Any substitute will do.
        if module is not None and (entry.direction is Direction.FORWARD or entry.tried):
            busy = entry.busy | {target}
            other = self._replicas.choose(module, entry.tried | busy, target).value
            if other is not None:
                return self._offer_to(other, replace(entry, busy=busy), now)
        self._put(put_off(entry, asked_s, now))
        return []

    def _target_failed(self, entry: Entry, detail: str, now: float) -> list[Action]:
        """Handles an unreachable target: sends the output to another replica, or retries the target for PATIENCE_S."""
        since = now if entry.failing_since is None else entry.failing_since
        if actions := self._instead_of_waiting(entry, since, detail, now):
            return actions
        if now - since >= PATIENCE_S:
            return self._give_up(entry, detail, now)
        offered = _OFFERED_IN[entry.direction]
        self._put(replace(entry, phase=offered, failing_since=since, retry_at=now + RETRY_S))
        return []

    def _instead_of_waiting(self, entry: Entry, since: float, detail: str, now: float) -> list[Action]:
        """Sends the output to another replica, or gives the microbatch up. Returns no action if a retry is better."""
        is_replaced = entry.direction is Direction.FORWARD or now - since >= SUBSTITUTE_AFTER_S
        if not is_replaced and entry.target is not None:
            is_replaced = self._replicas.is_given_up(entry.target)
        if is_replaced and (actions := self._offer_elsewhere(entry, now)):
            return actions
        module = entry.next_module
        if module is None or not self._replicas.goes_round(module):
            return []
        # New paths avoid the module. In the backward pass, and if another expert can be visited, launching the text
        # again is faster than waiting for a substitute.
        is_relaunched = entry.direction is Direction.BACKWARD or self._replicas.has_other_expert(module)
        return self._give_up(entry, detail, now) if is_relaunched or self._may_skip(entry) else []

    def _offer_elsewhere(self, entry: Entry, now: float) -> list[Action]:
        module, target = entry.next_module, entry.target
        if module is None or target is None:
            return []
        tried = entry.tried | {target}
        for without in (tried | entry.busy, tried):  # without an idle replica, try a busy one again
            other = self._replicas.choose(module, without, None).value
            if other is not None:
                return self._offer_to(other, replace(entry, tried=tried, refusals=0), now)
        return []

    def _may_skip(self, entry: Entry) -> bool:
        module, is_longer = entry.next_module, len(entry.path.hops) > self._replicas.fewest_hops
        if module is None or not is_longer or entry.purpose is not Purpose.TRAIN:
            return False
        return not self._replicas.has_other_expert(module)

    def _give_up(self, entry: Entry, detail: str, now: float) -> list[Action]:
        """Skips the next hop, for which no peer is left, if allowed; else reports the microbatch as undeliverable."""
        position, is_forward = entry.next_position, entry.direction is Direction.FORWARD
        if is_forward and self._may_skip(entry):
            path = entry.path.without(position)
            return self._offer(replace(entry, path=path, tried=frozenset(), busy=frozenset(), refusals=0), now)
        if is_forward and entry.next_module is not None:
            detail = f"{detail}; module {entry.next_module} has no other replica"
        if is_forward or entry.is_end:
            return self._strand(entry, position, detail)
        # The data node abandons the microbatch, unless the gradient arrived on another chain. We wait for its decision,
        # and so does the peer that guards our gradient, which is released here.
        self._await_settlement(entry, now)
        released = Receipt(entry.key.microbatch, Direction.BACKWARD, entry.key.position, ReceiptStatus.PASSED_ON)
        guard = entry.path.peer_at(entry.previous_position)
        asked = self._ask(self._entries[entry.key], now)  # at once: it may be complete already
        return [_stranded(entry, position, detail), *asked, SendControl(guard, released)]

    def _recall_again(self, entry: Entry, before: PeerId, now: float) -> list[Action]:
        if entry.failing_since is not None and now - entry.failing_since >= RECALL_PATIENCE_S:
            return self._give_back(entry, ReceiptStatus.REFUSED, "the input is not available")
        self._put(replace(entry, retry_at=now + RECALL_AGAIN_S))
        return [_recall(entry, before)]

    def _recall_answered(self, entry: Entry, receipt: Receipt) -> list[Action]:
        match receipt.status:
            case ReceiptStatus.PASSED_ON:
                return self._give_back(entry, ReceiptStatus.PASSED_ON, "the gradient arrived there already")
            case ReceiptStatus.REFUSED:
                return self._give_back(entry, ReceiptStatus.REFUSED, f"no input: {receipt.detail}")
            case _:
                return []

    def _give_back(self, entry: Entry, status: ReceiptStatus, detail: str) -> list[Action]:
        gradient = Backward(entry.key.microbatch, entry.path, entry.key.position)
        return [_answer(gradient, status, detail), self._drop(entry, detail)]

    def _recalled(self, sender: PeerId, message: Recall, now: float) -> list[Action]:
        """Answers a Recall: sends our output to the substitute of the next hop, or refuses with a reason."""
        entry = self.get(Key(message.microbatch, message.position))

        def answer(status: ReceiptStatus, detail: str, retry_s: float = 0.0) -> list[Action]:
            # Direction BACKWARD: it answers the gradient that the substitute holds.
            about = message.microbatch, Direction.BACKWARD, message.position
            return [SendControl(sender, Receipt(*about, status, retry_s, detail))]

        if entry is None:
            if message.microbatch in self._completed:
                return answer(ReceiptStatus.PASSED_ON, "complete")
            return answer(ReceiptStatus.REFUSED, _NOT_HELD)
        objection = self._objection_to_recall(entry, sender, message)
        if objection:
            return answer(ReceiptStatus.REFUSED, objection)
        if entry.phase in WITHOUT_OUTPUT:
            return answer(ReceiptStatus.BUSY, "not that far yet", RETRY_S)
        if entry.phase not in BEFORE_BACKWARD:
            return answer(ReceiptStatus.PASSED_ON, "the gradient is here already")
        if entry.phase is Phase.HANDING_ON and entry.target == sender and entry.retry_at is None:
            return []  # the output is in flight
        replaced = entry.path.hops[message.position + 1].peer
        tried = entry.tried if replaced == sender else entry.tried | {replaced}
        return self._offer_to(sender, replace(entry, tried=tried), now)

    def _objection_to_recall(self, entry: Entry, sender: PeerId, message: Recall) -> str:
        after = message.position + 1
        names_sender = after < len(message.path.hops) and message.path.hops[after].peer == sender
        if entry.purpose is Purpose.EVALUATE or entry.is_end or not names_sender:
            return "there is nothing to recall"
        # Our own view of the path up to this hop was checked at admission. The sender's may differ.
        if entry.path.route != message.path.route:
            return OTHER_ROUTE
        if not _same_modules(entry.path, message.path, after):
            return "this microbatch is held here on another path"
        known = entry.path.hops[after]
        if known.peer != sender and not self._replicas.hosts(sender, known.module):
            return "a substitute must host the module of the hop that it replaces"
        return ""

    def _await_settlement(self, entry: Entry, now: float) -> None:
        """Frees the slot after the gradient is passed on. The data node will decide whether our gradient counts."""
        self._residence_times.note(entry.path.data_node, now - entry.since)
        waiting = replace(entry, phase=Phase.SETTLING, target=None, failing_since=None, asked=0)
        self._put(replace(waiting, retry_at=now + ASK_S, deadline=math.inf))

    def _ask(self, entry: Entry, now: float) -> list[Action]:
        if entry.asked >= MAX_ASKS:
            return [Retract(entry.key), self._drop(entry, "its data node does not answer whether its gradient counts")]
        self._put(replace(entry, asked=entry.asked + 1, retry_at=now + ASK_S))
        return [SendControl(entry.path.data_node, Unsettled(entry.key.microbatch))]

    def _ask_again(self, data_node: PeerId, now: float) -> list[Action]:
        """Asks a data node whose link is back which of our gradients count, because earlier answers may be lost."""
        asked: list[Action] = []
        for entry in self.entries():
            if entry.phase is Phase.SETTLING and entry.path.data_node == data_node:
                self._put(replace(entry, retry_at=now + ASK_S))  # not in `asked`: a link may break any number of times
                asked.append(SendControl(data_node, Unsettled(entry.key.microbatch)))
        return asked

    def _settle(self, message: Settled) -> list[Action]:
        actions: list[Action] = []
        hops = message.path.hops
        for entry in self._of(message.microbatch):
            position = entry.key.position
            if entry.phase in ADDED:
                counts = 0 <= position < len(hops) and hops[position].peer == self.own
                actions.append(Confirmed(entry.key) if counts else Retract(entry.key))
            # In BACKWARD the gradient is not added yet; the entry asks about it later.
            if entry.phase is not Phase.BACKWARD:
                actions.append(self._drop(entry, "complete"))
        return actions

    def _close(self, message: Close) -> list[Action]:
        actions: list[Action] = []
        for entry in self._of(message.microbatch):
            # In BACKWARD the gradient will be added before the Retract takes effect.
            if entry.phase in ADDED | {Phase.BACKWARD} and not entry.is_end:
                actions.append(Retract(entry.key))
            self._sent(entry)
            actions.append(self._drop(entry, f"closed: {message.detail}"))
        return actions

    def _complete(self, start: Entry) -> list[Action]:
        """Completes a microbatch whose gradient has reached the start, and sends Settled to every hop."""
        microbatch, path = start.key.microbatch, start.path
        forgotten = [self._drop(end, "completed") for end in self._of(microbatch)]
        self._completed[microbatch] = path
        peers = dict.fromkeys(hop.peer for hop in path.hops)
        return [Finished(microbatch, path), *forgotten, *(SendControl(to, Settled(microbatch, path)) for to in peers)]

    def abandon(self, microbatch: MicrobatchId, detail: str) -> list[Action]:
        held = self._of(microbatch)
        peers = dict.fromkeys(hop.peer for entry in held for hop in entry.path.hops if hop.peer != self.own)
        for entry in held:
            self._sent(entry)
        gone: list[Action] = [self._drop(entry, detail) for entry in held]
        return [*gone, *(SendControl(peer, Close(microbatch, detail)) for peer in peers)]

    def _asked(self, sender: PeerId, microbatch: MicrobatchId) -> list[Action]:
        if microbatch.data_node != self.own:
            return []
        path = self._completed.get(microbatch)
        if path is not None:
            return [SendControl(sender, Settled(microbatch, path))]
        if self._of(microbatch):
            return []  # in flight: not decided yet
        return [SendControl(sender, Close(microbatch, "no longer in flight"))]


def _sender(message: Forward | Backward) -> PeerId:
    return message.path.peer_at(message.position + (-1 if isinstance(message, Forward) else 1))


def _received(message: Forward, now: float) -> Entry:
    key = Key(message.microbatch, message.position)
    return Entry(key, message.path, message.purpose, Phase.RECEIVING, message.lifetime_s, now, _sender(message))


def _answer(
    message: Forward | Backward, status: ReceiptStatus, detail: str = "", retry_after_s: float = 0.0
) -> SendControl:
    direction = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
    receipt = Receipt(message.microbatch, direction, message.position, status, retry_after_s, detail[:256])
    return SendControl(_sender(message), receipt)


def _sending(entry: Entry, target: PeerId) -> SendOutput:
    microbatch, path, position = entry.key.microbatch, entry.path, entry.next_position
    if entry.direction is Direction.FORWARD:
        return SendOutput(entry.key, target, Forward(microbatch, path, position, entry.purpose, entry.lifetime_s))
    return SendOutput(entry.key, target, Backward(microbatch, path, position))


def _recall(entry: Entry, before: PeerId) -> SendControl:
    return SendControl(before, Recall(entry.key.microbatch, entry.path, entry.key.position - 1))


def _stranded(entry: Entry, position: int, detail: str) -> SendControl:
    signature = b"" if entry.path.route is None else entry.path.route.signature
    message = Stranded(entry.key.microbatch, entry.direction, position, detail[:256], signature)
    return SendControl(entry.path.data_node, message)


def _passed_on(entry: Entry, now: float) -> list[Action]:
    """Builds PASSED_ON receipts: for the previous peer, whose custody ends, and for the data node's measurements."""
    receipt = Receipt(
        entry.key.microbatch,
        entry.direction,
        entry.key.position,
        ReceiptStatus.PASSED_ON,
        waited_s=entry.waited_s,
        computed_s=entry.computed_s,
        sent_s=max(0.0, now - entry.handed),
    )
    receivers = [entry.path.data_node]
    if -1 <= entry.previous_position <= len(entry.path.hops):
        receivers.insert(0, entry.path.peer_at(entry.previous_position))
    return [SendControl(peer, receipt) for peer in dict.fromkeys(receivers)]


def _timed(entry: Entry, now: float) -> Entry:
    """Starts the timer of a new attempt to send the output. Time of an earlier, failed attempt counts as waiting."""
    in_vain_s = now - entry.handed if entry.phase in OFFERED | GUARDED else 0.0
    return replace(entry, handed=now, waited_s=entry.waited_s + in_vain_s)


def put_off(entry: Entry, asked_s: float, now: float) -> Entry:
    """Schedules the next attempt to send an output if all replicas are busy: backoff from the requested retry time."""
    doublings = min(entry.refusals, MOST_DOUBLINGS)
    # Jitter by microbatch, so that microbatches refused together do not retry together.
    chance = zlib.crc32(f"{entry.key} {entry.refusals}".encode()) / 2**32 if doublings else 0.0
    pause_s = asked_s * 2.0**doublings * (1 + BUSY_JITTER * chance)
    return replace(entry, retry_at=now + pause_s, busy=frozenset(), refusals=entry.refusals + 1)


def _same_modules(one: Path, other: Path, position: int) -> bool:
    """Whether two paths have the same modules up to `position`, inclusive."""
    modules, others = ([hop.module for hop in path.hops[: position + 1]] for path in (one, other))
    return modules == others


def _joined(before: Path, after: Path, position: int) -> Path:
    """Joins the hops of `before` below `position` with the later hops of `after`. Each path has its own repairs."""
    return replace(before, hops=(*before.hops[:position], *after.hops[position:]))
