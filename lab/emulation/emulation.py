"""The emulated network's state: every member's site, who is cut off from whom, and what has passed between them.

Members are known by their index in the swarm. None stands for whoever is not a member, such as a `skipstone status`
from outside: its own link is ideal.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.emulation import regions
from lab.emulation.flow import Shaper
from lab.emulation.link_shape import Fault, LinkShape, Site

Member = int | None
Way = tuple[Member, Member]
"""From whom to whom."""

CHUNK_S = 0.005
MIN_CHUNK_BYTES = 2 * 1024
MAX_CHUNK_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class _Access:
    """A member's site, and the buckets that all its connections share."""

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
    """The emulated network, settable at any time; everything that is under way at the moment follows. For one event
    loop.

    The same seed draws the same jitter for the n-th connection between two members; when bytes come is the clock's.
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

    # ---- setting -------------------------------------------------------------------------------------------------

    def place(self, member: int, site: Site) -> None:
        """Places a member at a site, for the first time or again."""
        if member in self._members:
            self._members[member].move_to(site)
        else:
            self._members[member] = _Access(site)
        self._tell()

    def reshape(self, member: int, shape: LinkShape) -> None:
        """Gives a placed member another link; its region stays."""
        self.place(member, Site(shape, self._members[member].site.region))

    def partition(self, sides: Sequence[Sequence[int]]) -> None:
        """Cuts members of different sides off from each other, and nobody is told. Members of no side reach all."""
        self._sides = {member: side for side, members in enumerate(sides) for member in members}
        self._tell()

    def heal(self) -> None:
        """Ends a partition. Faults of single links stay."""
        self.partition(())

    def block(self, ways: Iterable[Way]) -> None:
        """Blocks these ways, and nobody is told; what was blocked before no longer is."""
        self._blocked = frozenset(ways)
        self._tell()

    def break_every(self, member: int, size_bytes: int | None) -> None:
        """Resets, whenever so many more bytes have come to a member, the connection that brought the last one, right
        behind it. None ends that.
        """
        if size_bytes is None:
            self._breaks.pop(member, None)
        else:
            self._breaks[member] = _Breaks(size_bytes, size_bytes)

    def clear(self) -> None:
        """Makes the network ideal."""
        self._breaks.clear()
        self.block(())
        for member in self._members:
            self.place(member, Site())
        self.heal()

    # ---- asking --------------------------------------------------------------------------------------------------

    def site(self, member: Member) -> Site:
        """The member's current site."""
        return self._access(member).site

    def is_reset(self, member: Member) -> bool:
        """Whether connections from and to it are reset."""
        return self.site(member).shape.fault is Fault.RESET

    def passes(self, way: Way) -> bool:
        """Whether anything is delivered on that way now."""
        source, target = way
        if way in self._blocked:
            return False
        if not (self.site(source).shape.carries_up and self.site(target).shape.carries_down):
            return False
        if source is None or target is None or source not in self._sides or target not in self._sides:
            return True
        return self._sides[source] == self._sides[target]

    async def passable(self, way: Way) -> None:
        """Waits until something is delivered on that way."""
        while not self.passes(way):
            await self.change()

    async def change(self) -> None:
        """Waits until anything is set."""
        await self._changed.wait()

    def one_way_s(self, way: Way, randomness: random.Random) -> float:
        """The delay of the next piece in seconds, rates apart."""
        one, other = (self.site(member) for member in way)
        delay_s = one.shape.latency_s + other.shape.latency_s
        jitter_s = one.shape.jitter_s * randomness.random() + other.shape.jitter_s * randomness.random()
        if one.region is not None and other.region is not None:
            delay_s += regions.one_way_s(one.region, other.region)
        return delay_s + jitter_s

    def chunk_bytes(self, way: Way) -> int:
        """The number of bytes to take in at once, so that many connections share a narrow link piece by piece."""
        source, target = way
        rate = min(self._access(source).up.bytes_per_s, self._access(target).down.bytes_per_s)
        return int(min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, rate * CHUNK_S)))

    def randomness(self, way: Way) -> random.Random:
        """A random generator for a new connection."""
        self._connections[way] += 1
        return random.Random(f"{self._seed} {way} {self._connections[way]}")  # noqa: S311 - no secret

    # ---- passing -------------------------------------------------------------------------------------------------

    def leave(self, way: Way, size_bytes: int, now: float) -> float:
        """Sends a piece off; returns when it has left the sender's link and what lies between."""
        left_at = self._access(way[0]).up.grant(size_bytes, now)
        between = self._bucket_between(way)
        return left_at if between is None else between.grant(size_bytes, left_at)

    def arrive(self, way: Way, size_bytes: int, now: float) -> float:
        """Brings a piece into the receiver's link; returns when it is through, and counts it."""
        self._passed[way] += size_bytes
        return self._access(way[1]).down.grant(size_bytes, now)

    def before_break(self, way: Way, size_bytes: int) -> int | None:
        """Counts a piece that is about to be handed over against the next break. Returns how much of it comes before a
        break; None when there is none in it.
        """
        breaks = None if way[1] is None else self._breaks.get(way[1])
        if breaks is None:
            return None
        breaks.left_bytes -= size_bytes
        if breaks.left_bytes > 0:
            return None
        through, breaks.left_bytes = size_bytes + breaks.left_bytes, breaks.every_bytes
        return through

    def passed(self) -> dict[Way, int]:
        """The bytes so far, by way."""
        return dict(self._passed)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _access(self, member: Member) -> _Access:
        return self._outside if member is None else self._members[member]

    def _bucket_between(self, way: Way) -> Shaper | None:
        """The limit between two regions, one for each pair of machines and direction."""
        one, other = (self.site(member).region for member in way)
        if one is None or other is None:
            return None
        bucket = self._between.setdefault(way, Shaper(0.0))
        bucket.bytes_per_s = regions.bytes_per_s(one, other)
        return bucket

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
