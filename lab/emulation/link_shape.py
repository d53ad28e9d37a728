"""The link of one peer, its faults, and the links that have a name."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ConfigError

MBIT = 1_000_000 / 8
"""Bytes per second in a megabit per second."""

# Measured between Google Cloud regions: gensyn-ai/skippipe, commit 7f20d8a, schedulers/communication_costs.py.
# Delays are one way, both tables are symmetric; each row is one region's values to the regions before it. The source
# has 0.24 MiB/s between NL and London, a hundredth of their neighbours' rates: we take it for a slip, times 100.
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
    """Returns the rate between two machines in these regions, in bytes per second."""
    return (_SAME_MIB_PER_S if one == other else _cell(_MIB_PER_S, one, other)) * 2**20


def _cell(table: tuple[tuple[float, ...], ...], one: str, other: str) -> float:
    first, last = sorted((REGIONS.index(one), REGIONS.index(other)))
    return table[last][first]


class Fault(enum.Enum):
    """A fault of a link."""

    NONE = "none"
    RESET = "reset"
    """Resets connections and refuses new ones."""
    HALF_OPEN = "half_open"
    """Accepts connections and delivers nothing to the peer; its own bytes still arrive."""
    BLACK_HOLE = "black_hole"
    """Delivers nothing in either direction, silently."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The link between a peer and the middle of the network."""

    latency_s: float = 0.0
    """One way; the links of both ends add up."""
    jitter_s: float = 0.0
    """Largest extra delay of one piece, drawn uniformly; the order is kept."""
    up_bytes_per_s: float = math.inf
    """From the peer, all its connections together; the narrower of both ends counts."""
    down_bytes_per_s: float = math.inf
    fault: Fault = Fault.NONE

    @property
    def carries_up(self) -> bool:
        return self.fault in (Fault.NONE, Fault.HALF_OPEN)

    @property
    def carries_down(self) -> bool:
        return self.fault is Fault.NONE


@dataclass(frozen=True, slots=True)
class Site:
    """A peer's link and its region; between two regions the measured delay and rate are added."""

    shape: LinkShape = LinkShape()
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A site with a name."""

    site: Site
    about: str


def _own(about: str, latency_ms: float, jitter_ms: float, up_mbit: float, down_mbit: float) -> Profile:
    shape = LinkShape(latency_ms / 1000, jitter_ms / 1000, up_mbit * MBIT, down_mbit * MBIT)
    return Profile(Site(shape), about)


PROFILES: Final[Mapping[str, Profile]] = {
    "none": Profile(Site(), "no emulation: loopback as it is"),
    "home-adsl": _own("1 Mbit/s up, 16 down, 15 ms and up to 5 more to the middle", 15, 5, 1, 16),
    "home-fibre": _own("100 Mbit/s each way, 5 ms and up to 2 more to the middle", 5, 2, 100, 100),
    "mobile": _own("10 Mbit/s up, 30 down, 25 ms and up to 30 more to the middle", 25, 30, 10, 30),
    "transatlantic": _own("1 Gbit/s each way, a round trip of 80 ms between any two peers", 20, 0.5, 1000, 1000),
} | {
    f"gcp-{region}": Profile(Site(region=region), f"a cloud machine in {region}; measured delays and rates")
    for region in REGIONS
}


def profile_of(name: str) -> Profile:
    """Returns the profile with this name. Raises ConfigError if there is none."""
    if name not in PROFILES:
        raise ConfigError(f"{name!r} is no profile", hint=f"Profiles are {', '.join(PROFILES)}.")
    return PROFILES[name]
