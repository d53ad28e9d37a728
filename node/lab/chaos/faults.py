"""What can be done to a swarm beside the repertoire of `node.lab.wan.scenario_events`. Each is a frozen dataclass that
knows how it is done."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from node.lab.chaos.fault_context import Bench
from node.lab.emulation.emulation import Way
from node.lab.emulation.link_shape import ShapeChange, Site
from node.lab.wan.laboratory import send_signal
from node.lab.wan.scenario_events import Freeze, named
from node.local_swarm.setup import node_command
from node.observability.events import RoundProgress
from node.observability.failpoints import VARIABLE, crash_at

DHT_CHILD = "protocol.dht.process"
P2P_DAEMON = "p2pd"
IN_AN_EXCHANGE = range(1, 100)
"""Percent of its pieces: a convener is frozen when it has taken in some and not all."""

OUTLIVED_S = 65.0
"""No record that a peer has signed holds so long: who still knows it then has heard from it since."""


@runtime_checkable
class Deed(Protocol):
    """A happening that carries itself out."""

    NAME: ClassVar[str]

    @property
    def at_s(self) -> float: ...

    def do(self, bench: Bench) -> None:
        """Does it, and marks what was done. Returns at once; what takes time goes on in the bench's tasks."""
        ...


@dataclass(frozen=True, slots=True)
class Worsen:
    """Peers have a worse link for a while."""

    NAME: ClassVar[str] = "worsen"
    at_s: float
    peers: tuple[int, ...]
    change: ShapeChange
    for_s: float

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        emulation = bench.lab.emulation
        before = {peer: emulation.site(peer) for peer in self.peers}
        for peer, site in before.items():
            emulation.place(peer, Site(self.change.applied_to(site.shape), site.region))

        def mend() -> None:
            for peer, site in before.items():
                emulation.place(peer, site)

        bench.lasts(f"{named(self.peers)}: {', '.join(self.change.in_words())}", self.for_s, mend)


@dataclass(frozen=True, slots=True)
class OneWay:
    """What some send does not reach others any more, while the way back is open."""

    NAME: ClassVar[str] = "one_way"
    at_s: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    for_s: float

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        ways: list[Way] = [(source, target) for source in self.sources for target in self.targets]
        bench.lab.emulation.block(ways)
        what = f"nothing from {named(self.sources)} reaches {named(self.targets)}"
        bench.lasts(what, self.for_s, lambda: bench.lab.emulation.block(()))


@dataclass(frozen=True, slots=True)
class Resets:
    """Connections to peers are reset in the middle of whatever they carry, again and again."""

    NAME: ClassVar[str] = "resets"
    at_s: float
    peers: tuple[int, ...]
    every_bytes: int
    for_s: float

    def do(self, bench: Bench) -> None:
        """See `Deed`."""

        def every(size_bytes: int | None) -> None:
            for peer in self.peers:
                bench.lab.emulation.break_every(peer, size_bytes)

        every(self.every_bytes)
        what = f"{named(self.peers)}: a connection is reset every {self.every_bytes} bytes"
        bench.lasts(what, self.for_s, lambda: every(None))


