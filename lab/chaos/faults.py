"""The faults of chaos scenarios, beside those of any scenario (`lab.experiment.scenario_events`)."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.emulation.emulation import Way
from lab.experiment.laboratory import send_signal
from lab.experiment.run import Run
from lab.experiment.scenario_events import ScenarioEvent, named
from lab.experiment.scenario_table import LONGEST_S, LinkTable, Moment, Peers, Span, Stage
from node.local_swarm.setup import node_command
from node.observability.events import RoundProgress
from node.observability.failpoints import POINTS, VARIABLE, crash_at

CHILDREN: Final = {"dht": "protocol.dht.process", "p2pd": "p2pd"}
"""The module of the DHT's process, and the program of its daemon."""
IN_AN_EXCHANGE = range(1, 100)
"""Percent of its pieces: a convener is frozen when it has taken in some and not all."""
OUTLIVED_S = 65.0
"""No record that a peer has signed holds so long: who still knows it then has heard from it since."""
MAX_CLOCK_S: Final = 10 * 365 * 24 * 3600.0


class Worsen(ScenarioEvent, LinkTable):
    """Gives peers a worse link for a while."""

    NAME = "worsen"
    peers: Peers
    for_s: Span

    def do(self, run: Run) -> None:
        emulation = run.lab.emulation
        before = {peer: emulation.site(peer) for peer in self.peers}
        for peer, site in before.items():
            emulation.place(peer, self.applied_to(site))

        def mend() -> None:
            for peer, site in before.items():
                emulation.place(peer, site)

        run.lasts(f"{named(self.peers)}: {', '.join(self.link_in_words())}", self.for_s, mend)


class OneWay(ScenarioEvent):
    """Cuts what some send off from others, while the way back is open."""

    NAME = "one_way"
    from_: Peers
    to: Peers
    for_s: Span

    def do(self, run: Run) -> None:
        ways: list[Way] = [(source, target) for source in self.from_ for target in self.to]
        run.lab.emulation.block(ways)
        what = f"nothing from {named(self.from_)} reaches {named(self.to)}"
        run.lasts(what, self.for_s, lambda: run.lab.emulation.block(()))


class Resets(ScenarioEvent):
    """Resets connections to peers in the middle of whatever they carry, again and again."""

    NAME = "resets"
    peers: Peers
    every_bytes: Annotated[int, Field(ge=1, le=2**40)]
    for_s: Span

    def do(self, run: Run) -> None:
        def every(size_bytes: int | None) -> None:
            for peer in self.peers:
                run.lab.emulation.break_every(peer, size_bytes)

        every(self.every_bytes)
        what = f"{named(self.peers)}: a connection is reset every {self.every_bytes} bytes"
        run.lasts(what, self.for_s, lambda: every(None))


class Child(ScenarioEvent):
    """Does something to one process that nodes have started: the DHT's own, or its p2pd."""

    NAME = "child"
    peers: Peers
    which: Literal["dht", "p2pd"]
    for_s: Span = 0.0
    """It stands still so long; 0 kills it."""

    def do(self, run: Run) -> None:
        program = CHILDREN[self.which]
        pids = [pid for pid in run.lab.processes_of(set(self.peers)) if _runs(pid, program)]
        what = f"{len(pids)} processes {program} of {named(self.peers)}"
        if len(pids) < len(self.peers):
            run.miss(f"only {what} were there")
        if not self.for_s:
            send_signal(pids, signal.SIGKILL)
            run.fault(f"{what} killed")
            return
        send_signal(pids, signal.SIGSTOP)
        run.lasts(f"{what} stand still", self.for_s, lambda: send_signal(pids, signal.SIGCONT))


