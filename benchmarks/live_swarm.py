"""One swarm of real nodes on emulated machines and links, from its start to its end: warmed up, measured, and what its
data nodes wrote down meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.live_cells import ARMS, PEERS, Cell, Change, Ground, changes_of, measured_s
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.observability.event_json import event_from_json
from tests.e2e.emulated import Network, Spec
from tests.e2e.small_run import HOME, FlightMark, read_flights

START_S: Final = 240.0
WARM_VISITS: Final = 10
"""Of each replica, before anything counts."""
LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """One swarm that is to be measured."""

    cell_name: str
    cell: Cell
    arm: str
    seed: int
    ground: Ground
    folder: Path
    """Its own, with everything that the nodes write."""

    def spec(self, index: int) -> Spec:
        is_data_node = self.ground.stages[index] == 0
        return Spec(
            self.ground.forward_s[index],
            str(self.folder / "network.json"),
            bytes_per_s=self.cell.bytes_per_s,
            rule=ARMS[self.arm].rule,
            window=self.cell.window,
            slots=None if is_data_node else self.cell.hop_slots,
            announced_factor=self.ground.announced[index],
            slowed=str(self.slowed(index)) if self.cell.changes else None,
            flights=str(self.flights(index)) if is_data_node else None,
            seed=index,
        )

    def slowed(self, index: int) -> Path:
        return self.folder / f"slowed-{index}"

    def flights(self, index: int) -> Path:
        return self.folder / f"flights-{index}.jsonl"


@dataclass(frozen=True, slots=True)
class Pacing:
    """How long a swarm takes. It is warm when every replica has had its visits and so many seconds are over; or when
    the most are over, because an arm may leave a slow replica alone for good."""

    seconds: float
    least_warm_s: float
    most_warm_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a swarm did. Times are those of the machine's monotonic clock."""

    begun: float
    ended: float
    warm_s: float
    cold: tuple[int, ...]
    """Replicas that had not had their visits when the measurement began."""
    flights: dict[int, list[FlightMark]]
    """By index of the data node, from its start on."""
    indices: dict[str, int]
    """Of the peers."""
    changed_at: tuple[float, ...]
    machine_load: float | None
    """Of all cores, whoever used them; but for what runs at low priority, which gives way."""
    swarm_load: float | None
    """Of all cores, by the swarm's processes."""
    failures: int
    """Nodes that ended otherwise than in good order."""


class SideBySide:
    """Swarms that run at the same time: they start one after the other, for each takes all cores then, and are measured
    together.

    Args:
        swarms: how many.
    """

    def __init__(self, swarms: int) -> None:
        self.starting = asyncio.Lock()
        self.together = asyncio.Barrier(swarms)


async def observe(trial: Trial, text: Path, pacing: Pacing, others: SideBySide) -> Seen:
    """Runs one swarm.

    Raises:
        RuntimeError: a node does not come up.
    """

    def place(index: int) -> Place:
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", trial.spec(index).to_json()))

    manifest = trial.cell.run(text, ARMS[trial.arm])
    told = LocalSwarmOptions(peers=PEERS, threads=1, log_dir=trial.folder / "logs")
    async with AsyncExitStack() as stack:
        async with others.starting:
            swarm = await stack.enter_async_context(LocalSwarm(manifest, told, places=place))
            regions = {peer.peer: trial.ground.regions[peer.index] for peer in swarm.peers}
            Network(regions, trial.ground.one_way_s).write(trial.folder / "network.json")
            await all_serve(swarm)
        indices = {str(peer.peer): peer.index for peer in swarm.peers}
        warm_s, cold = await _warm(trial, indices, pacing)
        await others.together.wait()
        begun, before = time.monotonic(), CpuTimes.now(swarm.processes().values())
        changed_at = await _through(trial, begun, pacing)
        ended, after = time.monotonic(), CpuTimes.now(swarm.processes().values())
        await others.together.wait()
        await swarm.stop()
    flights = {index: read_flights(trial.flights(index)) for index in trial.ground.replicas(0)}
    machine, own = CpuTimes.shares(before, after)
    failures = sum(end.exit_code != 0 for end in swarm.ends.values())
    return Seen(begun, ended, warm_s, cold, flights, indices, changed_at, machine, own, failures)


