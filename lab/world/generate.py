"""Made-up swarms: regions and links from a table of measurements, compute that differs, links that are not quite what
was measured."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.world.instance import MAX_PEERS, Instance, peer_of
from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

HANDLING_S = 0.35
"""Copies between host and device, and framing, of one message (SkipPipe's profile: 0.13 + 0.2 + 0.02 s)."""
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Regions:
    """Measurements between regions: one-way latency in seconds and bandwidth in bytes a second."""

    names: tuple[str, ...]
    latency_s: tuple[tuple[float, ...], ...]
    bytes_per_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make.

    Args:
        peers: 2 to MAX_PEERS, stage 0 included.
        spread: the slowest peer computes at most that many times as long as the fastest.
        forward_s: forward time of the fastest peer.
        bytes_each: size of one microbatch's tensor.
    """

    peers: int = 20
    stages: int = 6
    per_path: int = 3
    microbatches: int = 6
    slots: int = 3
    spread: float = 3.0
    forward_s: float = 0.44
    bytes_each: float = 32.0 * 2**20
    max_forward_jump: int = 4
    max_back_stops: int = 2
    max_back_distance: int = 2


def regions_from_json(data: Mapping[str, Any]) -> Regions:
    """Reads a table with `regions`, `latency_ms` and `bandwidth_gib_per_s`.

    Raises:
        ConfigError: it is not such a table.
    """
    try:
        names = tuple(str(name) for name in data["regions"])
        latency = tuple(tuple(float(value) / 1e3 for value in row) for row in data["latency_ms"])
        rate = tuple(tuple(float(value) * GIB for value in row) for row in data["bandwidth_gib_per_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the table of regions cannot be read: {error!r}") from error
    square = all(len(table) == len(names) and all(len(row) == len(names) for row in table) for table in (latency, rate))
    if not names or not square or any(value <= 0 for row in rate for value in row):
        raise ConfigError("the table of regions is not square, is empty, or has a link without bandwidth")
    return Regions(names, latency, rate)


def generate(shape: Shape, regions: Regions, seed: int) -> Instance:
    """A swarm of that shape; the same seed makes the same one.

    Raises:
        ConfigError: there are more stages than peers can serve, or too many peers.
    """
    if not shape.stages * 2 <= shape.peers <= MAX_PEERS or shape.spread < 1:
        raise ConfigError(
            f"{shape.peers} peers cannot serve {shape.stages} stages with spread {shape.spread}",
            hint=f"Take 2 peers a stage to {MAX_PEERS} peers, and a spread of at least 1.",
        )
    rng = random.Random(seed)  # noqa: S311 - a repeatable world, not a secret
    peers = [peer_of(index) for index in range(shape.peers)]
    home = {peer: rng.randrange(len(regions.names)) for peer in peers}
    every = range(len(regions.names))
    between = [[_message_s(regions, shape, here, there) for there in every] for here in every]
    rows = [{peer: between[here][home[peer]] for peer in peers} for here in every]
    costs = Costs(
        stages=_stages(peers, shape, rng),
        forward_s={peer: shape.forward_s * rng.uniform(1, shape.spread) for peer in peers},
        message_s={
            peer: rows[home[peer]] for peer in peers
        },  # one row for all of a region: 10,000 peers need no matrix
        slots=dict.fromkeys(peers, shape.slots),
        task_overhead_s=0.13,
    )
    rules = PathRules(
        shape.stages, shape.per_path, shape.max_forward_jump, shape.max_back_stops, shape.max_back_distance
    )
    return Instance(f"generated-{shape.peers}-{seed}", costs, rules, shape.microbatches)


def _message_s(regions: Regions, shape: Shape, here: int, there: int) -> float:
    return regions.latency_s[here][there] + shape.bytes_each / regions.bytes_per_s[here][there] + HANDLING_S


def _stages(peers: Sequence[PeerId], shape: Shape, rng: random.Random) -> tuple[tuple[PeerId, ...], ...]:
    """As many data nodes as the other peers can serve, one peer for each visit of a path; those others are dealt out
    evenly."""
    mixed = rng.sample(list(peers), len(peers))
    readers = _readers(shape)
    rest = mixed[readers:]
    others = [tuple(rest[stage :: shape.stages - 1]) for stage in range(shape.stages - 1)] if shape.stages > 1 else []
    return (tuple(mixed[:readers]), *others)


def _readers(shape: Shape) -> int:
    """How many data nodes: the number nearest to what the others can serve with which every stage can be visited
    equally often in one iteration."""
    most = shape.peers - shape.stages + 1

    def equal(readers: int) -> bool:
        return readers * shape.microbatches * shape.per_path % max(1, shape.stages - 1) == 0

    wanted = max(1, min(most, round(shape.peers / (shape.per_path + 1))))
    return min(
        (count for count in range(1, most + 1) if equal(count)), key=lambda count: abs(count - wanted), default=wanted
    )
