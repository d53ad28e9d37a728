"""One peer's custody on a desk: events go in as short lines, and what it does then comes out as one."""

from swarm.pipeline import custody
from swarm.vocabulary import pipeline_messages as messages
from swarm.vocabulary.types import MAX_HOPS, Hop, MicrobatchId, ModuleId, Path, PeerId, Reasoned

DATA, A, B, C = PeerId("data"), PeerId("a"), PeerId("b"), PeerId("c")
A2, B2, B3, C2 = PeerId("a2"), PeerId("b2"), PeerId("b3"), PeerId("c2")
REPLICAS = {1: (A, A2), 2: (B, B2, B3), 3: (C, C2)}
STAGE_OF = {peer: stage for stage, replicas in REPLICAS.items() for peer in replicas}  # All others are data nodes
LIFETIME_S = 30.0
MICROBATCH = MicrobatchId(DATA, 7)
OUT, BACK = messages.Direction.FORWARD, messages.Direction.BACKWARD
ACCEPTED, PASSED_ON = messages.ReceiptStatus.ACCEPTED, messages.ReceiptStatus.PASSED_ON
NAMES = {OUT: "out", BACK: "back"}


def path_by(*hops: str) -> Path:
    """The path by these peers; `c@2` is c in the place of a replica of module 2."""
    named = [(PeerId(peer), stage) for peer, _, stage in (hop.partition("@") for hop in hops)]
    return Path(DATA, tuple(Hop(ModuleId(int(stage or STAGE_OF[peer])), peer) for peer, stage in named))


ABC = path_by(A, B, C)


def by(path: Path) -> str:
    return " ".join(("by", *(hop.peer for hop in path.hops)))


