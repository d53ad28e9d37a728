"""Placement of a newcomer: the module where it helps the swarm most, empty ones first. Moving later is
`swarm.membership.rebalancing`.

It stands alone because a newcomer asks once, before it has a module; whoever has one asks otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from swarm.membership.capacity import ABOUT_EQUAL, Workload, allowed_throughput, draw, hosts_of, usual_power
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned


def choose_module(
    own: PeerId,
    modules: Sequence[ModuleId],
    announcements: Iterable[Announcement],
    workload: Workload,
    power: float = 0.0,
) -> Reasoned[ModuleId]:
    """The module that brings the swarm the highest throughput when the newcomer takes it.

    Where several are about equally good, the one that is shortest of peers; where these are about equal too, the
    newcomer's hash decides, so that several newcomers at once spread out. Takes time in proportion to modules and
    announcements.

    Args:
        modules: those it may take, at least one; a peer that cannot read the text leaves stage 0 out.
        announcements: everybody's; peers that are joining count as if they served already.
        power: of the newcomer, in units of cost per second; 0 when not known, which takes it for an average one.
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
    chosen = max(shortest, key=lambda module: draw(own, module))
    if allowed[chosen] == 0:
        return Reasoned(chosen, f"module {chosen} has no peer")
    return Reasoned(chosen, f"module {chosen} has the least power for its share of the visits")
