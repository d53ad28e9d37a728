"""A replica in virtual time: the real round machine, and hashes and delays for everything that a node would compute or
send."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.averaging.round_events import (
    Action,
    Arrived,
    CatchUp,
    CatchUpFailed,
    CaughtUp,
    CommitStaged,
    DropStaged,
    Event,
    Exchange,
    LinkLost,
    OtherReplica,
    Owing,
    PieceCame,
    PieceRejected,
    Release,
    ReplicasChanged,
    SnapshotTaken,
    Staged,
    TakeSnapshot,
    Tell,
    Tick,
    Worked,
)
from swarm.averaging.round_machine import RoundMachine
from swarm.simulation.virtual_network import Thunk
from swarm.vocabulary.averaging_messages import RoundId
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId
from tests.swarm.averaging.virtual_exchange import Piece, VirtualExchange, VirtualSeal, hash_of

if TYPE_CHECKING:
    from tests.swarm.averaging.round_world import RoundWorld

MODULE = ModuleId(1)
INITIAL = AnchorVersion(0, 0, 0, 0, hash_of("initial weights"))
TICK_S = 0.25
VIEW_S = 4.0
"""How long an announcement is believed."""
KEPT_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    base: AnchorVersion
    steps: int
    tokens: int
    gradient: bytes


class VirtualReplica:
    """Lives from its start to its crash; another one with the same name may come after it."""

    def __init__(self, world: RoundWorld, own: PeerId, version: AnchorVersion, newcomer: bool) -> None:
        self.world = world
        self.id = own
        self.machine = RoundMachine(own, MODULE, world.rules, version, VirtualSeal())
        self.history = [version]
        self.serving = not newcomer
        self.alive = True
        self.frozen = False
        self.spoils = False
        """Sends pieces that cannot be used."""
        self.slanders: PeerId | None = None
        """Says so of this one, which does not."""
        self.step_s = world.random.uniform(*world.shape.step_s)
        self.bandwidth = world.random.uniform(*world.shape.bandwidth)
        self.tokens_a_step = world.random.randint(50, 200)
        self.steps = self.tokens = self.work = 0
        self.snapshots: dict[int, Snapshot] = {}
        self.staged: dict[AnchorVersion, RoundId] = {}
        self.exchange: VirtualExchange | None = None
        self._events: deque[Event] = deque()
        self.early: list[Thunk] = []
        """Pieces that came before the roster."""
        self.kept: list[Thunk] = []
        """What waits in the sockets of a frozen process."""
        self.view: dict[PeerId, tuple[OtherReplica, float]] = {}
        self._told: tuple[OtherReplica, ...] | None = None
        self._busy_until = 0.0
        self._owed: frozenset[PeerId] = frozenset()
        world.time.after(world.random.uniform(0, TICK_S), self._tick)
        world.time.after(self.step_s, self._work)

    @property
    def version(self) -> AnchorVersion:
        return self.machine.version

    # ---- the process -----------------------------------------------------------------------------------------------

    def do(self, what: Thunk) -> None:
        """Runs now, or when the process runs again, or never."""
        if not self.alive:
            return
        if self.frozen:
            self.kept.append(what)
        else:
            what()

    def thaw(self) -> None:
        self.frozen = False
        kept, self.kept = self.kept, []
        for what in kept:
            self.do(what)

    def feed(self, event: Event) -> None:
        """One event after the other: what the actions of one bring about waits until they are all carried out."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            before = self.machine.version
            actions = self.machine.handle(self._events[0], self.world.time.now)
            self.world.observe(self, before, actions)
            for action in actions:
                self._carry_out(action)
            self._events.popleft()

    def _tick(self) -> None:
        if self.alive:
            if not self.frozen:
                self.feed(Tick())
                self.serving = self.serving or self.machine.settled
            self.world.time.after(TICK_S, self._tick)

    def _work(self) -> None:
        if not self.alive:
            return
        self.world.time.after(self.step_s, self._work)
        if self.frozen or self.world.idle or self.machine.describe().find("catching") >= 0:
            return
        self.steps, self.tokens, self.work = self.steps + 1, self.tokens + self.tokens_a_step, self.work + 1
        self.feed(Worked(self.steps, self.tokens))
        if self.machine.is_alone and self.steps >= self.world.rules.inner_steps:
            self._step_alone()

    def _step_alone(self) -> None:
        base = self.version
        digest = hash_of(base.digest, "alone", self.id, self.work)
        after = (base.fragment + 1) % self.world.rules.fragments
        version = AnchorVersion(base.round + 1, base.steps + self.steps, base.tokens + self.tokens, after, digest)
        self.steps = self.tokens = 0
        self.snapshots.clear()
        self._keep(version)
        self.feed(CaughtUp(version))

    def _keep(self, version: AnchorVersion) -> None:
        self.history = [*self.history, version][-KEPT_VERSIONS:]

    # ---- what the machine wants ------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Tell(to, message):
                self._tell(to, Arrived(self.id, message))
            case TakeSnapshot(attempt, _):
                seconds = self.world.random.choice(self.world.shape.prepare_s)
                self.world.time.after(seconds, lambda: self.do(lambda: self._take_snapshot(attempt)))
            case Exchange(roster):
                assert len(self.staged) <= 1, "there is room for one complete result, and the one in the making"
                snapshot = self.snapshots[roster.round.number]
                fragments = self.world.rules.fragments
                self.exchange = VirtualExchange(self.id, roster, snapshot.gradient, fragments, self._send)
                self._owed = frozenset()
                self.exchange.start()
                self._exchange_moved(self.exchange)
                if self.slanders is not None and roster.round.convener != self.id:
                    self.feed(PieceRejected(roster.round, self.slanders, "slander"))
                early, self.early = self.early, []
                for take in early:
                    take()
            case DropStaged(version):
                self.staged.pop(version, None)
            case Release(number):
                self.exchange = None
                self.snapshots = {kept: value for kept, value in self.snapshots.items() if kept > number}
                self.staged = {version: attempt for version, attempt in self.staged.items() if attempt.number > number}
            case CommitStaged(roster, version):
                self._commit(roster.round, version)
            case CatchUp(version, donors):
                seconds = self.world.random.uniform(0.1, 1.0)
                self.world.time.after(seconds, lambda: self.do(lambda: self._caught_up(version, donors)))

    def _tell(self, to: PeerId, event: Arrived) -> None:
        def deliver() -> None:
            receiver = self.world.replicas[to]
            receiver.do(lambda: receiver.feed(event))

        if not (self.world.links.message(self.id, to, deliver) and self.world.replicas[to].alive):
            self.world.time.after(0.05, lambda: self.do(lambda: self.feed(LinkLost(to))))

    def _take_snapshot(self, attempt: RoundId) -> None:
        old = self.snapshots.get(attempt.number)
        if old is None or old.base != self.version:
            gradient = hash_of(self.id, self.version, self.work)
            old = self.snapshots[attempt.number] = Snapshot(self.version, self.steps, self.tokens, gradient)
        norm = old.steps * self.world.random.uniform(0.9, 1.1)
        received = {peer: other.bandwidth for peer, other in self.world.replicas.items() if peer != self.id}
        self.feed(SnapshotTaken(attempt, old.steps, old.tokens, norm, self.bandwidth, received))

    def _commit(self, attempt: RoundId, version: AnchorVersion) -> None:
        assert self.staged.get(version) == attempt, "it commits what it has not prepared"
        snapshot = self.snapshots[attempt.number]
        assert snapshot.base == self.history[-1], "it commits into another anchor"
        self.steps, self.tokens = self.steps - snapshot.steps, self.tokens - snapshot.tokens
        self.snapshots.clear()
        self.staged.clear()
        self._keep(version)

    def _caught_up(self, version: AnchorVersion, donors: tuple[PeerId, ...]) -> None:
        near = (self.world.replicas[peer] for peer in donors if self.world.links.up(self.id, peer))
        if not any(donor.alive and not donor.frozen and version in donor.history for donor in near):
            return self.feed(CatchUpFailed(version, "no donor has it"))
        self.steps = self.tokens = 0
        self.snapshots.clear()
        self.staged.clear()
        self.exchange = None
        self._keep(version)
        return self.feed(CaughtUp(version))

    # ---- the exchange ----------------------------------------------------------------------------------------------

    def _send(self, to: PeerId, piece: Piece) -> None:
        seconds = self.world.rules.chunk_bytes / self.bandwidth
        start = max(self.world.time.now, self._busy_until)
        self._busy_until = start + seconds
        receiver = self.world.replicas[to]
        spoilt = self.spoils and not piece.reduced

        def deliver() -> None:
            self.world.replicas[to].do(lambda: self.world.replicas[to].piece_came(self.id, piece, spoilt))

        if receiver.alive and self.alive:
            self.world.links.tensor(self.id, to, self._busy_until - self.world.time.now, deliver)

    def piece_came(self, sender: PeerId, piece: Piece, spoilt: bool) -> None:
        exchange = self.exchange
        if exchange is None or exchange.roster.round != piece.roster.round:
            if piece.roster.round == self.machine.under_way:
                self.early.append(lambda: self.piece_came(sender, piece, spoilt))
            return
        if spoilt:
            self.feed(PieceRejected(piece.roster.round, sender, "not finite"))
        elif exchange.take(sender, piece):
            self.feed(PieceCame(piece.roster.round, sender))
            self._exchange_moved(exchange)

    def _exchange_moved(self, exchange: VirtualExchange) -> None:
        if exchange is not self.exchange:
            return
        owing = exchange.owing()
        attempt = exchange.roster.round
        if owing != self._owed:
            self._owed = owing
            self.feed(Owing(attempt, owing))
        result = exchange.result()
        if result is not None and result not in self.staged and result not in self.history:
            self.staged[result] = attempt
            self.world.staged(self, exchange.roster, result)
            self.feed(Staged(attempt, result))

    # ---- the others -------------------------------------------------------------------------------------------------

    def see(self, replica: OtherReplica) -> None:
        self.view[replica.peer] = (replica, self.world.time.now + VIEW_S)
        self.refresh_view()

    def refresh_view(self) -> None:
        now = self.world.time.now
        self.view = {peer: seen for peer, seen in self.view.items() if seen[1] > now}
        others = tuple(seen[0] for _, seen in sorted(self.view.items()))
        if others != self._told:
            self._told = others
            self.feed(ReplicasChanged(others))
