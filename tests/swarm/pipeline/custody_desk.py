"""One peer's custody on a desk: events go in by hand, actions are looked at as they come out."""

from __future__ import annotations

from swarm.pipeline.custody import RETRY_S, Custody
from swarm.pipeline.custody_events import (
    Action,
    Arrived,
    Computed,
    Entry,
    Key,
    PeerLost,
    Phase,
    Place,
    SendOutput,
    Started,
    Tell,
    TensorArrived,
    Tick,
)
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Direction,
    Forward,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
)
from swarm.vocabulary.types import MAX_HOPS, Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned

DATA, A, B, C = PeerId("data"), PeerId("a"), PeerId("b"), PeerId("c")
A2, B2, B3, C2 = PeerId("a2"), PeerId("b2"), PeerId("b3"), PeerId("c2")
REPLICAS = {1: (A, A2), 2: (B, B2, B3), 3: (C, C2)}
STAGES = {peer for replicas in REPLICAS.values() for peer in replicas}
"""All others are data nodes."""
LIFETIME_S = 30.0
MICROBATCH = MicrobatchId(DATA, 7)
OUT, BACK = Direction.FORWARD, Direction.BACKWARD
ACCEPTED, PASSED_ON = ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON
BUSY, REFUSED = ReceiptStatus.BUSY, ReceiptStatus.REFUSED


def path_by(*peers: PeerId) -> Path:
    return Path(DATA, tuple(Hop(ModuleId(stage), peer) for stage, peer in enumerate(peers, start=1)))


ABC = path_by(A, B, C)


def receipt(direction: Direction, position: int, status: ReceiptStatus, retry_after_s: float = 0.0) -> Receipt:
    return Receipt(MICROBATCH, direction, position, status, retry_after_s)


class Desk:
    """One peer's custody, with shorthand for what may happen to it. `dead` are the replicas that the chooser leaves
    out, `gone` the stages that new paths go round, `elsewhere` those where they visit another expert, `given_up` who
    does not answer any more, `unlinked` to whom there is no link."""

    def __init__(self, own: PeerId, slots: int = 2, fewest_hops: int = MAX_HOPS) -> None:
        self.own = own
        self.now = 100.0
        self.dead: set[PeerId] = set()
        self.fewest_hops = fewest_hops
        self.gone: set[int] = set()
        self.elsewhere: set[int] = set()
        self.given_up: set[PeerId] = set()
        self.unlinked: set[PeerId] = set()
        self.custody = Custody(own, slots, self)

    # ---- swarm.pipeline.custody.Replicas -----------------------------------------------------------------------------

    def choose(self, module: ModuleId, without: frozenset[PeerId]) -> Reasoned[PeerId | None]:
        left = [peer for peer in REPLICAS[module.stage] if peer not in without | self.dead]
        return Reasoned(left[0], "the first") if left else Reasoned(None, f"module {module} has no peer left")

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return peer in REPLICAS.get(module.stage, ()) or (module == ModuleId(0) and peer not in STAGES)

    def is_given_up(self, peer: PeerId) -> bool:
        return peer in self.given_up

    def is_linked(self, peer: PeerId) -> bool:
        return peer not in self.unlinked

    def goes_round(self, module: ModuleId) -> bool:
        return module.stage in self.gone

    def has_other_expert(self, module: ModuleId) -> bool:
        return module.stage in self.elsewhere

    # ---- what a test does ----------------------------------------------------------------------------------------

    def held(self, position: int) -> Entry | None:
        return self.custody.get(Key(MICROBATCH, position))

    def phase(self, position: int) -> Phase | None:
        holding = self.held(position)
        return None if holding is None else holding.phase

    def start(self, path: Path = ABC, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        return self.custody.handle(Started(MICROBATCH, path, purpose, LIFETIME_S), self.now)

    def forward(self, position: int, path: Path = ABC, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        """A Forward comes in, header and body."""
        message = Forward(MICROBATCH, path, position, purpose, LIFETIME_S)
        assert self.custody.admit_forward(message, self.now).value is Place.FREE
        return self.custody.handle(TensorArrived(message), self.now)

    def backward(self, position: int, path: Path = ABC) -> list[Action]:
        return self.custody.handle(TensorArrived(Backward(MICROBATCH, path, position)), self.now)

    def admits(self, position: int, path: Path = ABC) -> Place:
        """The header of a gradient comes in."""
        return self.custody.admit_backward(Backward(MICROBATCH, path, position), self.now).value

    def computed(self, position: int, seconds: float = 0.0) -> list[Action]:
        return self.custody.handle(Computed(Key(MICROBATCH, position), seconds), self.now)

    def receipt(
        self, sender: PeerId, direction: Direction, position: int, status: ReceiptStatus, retry_after_s: float = 0.0
    ) -> list[Action]:
        answer = receipt(direction, position, status, retry_after_s)
        return self.custody.handle(Arrived(sender, answer), self.now)

    def lose(self, peer: PeerId) -> list[Action]:
        return self.custody.handle(PeerLost(peer, "the link broke"), self.now)

    def lose_for_good(self, peer: PeerId) -> list[Action]:
        """Every new offer to the peer fails as well, until patience is over. Returns what follows then."""
        offered_again = 0
        while not (actions := self.lose(peer)):
            assert all(isinstance(action, SendOutput) and action.to == peer for action in self.wait(RETRY_S + 0.01))
            offered_again += 1
        assert offered_again > 1
        return actions

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.custody.handle(Tick(), self.now)

    def settled(self, path: Path, sender: PeerId = DATA) -> list[Action]:
        return self.custody.handle(Arrived(sender, Settled(MICROBATCH, path)), self.now)

    def recall(self, sender: PeerId, position: int, path: Path) -> list[Action]:
        return self.custody.handle(Arrived(sender, Recall(MICROBATCH, path, position)), self.now)

    # ---- shorthand for longer stretches ----------------------------------------------------------------------------

    def handing_on(self, position: int = 0, purpose: Purpose = Purpose.TRAIN) -> list[Action]:
        """Received, computed and offered to the next one."""
        self.forward(position, purpose=purpose)
        return self.computed(position)

    def guarding(self) -> list[Action]:
        self.handing_on()
        return self.receipt(B, OUT, 1, ACCEPTED)

    def awaiting(self) -> None:
        self.guarding()
        self.receipt(B, OUT, 1, PASSED_ON)

    def turned(self) -> None:
        """A data node whose microbatch has come to its end and is being handed back."""
        self.start()
        self.computed(-1)
        self.receipt(A, OUT, 0, ACCEPTED)
        self.receipt(A, OUT, 0, PASSED_ON)
        self.forward(3)
        self.computed(3)


def sent(to: PeerId, message: Forward | Backward, position: int) -> SendOutput:
    return SendOutput(Key(MICROBATCH, position), to, message)


def offer(to: PeerId, path: Path, position: int, purpose: Purpose = Purpose.TRAIN) -> SendOutput:
    """A hop offers its output to the next one, which has `position`."""
    return sent(to, Forward(MICROBATCH, path, position, purpose, LIFETIME_S), position - 1)


def stranded(direction: Direction, position: int, detail: str) -> Tell:
    return Tell(DATA, Stranded(MICROBATCH, direction, position, detail))
