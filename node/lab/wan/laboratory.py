"""A local swarm whose nodes reach each other through the emulated network alone, and everything that can be done to
it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from node.concurrency.task_groups import task_scope
from node.lab.emulation.emulation import Emulation, Member
from node.lab.emulation.link_shape import Site
from node.lab.emulation.profiles import profile_of
from node.lab.emulation.proxy import Door, ListenWatch, Proxy
from node.lab.emulation.sockets import Callers, Endpoint, descendants, require_proc
from node.lab.wan.scenario import Scenario
from node.lab.wan.scenario_events import (
    Freeze,
    Happening,
    Heal,
    Kill,
    Partition,
    ReplaceOne,
    Reshape,
    Start,
    Stop,
    named,
)
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, PlannedPeer
from swarm.vocabulary.errors import ConfigError, ResourceExhausted

MAX_MEMBERS = 60_000

Spawn = Callable[[Coroutine[None, None, None]], None]


def place(index: int) -> Place:
    """Each node listens on a loopback address of its own and tells the others another one, where its proxy is."""
    if index >= MAX_MEMBERS:
        raise ResourceExhausted(f"the emulation has addresses for {MAX_MEMBERS} peers")
    rest = f"{index // 250}.{index % 250 + 1}"
    return Place(host=f"127.77.{rest}", advertise=f"127.78.{rest}")


class Laboratory:
    """Made by `laboratory`. `swarm` and `emulation` may be used directly, too."""

    def __init__(
        self, swarm: LocalSwarm, emulation: Emulation, watch: ListenWatch, randomness: random.Random, spawn: Spawn
    ) -> None:
        """`randomness` draws victims; `spawn` starts tasks that live as long as the laboratory."""
        self.swarm = swarm
        self.emulation = emulation
        self.killed: set[int] = set()
        """By us: that they end with an exit code is no failure of theirs."""
        self._watch = watch
        self._callers = Callers(swarm.processes)
        self._random = randomness
        self.spawn = spawn
        """Starts a task that lives no longer than the laboratory."""
        self._thaw_at: dict[int, float] = {}
        """When (of the event loop) each frozen peer goes on."""

    @property
    def frozen(self) -> frozenset[int]:
        """Peers that stand still now."""
        return frozenset(self._thaw_at)

    def carry_out(self, happening: Happening) -> str:
        """Does it, and says in words what was done. Raises ConfigError for what a laboratory does not know."""
        match happening:
            case Reshape(_, peers, profile, change):
                for peer in peers:
                    before = self.emulation.site(peer) if profile is None else profile_of(profile).site
                    self.emulation.place(peer, Site(change.applied_to(before.shape), before.region))
                what = ", ".join(filter(None, (profile, *change.in_words())))
                return f"{named(peers)} got another link: {what or 'the same'}"
            case Kill(_, peers):
                for peer in peers:
                    self.kill(peer)
                return f"{named(peers)} killed"
            case Stop(_, peers):
                for peer in peers:
                    self.swarm.terminate(peer)
                return f"{named(peers)} asked to leave"
            case Start(_, stage, site):
                return f"peer {self.start(stage, site)} started for stage {stage}"
            case Freeze(_, peers, for_s):
                self._freeze(peers, for_s)
                return f"{named(peers)} frozen for {for_s:g} s"
            case Partition(_, sides):
                self.emulation.partition(sides)
                return f"partition: {' | '.join(named(side) for side in sides)}"
            case Heal():
                self.emulation.heal()
                return "the partition is healed"
            case ReplaceOne():
                return self._replace_one()
            case _:
                raise ConfigError(f"{happening.NAME} is nothing that a laboratory can do")

    def kill(self, peer: int) -> None:
        """With SIGKILL, and all that it has started."""
        self.killed.add(peer)
        self._thaw({peer} & self._thaw_at.keys())  # what it has started could not see its end otherwise
        self.swarm.kill(peer)

    def start(self, stage: int, site: Site, command: Sequence[str] | None = None) -> int:
        """Starts a peer and returns its index. Arguments and errors as `LocalSwarm.start_peer`."""
        index = self.swarm.start_peer(stage, command)
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
        self._thaw(set(self._thaw_at))
        self.emulation.clear()

    async def _find_caller(self, source: Endpoint, target: Endpoint) -> Member:
        return await asyncio.to_thread(self._callers.caller, source, target)

    def _replace_one(self) -> str:
        serving: dict[int, list[int]] = {}
        for index, peer in self.swarm.progress.peers.items():
            if peer.exit_code is None and peer.state == "serving" and index not in self.killed:
                serving.setdefault(peer.stage, []).append(index)
        spare = [index for replicas in serving.values() if len(replicas) > 1 for index in sorted(replicas)]
        if not spare:
            return "nobody could be spared to be replaced"
        victim = self._random.choice(spare)
        stage, site = self.swarm.progress.peers[victim].stage, self.emulation.site(victim)
        self.kill(victim)
        return f"peer {victim} killed; peer {self.start(stage, site)} started in its place for stage {stage}"

    # ---- standing still ------------------------------------------------------------------------------------------

    def _freeze(self, peers: Sequence[int], for_s: float) -> None:
        until = asyncio.get_running_loop().time() + for_s
        self._thaw_at |= {peer: max(until, self._thaw_at.get(peer, 0.0)) for peer in peers}
        self._signal(set(peers), signal.SIGSTOP)
        self.spawn(self._thaw_later(set(peers), until))

    async def _thaw_later(self, peers: set[int], until: float) -> None:
        """Those that were frozen again meanwhile, for longer, have a timer of their own."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, until - loop.time()))
        self._thaw({peer for peer in peers if self._thaw_at.get(peer, math.inf) <= until})

    def _thaw(self, peers: set[int]) -> None:
        for peer in peers:
            self._thaw_at.pop(peer, None)
        self._signal(peers, signal.SIGCONT)

    def _signal(self, peers: set[int], number: signal.Signals) -> None:
        """To every process of these peers. The DHT's is in a session of its own, so a process group is not enough."""
        send_signal(self.processes_of(peers), number)

    def processes_of(self, peers: set[int]) -> Iterator[int]:
        """Of these peers: their nodes' processes and all that those have started."""
        roots = {pid for index, pid in self.swarm.processes().items() if index in peers}
        return (pid for _, pid in descendants(roots)) if roots else iter(())


