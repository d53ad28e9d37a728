"""The round machine in small worlds without faults: replicas stay one module."""

from collections import Counter
from dataclasses import replace

import pytest

from swarm.averaging.round_events import CommitStaged
from swarm.vocabulary.averaging_messages import Roster
from swarm.vocabulary.types import AnchorVersion, PeerId
from tests.swarm.averaging.round_world import (
    INITIAL,
    SMALL_ROUNDS,
    RoundWorld,
    Shape,
    VirtualReplica,
    harm_of,
    try_seed,
)


def test_without_faults_every_round_commits_at_once_on_all_replicas() -> None:
    world = RoundWorld(1)
    world.run(60.0)
    assert len(world.commits) >= 15
    latest = max(version.round for version in world.commits)
    for version, who in world.commits.items():
        assert len(world.rosters[version]) == 4
        assert len(who) == 4 or version.round == latest
    assert set(world.attempts.values()) == {1}
    assert not world.forks()
    assert not world.caught_up
    assert len(set(world.leaders.values())) == 4


@pytest.mark.parametrize("replicas", [6, 32])
def test_one_slow_link_among_fast_ones_splits_nobody(replicas: int) -> None:
    rules = replace(SMALL_ROUNDS, inner_steps=50, chunks=60, chunk_bytes=2**20, piece_bytes=2**20, longest_s=900.0)
    world = RoundWorld(4, Shape(replicas, rules, bandwidth=(1e8, 1e9)))
    world.replicas[world.peers[0]].bandwidth = 2.5e6
    world.run(130.0)
    assert world.commits
    assert {len(roster) for roster in world.rosters.values()} == {replicas}
    assert set(world.attempts.values()) == {1}


CHUNKS, QUICK_CHUNKS = 10, 4
SEEDS_A_CHUNK = 40


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.long] * (chunk >= QUICK_CHUNKS)) for chunk in range(CHUNKS)]
)
def test_replicas_come_together_and_go_on_whatever_goes_wrong(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk * SEEDS_A_CHUNK, (chunk + 1) * SEEDS_A_CHUNK):
        world = try_seed(seed)
        seen["commits"] += len(world.commits)
        seen["catch-ups"] += sum(world.caught_up.values())
        seen["second attempts"] += sum(attempts > 1 for attempts in world.attempts.values())
        if harm_of(seed):
            seen["forks"] += len(world.forks())
    # Else the faults were not what they are meant to be, and the above has shown nothing.
    assert seen["commits"] > 4 * SEEDS_A_CHUNK
    assert seen["catch-ups"] > SEEDS_A_CHUNK
    assert seen["second attempts"] > SEEDS_A_CHUNK / 4
    assert seen["forks"] > SEEDS_A_CHUNK / 10


SLOW = Shape(
    rules=replace(SMALL_ROUNDS, inner_steps=8, chunks=12, longest_s=60.0),
    bandwidth=(9_000.0, 11_000.0),
    prepare_s=(0.02,),
)
NOTICED_S = 5.0


def first_exchange(world: RoundWorld) -> Roster:
    rosters: list[Roster] = []
    world.on_exchange = lambda replica, roster: rosters.append(roster)
    assert world.run_until(lambda: bool(rosters), 60.0)
    return rosters[0]


def committed_by(world: RoundWorld, peers: set[PeerId]) -> bool:
    return any(who >= peers for who in world.commits.values())


