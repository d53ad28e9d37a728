"""The laboratory: a local swarm whose nodes reach each other through the emulated network alone, and everything that
can be done to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from lab.emulation.emulation import Emulation, Member
from lab.emulation.link_shape import Site
from lab.emulation.proxy import Door, ListenWatch, Proxy
from lab.emulation.sockets import Callers, Endpoint, descendants, require_proc
from lab.experiment.scenario import Scenario
from node.concurrency.task_groups import task_scope
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, PlannedPeer
from node.local_swarm.swarm_progress import PeerProgress
from swarm.vocabulary.errors import ResourceExhausted

MAX_MEMBERS = 60_000


def place(index: int) -> Place:
    """The place of each node: it listens on a loopback address of its own and tells the others another one, where its
    proxy is.
    """
    if index >= MAX_MEMBERS:
        raise ResourceExhausted(f"the emulation has addresses for {MAX_MEMBERS} peers")
    rest = f"{index // 250}.{index % 250 + 1}"
    return Place(host=f"127.77.{rest}", advertise=f"127.78.{rest}")


class Laboratory:
    """The laboratory of one scenario. `swarm` and `emulation` may be used directly, too.

    Args:
        log_dir: gets the nodes' event logs.
        saving: where the nodes save their states, and every how many seconds.

    Raises:
        ConfigError: this system cannot tell whose a connection is.
    """

    def __init__(self, scenario: Scenario, log_dir: Path, saving: tuple[Path, float] | None = None) -> None:
        require_proc()
        options = LocalSwarmOptions(
            peers=scenario.peers, steps=None, threads=scenario.threads, log_dir=log_dir, router=scenario.router
        )
        if saving is not None:
            options = replace(options, checkpoint_dir=saving[0], checkpoint_every_s=saving[1])
        self.swarm = LocalSwarm(scenario.manifest, options, places=place)
        self.emulation = Emulation(scenario.seed)
        self.killed: set[int] = set()
        """By us: that they end with an exit code is no failure of theirs."""
        self._scenario = scenario
        self._watch = ListenWatch()
        self._callers = Callers(self.swarm.processes)
        self.frozen: Counter[int] = Counter()
        """How often each peer that stands still now was frozen."""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Runs the swarm within the block; its nodes are stopped in good order at the end, and killed after an
        exception.

        Raises:
            ResourceExhausted: a port or a process could not be had.
        """
        async with task_scope() as self._group:
            try:
                async with self.swarm:
                    self.spawn(self._watch.run())
                    try:
                        for peer in self.swarm.peers:
                            self.admit(peer, self._scenario.site_of(peer.index))
                        yield
                    finally:
                        self.calm()
            finally:
                for task in self._tasks:
                    task.cancel()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts a task that lives no longer than the laboratory; its error ends everything."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def serving(self) -> dict[int, PeerProgress]:
        """The living nodes that say that they serve, frozen ones included, by index."""
        peers = self.swarm.progress.peers.items()
        return {index: peer for index, peer in peers if peer.exit_code is None and peer.state == "serving"}

    def kill(self, peer: int) -> None:
        """Kills a peer with SIGKILL, and all that it has started."""
        self.killed.add(peer)
        self.thaw((peer,) * self.frozen[peer])  # what it has started could not see its end otherwise
        self.swarm.kill(peer)

    def start(self, stage: int, site: Site, command: Sequence[str] | None = None, expert: int = 0) -> int:
        """Starts a peer and returns its index. Arguments and errors as `LocalSwarm.start_peer`."""
        index = self.swarm.start_peer(stage, command, expert)
        self.admit(self.swarm.peers[index], site)
        return index

    def admit(self, peer: PlannedPeer, site: Site) -> None:
        """Puts the proxy in front of a peer that has been started. It has no port before."""
        self.emulation.place(peer.index, site)
        for port in (peer.port, peer.dht_port):
            door = Door(peer.index, (peer.place.told_host, port), (peer.place.host, port))
            self.spawn(Proxy(door, self.emulation, self._find_caller).run(self._watch))

    def calm(self) -> None:
        """Ends everything that was done to the network and to frozen peers, so that nodes can stop in good order."""
        self.thaw(tuple(self.frozen.elements()))
        self.emulation.clear()

    async def _find_caller(self, source: Endpoint, target: Endpoint) -> Member:
        return await asyncio.to_thread(self._callers.caller, source, target)

    def freeze(self, peers: Sequence[int]) -> None:
        """Stops peers with SIGSTOP to every process of theirs, until they were thawed as often."""
        self.frozen.update(peers)
        self._signal(set(peers), signal.SIGSTOP)

    def thaw(self, peers: Sequence[int]) -> None:
        """Takes back one freeze of each."""
        self.frozen -= Counter(peers)
        self._signal(set(peers) - self.frozen.keys(), signal.SIGCONT)

    def _signal(self, peers: set[int], number: signal.Signals) -> None:
        """To every process of these peers. The DHT's is in a session of its own, so a process group is not enough."""
        send_signal(self.processes_of(peers), number)

    def processes_of(self, peers: set[int]) -> Iterator[int]:
        """The processes of these peers: their nodes' and all that those have started."""
        roots = {pid for index, pid in self.swarm.processes().items() if index in peers}
        return (pid for _, pid in descendants(roots)) if roots else iter(())


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to each of the processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
