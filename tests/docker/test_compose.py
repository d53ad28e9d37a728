"""The swarm of the compose file trains on a real engine, and goes on when a container is killed, one is added, and all
are restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.docker.compose_lab import BUILD_LIMIT_S, LOGS, WAIT_LIMIT_S, Lab, engine, lab

HEALTH_CHECK = ("python", "/opt/skipstone/docker/healthcheck.py")
LIMIT_S = BUILD_LIMIT_S + 5 * WAIT_LIMIT_S

pytestmark = [pytest.mark.docker, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture
def swarm() -> Iterator[Lab]:
    with engine(), lab() as swarm:
        yield swarm


def test_a_swarm_of_containers_goes_on_when_they_come_and_go(swarm: Lab) -> None:
    took: dict[str, float] = {}
    began = time.monotonic()
    swarm.compose("build", limit_s=BUILD_LIMIT_S)
    took["build"] = time.monotonic() - began

    began = time.monotonic()
    swarm.compose("up", "--detach", "--no-build")
    assert len(swarm.containers()) == 6
    swarm.until_trained(peers=0, steps=1)
    took["up to the first step"] = time.monotonic() - began
    swarm.until_trained(peers=6, steps=5)
    took["up to an inner step of all six"] = time.monotonic() - began

    began = time.monotonic()
    swarm.kill(swarm.containers("stage")[0])
    assert len(swarm.containers()) == 5
    swarm.until_trained(peers=5, steps=5, since=swarm.heard())
    took["one killed, five train on"] = time.monotonic() - began

    began = time.monotonic()
    swarm.compose("up", "--detach", "--no-build", "--scale", "stage=5")  # the killed one comes back, too
    assert len(swarm.containers()) == 7
    seven = swarm.until_trained(peers=7, steps=5, since=swarm.heard())
    took["one back and one added, seven train"] = time.monotonic() - began
    assert len(seven.inner_steps) == 7, "the one that came back is the peer it was, and nobody shares an identity"

    check_what_it_says(swarm, set(seven.inner_steps))

    began, moment = time.monotonic(), time.time()
    swarm.compose("restart", "--timeout=30")
    took["all restarted: the command"] = time.monotonic() - began
    again = swarm.until_trained(peers=7, steps=5, started_after=moment)
    took["all restarted, seven train"] = time.monotonic() - began
    assert set(again.inner_steps) == set(seven.inner_steps), "all are the peers they were"

    swarm.compose("stop", "--timeout=30")
    print(swarm.compose("run", "--rm", "--no-deps", "bootstrap", "check", LOGS))  # fails if a microbatch counted twice
    print(json.dumps({what: round(seconds, 1) for what, seconds in took.items()}))


def check_what_it_says(swarm: Lab, peers: set[str]) -> None:
    """`status` from inside a container, and the health of each."""
    (data,) = swarm.containers("data")
    said = json.loads(swarm.inside(data, "skipstone", "status", "--json").splitlines()[-1])
    assert said["step"] > 0
    assert said["waiting_for"] == []
    assert {peer["peer"] for peer in said["peers"]} == peers
    for container in swarm.containers():
        swarm.inside(container, *HEALTH_CHECK)
