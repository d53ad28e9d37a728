"""Ways to reach a node: direct, mapped (by a router), reverse (called through peers), unreachable."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.types import PeerId, short


class ReachStep(enum.Enum):
    """The way in which peers reach a node."""

    DIRECT = "direct"
    MAPPED = "mapped"
    REVERSE = "reverse"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class ReachMode(enum.Enum):
    """Measures that a node may take to be reachable. It tests its reachability in both modes."""

    AUTO = "auto"  # Asks the router to open a port if peers cannot connect
    DIRECT = "direct"  # Never asks a router


@dataclass(frozen=True, slots=True)
class Standing:
    """Reachability of a node: the step and its reason."""

    step: ReachStep
    reason: str
    address: str | None = None  # `host:port` to which peers have connected
    fix: str = ""  # Advice for a better step
    translated: bool = False  # Whether the node is behind NAT
    seen_host: str = ""  # Our address in the view of peers


def held_by(standing: Standing, via: Sequence[PeerId]) -> Standing:
    """Raises the standing to `reverse` if peers can pass calls on to the node."""
    if not via:
        return standing
    called = f"called through {', '.join(map(short, via))}, then opens the link itself"
    return replace(standing, step=ReachStep.REVERSE, reason=f"{called}; {standing.reason}")


NOT_LOOKED = Standing(ReachStep.UNKNOWN, "not tested yet")