class FullDisk(ScenarioEvent):
    """Keeps nodes from writing to any file: the kernel refuses each write as it does on a full disk (EFBIG in place of
    ENOSPC).
    """

    NAME = "full_disk"
    peers: Peers
    for_s: Span

    def do(self, run: Run) -> None:
        pids = [pid for peer, pid in run.lab.swarm.processes().items() if peer in self.peers]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, most) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))

        def free() -> None:
            for pid, limit in limits.items():
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        run.lasts(f"the disk of {named(self.peers)} is full", self.for_s, free)


def _known_point(name: str) -> str:
    if name not in POINTS:
        raise ValueError(f"{name!r} is none of {', '.join(POINTS)}")
    return name


class Crash(ScenarioEvent):
    """Starts a peer that kills itself at a named point (`node.observability.failpoints`)."""

    NAME = "crash"
    stage: Stage
    point: Annotated[str, AfterValidator(_known_point)]
    nth: Annotated[int, Field(ge=1, le=10**9)] = 1
    again: bool = False
    """Whether it is started again then, as itself."""
    leave_after_s: Span = 0.0
    """So long after it serves it is asked to leave; 0 for never."""

    def do(self, run: Run) -> None:
        command = ("/usr/bin/env", f"{VARIABLE}={crash_at(self.point, self.nth)}", *node_command())
        peer = run.lab.start(self.stage, run.first_site, command)
        run.note(f"peer {peer} started for stage {self.stage}; it will kill itself at `{self.point}`")
        run.later(self._follow(run, peer), f"peer {peer} to come to `{self.point}`")

    async def _follow(self, run: Run, peer: int) -> None:
        if self.leave_after_s:
            await run.serving(peer)
            await asyncio.sleep(self.leave_after_s)
            run.lab.swarm.terminate(peer)
        run.lab.killed.add(peer)
        end = await run.ended(peer)
        if end.exit_code != 128 + signal.SIGKILL:
            run.miss(f"peer {peer} ended with {end.exit_code} before it came to `{self.point}`")
            return
        run.fault(f"peer {peer} killed at `{self.point}`")
        if self.again:
            await run.restarted(peer)
            run.note(f"peer {peer} serves again")


class Restart(ScenarioEvent):
    """Ends peers, one after the other or all at once, and starts them again as themselves."""

    NAME = "restart"
    peers: Peers
    politely: bool = False
    """SIGTERM, and the next one when this one serves again; else SIGKILL, all at once."""
    gap_s: Moment = 0.0
    """From its end to its start."""

    def do(self, run: Run) -> None:
        if self.politely:
            run.later(self._one_by_one(run), f"{named(self.peers)} to be restarted")
            return
        for peer in self.peers:
            run.lab.kill(peer)
            run.later(self._again(run, peer), f"peer {peer} to be restarted")
        run.fault(f"{named(self.peers)} killed")

    async def _one_by_one(self, run: Run) -> None:
        for peer in self.peers:
            run.lab.swarm.terminate(peer)
            run.fault(f"peer {peer} asked to leave")
            await self._again(run, peer)

    async def _again(self, run: Run, peer: int) -> None:
        await run.ended(peer)
        await asyncio.sleep(self.gap_s)
        await run.restarted(peer)
        run.end(f"peer {peer} serves again")


