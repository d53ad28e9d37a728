"""Ways to reach a node: direct, mapped (by a router), reverse (called through peers), unreachable."""

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
    """Whether a node may ask its router to open a port. The node tests its reachability in both modes."""

    AUTO = "auto"  # Asks the router to open a port if peers cannot connect
    DIRECT = "direct"  # Never asks a router


@dataclass(frozen=True, slots=True)
class Standing:
    """Reachability of a node: the way in which peers reach it, with reason and advice."""

    step: ReachStep
    reason: str
    address: str | None = None  # `host:port` to which peers have connected
    fix: str = ""  # Advice for a better step
    translated: bool = False  # Whether the node is behind NAT
    seen_host: str = ""  # Our address in the view of peers


def held_by(standing: Standing, via: Sequence[PeerId]) -> Standing:
    """Changes the standing to `reverse` if peers in `via` can ask the node to connect to a caller."""
    if not via:
        return standing
    called = f"called through {', '.join(map(short, via))}, then opens the link itself"
    return replace(standing, step=ReachStep.REVERSE, reason=f"{called}; {standing.reason}")


NOT_LOOKED = Standing(ReachStep.UNKNOWN, "not tested yet")
