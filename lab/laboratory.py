"""The laboratory: a local swarm behind the emulated network, and all faults that can be injected."""

import asyncio
import contextlib
import enum
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.audit import is_rerouted
from lab.emulation.emulation import Emulation, Member, Site
from lab.emulation.proxy import Callers, Endpoint, ListenWatch, ProxiedPort, Proxy, descendants, require_proc
from node.concurrency.task_groups import task_scope
from node.local_swarm.child_process import ChildEnd
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSwarmOptions, PlannedPeer
from node.local_swarm.swarm_progress import PeerProgress
from node.observability.event_json import event_from_json
from node.observability.events import (
    CaughtUp,
    Completed,
    ReplicaAccused,
    Restored,
    RoundCommitted,
    RoundProgress,
    Visit,
)
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import SkipstoneError

# Short, because a round's exchange may last only a moment.
READ_EVERY_S = 0.02
READ_BYTES = 1 << 20
# The current anchor and the previous one, for `agree`.
ANCHORS_KEPT = 2
_EVENT = b'{"event":"'
# Most lines are of these kinds; their names are compared as bytes, without parsing.
_COMPLETED, _VISIT = Completed.NAME.encode(), Visit.NAME.encode()
_READ = {kind.NAME.encode() for kind in (RoundProgress, RoundCommitted, CaughtUp, Restored, ReplicaAccused)}


@dataclass(frozen=True, slots=True)
class Held:
    module: str
    round: int
    digest: str


@dataclass(slots=True)
class Accused:
    """Accusers of a replica, and how many rounds they committed after that: in all, and together with it."""

    by: set[str] = field(default_factory=set)
    commits: int = 0
    with_it: int = 0


class LogWatch:
    """Totals from the event logs in a folder, kept up to date by `run`. `now` returns seconds since the run began."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self.completed: list[float] = []
        self.rerouted: list[float] = []
        self.visits: Counter[str] = Counter()
        self.anchors: dict[str, tuple[Held, ...]] = {}
        self.accused: dict[str, Accused] = {}
        self._folder = folder
        self._now = now
        self._files: dict[Path, tuple[int, bytes]] = {}
        self._wanted: dict[asyncio.Future[RoundProgress], Callable[[RoundProgress], bool]] = {}

    async def run(self) -> None:
        """Reads new lines of all event logs until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(READ_EVERY_S)
        finally:
            for file, _ in self._files.values():
                os.close(file)

    async def until(self, wanted: Callable[[RoundProgress], bool]) -> RoundProgress:
        """Waits for the next `RoundProgress` event for which `wanted` returns true."""
        found: asyncio.Future[RoundProgress] = asyncio.get_running_loop().create_future()
        self._wanted[found] = wanted
        try:
            return await found
        finally:
            del self._wanted[found]

    def _look(self) -> None:
        for path in self._folder.glob("*.jsonl"):
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY), b""
        for path, (file, rest) in tuple(self._files.items()):
            if new := os.read(file, READ_BYTES):
                # The last line may be incomplete: keep it for the next read.
                *lines, rest = (rest + new).split(b"\n")
                self._files[path] = file, rest
                for line in lines:
                    self._take(path.name.partition("-")[0], line)

    def _take(self, peer: str, line: bytes) -> None:
        name = line.removeprefix(_EVENT).partition(b'"')[0]  # most lines need no parsing
        if name == _COMPLETED:
            self.completed.append(self._now())
            if b'"route"' in line and is_rerouted(event_from_json(line)):
                self.rerouted.append(self.completed[-1])
        elif name == _VISIT:
            self.visits[peer] += 1
        elif name in _READ:
            event = event_from_json(line)
            match event:
                case RoundCommitted() | CaughtUp() | Restored():
                    held = Held(event.module, event.round, event.digest)
                    self.anchors[event.peer] = (*self.anchors.get(event.peer, ()), held)[-ANCHORS_KEPT:]
                    if isinstance(event, RoundCommitted):
                        self._count_commit(event)
                case ReplicaAccused():
                    self.accused.setdefault(event.accused, Accused()).by.add(event.peer)
                case RoundProgress():
                    for found, wanted in self._wanted.items():
                        if not found.done() and wanted(event):
                            found.set_result(event)

    def _count_commit(self, commit: RoundCommitted) -> None:
        for name, accused in self.accused.items():
            if commit.peer in accused.by:
                accused.commits += 1
                accused.with_it += name in commit.contributors