class Desk:
    """One peer's custody. An event is a line such as `b accepted out 1` or `forward 0 by a b c`."""

    def __init__(self, own: PeerId, slots: int = 2, fewest_hops: int = MAX_HOPS) -> None:
        self.now = 100.0
        self.fewest_hops = fewest_hops
        self.dead: set[str] = set()
        self.gone: set[str] = set()
        self.elsewhere: set[str] = set()
        self.given_up: set[str] = set()
        self.unlinked: set[str] = set()
        self.sendings: list[str] = []
        self.custody = custody.Custody(own, slots, self)

    def choose(self, module: ModuleId, without: frozenset[PeerId], busy: PeerId | None) -> Reasoned[PeerId | None]:
        left = [peer for peer in REPLICAS[module.stage] if peer not in without | self.dead]
        return Reasoned(left[0], "the first") if left else Reasoned(None, f"module {module} has no peer left")

    def link_took(self, peer: PeerId, since: float) -> None:
        self.sendings.append(f"{peer} {self.now - since:g}")

    def hosts(self, peer: PeerId, module: ModuleId) -> bool:
        return STAGE_OF.get(peer, 0) == module.stage

    def is_given_up(self, peer: PeerId) -> bool:
        return peer in self.given_up

    def is_linked(self, peer: PeerId) -> bool:
        return peer not in self.unlinked

    def goes_round(self, module: ModuleId) -> bool:
        return str(module.stage) in self.gone

    def has_other_expert(self, module: ModuleId) -> bool:
        return str(module.stage) in self.elsewhere

    def do(self, line: str) -> str:
        """What custody does: its actions, or the answer to a header."""
        event, _, hops = line.partition(" by")
        path = path_by(*hops.split()) if " by" in line else ABC
        what, *rest = event.split()
        purpose = messages.Purpose.EVALUATE if "evaluate" in rest else messages.Purpose.TRAIN
        if what in ("dead", "gone", "elsewhere", "given_up", "unlinked"):
            setattr(self, what, set(rest))
            return ""
        if what == "admit":
            return self.admit(self.tensor(rest[0], int(rest[1]), path, purpose)).value.name
        if what == "handed":  # received, computed, offered to the next peer
            self.do(f"forward {' '.join(rest)}{line[len(event) :]}")
            return self.do(f"computed {rest[0]}")
        if what == "lost":  # every offer to it fails, until patience is over
            while not (actions := self.do(f"lose {rest[0]}")):
                self.do("wait 0.31")
            return actions
        return "; ".join(said(action) for action in self._actions(what, rest, path, purpose))

    def _actions(self, what: str, rest: list[str], path: Path, purpose: messages.Purpose) -> list[custody.Action]:
        handle, now = self.custody.handle, self.now
        match what, rest:
            case "start", _:
                return handle(custody.Started(MICROBATCH, path, purpose, LIFETIME_S), now)
            case "forward" | "backward", [position, *_]:
                message = self.tensor(what, int(position), path, purpose)
                if isinstance(message, messages.Forward):
                    self.admit(message)
                return handle(custody.TensorArrived(message), now)
            case "broken", [kind, position]:
                return handle(custody.BrokenOff(self.tensor(kind, int(position), path, purpose)), now)
            case "computed", [position, *seconds]:
                return handle(custody.Computed(custody.Key(MICROBATCH, int(position)), *map(float, seconds)), now)
            case "failed", [position]:
                return handle(custody.ComputeFailed(custody.Key(MICROBATCH, int(position)), "out of memory"), now)
            case "lose", [peer]:
                return handle(custody.PeerLost(PeerId(peer), "the link broke"), now)
            case "linked", [peer]:
                return handle(custody.PeerBack(PeerId(peer)), now)
            case "wait", [seconds]:
                self.now += float(seconds)
                return handle(custody.Tick(), self.now)
            case "touch", [position]:
                self.custody.touch(custody.Key(MICROBATCH, int(position)), now)
                return []
            case "abandon", _:
                return self.custody.abandon(MICROBATCH, "enough")
            case sender, ["settled"]:
                return handle(custody.ControlArrived(PeerId(sender), messages.Settled(MICROBATCH, path)), now)
            case sender, ["close"]:
                return handle(custody.ControlArrived(PeerId(sender), messages.Close(MICROBATCH, "abandoned")), now)
            case sender, ["asks"]:
                return handle(custody.ControlArrived(PeerId(sender), messages.Unsettled(MICROBATCH)), now)
            case sender, ["recalls", position]:
                recall = messages.Recall(MICROBATCH, path, int(position))
                return handle(custody.ControlArrived(PeerId(sender), recall), now)
            case sender, [status, direction, position, *retry]:
                way, kind = OUT if direction == "out" else BACK, messages.ReceiptStatus[status.upper()]
                receipt = messages.Receipt(MICROBATCH, way, int(position), kind, *map(float, retry))
                return handle(custody.ControlArrived(PeerId(sender), receipt), now)
            case _:
                raise AssertionError((what, rest))

    def tensor(
        self, kind: str, position: int, path: Path = ABC, purpose: messages.Purpose = messages.Purpose.TRAIN
    ) -> messages.Forward | messages.Backward:
        if kind == "forward":
            return messages.Forward(MICROBATCH, path, position, purpose, LIFETIME_S)
        return messages.Backward(MICROBATCH, path, position)

    def admit(self, message: messages.Forward | messages.Backward) -> Reasoned[custody.SlotState]:
        if isinstance(message, messages.Forward):
            return self.custody.admit_forward(message, self.now)
        return self.custody.admit_backward(message, self.now)

    def state(self) -> str:
        return ", ".join(f"{entry.key.position} {entry.phase.name}" for entry in self.custody.entries()) or "gone"


def said(action: custody.Action) -> str:
    match action:
        case custody.Compute(key, work, purpose):
            return f"compute {work.name} {key.position}" + (" evaluate" if purpose is messages.Purpose.EVALUATE else "")
        case custody.SendOutput(_, to, message):
            kind = "hidden" if isinstance(message, messages.Forward) else "gradient"
            return f"{to} < {kind} {message.position} {by(message.path)}"
        case custody.SendControl(to, message):
            return f"{to} < {told(message)}"
        case custody.KeepGradient(key):
            return f"keep {key.position}"
        case custody.Confirmed(key):
            return f"count {key.position}"
        case custody.Retract(key):
            return f"take back {key.position}"
        case custody.Forget(key, reason):
            return f"forget {key.position}, {reason}"
        case custody.Finished(_, path):
            return f"finished {by(path)}"


def told(message: messages.MicrobatchControl) -> str:
    match message:
        case messages.Receipt():
            times = message.retry_after_s, message.waited_s, message.computed_s, message.sent_s
            timed = "".join(
                f" {name} {value:g}"
                for name, value in zip(("retry", "waited", "computed", "sent"), times, strict=True)
                if value
            )
            return f"{message.status.name.lower()} {NAMES[message.direction]} {message.position}{timed}"
        case messages.Stranded():
            return f"stranded {NAMES[message.direction]} {message.position}, {message.detail}"
        case messages.Recall():
            return f"recall {message.position} {by(message.path)}"
        case messages.Settled():
            return f"settled {by(message.path)}"
        case messages.Unsettled():
            return "asks"
        case messages.Close():
            return "close"
        case _:
            raise AssertionError(message)
