"""Random planning problems by seed, with different links, speeds, slots, stages and rules.

Cloud links follow SkipPipe's measurements between twelve regions (arXiv 2502.19913 and its code), where bandwidth
times latency is about one TCP window. Figures of homes and LANs are assumed.
"""

import math
import random
from collections.abc import Callable, Sequence

from lab.world.instance import Instance, peer_of
from swarm.routing.measured_times import Costs
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.types import PeerId

Range = tuple[float, float]
MessageSeconds = dict[PeerId, dict[PeerId, float]]
MIB = 2.0**20

PEERS = (18, 42)
STAGES = (4, 9)  # With stage 0
FEWEST_REPLICAS = 2
MICROBATCHES = (4, 12)
SLOTS = (1, 6)
SKIPPED = (0.25, 0.5)
"""Share of the stages after stage 0 that a path skips."""
SPREAD = (2.0, 8.0)
"""Largest ratio of forward times."""
FORWARD_S = (0.2, 2.0)
"""Forward time of the fastest peer, in seconds."""
BACK_STOPS = (0, 2)
TASK_OVERHEAD_S = 0.13
"""Time that a peer is blocked after a task (SkipPipe), in seconds."""
HANDLING_S = 0.35
"""Device copies and framing of one message (SkipPipe's profile: 0.13 + 0.2 + 0.02), in seconds."""

CLOUD_TENSOR_MIB = (8.0, 64.0)
CLOUD_REGIONS = (4, 12)
CLOUD_LATENCY_S = (0.003, 0.135)
"""One-way latency between the nearest and the farthest regions (measured), in seconds."""
CLOUD_WINDOW_BYTES = (0.8 * MIB, 1.4 * MIB)
"""Bandwidth times latency between two regions (measured)."""
CLOUD_WITHIN_S, CLOUD_WITHIN_BYTES_PER_S = 0.001, 2.0**31
"""Latency and bandwidth within a region (measured)."""

HOME_TENSOR_MIB = (4.0, 32.0)  # Compressed
HOME_UP_BYTES_PER_S, HOME_DOWN_BYTES_PER_S = (20e6 / 8, 100e6 / 8), (100e6 / 8, 1000e6 / 8)
"""Assumed: 20 to 100 Mbit/s up, 100 to 1,000 down."""
HOME_ACCESS_S, HOME_DISTANCE_S = (0.003, 0.015), 0.04
"""Assumed one-way latencies of an access line, and between the farthest towns, in seconds."""

LAN_TENSOR_MIB = (8.0, 64.0)
LAN_LATENCY_S = (0.0001, 0.0005)
LAN_BYTES_PER_S = (1e9 / 8, 2.5e9 / 8, 10e9 / 8)
"""Assumed: Ethernet of 1, 2.5 or 10 Gbit/s."""


def problem(seed: int) -> Instance:
    """Returns a problem in which every stage can be visited equally often within a step."""
    rng = random.Random(seed)
    while True:
        instance = _drawn(f"problem-{seed}", rng)
        if instance.microbatches * len(instance.stages[0]) * instance.rules.per_path % instance.rules.skippable == 0:
            return instance


def _drawn(name: str, rng: random.Random) -> Instance:
    stages = rng.randint(*STAGES)
    per_path = rng.choice(_lengths(stages - 1))
    back_stops = rng.randint(*BACK_STOPS)
    jump = rng.randint(min(stages - per_path, stages - 1), stages - 1)
    rules = PathRules(stages, per_path, jump, back_stops, back_stops)
    peers = [peer_of(index) for index in range(rng.randint(max(PEERS[0], FEWEST_REPLICAS * stages + 2), PEERS[1]))]
    kind, links = rng.choice((("clouds", clouds), ("clouds", clouds), ("homes", homes), ("lan", lan)))
    spread, fastest_s = _log_uniform(rng, SPREAD), _log_uniform(rng, FORWARD_S)
    placed = _placed(peers, stages, per_path, rng)
    costs = Costs(
        forward_s={peer: fastest_s * _log_uniform(rng, (1.0, spread)) for peer in peers},
        message_s=links(peers, rng),
        slots={peer: rng.randint(*SLOTS) for peer in peers},
        task_overhead_s=TASK_OVERHEAD_S,
    )
    return Instance(f"{name}-{kind}", placed, costs, rules, rng.randint(*MICROBATCHES))