LOOK_S = 0.05


class Kind(enum.Enum):
    """Kind of a mark: a fault begins, a fault ends, or another event."""

    FAULT = "fault"
    END = "end"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Mark:
    """Entry of the diary, which lists an experiment's faults and other events."""

    at_s: float
    kind: Kind
    what: str
    lasts: bool = False


def deployment(index: int) -> Deployment:
    """Returns a node's addresses: it listens at one loopback address and advertises another, its proxy's."""
    # Loopback is a whole /8, so each node gets two addresses.
    rest = f"{index // 250}.{index % 250 + 1}"
    return Deployment(host=f"127.77.{rest}", advertise=f"127.78.{rest}")


class Laboratory:
    """A local swarm, its emulated network, and the diary of its faults. Raises ConfigError without Linux's /proc."""

    def __init__(
        self,
        manifest: Manifest,
        options: LocalSwarmOptions,
        sites: Sequence[Site],
        seed: int,
        tell: Callable[[Mark], None],
    ) -> None:
        require_proc()
        assert options.log_dir is not None
        self.swarm = LocalSwarm(manifest, options, deployments=deployment)
        self.emulation = Emulation(seed)
        self.watch = LogWatch(options.log_dir, self.now)
        self.sites = sites
        self.seed = seed
        self.lots = random.Random(f"{seed} victims")  # noqa: S311 - no secret
        self.killed: set[int] = set()
        self.frozen: Counter[int] = Counter()
        self.odd: dict[int, bool] = {}
        """Peers started with a fault, and whether others should work with them."""
        self.liars: set[str] = set()
        self.marks: list[Mark] = []
        self.missed: list[str] = []
        self.waiting: list[str] = []
        self._tell = tell
        self._began = math.inf
        self._ports = ListenWatch()
        self._callers = Callers(self.swarm.processes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Runs the swarm within the block. Raises ResourceExhausted if a port or process is unavailable."""
        async with task_scope() as self._group:
            try:
                async with self.swarm:
                    self._spawn(self._ports.run())
                    self._spawn(self.watch.run())
                    try:
                        for peer in self.swarm.peers:
                            self._admit(peer, self.sites[peer.index])
                        yield
                    finally:
                        self.calm()
            finally:
                for task in self._tasks:
                    task.cancel()

    def begin(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        """Returns the seconds since `begin` was called; -1 before that."""
        return time.monotonic() - self._began if self._began < math.inf else -1.0

    def serving(self) -> dict[int, PeerProgress]:
        """Returns the living nodes that serve, including frozen ones, by index."""
        peers = self.swarm.progress.peers.items()
        return {index: peer for index, peer in peers if peer.exit_code is None and peer.state == "serving"}

    @property
    def failures(self) -> dict[int, int]:
        """Exit codes, by index, of nodes that failed although the laboratory did not kill them."""
        ends = self.swarm.ends.items()
        return {peer: end.exit_code for peer, end in ends if end.exit_code and peer not in self.killed}

    def kill(self, peer: int) -> None:
        self.killed.add(peer)
        self.thaw((peer,) * self.frozen[peer])  # otherwise its children could not see its end
        self.swarm.kill(peer)

    def start(self, stage: int, site: Site, command: Sequence[str] | None = None, expert: int = 0) -> int:
        """Starts a peer and returns its index. Raises as `LocalSwarm.start_peer`."""
        index = self.swarm.start_peer(stage, command, expert)
        self._admit(self.swarm.peers[index], site)
        return index

    async def restarted(self, peer: int) -> None:
        """Starts an ended peer again with its identity, and waits until it serves."""
        self.swarm.restart_peer(peer)
        self.killed.discard(peer)
        self.note(f"peer {peer} started again")
        await self.until_serving(peer)

    async def ended(self, peer: int) -> ChildEnd:
        """Waits until the peer's process and all its children are gone."""
        await until(lambda: peer in self.swarm.ends and peer not in self.swarm.processes())
        await asyncio.sleep(LOOK_S)  # lets the swarm drop its handle
        return self.swarm.ends[peer]

    async def until_visited(self, peer: int) -> None:
        name = self.swarm.peers[peer].peer
        await until(lambda: self.watch.visits[name] > 0)

    async def until_serving(self, peer: int) -> None:
        await until(lambda: self.swarm.progress.peers[peer].state == "serving")

    def freeze(self, peers: Sequence[int]) -> None:
        """Stops all processes of these peers with SIGSTOP. If freezes overlap, each one must be ended by `thaw`."""
        # Freezes may overlap, so count them.
        self.frozen.update(peers)
        send_signal(self.processes_of(set(peers)), signal.SIGSTOP)

    def thaw(self, peers: Sequence[int]) -> None:
        self.frozen -= Counter(peers)
        send_signal(self.processes_of(set(peers) - self.frozen.keys()), signal.SIGCONT)

    def processes_of(self, peers: set[int]) -> Iterator[int]:
        """Yields the processes of these peers. The DHT runs in another session, so a process group is not enough."""
        roots = {pid for index, pid in self.swarm.processes().items() if index in peers}
        return (pid for _, pid in descendants(roots)) if roots else iter(())

    def _admit(self, peer: PlannedPeer, site: Site) -> None:
        self.emulation.place(peer.index, site)
        for port in (peer.port, peer.dht_port):
            proxied = ProxiedPort(peer.index, (peer.deployment.advertised_host, port), (peer.deployment.host, port))
            self._spawn(Proxy(proxied, self.emulation, self._find_caller).run(self._ports))

    async def _find_caller(self, source: Endpoint, target: Endpoint) -> Member:
        return await asyncio.to_thread(self._callers.caller, source, target)

    def attempt(self, name: str, action: Callable[[], None]) -> None:
        """Calls `action`, the start of an event. A SkipstoneError makes it a missed event and does not end the run."""
        try:
            action()
        except SkipstoneError as error:
            self.miss(f"{name} was not possible: {error}")

    def later(self, work: Coroutine[None, None, None], what: str) -> None:
        """Runs the later work of an event in a task that ends with the run at the latest. `what` describes the work."""

        async def do() -> None:
            try:
                await work
            except SkipstoneError as error:
                self.miss(f"not possible: {error}")
            self.waiting.remove(what)

        self.waiting.append(what)
        task = self._spawn(do())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def lasts(self, what: str, for_s: float, mend: Callable[[], None]) -> None:
        """Notes a fault in the diary, and calls `mend` after `for_s` seconds or when the run ends."""
        self.fault(what, lasts=True)

        async def mend_later() -> None:
            try:
                await asyncio.sleep(for_s)
            # Also if the run ends early.
            finally:
                mend()
            self.end(f"over: {what}")

        self.later(mend_later(), f"the end of: {what}")

    async def end_what_lasts(self) -> None:
        """Mends all faults and cancels pending events, so that nodes can stop cleanly."""
        await cancelled(self._later)
        self.calm()

    def calm(self) -> None:
        self.thaw(tuple(self.frozen.elements()))
        self.emulation.clear()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a task that ends with the laboratory. If the task fails, its error ends the whole run."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fault(self, what: str, *, lasts: bool = False) -> None:
        self._mark(Mark(self.now(), Kind.FAULT, what, lasts))

    def end(self, what: str) -> None:
        self._mark(Mark(self.now(), Kind.END, what))

    def note(self, what: str) -> None:
        self._mark(Mark(self.now(), Kind.NOTE, what))

    def miss(self, what: str) -> None:
        """Notes in the diary that an event could not be carried out, so that the run does not pass."""
        self.missed.append(what)
        self.note(what)

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        self._tell(mark)


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def until(over: Callable[[], bool]) -> None:
    """Waits until `over` returns true. Polls, because other processes change the result."""
    while True:
        if over():
            return
        await asyncio.sleep(LOOK_S)


async def cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