@dataclass(frozen=True, slots=True)
class Child:
    """Something happens to one process that nodes have started: the DHT's own, or its p2pd."""

    NAME: ClassVar[str] = "child"
    at_s: float
    peers: tuple[int, ...]
    which: str
    """DHT_CHILD or P2P_DAEMON."""
    for_s: float
    """It stands still so long; 0 kills it."""

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        pids = [pid for pid in bench.lab.processes_of(set(self.peers)) if _runs(pid, self.which)]
        what = f"{len(pids)} processes {self.which} of {named(self.peers)}"
        if len(pids) < len(self.peers):
            bench.miss(f"only {what} were there")
        if not self.for_s:
            send_signal(pids, signal.SIGKILL)
            bench.fault(f"{what} killed")
            return
        send_signal(pids, signal.SIGSTOP)
        bench.lasts(f"{what} stand still", self.for_s, lambda: send_signal(pids, signal.SIGCONT))


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Nodes cannot write to any file: the kernel refuses each write as it does on a full disk (EFBIG in place of
    ENOSPC)."""

    NAME: ClassVar[str] = "full_disk"
    at_s: float
    peers: tuple[int, ...]
    for_s: float

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        pids = [pid for peer, pid in bench.lab.swarm.processes().items() if peer in self.peers]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, most) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))

        def free() -> None:
            for pid, limit in limits.items():
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        bench.lasts(f"the disk of {named(self.peers)} is full", self.for_s, free)


@dataclass(frozen=True, slots=True)
class Crash:
    """A peer joins that kills itself at a named point (`node.observability.failpoints`)."""

    NAME: ClassVar[str] = "crash"
    at_s: float
    stage: int
    point: str
    nth: int
    again: bool
    """Whether it is started again then, as itself."""
    leave_after_s: float
    """So long after it serves it is asked to leave; 0 for never."""
    site: Site

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        command = ("/usr/bin/env", f"{VARIABLE}={crash_at(self.point, self.nth)}", *node_command())
        peer = bench.lab.start(self.stage, self.site, command)
        bench.note(f"peer {peer} started for stage {self.stage}; it will kill itself at `{self.point}`")
        bench.later(self._follow(bench, peer), f"peer {peer} to come to `{self.point}`")

    async def _follow(self, bench: Bench, peer: int) -> None:
        if self.leave_after_s:
            await bench.serving(peer)
            await asyncio.sleep(self.leave_after_s)
            bench.lab.swarm.terminate(peer)
        bench.lab.killed.add(peer)
        end = await bench.ended(peer)
        if end.exit_code != 128 + signal.SIGKILL:
            bench.miss(f"peer {peer} ended with {end.exit_code} before it came to `{self.point}`")
            return
        bench.fault(f"peer {peer} killed at `{self.point}`")
        if self.again:
            await bench.restarted(peer)
            bench.note(f"peer {peer} serves again")


@dataclass(frozen=True, slots=True)
class Restart:
    """Peers end, one after the other or all at once, and start again as themselves."""

    NAME: ClassVar[str] = "restart"
    at_s: float
    peers: tuple[int, ...]
    politely: bool
    """SIGTERM, and the next one when this one serves again; else SIGKILL, all at once."""
    gap_s: float
    """From its end to its start."""

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        if self.politely:
            bench.later(self._one_by_one(bench), f"{named(self.peers)} to be restarted")
            return
        for peer in self.peers:
            bench.lab.kill(peer)
            bench.later(self._again(bench, peer), f"peer {peer} to be restarted")
        bench.fault(f"{named(self.peers)} killed")

    async def _one_by_one(self, bench: Bench) -> None:
        for peer in self.peers:
            bench.lab.swarm.terminate(peer)
            bench.fault(f"peer {peer} asked to leave")
            await self._again(bench, peer)

    async def _again(self, bench: Bench, peer: int) -> None:
        await bench.ended(peer)
        await asyncio.sleep(self.gap_s)
        await bench.restarted(peer)
        bench.end(f"peer {peer} serves again")


@dataclass(frozen=True, slots=True)
class Odd:
    """A peer joins that is not like the others (`node.lab.chaos.faulty_node`)."""

    NAME: ClassVar[str] = "odd"
    at_s: float
    stage: int
    oddities: tuple[str, ...]
    """Options of `node.lab.chaos.faulty_node`."""
    works: bool
    """Whether the others are to work with it, or to leave it out."""
    site: Site
    step_after_s: float = 0.0
    """So long after its start, and not before it is worked with if its clock is right until then, its clock is set; 0:
    never."""
    starts_right: bool = True

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        command = (sys.executable, "-P", "-m", "node.lab.chaos.faulty_node", *self.oddities, "--")
        peer = bench.lab.start(self.stage, self.site, command)
        bench.odd[peer] = self.works
        if self.step_after_s:
            bench.later(self._step(bench, peer), f"peer {peer} to be worked with after its clock was set")
        elif self.works:
            bench.later(bench.visited(peer), f"somebody to work with peer {peer}")
        bench.fault(f"peer {peer} started for stage {self.stage} with {' '.join(self.oddities)}")

    async def _step(self, bench: Bench, peer: int) -> None:
        await asyncio.sleep(self.step_after_s)
        if self.starts_right:
            await bench.visited(peer)
        send_signal((bench.lab.swarm.processes()[peer],), signal.SIGUSR1)
        bench.fault(f"the clock of peer {peer} is set")
        if self.starts_right:
            await asyncio.sleep(OUTLIVED_S)
        bench.watch.visited.discard(bench.lab.swarm.peers[peer].peer)
        await bench.visited(peer)
        bench.note(f"peer {peer} is worked with after its clock was set")


@dataclass(frozen=True, slots=True)
class Lie:
    """A replica joins that lies in rounds, in every part that it gets to play (`node.lab.chaos.lying_node`)."""

    NAME: ClassVar[str] = "lie"
    at_s: float
    stage: int
    seed: int
    """Of its choice of lies."""
    site: Site

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        command = (sys.executable, "-P", "-m", "node.lab.chaos.lying_node", f"--seed={self.seed}", "--")
        peer = bench.lab.start(self.stage, self.site, command)
        bench.liars.add(bench.lab.swarm.peers[peer].peer)
        bench.lab.killed.add(peer)  # however it ends
        bench.later(bench.visited(peer), f"peer {peer} to be at work")
        bench.note(f"peer {peer} started for stage {self.stage}; it lies in rounds")


@dataclass(frozen=True, slots=True)
class FreezeConvener:
    """The convener of a stage's round stands still in the middle of the exchange, whoever it is."""

    NAME: ClassVar[str] = "freeze_convener"
    at_s: float
    stage: int
    for_s: float

    def do(self, bench: Bench) -> None:
        """See `Deed`."""
        bench.note(f"waiting for a round of stage {self.stage}")
        bench.later(self._follow(bench), f"a round of stage {self.stage} to be in the middle of its exchange")

    async def _follow(self, bench: Bench) -> None:
        progress = await bench.watch.until(self._is_it)
        peer = next(each.index for each in bench.lab.swarm.peers if each.peer == progress.peer)
        bench.lab.carry_out(Freeze(self.at_s, (peer,), self.for_s))
        what = f"peer {peer}, convener of round {progress.round}, frozen at {progress.percent} %"
        bench.lasts(what, self.for_s, lambda: None)

    def _is_it(self, progress: RoundProgress) -> bool:
        mine = progress.module.partition(".")[0] == str(self.stage) and progress.peer == progress.convener
        return mine and progress.percent in IN_AN_EXCHANGE


def _runs(pid: int, which: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return False
    return which in words if which == DHT_CHILD else Path(words[0]).name == which
