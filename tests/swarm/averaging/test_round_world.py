"""The round machine in small worlds without faults: replicas stay one module."""

from __future__ import annotations

from tests.swarm.averaging.round_world import RoundWorld, Shape


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
    assert len(set(world.conveners.values())) == 4


def test_many_replicas_and_fragments() -> None:
    world = RoundWorld(2, Shape(replicas=7))
    world.run(40.0)
    assert len(world.commits) >= 8
    assert not world.forks()
    assert not world.caught_up
