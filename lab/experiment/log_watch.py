"""The watch of a swarm's event logs while they are written: when microbatches are completed, how far rounds are, and
what came of them.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
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
_COMPLETED = f'{{"event":"{Completed.NAME}"'.encode()
_VISIT = f'{{"event":"{Visit.NAME}"'.encode()
_PROGRESS = f'{{"event":"{RoundProgress.NAME}"'.encode()
_ANCHORS = tuple(f'{{"event":"{kind.NAME}"'.encode() for kind in (RoundCommitted, CaughtUp, Restored))
_ACCUSED = f'{{"event":"{ReplicaAccused.NAME}"'.encode()
_ANCHORS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Held:
    """An anchor that a replica has taken over."""

    module: str
    round: int
    digest: str


@dataclass(slots=True)
class Accused:
    """A replica that others say has lied, and the rounds that they have committed since the first said so."""

    by: set[str] = field(default_factory=set)
    commits: int = 0
    """One for each replica and round."""
    with_it: int = 0
    """Those with its pseudo-gradient in them."""


class LogWatch:
    """Follows the event logs; `run` carries it.

    Args:
        now: seconds, on the scale of the diary.
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self.completed: list[float] = []
        """When each completed microbatch was seen in its data node's log, to LOOK_S and the machine's load."""
        self.rerouted: list[float] = []
        """Likewise of those that another expert than their own has seen."""
        self.visited: set[str] = set()
        """Peers whose gradients have counted."""
        self.anchors: dict[str, deque[Held]] = {}
        """Of each peer the last ones that it has taken over."""
        self.accused: dict[str, Accused] = {}
        self._folder = folder
        self._now = now
        self._files: dict[Path, tuple[int, bytes]] = {}
        self._wanted: dict[asyncio.Future[RoundProgress], Callable[[RoundProgress], bool]] = {}

    async def run(self) -> None:
        """Reads what is new, until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for file, _ in self._files.values():
                os.close(file)

    async def until(self, wanted: Callable[[RoundProgress], bool]) -> RoundProgress:
        """Waits for the next event of a round that is wanted."""
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
            *lines, rest = (rest + os.read(file, READ_BYTES)).split(b"\n")
            self._files[path] = file, rest
            for line in lines:
                self._take(path.name.partition("-")[0], line)

    def _take(self, peer: str, line: bytes) -> None:
        if line.startswith(_COMPLETED):
            self.completed.append(self._now())
            if b'"route"' in line and is_rerouted(event_from_json(line)):
                self.rerouted.append(self.completed[-1])
        elif line.startswith(_VISIT):
            self.visited.add(peer)
        elif line.startswith(_ANCHORS):
            event = event_from_json(line)
            if isinstance(event, RoundCommitted | CaughtUp | Restored):
                held = Held(event.module, event.round, event.digest)
                self.anchors.setdefault(event.peer, deque(maxlen=_ANCHORS_KEPT)).append(held)
            if isinstance(event, RoundCommitted):
                self._note_company(event)
        elif line.startswith(_ACCUSED):
            event = event_from_json(line)
            if isinstance(event, ReplicaAccused):
                self.accused.setdefault(event.accused, Accused()).by.add(event.peer)
        elif self._wanted and line.startswith(_PROGRESS):
            event = event_from_json(line)
            for found, wanted in self._wanted.items():
                if isinstance(event, RoundProgress) and not found.done() and wanted(event):
                    found.set_result(event)

    def _note_company(self, commit: RoundCommitted) -> None:
        for name, accused in self.accused.items():
            if commit.peer in accused.by:
                accused.commits += 1
                accused.with_it += name in commit.contributors
