"""The emulated network: each member's link and region, partitions, faults, and counts of delivered bytes.

Members are known by their index in the swarm. None is a caller outside the swarm, with an ideal link.
"""

import asyncio
import enum
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ConfigError

MBIT = 1_000_000 / 8

# Measured between Google Cloud regions: gensyn-ai/skippipe, commit 7f20d8a, schedulers/communication_costs.py.
# Delays are one-way and both tables symmetric; a row lists a region's values to the regions before it. The source has
# 0.24 MiB/s between NL and London, 1 % of their neighbours' rates. That must be a slip, so we use 24.
REGIONS: Final = (
    "australia",
    "belgium",
    "canada",
    "germany",
    "iowa",
    "japan",
    "la",
    "nl",
    "oregon",
    "singapore",
    "taiwan",
    "london",
)

_SAME_MS: Final = 1.0
_SAME_MIB_PER_S: Final = 2048.0

_LATENCY_MS: Final = (
    (),
    (129.0,),
    (98.0, 41.0),
    (125.5, 4.0, 44.0),
    (84.0, 49.0, 14.0, 53.5),
    (58.0, 112.0, 74.0, 112.0, 72.5),
    (69.0, 70.0, 35.0, 73.0, 23.4, 50.0),
    (128.0, 3.0, 42.0, 3.5, 51.0, 108.5, 71.5),
    (68.0, 66.0, 30.5, 68.0, 19.3, 46.2, 12.4, 67.0),
    (48.0, 83.0, 107.0, 80.0, 101.5, 35.6, 79.5, 81.5, 78.5),
    (67.0, 105.0, 89.0, 102.0, 88.0, 19.2, 64.0, 105.5, 59.5, 23.2),
    (132.0, 3.5, 38.5, 6.6, 48.1, 107.0, 68.0, 4.8, 64.0, 85.0, 109.5),
)

_MIB_PER_S: Final = (
    (),
    (10.06,),
    (13.5, 20.38),
    (10.71, 248.32, 32.62),
    (11.5, 29.0, 77.5, 27.25),
    (14.12, 12.0, 18.5, 11.35, 14.31),
    (15.0, 19.88, 31.25, 18.69, 62.94, 28.44),
    (9.75, 248.32, 25.62, 248.32, 28.06, 11.65, 14.59),
    (15.0, 21.38, 48.25, 15.28, 92.5, 31.19, 121.38, 20.88),
    (30.5, 16.5, 12.22, 12.8, 12.94, 39.94, 17.25, 16.75, 17.19),
    (21.5, 12.75, 15.06, 12.88, 13.11, 78.56, 16.58, 12.25, 23.88, 63.38),
    (9.62, 248.32, 37.25, 193.28, 22.38, 9.1, 15.28, 24.0, 21.75, 16.06, 9.18),
)


def region_delay_s(one: str, other: str) -> float:
    """Returns the one-way delay between two regions, in seconds."""
    return (_SAME_MS if one == other else _cell(_LATENCY_MS, one, other)) / 1000


def region_bytes_per_s(one: str, other: str) -> float:
    """Returns the rate between machines in two regions, in bytes per second."""
    return (_SAME_MIB_PER_S if one == other else _cell(_MIB_PER_S, one, other)) * 2**20


def _cell(table: tuple[tuple[float, ...], ...], one: str, other: str) -> float:
    first, last = sorted((REGIONS.index(one), REGIONS.index(other)))
    return table[last][first]


class Fault(enum.Enum):
    """Fault of a peer's emulated link: connections are reset, only the upload works, or nothing passes."""

    NONE = "none"
    RESET = "reset"
    HALF_OPEN = "half_open"
    BLACK_HOLE = "black_hole"


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Latency, jitter, rates and fault of the link between a peer and the core of the network."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    fault: Fault = Fault.NONE

    @property
    def carries_up(self) -> bool:
        # On a half-open link the peer sends but receives nothing.
        return self.fault in (Fault.NONE, Fault.HALF_OPEN)

    @property
    def carries_down(self) -> bool:
        return self.fault is Fault.NONE


