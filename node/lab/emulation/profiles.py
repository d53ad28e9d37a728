"""Named links. Delays are one way, between the peer and the middle of the network; two peers are twice as far apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.lab.emulation.link_shape import MBIT, LinkShape, Site
from node.lab.emulation.regions import REGIONS
from swarm.vocabulary.errors import ConfigError


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