def _lengths(skippable: int) -> Sequence[int]:
    """Returns the possible numbers of stages per path, by SKIPPED."""
    least, most = SKIPPED
    return [skippable - skips for skips in range(skippable) if least <= skips / skippable <= most]


def _placed(peers: Sequence[PeerId], stages: int, per_path: int, rng: random.Random) -> tuple[tuple[PeerId, ...], ...]:
    """Assigns about one data node per `per_path` other peers, and a random number of replicas to each other stage."""
    mixed = rng.sample(list(peers), len(peers))
    data_nodes = max(FEWEST_REPLICAS, round(len(peers) / (per_path + 1)) + rng.randint(-1, 1))
    data_nodes = min(data_nodes, len(peers) - FEWEST_REPLICAS * (stages - 1))
    sizes = [data_nodes] + [FEWEST_REPLICAS] * (stages - 1)
    for _ in range(len(peers) - sum(sizes)):
        sizes[rng.randrange(1, stages)] += 1
    return tuple(tuple(mixed[sum(sizes[:stage]) : sum(sizes[: stage + 1])]) for stage in range(stages))


def _log_uniform(rng: random.Random, between: Range) -> float:
    return math.exp(rng.uniform(math.log(between[0]), math.log(between[1])))


def clouds(peers: Sequence[PeerId], rng: random.Random) -> MessageSeconds:
    """Returns links of peers in random regions of a map; bandwidth falls with distance."""
    sent_bytes = MIB * _log_uniform(rng, CLOUD_TENSOR_MIB)
    regions = range(rng.randint(*CLOUD_REGIONS))
    at = [(rng.random(), rng.random()) for _ in regions]
    nearest_s, farthest_s = CLOUD_LATENCY_S
    between = {(here, here): CLOUD_WITHIN_S + sent_bytes / CLOUD_WITHIN_BYTES_PER_S for here in regions}
    for here in regions:
        for there in regions[:here]:
            latency_s = nearest_s + (farthest_s - nearest_s) * math.dist(at[here], at[there]) / math.sqrt(2)
            seconds = latency_s + sent_bytes * latency_s / rng.uniform(*CLOUD_WINDOW_BYTES)
            between[here, there] = between[there, here] = seconds
    region = {peer: rng.choice(regions) for peer in peers}
    return _table(peers, lambda here, there: between[region[here], region[there]])


def homes(peers: Sequence[PeerId], rng: random.Random) -> MessageSeconds:
    """Returns links of peers behind asymmetric access lines, without contention."""
    sent_bytes = MIB * _log_uniform(rng, HOME_TENSOR_MIB)
    up = {peer: _log_uniform(rng, HOME_UP_BYTES_PER_S) for peer in peers}
    down = {peer: _log_uniform(rng, HOME_DOWN_BYTES_PER_S) for peer in peers}
    access_s = {peer: rng.uniform(*HOME_ACCESS_S) for peer in peers}
    at = {peer: (rng.random(), rng.random()) for peer in peers}

    def seconds(here: PeerId, there: PeerId) -> float:
        distance_s = HOME_DISTANCE_S * math.dist(at[here], at[there]) / math.sqrt(2)
        return access_s[here] + distance_s + access_s[there] + sent_bytes / min(up[here], down[there])

    return _table(peers, seconds)


def lan(peers: Sequence[PeerId], rng: random.Random) -> MessageSeconds:
    """Returns links of peers on one network with Ethernet interfaces of different speeds."""
    sent_bytes = MIB * _log_uniform(rng, LAN_TENSOR_MIB)
    latency_s = rng.uniform(*LAN_LATENCY_S)
    rate = {peer: rng.choice(LAN_BYTES_PER_S) for peer in peers}
    return _table(peers, lambda here, there: latency_s + sent_bytes / min(rate[here], rate[there]))


def _table(peers: Sequence[PeerId], seconds: Callable[[PeerId, PeerId], float]) -> MessageSeconds:
    return {here: {there: HANDLING_S + seconds(here, there) for there in peers} for here in peers}
