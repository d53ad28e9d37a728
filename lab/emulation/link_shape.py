"""The emulated link between one peer and the network: delay, rates, and faults; and the named ones.

Delays are one way, between the peer and the middle of the network; two peers are twice as far apart.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lab.emulation.regions import REGIONS
from swarm.vocabulary.errors import ConfigError

MBIT = 1_000_000 / 8
"""Bytes a second."""
MAX_DELAY_S = 60.0
LEAST_BYTES_PER_S = 128.0


class Fault(enum.Enum):
    """A fault of a link."""

    NONE = "none"
    RESET = "reset"
    """Its connections are reset, and new ones are refused."""
    HALF_OPEN = "half_open"
    """Connections are accepted, but nothing gets to the peer any more; what it sends still arrives."""
    BLACK_HOLE = "black_hole"
    """Nothing is delivered either way, and nobody is told."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The link between a peer and the middle of the network.

    What a peer sends to another passes through its own way up and the other's way down, so delays add up and the
    narrower rate counts.

    Raises:
        ConfigError: a value is out of range.
    """

    latency_s: float = 0.0
    """One way."""
    jitter_s: float = 0.0
    """Up to so much more, drawn evenly for each piece; order is kept."""
    up_bytes_per_s: float = math.inf
    """From the peer, all its connections together; infinite for no limit."""
    down_bytes_per_s: float = math.inf
    """To the peer, likewise."""
    fault: Fault = Fault.NONE

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s"):
            if not 0 <= getattr(self, name) <= MAX_DELAY_S:
                raise ConfigError(f"link: {name} is {getattr(self, name)}; 0 to {MAX_DELAY_S:g} seconds are allowed")
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if not getattr(self, name) >= LEAST_BYTES_PER_S:
                raise ConfigError(f"link: {name} is {getattr(self, name)}; at least {LEAST_BYTES_PER_S:g} is allowed")

    @property
    def carries_up(self) -> bool:
        """Whether what the peer sends gets away."""
        return self.fault in (Fault.NONE, Fault.HALF_OPEN)

    @property
    def carries_down(self) -> bool:
        """Whether anything is delivered to the peer."""
        return self.fault is Fault.NONE


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a peer: its own link, and the region of the world it is in, if that matters."""

    shape: LinkShape = LinkShape()
    region: str | None = None
    """One of `regions.REGIONS`: between two peers with regions the table's delays and rates come on top."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A site with a name and a sentence about it."""

    name: str
    site: Site
    about: str


def _own(name: str, about: str, latency_ms: float, jitter_ms: float, up_mbit: float, down_mbit: float) -> Profile:
    shape = LinkShape(latency_ms / 1000, jitter_ms / 1000, up_mbit * MBIT, down_mbit * MBIT)
    return Profile(name, Site(shape), about)


PROFILES: Final[Mapping[str, Profile]] = {
    profile.name: profile
    for profile in (
        Profile("none", Site(), "no emulation: loopback as it is"),
        _own("home-adsl", "1 Mbit/s up, 16 down, 15 ms and up to 5 more to the middle", 15, 5, 1, 16),
        _own("home-fibre", "100 Mbit/s each way, 5 ms and up to 2 more to the middle", 5, 2, 100, 100),
        _own("mobile", "10 Mbit/s up, 30 down, 25 ms and up to 30 more to the middle", 25, 30, 10, 30),
        _own("transatlantic", "1 Gbit/s each way, a round trip of 80 ms between any two peers", 20, 0.5, 1000, 1000),
        *(
            Profile(
                f"gcp-{region}", Site(LinkShape(), region), f"a cloud machine in {region}; measured delays and rates"
            )
            for region in REGIONS
        ),
    )
}


def profile_of(name: str) -> Profile:
    """The profile of a name. Raises ConfigError for a name that is none."""
    if name not in PROFILES:
        raise ConfigError(f"{name!r} is no profile", hint=f"Profiles are {', '.join(PROFILES)}.")
    return PROFILES[name]