@dataclass(frozen=True, slots=True)
class Saving:
    """Where the peers save their states, and every how many seconds."""

    folder: Path
    every_s: float


@asynccontextmanager
async def laboratory(scenario: Scenario, log_dir: Path, saving: Saving | None = None) -> AsyncIterator[Laboratory]:
    """The scenario's swarm, started; its nodes are stopped in good order at the end, and killed after an exception.

    Raises:
        ConfigError: this system cannot tell whose a connection is.
        ResourceExhausted: a port or a process could not be had.
    """
    require_proc()
    options = LocalSwarmOptions(peers=scenario.peers, steps=None, threads=scenario.threads, log_dir=log_dir)
    if saving is not None:
        options = replace(options, checkpoint_dir=saving.folder, checkpoint_every_s=saving.every_s)
    swarm = LocalSwarm(scenario.manifest, options, places=place)
    watch = ListenWatch()
    victims = random.Random(f"{scenario.seed} victims")  # noqa: S311 - no secret
    async with _background() as spawn, swarm:
        spawn(watch.run())
        lab = Laboratory(swarm, Emulation(scenario.seed), watch, victims, spawn)
        try:
            for peer in swarm.peers:
                lab.admit(peer, scenario.site_of(peer.index))
            yield lab
        finally:
            lab.calm()


@asynccontextmanager
async def _background() -> AsyncIterator[Spawn]:
    """Starts tasks that are cancelled at the end of the block; an error of one ends the block with it."""
    running: set[asyncio.Task[None]] = set()
    async with task_scope() as tasks:

        def spawn(work: Coroutine[None, None, None]) -> None:
            task = tasks.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)

        try:
            yield spawn
        finally:
            for task in running:
                task.cancel()


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """To each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
