"""The laboratory: a local swarm behind the emulated network, and everything that can be done to it."""

from __future__ import annotations

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
from dataclasses import dataclass

from lab.emulation.emulation import Emulation, Member
from lab.emulation.link_shape import Site
from lab.emulation.proxy import ListenWatch, ProxiedPort, Proxy
from lab.emulation.sockets import Callers, Endpoint, descendants, require_proc
from lab.log_watch import LogWatch
from node.concurrency.task_groups import task_scope
from node.local_swarm.child_process import ChildEnd
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, PlannedPeer
from node.local_swarm.swarm_progress import PeerProgress
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import SkipstoneError

LOOK_S = 0.05
"""Interval between looks at other processes, in seconds."""


class Kind(enum.Enum):
    """The kind of a line in the diary."""

    FAULT = "fault"
    END = "end"
    """The end of a fault that lasted."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the diary."""

    at_s: float
    kind: Kind
    what: str
    lasts: bool = False
    """The fault has an end, and recovery is counted from there."""


def place(index: int) -> Place:
    """Returns a node's place: it listens at a loopback address of its own and advertises its proxy's."""
    rest = f"{index // 250}.{index % 250 + 1}"
    return Place(host=f"127.77.{rest}", advertise=f"127.78.{rest}")


class Laboratory:
    """A local swarm, its emulated network, and the diary of a run.

    Args:
        sites: the site of each peer.
        tell: receives each line of the diary.

    Raises:
        ConfigError: this system does not tell which process holds a socket.
    """

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
        self.swarm = LocalSwarm(manifest, options, places=place)
        self.emulation = Emulation(seed)
        self.watch = LogWatch(options.log_dir, self.now)
        self.sites = sites
        self.seed = seed
        self.lots = random.Random(f"{seed} victims")  # noqa: S311 - no secret
        self.killed: set[int] = set()
        """Peers that we killed: their exit code is no failure."""
        self.frozen: Counter[int] = Counter()
        """Number of freezes of each frozen peer."""
        self.odd: dict[int, bool] = {}
        """Peers with a fault of their own, and whether the others should work with them."""
        self.liars: set[str] = set()
        self.marks: list[Mark] = []
        self.missed: list[str] = []
        """Events that were not possible: the run then shows nothing."""
        self.waiting: list[str] = []
        """Consequences of events that are still to come."""
        self._tell = tell
        self._began = math.inf
        self._ports = ListenWatch()
        self._callers = Callers(self.swarm.processes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Runs the swarm within the block. Raises ResourceExhausted if a port or a process is not available."""
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
        """Returns the seconds since the run began; -1 before."""
        return time.monotonic() - self._began if self._began < math.inf else -1.0

    # ---- peers ---------------------------------------------------------------------------------------------------

    def serving(self) -> dict[int, PeerProgress]:
        """Returns the living nodes that serve, frozen ones included, by index."""
        peers = self.swarm.progress.peers.items()
        return {index: peer for index, peer in peers if peer.exit_code is None and peer.state == "serving"}

    @property
    def failures(self) -> dict[int, int]:
        """Exit codes of nodes that failed by themselves."""
        ends = self.swarm.ends.items()
        return {peer: end.exit_code for peer, end in ends if end.exit_code and peer not in self.killed}

    def kill(self, peer: int) -> None:
        self.killed.add(peer)
        self.thaw((peer,) * self.frozen[peer])  # else its children could not see its end
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
        await asyncio.sleep(LOOK_S)  # the swarm drops its handle
        return self.swarm.ends[peer]

    async def until_visited(self, peer: int) -> None:
        name = self.swarm.peers[peer].peer
        await until(lambda: self.watch.visits[name] > 0)

    async def until_serving(self, peer: int) -> None:
        await until(lambda: self.swarm.progress.peers[peer].state == "serving")

    def freeze(self, peers: Sequence[int]) -> None:
        """Stops all processes of these peers with SIGSTOP, until each freeze is taken back."""
        self.frozen.update(peers)
        send_signal(self.processes_of(set(peers)), signal.SIGSTOP)

    def thaw(self, peers: Sequence[int]) -> None:
        self.frozen -= Counter(peers)
        send_signal(self.processes_of(set(peers) - self.frozen.keys()), signal.SIGCONT)

    def processes_of(self, peers: set[int]) -> Iterator[int]:
        """Yields the processes of these peers. The DHT's is in another session, so a process group is not enough."""
        roots = {pid for index, pid in self.swarm.processes().items() if index in peers}
        return (pid for _, pid in descendants(roots)) if roots else iter(())

    def _admit(self, peer: PlannedPeer, site: Site) -> None:
        self.emulation.place(peer.index, site)
        for port in (peer.port, peer.dht_port):
            proxied = ProxiedPort(peer.index, (peer.place.told_host, port), (peer.place.host, port))
            self._spawn(Proxy(proxied, self.emulation, self._find_caller).run(self._ports))

    async def _find_caller(self, source: Endpoint, target: Endpoint) -> Member:
        return await asyncio.to_thread(self._callers.caller, source, target)

    # ---- events --------------------------------------------------------------------------------------------------

    def attempt(self, name: str, action: Callable[[], None]) -> None:
        """Carries an action out; an error of ours is a missed event and does not end the run."""
        try:
            action()
        except SkipstoneError as error:
            self.miss(f"{name} was not possible: {error}")

    def later(self, work: Coroutine[None, None, None], what: str) -> None:
        """Starts the rest of an event, which ends with the run at the latest."""

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
        """Notes a fault and mends it after `for_s` seconds, or when the run ends."""
        self.fault(what, lasts=True)

        async def mend_later() -> None:
            try:
                await asyncio.sleep(for_s)
            finally:
                mend()
            self.end(f"over: {what}")

        self.later(mend_later(), f"the end of: {what}")

    async def end_what_lasts(self) -> None:
        """Mends all faults and cancels what is still to come, so that nodes can stop in good order."""
        await cancelled(self._later)
        self.calm()

    def calm(self) -> None:
        self.thaw(tuple(self.frozen.elements()))
        self.emulation.clear()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a task that ends with the laboratory; its error ends everything."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the diary -----------------------------------------------------------------------------------------------

    def fault(self, what: str, *, lasts: bool = False) -> None:
        self._mark(Mark(self.now(), Kind.FAULT, what, lasts))

    def end(self, what: str) -> None:
        self._mark(Mark(self.now(), Kind.END, what))

    def note(self, what: str) -> None:
        self._mark(Mark(self.now(), Kind.NOTE, what))

    def miss(self, what: str) -> None:
        """Notes an event that was not possible."""
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
    """Polls a condition of other processes."""
    while True:
        if over():
            return
        await asyncio.sleep(LOOK_S)


async def cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