@dataclass(frozen=True, slots=True)
class Site:
    """A peer's link and optional cloud region. Between two regions, measured delay and rate apply as well."""

    shape: LinkShape = LinkShape()
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A predefined link and region, with a description for people."""

    site: Site
    about: str


def _own(about: str, latency_ms: float, jitter_ms: float, up_mbit: float, down_mbit: float) -> Profile:
    shape = LinkShape(latency_ms / 1000, jitter_ms / 1000, up_mbit * MBIT, down_mbit * MBIT)
    return Profile(Site(shape), about)


PROFILES: Final[Mapping[str, Profile]] = {
    "none": Profile(Site(), "no emulation, plain loopback"),
    "home-adsl": _own("1 Mbit/s up, 16 down, 15 to 20 ms to the core", 15, 5, 1, 16),
    "home-fibre": _own("100 Mbit/s each way, 5 to 7 ms to the core", 5, 2, 100, 100),
    "mobile": _own("10 Mbit/s up, 30 down, 25 to 55 ms to the core", 25, 30, 10, 30),
    "transatlantic": _own("1 Gbit/s each way, 80 ms round trip between any two peers", 20, 0.5, 1000, 1000),
} | {
    f"gcp-{region}": Profile(Site(region=region), f"a cloud machine in {region}, with measured delays and rates")
    for region in REGIONS
}


def profile_of(name: str) -> Profile:
    """Returns the profile with this name. Raises ConfigError if it is unknown."""
    if name not in PROFILES:
        raise ConfigError(f"{name!r} is not a profile", hint=f"Choose one of {', '.join(PROFILES)}.")
    return PROFILES[name]


Member = int | None
Way = tuple[Member, Member]

BURST_S = 0.005
CHUNK_S = 0.005
MIN_CHUNK_BYTES = 2 * 1024
MAX_CHUNK_BYTES = 64 * 1024


class Shaper:
    """Rate limiter shared by all connections of a link: a token bucket as virtual scheduling (ITU-T I.371, GCRA)."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = -math.inf

    def grant(self, size_bytes: int, now: float) -> float:
        """Queues `size_bytes` on the link. Returns the time, `now` or later, at which all have been sent."""
        if math.isinf(self.bytes_per_s):
            return now
        self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_s
        # A short burst may leave early, so that small messages do not wait.
        return max(now, self._free_at - BURST_S)


class _Access:
    def __init__(self, site: Site) -> None:
        self.up, self.down = Shaper(math.inf), Shaper(math.inf)
        self.move_to(site)

    def move_to(self, site: Site) -> None:
        self.site = site
        self.up.bytes_per_s = site.shape.up_bytes_per_s
        self.down.bytes_per_s = site.shape.down_bytes_per_s


@dataclass(slots=True)
class _Breaks:
    every_bytes: int
    left_bytes: int


class Emulation:
    """The emulated network of a swarm. `seed` fixes the jitter of the n-th connection between two members."""

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

    def place(self, member: int, site: Site) -> None:
        if member in self._members:
            self._members[member].move_to(site)
        else:
            self._members[member] = _Access(site)
        self._notify()

    def partition(self, sides: Sequence[Sequence[int]]) -> None:
        """Silently stops traffic between different sides. Members of no side reach everyone."""
        self._sides = {member: side for side, members in enumerate(sides) for member in members}
        self._notify()

    def heal(self) -> None:
        """Ends a partition. Faults of single links stay."""
        self.partition(())

    def block(self, ways: Iterable[Way]) -> None:
        """Silently stops traffic on exactly these ways, each from one member to another."""
        self._blocked = frozenset(ways)
        self._notify()

    def break_every(self, member: int, size_bytes: int | None) -> None:
        """Resets a connection to the member after every `size_bytes` that it receives; None stops that."""
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
        """Draws the one-way delay of the next bytes on a connection, in seconds, without transmission time."""
        one, other = (self.site(member) for member in way)
        delay_s = one.shape.latency_s + other.shape.latency_s
        jitter_s = one.shape.jitter_s * randomness.random() + other.shape.jitter_s * randomness.random()
        if one.region is not None and other.region is not None:
            delay_s += region_delay_s(one.region, other.region)
        return delay_s + jitter_s

    def chunk_bytes(self, way: Way) -> int:
        """Returns how many bytes a connection may read at once: few enough to share a narrow link with others."""
        source, target = way
        rate = min(self._access(source).up.bytes_per_s, self._access(target).down.bytes_per_s)
        return int(min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, rate * CHUNK_S)))

    def randomness(self, way: Way) -> random.Random:
        """Returns the seeded random generator of a new connection, for its jitter."""
        self._connections[way] += 1
        return random.Random(f"{self._seed} {way} {self._connections[way]}")  # noqa: S311 - no secret

    def leave(self, way: Way, size_bytes: int, now: float) -> float:
        """Returns the time at which `size_bytes` have passed the sender's link and the link between the regions."""
        left_at = self._access(way[0]).up.grant(size_bytes, now)
        one, other = (self.site(member).region for member in way)
        if one is None or other is None:
            return left_at
        between = self._between.setdefault(way, Shaper(0.0))
        between.bytes_per_s = region_bytes_per_s(one, other)
        return between.grant(size_bytes, left_at)

    def arrive(self, way: Way, size_bytes: int, now: float) -> float:
        """Counts `size_bytes` as delivered, and returns the time at which they have passed the receiver's link."""
        self._passed[way] += size_bytes
        return self._access(way[1]).down.grant(size_bytes, now)

    def before_break(self, way: Way, size_bytes: int) -> int | None:
        """Counts bytes towards the receiver's next reset. Returns how many pass if that reset is due now, else None."""
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
        # Waiters hold the old event; a new one serves the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