def undisturbed_s() -> float:
    """From the roster to the last commit."""
    world = RoundWorld(5, SLOW)
    first_exchange(world)
    start = world.time.now
    assert world.run_until(lambda: committed_by(world, set(world.peers)), 60.0)
    return world.time.now - start


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("who", ["convener", "member"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_survivors_commit_within_five_seconds_and_a_round(share: float, who: str, how: str) -> None:
    round_s = undisturbed_s()
    assert round_s > 1.0
    world = RoundWorld(5, SLOW)
    roster = first_exchange(world)
    world.run(share * round_s)
    convener = roster.round.convener
    victim = convener if who == "convener" else next(each.peer for each in roster.members if each.peer != convener)
    (world.crash if how == "kill" else world.freeze)(victim)
    survivors = set(world.peers) - {victim}

    def are_together() -> bool:  # on a committed round; one that lacked a piece of the victim has downloaded it
        held = {world.replicas[peer].version for peer in survivors}
        return len(held) == 1 and held <= world.commits.keys()

    assert world.run_until(are_together, NOTICED_S + round_s), world.explain()
    assert not world.forks()
    if how == "freeze":
        world.thaw(victim)
    else:
        world.restart(victim, INITIAL)
    reached = max(version.round for version in world.versions())
    assert world.run_until(
        lambda: any(version.round > reached and who == set(world.peers) for version, who in world.commits.items()), 60.0
    ), world.explain()
    assert not world.forks()


@pytest.mark.parametrize("times", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("fragments", [1, 3])
def test_who_downloads_longer_than_a_round_takes_is_waited_for(times: float, fragments: int) -> None:
    world = RoundWorld(7, Shape(rules=replace(SMALL_ROUNDS, inner_steps=3 * fragments, fragments=fragments)))
    world.run(60.0)
    round_s, late = 60.0 / max(version.round for version in world.versions()), world.peers[1]
    world.replicas[late].catch_up_s = times * round_s, times * round_s
    world.freeze(late)
    world.run(NOTICED_S + 3 * round_s)
    world.thaw(late)
    thawed = max(version.round for version in world.versions())
    together = 0
    for _ in range(20):
        world.run(2 * round_s)
        together = sum(len(who) == 4 for version, who in world.commits.items() if version.round > thawed)
        if together > 2:
            break
    assert together > 2, world.explain()
    assert together > (max(version.round for version in world.commits) - thawed) / 3, "it takes part from then on"
    assert world.caught_up[late] < 6
    assert not world.forks()


def test_who_is_always_behind_costs_a_quarter_of_the_rounds_at_most() -> None:
    undisturbed, world = RoundWorld(7), RoundWorld(7)
    for each in (undisturbed, world):
        each.run(20.0)
    world.replicas[world.peers[1]].catch_up_s = 60.0, 60.0
    world.freeze(world.peers[1])
    world.run(10.0)
    world.thaw(world.peers[1])
    undisturbed.run(10.0)
    before = [max(version.round for version in each.commits) for each in (world, undisturbed)]
    for each in (world, undisturbed):
        each.run(200.0)
    after = [max(version.round for version in each.commits) for each in (world, undisturbed)]
    assert after[0] - before[0] > 0.75 * (after[1] - before[1])


def split(world: RoundWorld, *groups: list[PeerId], rounds: int) -> None:
    """Lets both sides go on for so many rounds."""
    assert world.run_until(lambda: committed_by(world, set(world.peers)) and world.agreed(), 60.0)
    enough = next(iter(world.versions())).round + rounds
    world.links.partition(*groups)
    assert world.run_until(lambda: all(each.version.round >= enough for each in world.living), 200.0), world.explain()


def rounds_until_agreed(world: RoundWorld) -> int:
    before = max(version.round for version in world.versions())
    world.links.heal()
    world.caught_up.clear()
    assert world.run_until(world.agreed, 60.0), world.explain()
    return max(version.round for version in world.versions()) - before


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("first", "rounds", "most"), [(2, 5, 3), (3, 3, 2)])
def test_both_sides_of_a_partition_go_on_and_meet_in_two_rounds(first: int, rounds: int, most: int, seed: int) -> None:
    """`most`: a replica catches up once more for each round that the others have under way meanwhile."""
    world = RoundWorld(seed)
    sides = world.peers[:first], world.peers[first:]
    split(world, *sides, rounds=rounds)
    assert world.replicas[sides[0][0]].version != world.replicas[sides[1][0]].version
    assert rounds_until_agreed(world) <= 2
    world.run(40.0)
    assert set(world.caught_up) in [set(side) for side in sides if len(side) <= 2], "only those that lost catch up"
    assert max(world.caught_up.values()) <= most
    last = max(world.commits, key=lambda version: version.round)
    assert set(world.rosters[last]) == set(world.peers)


def test_three_win_over_one_that_is_many_rounds_ahead() -> None:
    world = RoundWorld(2)
    a, b, c, d = world.peers
    world.replicas[d].step_s = 0.1
    split(world, [a, b, c], [d], rounds=3)
    assert world.replicas[d].version.round > world.replicas[a].version.round + 2
    before = len(world.commits)
    world.links.heal()
    assert world.run_until(world.agreed, 60.0), world.explain()
    assert len([version for version, who in world.commits.items() if a in who]) <= before + 2
    assert len(world.commits) - before <= 2, "their next round has a number above the lone one's"
    assert world.caught_up[a] + world.caught_up[b] + world.caught_up[c] == 0


@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_what_a_convener_committed_before_it_died_holds(replicas: int) -> None:
    world = RoundWorld(9, replace(SLOW, replicas=replicas))
    first: list[AnchorVersion] = []

    def dies(replica: VirtualReplica, commit: CommitStaged) -> None:
        if not first:
            first.append(commit.version)
            world.links.partition([replica.id], [peer for peer in world.peers if peer != replica.id])
            world.crash(replica.id)

    world.on_commit = dies
    assert world.run_until(lambda: bool(first), 60.0)
    others = {replica.id for replica in world.living}
    assert not any(replica.version == first[0] for replica in world.living)
    assert world.run_until(lambda: all(replica.version.round > 0 for replica in world.living), 20.0), world.explain()
    assert world.commits[first[0]] & others
    assert not world.forks()
    assert world.run_until(lambda: all(replica.version.round > 1 for replica in world.living), 60.0), world.explain()


def test_a_lone_replica_steps_by_itself_until_another_one_comes() -> None:
    world = RoundWorld(3, Shape(replicas=2))
    a, b = world.peers
    world.run(1.0)
    world.crash(b)
    assert world.run_until(lambda: world.replicas[a].machine.is_alone, 15.0)
    assert world.run_until(lambda: world.replicas[a].version.round >= 3, 30.0)
    world.restart(b, INITIAL)
    assert world.run_until(lambda: committed_by(world, {a, b}), 30.0), world.explain()
    assert not world.replicas[a].machine.is_alone
    assert world.caught_up[a] == 0


def test_who_sends_rubbish_is_left_out_and_then_not_invited_for_a_while() -> None:
    world = RoundWorld(4)
    offender = world.peers[2]
    world.replicas[offender].spoils = True
    world.run(60.0)
    others = set(world.peers) - {offender}
    theirs = [version for version, who in world.commits.items() if who != {offender}]
    assert len(theirs) >= 12
    assert all(set(world.rosters[version]) == others for version in theirs)
    assert sum(attempts - 1 for attempts in world.attempts.values()) <= 4, "later it costs no second attempts any more"
    assert not {peer for peer in world.caught_up if peer != offender}


def test_a_slanderer_does_not_keep_the_others_from_each_other() -> None:
    world = RoundWorld(11, Shape(replicas=5))
    slanderer, victim, *others = world.peers
    world.replicas[slanderer].slanders = victim
    world.run(90.0)
    theirs = [version for version, who in world.commits.items() if who >= set(others)]
    assert len(theirs) >= 12
    assert world.caught_up[victim] < len(theirs)
    assert any(victim in world.rosters[version] for version in theirs)


def test_two_that_cannot_reach_each_other_hold_up_nobody() -> None:
    world = RoundWorld(6)
    a, b, *_ = world.peers
    world.cut(a, b)
    world.run(90.0)
    assert len(world.commits) >= 8
    assert max(world.attempts.values()) <= 3
    assert not world.forks()
    assert a in set().union(*world.rosters.values())
    assert b in set().union(*world.rosters.values())


def test_a_round_costs_messages_in_proportion_to_the_pairs() -> None:
    for replicas in (3, 9):
        world = RoundWorld(7, Shape(replicas=replicas))
        world.run(30.0)
        assert len(world.commits) >= 5
        assert world.links.sent <= 6 * replicas * replicas * len(world.commits)
