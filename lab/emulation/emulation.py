"""The emulated network: the site of each member, partitions and faults, and the bytes that have passed.

Members are known by their index in the swarm. None is a caller from outside, with an ideal link.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.emulation.link_shape import Fault, LinkShape, Site, region_bytes_per_s, region_delay_s

Member = int | None
Way = tuple[Member, Member]
"""Sender and receiver."""

BURST_S = 0.005
"""Time's worth of bytes that leaves at once after a pause. Timers are no finer."""
CHUNK_S = 0.005
MIN_CHUNK_BYTES = 2 * 1024
MAX_CHUNK_BYTES = 64 * 1024


class Shaper:
    """Delays what exceeds a rate, first come, first served; all connections of a link share it.

    The virtual scheduling form of a token bucket (ITU-T I.371, GCRA).
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = -math.inf

    def grant(self, size_bytes: int, now: float) -> float:
        """Returns the time, `now` or later, at which these bytes have left."""
        if math.isinf(self.bytes_per_s):
            return now
        self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_s
        return max(now, self._free_at - BURST_S)


@dataclass(slots=True, eq=False)
class _Access:
    site: Site
    up: Shaper = field(init=False)
    down: Shaper = field(init=False)

    def __post_init__(self) -> None:
        self.up = Shaper(self.site.shape.up_bytes_per_s)
        self.down = Shaper(self.site.shape.down_bytes_per_s)

    def move_to(self, site: Site) -> None:
        self.site = site
        self.up.bytes_per_s = site.shape.up_bytes_per_s
        self.down.bytes_per_s = site.shape.down_bytes_per_s


@dataclass(slots=True)
class _Breaks:
    every_bytes: int
    left_bytes: int


class Emulation:
    """The emulated network of one event loop; changes take effect at once.

    The same seed draws the same jitter for the n-th connection between two members.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._members: dict[int, _Access] = {}
        self._outside = _Access(Site())
        self._between: dict[Way, Shaper] = {}
        self._sides: dict[int, int] = {}
        self._blocked: frozenset[Way] = frozenset()
        self._breaks: dict[int, _Breaks] = {}
        self._connections: Counter[Way] = Counter()
        self._passed: Counter[Way] = Counter()
        self._changed = asyncio.Event()

    # ---- changes -------------------------------------------------------------------------------------------------

    def place(self, member: int, site: Site) -> None:
        if member in self._members:
            self._members[member].move_to(site)
        else:
            self._members[member] = _Access(site)
        self._notify()

    def reshape(self, member: int, shape: LinkShape) -> None:
        """Gives a member another link; its region stays."""
        self.place(member, Site(shape, self._members[member].site.region))

    def partition(self, sides: Sequence[Sequence[int]]) -> None:
        """Silently cuts the sides off from each other. Members of no side reach all."""
        self._sides = {member: side for side, members in enumerate(sides) for member in members}
        self._notify()

    def heal(self) -> None:
        """Ends a partition. Faults of single links stay."""
        self.partition(())

    def block(self, ways: Iterable[Way]) -> None:
        """Silently blocks these ways, and only these."""
        self._blocked = frozenset(ways)
        self._notify()

    def break_every(self, member: int, size_bytes: int | None) -> None:
        """Resets a connection to the member after every `size_bytes` that came to it; None stops that."""
        if size_bytes is None:
            self._breaks.pop(member, None)
        else:
            self._breaks[member] = _Breaks(size_bytes, size_bytes)

    def clear(self) -> None:
        self._breaks.clear()
        self.block(())
        for member in self._members:
            self.place(member, Site())
        self.heal()

    # ---- the current state ---------------------------------------------------------------------------------------

    def site(self, member: Member) -> Site:
        return self._access(member).site

    def is_reset(self, member: Member) -> bool:
        return self.site(member).shape.fault is Fault.RESET

    def passes(self, way: Way) -> bool:
        source, target = way
        if way in self._blocked:
            return False
        if not (self.site(source).shape.carries_up and self.site(target).shape.carries_down):
            return False
        if source is None or target is None or source not in self._sides or target not in self._sides:
            return True
        return self._sides[source] == self._sides[target]

    async def passable(self, way: Way) -> None:
        while not self.passes(way):
            await self.change()

    async def change(self) -> None:
        await self._changed.wait()

    def one_way_s(self, way: Way, randomness: random.Random) -> float:
        """Draws the delay of the next piece, in seconds, without the time its bytes take."""
        one, other = (self.site(member) for member in way)
        delay_s = one.shape.latency_s + other.shape.latency_s
        jitter_s = one.shape.jitter_s * randomness.random() + other.shape.jitter_s * randomness.random()
        if one.region is not None and other.region is not None:
            delay_s += region_delay_s(one.region, other.region)
        return delay_s + jitter_s

    def chunk_bytes(self, way: Way) -> int:
        """Returns how much to read at once, so that connections share a narrow link piece by piece."""
        source, target = way
        rate = min(self._access(source).up.bytes_per_s, self._access(target).down.bytes_per_s)
        return int(min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, rate * CHUNK_S)))

    def randomness(self, way: Way) -> random.Random:
        """Returns the random generator of a new connection."""
        self._connections[way] += 1
        return random.Random(f"{self._seed} {way} {self._connections[way]}")  # noqa: S311 - no secret

    # ---- traffic -------------------------------------------------------------------------------------------------

    def leave(self, way: Way, size_bytes: int, now: float) -> float:
        """Returns when a piece has left the sender's link and the link between the regions."""
        left_at = self._access(way[0]).up.grant(size_bytes, now)
        one, other = (self.site(member).region for member in way)
        if one is None or other is None:
            return left_at
        between = self._between.setdefault(way, Shaper(0.0))
        between.bytes_per_s = region_bytes_per_s(one, other)
        return between.grant(size_bytes, left_at)

    def arrive(self, way: Way, size_bytes: int, now: float) -> float:
        """Counts a piece and returns when it is through the receiver's link."""
        self._passed[way] += size_bytes
        return self._access(way[1]).down.grant(size_bytes, now)

    def before_break(self, way: Way, size_bytes: int) -> int | None:
        """Counts a piece against the next reset; returns how much of it comes before one, None if all does."""
        breaks = None if way[1] is None else self._breaks.get(way[1])
        if breaks is None:
            return None
        breaks.left_bytes -= size_bytes
        if breaks.left_bytes > 0:
            return None
        through, breaks.left_bytes = size_bytes + breaks.left_bytes, breaks.every_bytes
        return through

    def passed(self) -> dict[Way, int]:
        return dict(self._passed)

    def _access(self, member: Member) -> _Access:
        return self._outside if member is None else self._members[member]

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
