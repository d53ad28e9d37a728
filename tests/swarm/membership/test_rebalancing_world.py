"""Small swarms in virtual time: they come near the best placement, and then they are still."""

from statistics import mean

from swarm.vocabulary.types import ModuleId
from tests.swarm.membership.placement_world import DRAIN_TICKS, JOIN_TICKS, RULES, TICK_S, Move, World

MINUTE = round(60 / TICK_S)
HOUR_S = 3600.0
LEAST_OF_BEST = 0.4
"""Single moves cannot exchange two peers, so a swarm may end short of the best placement; never by more than this."""
MEAN_OF_BEST = 0.85


def lived(seed: int, longest_delay: int = 0) -> World:
    """Ten minutes of coming and dying, then twenty of peace."""
    world = World(seed, longest_delay)
    world.run(10 * MINUTE, churn=0.03)
    world.run(20 * MINUTE)
    return world


def most_moves_an_hour(world: World) -> float:
    peers = [move.peer for move in world.moves]
    return max((peers.count(peer) for peer in peers), default=0) * HOUR_S / (world.tick * TICK_S)


def at_once(moves: list[Move]) -> int:
    return sum(move.others_on_the_way for move in moves)


def test_peers_come_near_the_best_placement_and_are_still() -> None:
    """No move empties a module, and no two go to the same place at once, as long as all see the same."""
    shares = []
    for seed in range(40):
        world = lived(seed)
        shares.append(world.throughput() / world.best_throughput())
        assert shares[-1] >= LEAST_OF_BEST, f"seed {seed}: {shares[-1]:.2f}"
        assert all(move.tick < world.tick - 10 * MINUTE for move in world.moves), f"seed {seed}: no end of moving"
        assert most_moves_an_hour(world) <= 6, f"seed {seed}"
        assert all(move.left_behind for move in world.moves), f"seed {seed}"
        assert not at_once(world.moves), f"seed {seed}"
    assert mean(shares) >= MEAN_OF_BEST


def test_late_news_does_bounded_harm() -> None:
    """Views up to 15 s old: two may set out for the same place, but not three, and nobody goes round in circles."""
    together = 0
    for seed in range(1000, 1025):
        world = lived(seed, longest_delay=3)
        assert all(move.left_behind for move in world.moves), f"seed {seed}"
        assert max((move.others_on_the_way for move in world.moves), default=0) <= 1, f"seed {seed}"
        assert most_moves_an_hour(world) <= 6, f"seed {seed}"
        assert all(move.tick < world.tick - 10 * MINUTE for move in world.moves), f"seed {seed}"
        assert world.throughput() >= LEAST_OF_BEST * world.best_throughput(), f"seed {seed}"
        together += at_once(world.moves)
    assert together <= 3


def test_a_module_that_loses_its_last_peer_is_filled_within_seconds() -> None:
    """When another can spare one: at the latest when the last possible mover has had its turn."""
    filled = 0
    for seed in range(40):
        world = World(seed)
        for _ in range(3):
            world.join()
        world.run(20 * MINUTE)
        modules = [member.module for member in world.members.values()]
        alone = sorted(member.peer for member in world.members.values() if modules.count(member.module) == 1)
        if not alone:
            continue
        del world.members[alone[0]]
        turns = RULES.empty_after_s + RULES.turn_s
        world.run(round(turns / TICK_S) + 2 + DRAIN_TICKS + JOIN_TICKS)
        assert world.throughput() > 0, f"seed {seed}"
        filled += 1
    assert filled > 8


def test_five_newcomers_at_once_serve_all_of_four_experts() -> None:
    """None of them sees where the others go; whoever is one too many moves to the expert that nobody has taken."""
    experts = (ModuleId(0), *(ModuleId(stage, expert) for stage in (1, 2) for expert in (0, 1)))
    late = 0
    for seed in range(40):
        world = World(seed, longest_delay=1, modules=experts, at_first=0)
        for _ in range(5):
            world.join()
        late += world.throughput() == 0
        world.run(3 * MINUTE)
        assert world.throughput() > 0, f"seed {seed}"
    assert late > 8, "many of them have to move"