class Odd(ScenarioEvent):
    """Starts a peer that is not like the others (`lab.chaos.faulty_node`): its wall clock is wrong or is set, or
    it speaks other versions of the protocol.
    """

    NAME = "odd"
    stage: Stage
    clock_s: Annotated[float, Field(ge=-MAX_CLOCK_S, le=MAX_CLOCK_S)] = 0.0
    """So much ahead from its start on."""
    step_s: Annotated[float, Field(ge=-MAX_CLOCK_S, le=MAX_CLOCK_S)] = 0.0
    """So much it is set forward later."""
    step_after_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 0.0
    """So long after its start, and not before it is worked with if its clock is right until then."""
    protocol: Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")] | None = None
    """Versions like `1-2`."""
    works: bool = False
    """Whether the others are to work with it, or to leave it out."""

    @model_validator(mode="after")
    def _is_odd(self) -> Self:
        if not self.oddities:
            raise ValueError("clock and step and protocol are missing: there is nothing odd")
        if bool(self.step_s) != bool(self.step_after_s):
            raise ValueError("step and step_after go together: one says how far, the other when")
        return self

    @property
    def oddities(self) -> tuple[str, ...]:
        """The options of `lab.chaos.faulty_node`."""
        given = {"clock": self.clock_s and f"{self.clock_s:g}", "step": self.step_s and f"{self.step_s:g}"}
        return tuple(f"--{key}={value}" for key, value in (given | {"protocol": self.protocol}).items() if value)

    def do(self, run: Run) -> None:
        peer = run.lab.start(self.stage, run.first_site, _module_command("faulty_node", *self.oddities))
        run.odd[peer] = self.works
        if self.step_s:
            run.later(self._step(run, peer), f"peer {peer} to be worked with after its clock was set")
        elif self.works:
            run.later(run.visited(peer), f"somebody to work with peer {peer}")
        run.fault(f"peer {peer} started for stage {self.stage} with {' '.join(self.oddities)}")

    async def _step(self, run: Run, peer: int) -> None:
        starts_right = not self.clock_s
        await asyncio.sleep(self.step_after_s)
        if starts_right:
            await run.visited(peer)
        send_signal((run.lab.swarm.processes()[peer],), signal.SIGUSR1)
        run.fault(f"the clock of peer {peer} is set")
        if starts_right:
            await asyncio.sleep(OUTLIVED_S)
        run.watch.visited.discard(run.lab.swarm.peers[peer].peer)
        await run.visited(peer)
        run.note(f"peer {peer} is worked with after its clock was set")


class Lie(ScenarioEvent):
    """Starts a replica that lies in rounds, in every part that it gets to play (`lab.chaos.lying_node`)."""

    NAME = "lie"
    stage: Stage
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Of its choice of lies."""

    def do(self, run: Run) -> None:
        peer = run.lab.start(self.stage, run.first_site, _module_command("lying_node", f"--seed={self.seed}"))
        run.liars.add(run.lab.swarm.peers[peer].peer)
        run.lab.killed.add(peer)  # however it ends
        run.later(run.visited(peer), f"peer {peer} to be at work")
        run.note(f"peer {peer} started for stage {self.stage}; it lies in rounds")


class FreezeConvener(ScenarioEvent):
    """Freezes the convener of a stage's round in the middle of the exchange, whoever it is."""

    NAME = "freeze_convener"
    stage: Stage
    for_s: Span

    def do(self, run: Run) -> None:
        run.note(f"waiting for a round of stage {self.stage}")
        run.later(self._follow(run), f"a round of stage {self.stage} to be in the middle of its exchange")

    async def _follow(self, run: Run) -> None:
        progress = await run.watch.until(self._is_it)
        peer = next(each.index for each in run.lab.swarm.peers if each.peer == progress.peer)
        run.lab.freeze((peer,))
        what = f"peer {peer}, convener of round {progress.round}, frozen at {progress.percent} %"
        run.lasts(what, self.for_s, lambda: run.lab.thaw((peer,)))

    def _is_it(self, progress: RoundProgress) -> bool:
        mine = progress.module.partition(".")[0] == str(self.stage) and progress.peer == progress.convener
        return mine and progress.percent in IN_AN_EXCHANGE


FAULTS: Final[tuple[type[ScenarioEvent], ...]] = (
    Worsen,
    OneWay,
    Resets,
    Child,
    FullDisk,
    Crash,
    Restart,
    Odd,
    Lie,
    FreezeConvener,
)


def _module_command(module: str, *options: str) -> tuple[str, ...]:
    # By its path: an installation names the packages of the wheel only, which `lab` is none of.
    return (sys.executable, "-P", str(Path(__file__).with_name(f"{module}.py")), *options, "--")


def _runs(pid: int, program: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return False
    return program in words if program == CHILDREN["dht"] else Path(words[0]).name == program
