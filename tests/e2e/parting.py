"""Cuts a swarm in two, lets both sides go on for some rounds, and puts it together again."""

import time
from dataclasses import dataclass
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.observability.events import PeerChange, RoundCommitted
from protocol.manifest.manifest import Manifest
from tests.e2e.home_network import SplitNetwork
from tests.e2e.round_watch import LogTail, RoundWatch
from tests.e2e.small_run import small_run
from tests.e2e.striking import replicas_of

ROUNDS_APART = 5
TWO_AND_TWO = "aaabbb"
THREE_AND_ONE = "aaabab"


def parted_run(text: Path, inner_steps: int = 10) -> Manifest:
    """Six peers make two data nodes and four replicas of stage 1."""
    return small_run(text, blocks=(1, 2), inner_steps=inner_steps, staleness=1)


@dataclass(frozen=True, slots=True)
class Parted:
    sides: tuple[frozenset[str], frozenset[str]]
    before: int
    apart: tuple[int, int]
    apart_s: float
    contact_s: float
    together_s: float
    rounds_after: int


async def part(swarm: LocalSwarm, watch: RoundWatch, network: SplitNetwork, logs: Path) -> Parted:
    """With the cable whole at the beginning and at the end."""
    replicas = replicas_of(swarm)
    first, second = (
        frozenset(peer for peer, index in replicas.items() if index in network.side(side)) for side in ("a", "b")
    )
    await watch.all_together(first | second, 0)
    before = max(map(watch.round_of, replicas))
    cut = time.monotonic()
    network.cut()
    for side in (first, second):
        await watch.all_at(side, before + ROUNDS_APART)
    healed, links, commits = time.monotonic(), LogTail(logs, PeerChange), LogTail(logs, RoundCommitted)
    links.skip()
    commits.skip()
    apart = tuple(min(map(watch.round_of, side)) - before for side in (first, second))
    network.heal()
    await links.until(
        lambda own, link: (
            link.change == "up" and {own, link.peer} <= replicas.keys() and ((own in first) != (link.peer in first))
        )
    )
    contact = time.monotonic()
    links.close()
    leading = max(map(watch.round_of, replicas))
    together = await watch.all_together(first | second, leading)
    together_s = time.monotonic() - healed
    # The data nodes' module was parted as well.
    data_nodes = {peer.peer for peer in swarm.peers if peer.stage == 0}
    await commits.until(lambda own, commit: data_nodes <= set(commit.members))
    commits.close()
    took_s = (healed - cut, contact - healed, together_s)
    return Parted((first, second), before, (apart[0], apart[1]), *took_s, together.round - leading)
