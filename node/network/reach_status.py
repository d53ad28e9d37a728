"""The steps of the reachability ladder: direct, mapped (by a router), reverse (called through peers), unreachable."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.types import PeerId, short


class ReachStep(enum.Enum):
    """A step of the ladder, by which others reach a node."""

    DIRECT = "direct"
    MAPPED = "mapped"
    REVERSE = "reverse"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class ReachMode(enum.Enum):
    """The measures that a node takes so that others can reach it. It finds out how they do in any case."""

    AUTO = "auto"  # Asks the router for a port if its own is unreachable
    DIRECT = "direct"  # Asks no router


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's standing on the ladder."""

    step: ReachStep
    reason: str
    address: str | None = None  # `host:port` at which others have connected
    fix: str = ""  # Advice for a better step
    translated: bool = False  # Whether there is address translation
    seen_host: str = ""  # Our address as others see it


def held_by(standing: Standing, via: Sequence[PeerId]) -> Standing:
    """The standing, raised to `reverse` if there are peers through which the node can be called."""
    if not via:
        return standing
    called = f"called through {', '.join(map(short, via))}, and then opens the link itself"
    return replace(standing, step=ReachStep.REVERSE, reason=f"{called}; {standing.reason}")


NOT_LOOKED = Standing(ReachStep.UNKNOWN, "not found out yet")
