"""Replicas of one module in virtual time, what lies between them, what goes wrong, and what must hold whatever does."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from lab.world.world import Thunk, VirtualTime
from swarm.averaging import round_events as events
from swarm.averaging.round_events import Action, CommitStaged, RoundRules, SendMessage
from swarm.averaging.round_machine import RoundMachine
from swarm.vocabulary import averaging_messages as messages
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId


class VirtualLinks:
    """Links between all pairs of peers. `loss`: share of messages that vanish; tensors arrive unless a link is cut."""

    def __init__(self, time: VirtualTime, random: Random, loss: float, repeats: float, slowest_s: float) -> None:
        self._time = time
        self._random = random
        self.loss = loss
        self.repeats = repeats
        self._slowest_s = slowest_s
        self._cut: set[frozenset[PeerId]] = set()
        self._group: dict[PeerId, int] = {}
        self.sent = 0

    def up(self, one: PeerId, other: PeerId) -> bool:
        return self._group.get(one, 0) == self._group.get(other, 0) and frozenset((one, other)) not in self._cut

    def message(self, sender: PeerId, to: PeerId, deliver: Thunk) -> bool:
        """False when the sender learns that there is no link."""
        self.sent += 1
        if not self.up(sender, to):
            return False
        for _ in range(2 if self._random.random() < self.repeats else 1):
            if self._random.random() >= self.loss:
                self._carry(sender, to, self._random.uniform(0.001, self._slowest_s), deliver)
        return True

    def tensor(self, sender: PeerId, to: PeerId, seconds: float, deliver: Thunk) -> None:
        self._carry(sender, to, seconds + self._random.uniform(0.001, 0.01), deliver)

    def _carry(self, sender: PeerId, to: PeerId, seconds: float, deliver: Thunk) -> None:
        self._time.after(seconds, lambda: deliver() if self.up(sender, to) else None)

    def cut(self, one: PeerId, other: PeerId) -> None:
        self._cut.add(frozenset((one, other)))

    def partition(self, *groups: Iterable[PeerId]) -> None:
        self._group = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        self._cut.clear()
        self._group.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """A contribution to a chunk, or its reduced result."""

    roster: messages.Roster
    chunk: int
    reduced: bool
    value: bytes


def hash_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


class VirtualSigner:
    """`swarm.averaging.round_events.Signer` for names without keys: an unchanged entry is signed by the peer in it."""

    def sign(self, entry: messages.Entry) -> messages.Entry:
        return replace(entry, signature=hash_of("signed", replace(entry, signature=b"")) * 2)

    def verify(self, entry: messages.Entry) -> bool:
        return entry == self.sign(entry)

    def vouches(self, tally: messages.WorkTally) -> bool:
        return tally.signature == b"good"


@dataclass(slots=True)
class VirtualExchange:
    """Contributions go to the reducer of each chunk; when it has all, the result goes to everybody."""

    own: PeerId
    roster: messages.Roster
    gradient: bytes
    fragments: int
    send: Callable[[PeerId, Piece], None]
    contributions: dict[int, dict[PeerId, bytes]] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, PeerId]:
        return {chunk: each.peer for each in self.roster.members for chunk in range(each.first_chunk, each.end_chunk)}

    @property
    def contributors(self) -> frozenset[PeerId]:
        return frozenset(member.peer for member in self.roster.members if member.coefficient > 0)

    def start(self) -> None:
        if self.own in self.contributors:
            for chunk, reducer in self.chunks.items():
                piece = Piece(self.roster, chunk, False, hash_of(self.gradient, chunk))
                if reducer == self.own:
                    self.take(self.own, piece)
                else:
                    self.send(reducer, piece)

    def take(self, sender: PeerId, piece: Piece) -> bool:
        if piece.reduced:
            if self.chunks.get(piece.chunk) != sender or piece.chunk in self.results:
                return False
            self.results[piece.chunk] = piece.value
            return True
        if sender not in self.contributors or self.chunks.get(piece.chunk) != self.own:
            return False
        self.contributions.setdefault(piece.chunk, {})[sender] = piece.value
        if self.contributions[piece.chunk].keys() == self.contributors and piece.chunk not in self.results:
            self._reduce(piece.chunk)
        return True

    def _reduce(self, chunk: int) -> None:
        value = hash_of(sorted(self.contributions[chunk].items()))
        self.results[chunk] = value
        for member in self.roster.members:
            if member.peer != self.own:
                self.send(member.peer, Piece(self.roster, chunk, True, value))

    def owing(self) -> frozenset[PeerId]:
        missing = {reducer for chunk, reducer in self.chunks.items() if chunk not in self.results}
        late = {
            peer
            for chunk, reducer in self.chunks.items()
            if reducer == self.own
            for peer in self.contributors - self.contributions.get(chunk, {}).keys()
        }
        return frozenset((missing | late) - {self.own})

    def result(self) -> AnchorVersion | None:
        if len(self.results) < len(self.chunks):
            return None
        roster = self.roster
        digest = hash_of(roster.base.digest, roster.round.number, sorted(self.results.items()))
        after = (roster.base.fragment + 1) % self.fragments
        return AnchorVersion(roster.round.number, roster.steps, roster.tokens, after, digest)


MODULE = ModuleId(1)
INITIAL = AnchorVersion(0, 0, 0, 0, hash_of("initial weights"))
TICK_S = 0.25
VIEW_S = 4.0  # How long an announcement is believed
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
        self.machine = RoundMachine(own, MODULE, world.rules, version, VirtualSigner())
        self.history = [version]
        self.serving = not newcomer
        self.alive = True
        self.frozen = False
        self.spoils = False  # Sends pieces that cannot be used
        self.catch_up_s = 0.1, 1.0
        self.slanders: PeerId | None = None  # Says so of this one, which does not
        self.step_s = world.random.uniform(*world.shape.step_s)
        self.bandwidth = world.random.uniform(*world.shape.bandwidth)
        self.tokens_a_step = world.random.randint(50, 200)
        self.steps = self.tokens = self.work = 0
        self.snapshots: dict[int, Snapshot] = {}
        self.staged: dict[AnchorVersion, messages.RoundId] = {}
        self.exchange: VirtualExchange | None = None
        self._events: deque[events.Event] = deque()
        self.early: list[Thunk] = []  # Pieces that came before the roster
        self.kept: list[Thunk] = []  # What waits in the sockets of a frozen process
        self.view: dict[PeerId, tuple[events.OtherReplica, float]] = {}
        self._told: tuple[events.OtherReplica, ...] | None = None
        self._flows: dict[tuple[PeerId, bool], deque[Piece]] = {}
        self._owed: frozenset[PeerId] = frozenset()
        world.time.after(world.random.uniform(0, TICK_S), self._tick)
        world.time.after(self.step_s, self._work)

    @property
    def version(self) -> AnchorVersion:
        return self.machine.version

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

    def feed(self, event: events.Event) -> None:
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
                self.feed(events.Tick())
                self.serving = self.serving or self.machine.settled
            self.world.time.after(TICK_S, self._tick)

    def _work(self) -> None:
        if not self.alive:
            return
        self.world.time.after(self.step_s, self._work)
        if self.frozen or self.machine.describe().find("catching") >= 0:
            return
        self.steps, self.tokens, self.work = self.steps + 1, self.tokens + self.tokens_a_step, self.work + 1
        self.feed(events.Worked(self.steps, self.tokens))
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
        self.feed(events.CaughtUp(version))

    def _keep(self, version: AnchorVersion) -> None:
        self.history = [*self.history, version][-KEPT_VERSIONS:]

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendMessage(to, message):
                self._tell(to, events.MessageArrived(self.id, message))
            case events.TakeSnapshot(attempt, _):
                seconds = self.world.random.choice(self.world.shape.prepare_s)
                self.world.time.after(seconds, lambda: self.do(lambda: self._take_snapshot(attempt)))
            case events.Exchange(roster):
                assert len(self.staged) <= 1, "there is room for one complete result, and the one in the making"
                snapshot = self.snapshots[roster.round.number]
                fragments = self.world.rules.fragments
                self.exchange = VirtualExchange(self.id, roster, snapshot.gradient, fragments, self._send)
                self._owed = frozenset()
                self.exchange.start()
                self._exchange_moved(self.exchange)
                if self.slanders is not None and roster.round.convener != self.id:
                    self.feed(events.PieceRejected(roster.round, self.slanders, "slander"))
                early, self.early = self.early, []
                for take in early:
                    take()
            case events.DropStaged(version):
                self.staged.pop(version, None)
            case events.Release(number):
                self.exchange = None
                self.snapshots = {kept: value for kept, value in self.snapshots.items() if kept > number}
                self.staged = {version: attempt for version, attempt in self.staged.items() if attempt.number > number}
            case CommitStaged(roster, version):
                self._commit(roster.round, version)
            case events.CatchUp(version, donors):
                seconds = self.world.random.uniform(*self.catch_up_s)
                self.world.time.after(seconds, lambda: self.do(lambda: self._caught_up(version, donors)))

    def _tell(self, to: PeerId, event: events.MessageArrived) -> None:
        def deliver() -> None:
            receiver = self.world.replicas[to]
            receiver.do(lambda: receiver.feed(event))

        if not (self.world.links.message(self.id, to, deliver) and self.world.replicas[to].alive):
            self.world.time.after(0.05, lambda: self.do(lambda: self.feed(events.LinkLost(to))))

    def _take_snapshot(self, attempt: messages.RoundId) -> None:
        old = self.snapshots.get(attempt.number)
        if old is None or old.base != self.version:
            gradient = hash_of(self.id, self.version, self.work)
            old = self.snapshots[attempt.number] = Snapshot(self.version, self.steps, self.tokens, gradient)
        norm = old.steps * self.world.random.uniform(0.9, 1.1)
        received = {peer: other.bandwidth for peer, other in self.world.replicas.items() if peer != self.id}
        self.feed(events.SnapshotTaken(attempt, old.steps, old.tokens, norm, self.bandwidth, received))

    def _commit(self, attempt: messages.RoundId, version: AnchorVersion) -> None:
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
            return self.feed(events.CatchUpFailed(version, "no donor has it"))
        self.steps = self.tokens = 0
        self.snapshots.clear()
        self.staged.clear()
        self.exchange = None
        self._keep(version)
        return self.feed(events.CaughtUp(version))

    def _send(self, to: PeerId, piece: Piece) -> None:
        is_idle = not self._flows
        self._flows.setdefault((to, piece.reduced), deque()).append(piece)
        if is_idle:
            self._send_next()

    def _send_next(self) -> None:
        """Sends a piece of each flow in turn, as a node does, without those of an exchange that has ended."""
        while self._flows:
            (to, reduced), pieces = next(iter(self._flows.items()))
            while pieces and (self.exchange is None or pieces[0].roster.round != self.exchange.roster.round):
                pieces.popleft()
            if pieces:
                seconds = self.world.rules.chunk_bytes / self.bandwidth
                self.world.time.after(seconds, partial(self.do, partial(self._sent, to, pieces[0])))
                return
            del self._flows[to, reduced]

    def _sent(self, to: PeerId, piece: Piece) -> None:
        pieces = self._flows.pop((to, piece.reduced))
        pieces.popleft()
        if pieces:
            self._flows[to, piece.reduced] = pieces
        spoilt = self.spoils and not piece.reduced

        def deliver() -> None:
            self.world.replicas[to].do(lambda: self.world.replicas[to].piece_came(self.id, piece, spoilt))

        if self.world.replicas[to].alive:
            self.world.links.tensor(self.id, to, 0.0, deliver)
        self._send_next()

    def piece_came(self, sender: PeerId, piece: Piece, spoilt: bool) -> None:
        exchange = self.exchange
        if exchange is None or exchange.roster.round != piece.roster.round:
            if piece.roster.round == self.machine.current_attempt:
                self.early.append(lambda: self.piece_came(sender, piece, spoilt))
            return
        if spoilt:
            self.feed(events.PieceRejected(piece.roster.round, sender, "not finite"))
        elif exchange.take(sender, piece):
            self.feed(events.PieceArrived(piece.roster.round, sender))
            self._exchange_moved(exchange)

    def _exchange_moved(self, exchange: VirtualExchange) -> None:
        if exchange is not self.exchange:
            return
        owing = exchange.owing()
        attempt = exchange.roster.round
        if owing != self._owed:
            self._owed = owing
            self.feed(events.Owing(attempt, owing))
        result = exchange.result()
        if result is not None and result not in self.staged and result not in self.history:
            self.staged[result] = attempt
            self.world.staged(self, exchange.roster, result)
            self.feed(events.Staged(attempt, result))

    def see(self, replica: events.OtherReplica) -> None:
        self.view[replica.peer] = (replica, self.world.time.now + VIEW_S)
        self.refresh_view()

    def refresh_view(self) -> None:
        now = self.world.time.now
        self.view = {peer: seen for peer, seen in self.view.items() if seen[1] > now}
        others = tuple(seen[0] for _, seen in sorted(self.view.items()))
        if others != self._told:
            self._told = others
            self.feed(events.ReplicasChanged(others))


ANNOUNCE_S = 1.0
SMALL_ROUNDS = RoundRules(inner_steps=3, fragments=1, chunks=6, longest_s=12.0, chunk_bytes=1000, piece_bytes=1000)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a world is, and how bad its network."""

    replicas: int = 4
    rules: RoundRules = SMALL_ROUNDS
    loss: float = 0.0
    repeats: float = 0.0
    slowest_s: float = 0.05  # Of a small message
    step_s: tuple[float, float] = (0.6, 1.2)
    bandwidth: tuple[float, float] = (20_000.0, 100_000.0)
    prepare_s: tuple[float, ...] = (0.01, 0.05, 0.2)