async def all_serve(swarm: LocalSwarm, within_s: float = START_S) -> None:
    """Returns when all nodes serve.

    Raises:
        RuntimeError: one does not come up; with the states of all and the swarm's last notes.
    """
    begun = time.monotonic()
    while any(peer.state != "serving" for peer in swarm.progress.peers.values()):
        waited_s = time.monotonic() - begun
        if swarm.ends or waited_s > within_s:
            states = ", ".join(f"{index} {peer.state}" for index, peer in sorted(swarm.progress.peers.items()))
            notes = "; ".join(note.message for note in swarm.progress.notes) or "nothing"
            raise RuntimeError(f"not all nodes serve after {waited_s:.0f} s ({states}); they say: {notes}")
        await asyncio.sleep(0.2)


async def _warm(trial: Trial, indices: dict[str, int], pacing: Pacing) -> tuple[float, tuple[int, ...]]:
    """How long it took, and the replicas that are cold yet."""
    start = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        past = time.monotonic() - start
        visits = _visits(trial, indices)
        cold = tuple(i for i, stage in enumerate(trial.ground.stages) if stage and visits[i] < WARM_VISITS)
        if past >= pacing.most_warm_s or (past >= pacing.least_warm_s and not cold):
            return past, cold


def _visits(trial: Trial, indices: dict[str, int]) -> Counter[int]:
    """By index of the replica, since the start."""
    marks = (mark for index in trial.ground.replicas(0) for mark in read_flights(trial.flights(index)))
    return Counter(indices[peer] for mark in marks if mark.kind == HOME for peer in mark.peers)


async def _through(trial: Trial, begun: float, pacing: Pacing) -> tuple[float, ...]:
    """The measured seconds, with what changes in them; returns when it changed."""
    seconds = measured_s(trial.cell, pacing.seconds)
    changed_at = list[float]()
    for change in changes_of(trial.cell, trial.ground, trial.seed, seconds):
        await asyncio.sleep(max(0.0, begun + change.after_s - time.monotonic()))
        _carry_out(trial, change)
        changed_at.append(time.monotonic())
    await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
    return tuple(changed_at)


def _carry_out(trial: Trial, change: Change) -> None:
    """At once, so that nobody reads half of it."""
    path = trial.slowed(change.index)
    half = path.with_suffix(".part")
    half.write_text(str(change.factor))
    half.rename(path)


def events_in(files: Iterable[Path]) -> Iterator[object]:
    """The events of some nodes' logs."""
    for file in files:
        for line in file.read_bytes().splitlines():
            yield event_from_json(line)


def tell(line: str) -> None:
    """Writes progress."""
    print(line, file=sys.stderr, flush=True)


# ---- the cores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks of all cores since the machine's start, as Linux tells them; None elsewhere."""

    all: int
    idle: int
    """Or used at low priority (nice)."""
    own: int
    """By some processes and all that they have started, as long as those live."""

    @classmethod
    def now(cls, groups: Iterable[int]) -> CpuTimes | None:
        """Args: groups: process groups."""
        if not Path("/proc/stat").exists():
            return None
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        wanted = frozenset(groups)
        own = sum(_ticks(folder, wanted) for folder in Path("/proc").iterdir() if folder.name.isdigit())
        return cls(sum(fields), fields[1] + fields[3] + fields[4], own)

    @staticmethod
    def shares(before: CpuTimes | None, after: CpuTimes | None) -> tuple[float | None, float | None]:
        """Of the time between: how busy the machine was, and how busy with these processes."""
        if before is None or after is None or after.all <= before.all:
            return None, None
        whole = after.all - before.all
        return 1 - (after.idle - before.idle) / whole, (after.own - before.own) / whole


def _ticks(folder: Path, groups: frozenset[int]) -> int:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0
    return int(fields[11]) + int(fields[12]) if int(fields[2]) in groups else 0
