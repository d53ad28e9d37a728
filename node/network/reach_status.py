"""The steps of the reachability ladder: the ways by which others can reach a node, best first.

    direct       others connect to the node's own port
    mapped       the router forwards a port to it, because it was asked to (UPnP or NAT-PMP)
    reverse      neither, but it keeps links to a few peers, and through them it is called: then it opens a link itself
    unreachable  there is nobody to hold on to either
    unknown      nobody was there to find it out

More steps may come (`relay`): whoever reads a step has to expect words that it does not know.
"""

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

    AUTO = "auto"
    """Asks the router for a port when its own cannot be reached."""
    DIRECT = "direct"
    """Asks no router."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's standing on the ladder."""

    step: ReachStep
    reason: str
    address: str | None = None
    """`host:port` at which others have connected; None when they have not."""
    fix: str = ""
    """What a person can do to reach a better step."""
    translated: bool = False
    """Whether a router stands between that translates addresses, so that it may be worth asking it for a port."""
    seen_host: str = ""
    """The address that the others see."""


def held_by(standing: Standing, via: Sequence[PeerId]) -> Standing:
    """The standing, raised to `reverse` if there are peers through which the node can be called."""
    if not via:
        return standing
    called = f"called through {', '.join(map(short, via))}, and then opens the link itself"
    return replace(standing, step=ReachStep.REVERSE, reason=f"{called}; {standing.reason}")


NOT_LOOKED = Standing(ReachStep.UNKNOWN, "not found out yet")
