"""Where a scenario's deeds are done: the laboratory, the look-out, the diary, and the tasks that deeds leave behind."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from node.lab.chaos.observation import Watch
from node.lab.wan.laboratory import Laboratory
from node.local_swarm.child_process import ChildEnd
from swarm.vocabulary.errors import SkipstoneError

LOOK_S = 0.05


class Kind(enum.Enum):
    """What a line of the diary means for the recovery."""

    FAULT = "fault"
    END = "end"
    """Of a fault that lasted."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the diary."""

    at_s: float
    """After all were at work."""
    kind: Kind
    what: str
    lasts: bool = False
    """A fault with an end, from which recovery is counted."""


class Bench:
    """Made for one run of a scenario.

    Args:
        now: seconds since all were at work.
        tell: is handed every line of the diary.
    """

    def __init__(self, lab: Laboratory, watch: Watch, now: Callable[[], float], tell: Callable[[Mark], None]) -> None:
        self.lab = lab
        self.watch = watch
        self.marks: list[Mark] = []
        self.missed: list[str] = []
        """What could not be done as the scenario wants it: it then shows nothing."""
        self.odd: dict[int, bool] = {}
        """Peers that are not like the others, and whether they should be worked with."""
        self.liars: set[str] = set()
        """Peers that lie in rounds."""
        self.waiting: list[str] = []
        """What is still to come of what has been done."""
        self._now = now
        self._tell = tell

    # ---- the diary -----------------------------------------------------------------------------------------------

    def fault(self, what: str, *, lasts: bool = False) -> None:
        """Something has been broken at this moment."""
        self._mark(Mark(self._now(), Kind.FAULT, what, lasts))

    def end(self, what: str) -> None:
        """A fault is over."""
        self._mark(Mark(self._now(), Kind.END, what))

    def note(self, what: str) -> None:
        """Something is worth telling."""
        self._mark(Mark(self._now(), Kind.NOTE, what))

    def miss(self, what: str) -> None:
        """The scenario could not be carried out as written."""
        self.missed.append(what)
        self.note(what)

    def lasts(self, what: str, for_s: float, mend: Callable[[], None]) -> None:
        """Something has been broken, and is mended after a while."""
        self.fault(what, lasts=True)

        async def mend_later() -> None:
            await asyncio.sleep(for_s)
            mend()
            self.end(f"over: {what}")

        self.later(mend_later(), f"the end of: {what}")

    def _mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        self._tell(mark)

    # ---- what takes time -----------------------------------------------------------------------------------------

    def later(self, work: Coroutine[None, None, None], what: str) -> None:
        """Starts the rest of a deed; the run waits for it, but not for ever."""

        async def do() -> None:
            try:
                await work
            except SkipstoneError as error:
                self.miss(f"not possible: {error}")
            self.waiting.remove(what)

        self.waiting.append(what)
        self.lab.spawn(do())

    async def ended(self, peer: int) -> ChildEnd:
        """Waits until the peer's process is gone, and everything that it has started."""
        swarm = self.lab.swarm
        await until(lambda: peer in swarm.ends and peer not in swarm.processes())
        await asyncio.sleep(LOOK_S)  # the swarm lets go of it
        return self.lab.swarm.ends[peer]

    async def restarted(self, peer: int) -> None:
        """Starts a peer that has ended again, as itself, and waits until it serves. From now on its end is its own."""
        self.lab.swarm.restart_peer(peer)
        self.lab.killed.discard(peer)
        self.note(f"peer {peer} started again")
        await self.serving(peer)

    async def visited(self, peer: int) -> None:
        """Waits until a gradient of the peer's has counted."""
        name = self.lab.swarm.peers[peer].peer
        await until(lambda: name in self.watch.visited)

    async def serving(self, peer: int) -> None:
        """Waits until the peer says that it serves."""
        await until(lambda: self.lab.swarm.progress.peers[peer].state == "serving")


async def until(over: Callable[[], bool]) -> None:
    """Looks again and again: what is waited for is in other processes."""
    while True:
        if over():
            return
        await asyncio.sleep(LOOK_S)
