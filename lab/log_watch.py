"""The watch of a swarm's event logs while the nodes write them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab.audit import is_rerouted
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

LOOK_S = 0.02
READ_BYTES = 1 << 20
ANCHORS_KEPT = 2
_EVENT = b'{"event":"'
_COMPLETED, _VISIT = Completed.NAME.encode(), Visit.NAME.encode()
_READ = {kind.NAME.encode() for kind in (RoundProgress, RoundCommitted, CaughtUp, Restored, ReplicaAccused)}


@dataclass(frozen=True, slots=True)
class Held:
    module: str
    round: int
    digest: str


@dataclass(slots=True)
class Accused:
    """A replica accused of lying, and the rounds that its accusers have committed since."""

    by: set[str] = field(default_factory=set)
    commits: int = 0
    """One for each accuser and round."""
    with_it: int = 0
    """Commits that contain its pseudo-gradient."""


class LogWatch:
    """Follows the event logs in a folder, while `run` runs. `now` returns seconds since the run began."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self.completed: list[float] = []
        """Time of each completed microbatch, within LOOK_S."""
        self.rerouted: list[float] = []
        """Time of each completed microbatch that visited an expert outside its route."""
        self.visits: Counter[str] = Counter()
        """Gradients of each peer that have counted."""
        self.anchors: dict[str, tuple[Held, ...]] = {}
        self.accused: dict[str, Accused] = {}
        self._folder = folder
        self._now = now
        self._files: dict[Path, tuple[int, bytes]] = {}
        self._wanted: dict[asyncio.Future[RoundProgress], Callable[[RoundProgress], bool]] = {}

    async def run(self) -> None:
        """Reads new lines, until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for file, _ in self._files.values():
                os.close(file)

    async def until(self, wanted: Callable[[RoundProgress], bool]) -> RoundProgress:
        """Waits for the next progress of a round that is wanted."""
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
                *lines, rest = (rest + new).split(b"\n")
                self._files[path] = file, rest
                for line in lines:
                    self._take(path.name.partition("-")[0], line)

    def _take(self, peer: str, line: bytes) -> None:
        name = line.removeprefix(_EVENT).partition(b'"')[0]  # most lines need not be parsed
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