class RoundWorld:
    """Checks at every action that nothing impossible happens; `commits` has what was agreed."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.rules = self.shape.rules
        self.random = Random(seed)
        self.time = VirtualTime()
        self.links = VirtualLinks(self.time, self.random, self.shape.loss, self.shape.repeats, self.shape.slowest_s)
        self.commits: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        self.rosters: dict[AnchorVersion, tuple[PeerId, ...]] = {}
        self.leaders: dict[int, PeerId] = {}
        self.attempts: Counter[int] = Counter()  # Of each round number
        self.prepared: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        """Who has ever had the whole result, and below from which exchange."""
        self.told: defaultdict[AnchorVersion, set[PeerId]] = defaultdict(set)
        self.exchanged: dict[AnchorVersion, messages.Roster] = {}
        self.on_commit: Callable[[VirtualReplica, CommitStaged], None] = lambda replica, commit: None
        self.caught_up: Counter[PeerId] = Counter()
        self.on_exchange: Callable[[VirtualReplica, messages.Roster], None] = lambda replica, roster: None
        self.replicas: dict[PeerId, VirtualReplica] = {}
        for number in range(self.shape.replicas):
            peer = PeerId(f"peer{number}")
            self.replicas[peer] = VirtualReplica(self, peer, INITIAL, newcomer=False)
        for replica in self.living:
            for other in self.living:
                if other is not replica:
                    replica.see(self._announcement(other))
            self.time.after(self.random.uniform(0, ANNOUNCE_S), partial(self._announce, replica))

    @property
    def living(self) -> list[VirtualReplica]:
        return [replica for replica in self.replicas.values() if replica.alive]

    @property
    def peers(self) -> list[PeerId]:
        return list(self.replicas)

    def _announcement(self, replica: VirtualReplica) -> events.OtherReplica:
        return events.OtherReplica(replica.id, replica.version, replica.serving)

    def _announce(self, replica: VirtualReplica) -> None:
        if not replica.alive:
            return
        self.time.after(ANNOUNCE_S, partial(self._announce, replica))
        if replica.frozen:
            return
        replica.refresh_view()
        announced = self._announcement(replica)
        for other in self.living:
            if other is not replica and self.links.up(replica.id, other.id):
                self.time.after(self.random.uniform(0.01, ANNOUNCE_S), partial(other.do, partial(other.see, announced)))

    def observe(self, replica: VirtualReplica, before: AnchorVersion, actions: Iterable[Action]) -> None:
        after = replica.version
        if after != before:
            assert after.round > before.round, f"{replica.id} went from round {before.round} to {after.round}"
        for action in actions:
            match action:
                case CommitStaged(roster, version):
                    self.on_commit(replica, action)
                    self.commits[version].add(replica.id)
                    self.rosters[version] = roster.peers
                    self.leaders[version.round] = roster.round.convener
                case SendMessage(_, messages.Prepared(_, version)):
                    self.told[version].add(replica.id)
                case SendMessage(_, messages.Commit(attempt, version)):
                    self._check_majority(attempt, version)
                case events.CatchUp():
                    self.caught_up[replica.id] += 1
                case SendMessage(_, messages.Invitation(attempt)):
                    assert attempt.attempt < messages.MAX_ATTEMPTS
                    assert attempt.convener == replica.id
                    self.attempts[attempt.number] = max(self.attempts[attempt.number], attempt.attempt + 1)
                case events.Exchange(roster):
                    if roster.round.convener == replica.id:
                        self._check_nothing_thrown_away(roster)
                    self.on_exchange(replica, roster)
                case _:
                    pass

    def staged(self, replica: VirtualReplica, roster: messages.Roster, version: AnchorVersion) -> None:
        self.prepared[version].add(replica.id)
        self.exchanged[version] = roster

    def _check_majority(self, attempt: messages.RoundId, version: AnchorVersion) -> None:
        """Of this exchange's own result; one that was found later may have been a majority's that is gone."""
        roster = self.exchanged[version]
        if roster.round == attempt:
            assert 2 * len(self.prepared[version]) > len(roster.members), "a commit without a majority"

    def _check_nothing_thrown_away(self, roster: messages.Roster) -> None:
        """A result that somebody has committed, and that a member has told of, is not replaced by another one."""
        for version in self.commits:
            if version.round > roster.base.round and self.exchanged[version].base == roster.base:
                holders = set(roster.peers) & self.told[version]
                still = {peer for peer in holders if version in self.replicas[peer].staged}
                assert not still, f"{still} have the committed round {version.round}, and it is done again"

    def versions(self) -> set[AnchorVersion]:
        return {replica.version for replica in self.living}

    def forks(self) -> list[int]:
        digests: defaultdict[int, set[bytes]] = defaultdict(set)
        for version in self.commits:
            digests[version.round].add(version.digest)
        return sorted(number for number, found in digests.items() if len(found) > 1)

    def explain(self) -> str:
        return "\n".join(f"{replica.id}: {replica.machine.describe()}" for replica in self.living)

    def run(self, seconds: float) -> None:
        self.time.run_until(self.time.now + seconds)

    def run_until(self, enough: Callable[[], bool], within_s: float) -> bool:
        self.time.run_until(self.time.now + within_s, enough)
        return enough()

    def agreed(self) -> bool:
        return len(self.versions()) == 1

    def cut(self, one: PeerId, other: PeerId) -> None:
        self.links.cut(one, other)
        for peer, lost in ((one, other), (other, one)):
            replica = self.replicas[peer]
            replica.do(partial(replica.feed, events.LinkLost(lost)))

    def crash(self, peer: PeerId) -> None:
        self.replicas[peer].alive = False

    def restart(self, peer: PeerId, version: AnchorVersion) -> None:
        assert not self.replicas[peer].alive
        replica = self.replicas[peer] = VirtualReplica(self, peer, version, newcomer=True)
        self._announce(replica)
        for other in self.living:
            if other is not replica and self.links.up(peer, other.id):
                replica.see(self._announcement(other))
        replica.refresh_view()

    def freeze(self, peer: PeerId) -> None:
        self.replicas[peer].frozen = True

    def thaw(self, peer: PeerId) -> None:
        self.replicas[peer].thaw()


FAULTS_S = 24.0
FAULT_EVERY_S = 2.0
SETTLE_S = 45.0  # From the last fault to one anchor: announcements, one failed attempt, one round, one download
PROGRESS_S = 60.0
MESSAGES_A_SECOND = 8.0  # At most, on average, from each replica to each other; a pulse is two


def world_of(seed: int) -> RoundWorld:
    """Three to six replicas on a network that is good or bad."""
    random = Random(seed * 7919)
    rules = replace(SMALL_ROUNDS, inner_steps=random.choice((4, 5, 6)), fragments=random.choice((1, 1, 2)))
    shape = Shape(
        replicas=random.choice((2, 3, 3, 4, 4, 5)),
        rules=rules,
        loss=random.choice((0.0, 0.01, 0.05)),
        repeats=random.choice((0.0, 0.05)),
        slowest_s=random.choice((0.02, 0.1, 0.4)),
        bandwidth=random.choice(((20_000.0, 100_000.0), (2_000.0, 20_000.0))),
        prepare_s=random.choice(((0.01, 0.2), (0.05, 3.0))),
    )
    return RoundWorld(seed, shape)


def harm_of(seed: int) -> list[str]:
    """The kinds of faults in a world, each of which may fork it. Every fifth world suffers only from its network."""
    kinds = ("crash freeze cut partition", "crash freeze cut", "freeze cut", "freeze cut partition", "")
    return kinds[seed % 5].split()


class Faults:
    def __init__(self, world: RoundWorld, kinds: list[str]) -> None:
        self._world = world
        self._random = world.random
        self._kinds = [getattr(self, f"_{kind}") for kind in kinds]

    def run(self, seconds: float) -> None:
        end = self._world.time.now + seconds
        while self._world.time.now < end:
            self._world.run(self._random.expovariate(1 / FAULT_EVERY_S))
            if self._kinds:
                self._random.choice(self._kinds)()

    def end(self) -> None:
        self._world.links.heal()
        for peer in self._world.peers:
            self._world.thaw(peer)
            self._restart(peer)

    def _some(self) -> PeerId:
        return self._random.choice(self._world.peers)

    def _crash(self) -> None:
        peer = self._some()
        if len(self._world.living) > 1:
            self._world.crash(peer)
            self._world.time.after(self._random.uniform(0.5, 8.0), partial(self._restart, peer))

    def _restart(self, peer: PeerId) -> None:
        replica = self._world.replicas[peer]
        if not replica.alive:
            self._world.restart(peer, self._random.choice((INITIAL, replica.history[0], replica.history[-1])))

    def _freeze(self) -> None:
        peer = self._some()
        self._world.freeze(peer)
        self._world.time.after(self._random.choice((0.4, 1.0, 3.0, 8.0)), partial(self._world.thaw, peer))

    def _cut(self) -> None:
        one, other = self._random.sample(self._world.peers, 2)
        self._world.cut(one, other)
        self._world.time.after(self._random.uniform(0.2, 6.0), self._world.links.heal)

    def _partition(self) -> None:
        peers = self._world.peers
        self._random.shuffle(peers)
        border = self._random.randint(1, len(peers) - 1)
        self._world.links.partition(peers[:border], peers[border:])
        self._world.time.after(self._random.uniform(1.0, 12.0), self._world.links.heal)


def try_seed(seed: int) -> RoundWorld:
    """Raises AssertionError when something that must hold does not; returns the world for counting."""
    world, harm = world_of(seed), harm_of(seed)
    faults = Faults(world, harm)
    faults.run(FAULTS_S)
    if not harm:
        assert not world.forks(), f"two results for rounds {world.forks()} though nothing was split"
    faults.end()
    assert world.run_until(world.agreed, SETTLE_S), f"no agreement\n{world.explain()}"
    reached = max(version.round for version in world.versions())
    together = partial(_all_took_part, world, reached)
    assert world.run_until(together, PROGRESS_S), f"no round of all after round {reached}\n{world.explain()}"
    pairs = len(world.replicas) * (len(world.replicas) - 1)
    assert world.links.sent < MESSAGES_A_SECOND * pairs * world.time.now, f"{world.links.sent} messages"
    return world


def _all_took_part(world: RoundWorld, reached: int) -> bool:
    since = [who for version, who in world.commits.items() if version.round > reached]
    return set().union(*since) == set(world.peers)
