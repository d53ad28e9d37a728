"""Watches the rounds of a swarm of real processes."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from node.local_swarm.local_swarm import LocalSwarm
from node.observability import events
from node.observability.event_json import event_from_json

PATIENCE_S = 240.0
LOOK_S = 0.001

Found = TypeVar("Found")
Kind = TypeVar("Kind", events.RoundProgress, events.PeerChange, events.RoundCommitted, events.Completed)


@dataclass(frozen=True, slots=True)
class Stand:
    at: float
    event: events.RoundCommitted | events.CaughtUp | events.Restored

    @property
    def peer(self) -> str:
        return self.event.peer

    @property
    def anchor(self) -> tuple[int, str]:
        return self.event.round, self.event.digest


@dataclass(eq=False)
class RoundWatch:
    """What a swarm has said so far of the rounds of one module."""

    swarm: LocalSwarm
    module: str
    stands: list[Stand] = field(default_factory=list)
    stepped_at: list[float] = field(default_factory=list)
    accusations: list[events.ReplicaAccused] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: events.Event) -> None:
        match event:
            case events.RoundCommitted() | events.CaughtUp() | events.Restored() if event.module == self.module:
                self.stands.append(Stand(time.monotonic(), event))
            case events.Step():
                self.stepped_at.append(time.monotonic())
            case events.ReplicaAccused():
                self.accusations.append(event)
        self._news.set()

    async def until(self, find: Callable[[], Found | None], patience_s: float = PATIENCE_S) -> Found:
        """Gives up when the swarm has said nothing for so long: how fast it goes on is the machine's affair."""
        while (found := find()) is None:
            self._news.clear()
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        return found

    def holding(self) -> dict[str, Stand]:
        return {stand.peer: stand for stand in self.stands}

    def round_of(self, peer: str) -> int:
        stand = self.holding().get(peer)
        return 0 if stand is None else stand.event.round

    def commits_of(self, peer: str) -> list[events.RoundCommitted]:
        return [s.event for s in self.stands if s.peer == peer and isinstance(s.event, events.RoundCommitted)]

    def first_at(self, peer: str, number: int) -> Stand | None:
        """When it first stood at this round or a later one."""
        return next((stand for stand in self.stands if stand.peer == peer and stand.event.round >= number), None)

    async def all_at(self, peers: frozenset[str], number: int) -> dict[str, Stand]:
        """When each first stood at this round or a later one, once all do."""

        def find() -> dict[str, Stand] | None:
            found = {peer: stand for peer in peers if (stand := self.first_at(peer, number)) is not None}
            return found if len(found) == len(peers) else None

        return await self.until(find)

    async def all_together(self, peers: frozenset[str], after: int) -> events.RoundCommitted:
        """A round after this one that all of them have committed as its members."""

        def find() -> events.RoundCommitted | None:
            common = [
                {(c.round, c.digest): c for c in self.commits_of(peer) if c.round > after and peers <= set(c.members)}
                for peer in peers
            ]
            keys = set.intersection(*(set(commits) for commits in common))
            return common[0][min(keys)] if keys else None

        return await self.until(find)

    def digests(self, peers: frozenset[str]) -> dict[int, set[str]]:
        """The digests of these replicas by round, from the first round that all have held in common."""
        holders: dict[int, dict[str, set[str]]] = {}
        for stand in self.stands:
            if stand.peer in peers:
                holders.setdefault(stand.event.round, {}).setdefault(stand.event.digest, set()).add(stand.peer)
        common = [number for number, held in holders.items() if peers in map(frozenset, held.values())]
        return {number: set(held) for number, held in holders.items() if number >= min(common, default=0)}


@asynccontextmanager
async def watching(swarm: LocalSwarm, module: str) -> AsyncIterator[RoundWatch]:
    """Reads the swarm's events as long as the block lasts."""
    watch = RoundWatch(swarm, module)

    async def read() -> None:
        async for event in swarm.events():
            watch.take(event)

    reading = asyncio.create_task(read())
    try:
        yield watch
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


class LogTail(Generic[Kind]):
    """Follows the event logs in a folder, for what only they tell."""

    def __init__(self, folder: Path, kind: type[Kind]) -> None:
        self._folder = folder
        self._kind: type[Kind] = kind
        self._beginning = f'{{"event":"{kind.NAME}"'.encode()
        self._files: dict[Path, tuple[int, bytes]] = {}

    def read(self) -> list[tuple[str, Kind]]:
        """Each event of that kind once, with the peer that logged it."""
        found = []
        for path in self._folder.glob("*.jsonl"):
            file, rest = self._files.get(path) or (os.open(path, os.O_RDONLY), b"")
            *lines, rest = (rest + os.read(file, 2**20)).split(b"\n")
            self._files[path] = file, rest
            for line in lines:
                event = event_from_json(line) if line.startswith(self._beginning) else None
                if isinstance(event, self._kind):
                    found.append((path.name.partition("-")[0], event))
        return found

    async def until(self, wanted: Callable[[str, Kind], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(wanted(peer, event) for peer, event in self.read()):
                await asyncio.sleep(LOOK_S)

    def skip(self) -> None:
        while self.read():
            pass

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()
