"""Placement of a newcomer: the module where it helps the swarm most, empty ones first. Moving later is
`swarm.membership.rebalancing`.

It stands alone because a newcomer asks once, before it has a module; whoever has one asks otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from swarm.membership.capacity import ABOUT_EQUAL, Workload, allowed_throughput, draw, hosts_of, usual_power
from swarm.membership.room import Needs, Room
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned

NO_NEEDS: Final[Needs] = {}
"""Where memory is no matter."""


def choose_module(
    own: PeerId,
    modules: Sequence[ModuleId],
    announcements: Iterable[Announcement],
    workload: Workload,
    power: float = 0.0,
    needs: Needs = NO_NEEDS,
) -> Reasoned[ModuleId]:
    """The module that brings the swarm the highest throughput when the newcomer takes it.

    Where several are about equally good, the one that is shortest of peers; where these are about equal too, the one
    that takes most memory, because fewer of those that come later have room for it; and then the newcomer's hash
    decides, so that several newcomers at once spread out. Takes time in proportion to modules and
    announcements.

    Args:
        modules: those it may take, at least one; a peer that cannot read the text leaves stage 0 out, and every peer
            what it has no room for (`modules_that_fit`).
        announcements: everybody's; peers that are joining count as if they served already.
        power: of the newcomer, in units of cost per second; 0 when not known, which takes it for an average one.
        needs: what the modules take of a peer's memory.
    """
    hosts = hosts_of(announcements, workload)
    allowed = allowed_throughput(hosts, workload)
    power = power or usual_power(host.power for host in hosts)

    weakest = min(allowed, key=allowed.__getitem__)
    next_weakest = min((value for module, value in allowed.items() if module != weakest), default=inf)
    with_us = {}
    """The swarm's throughput if the newcomer takes the module."""
    for module in modules:
        others = next_weakest if module == weakest else allowed[weakest]
        with_us[module] = min(allowed[module] + power / workload.work(module), others)

    best = max(with_us.values())
    helpful = [module for module in modules if with_us[module] >= best * (1 - ABOUT_EQUAL)]
    least = min(allowed[module] for module in helpful)
    shortest = [module for module in helpful if allowed[module] <= least * (1 + ABOUT_EQUAL)]
    memory = {module: needs[module].all if module in needs else 0 for module in shortest}
    most = max(memory.values())
    largest = [module for module in shortest if memory[module] >= most * (1 - ABOUT_EQUAL)]
    chosen = max(largest, key=lambda module: draw(own, module))
    larger = ", and takes most memory of these" if len(largest) < len(shortest) else ""
    if allowed[chosen] == 0:
        return Reasoned(chosen, f"module {chosen} has no peer{larger}")
    return Reasoned(chosen, f"module {chosen} has the least power for its share of the visits{larger}")


def modules_that_fit(modules: Iterable[ModuleId], room: Room, needs: Needs) -> list[ModuleId]:
    """The modules that there is room for."""
    return [module for module in modules if room.lacks(needs[module]) is None]
