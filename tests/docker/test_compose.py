"""The compose file's swarm trains on a real engine, and goes on when containers are killed, added, restarted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from node.observability.event_json import event_from_json
from node.observability.events import Event, InnerStep, Step
from swarm.vocabulary.errors import ProtocolViolation

ROOT = Path(__file__).parent.parent.parent
HELPER = ROOT.parent / "shared" / "tools" / "docker-up"
ENGINE_PID = Path("/var/run/docker.pid")
PROJECT = f"skipstone-test-{os.getpid()}"
IMAGE = "skipstone:test"
LOGS = "/var/lib/skipstone/logs"
HELPER_LIMIT_S, BUILD_LIMIT_S, COMMAND_LIMIT_S = 400.0, 1000.0, 120.0
WAIT_LIMIT_S = 240.0
POLL_S = 0.5


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """A Docker engine that answers; one that was started for this is stopped at the end."""
    was_there = _answers()
    if HELPER.is_file():
        said = _quietly(str(HELPER), limit_s=HELPER_LIMIT_S)
        if said is not None and not _answers():
            pytest.skip(f"no Docker engine could be started: {said}")
    elif not was_there:
        pytest.skip("no Docker engine answers on this machine")
    if not _compose():
        pytest.skip("neither `docker compose` nor `docker-compose` is on this machine")
    try:
        yield
    finally:
        if not was_there and ENGINE_PID.is_file():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(ENGINE_PID.read_text()), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the event logs of all nodes have said so far."""

    steps: int = 0
    inner_steps: Counter[str] = field(default_factory=Counter)

    def trained_since(self, before: Heard) -> int:
        return len(self.inner_steps - before.inner_steps)


class Lab:
    def compose(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Runs one compose command; a failure shows what it wrote."""
        file = ROOT / "docker" / "docker-compose.yml"
        return _run(*_compose(), "-f", str(file), "-p", PROJECT, *arguments, limit_s=limit_s)

    def containers(self, service: str | None = None) -> list[str]:
        filters = [f"label=com.docker.compose.project={PROJECT}"]
        if service is not None:
            filters.append(f"label=com.docker.compose.service={service}")
        return _run("docker", "ps", "--quiet", *(word for one in filters for word in ("--filter", one))).split()

    def inside(self, container: str, *command: str) -> str:
        return _run("docker", "exec", container, *command)

    def kill(self, container: str) -> None:
        """Ends it with SIGKILL, as a crash would; the engine does not start it again by itself."""
        _run("docker", "kill", container)

    def heard(self, started_after: float = 0.0) -> Heard:
        """Reads, through any running container, the event logs of nodes started after that Unix time."""
        steps, inner_steps = 0, Counter[str]()
        for event in self._events(started_after):
            if isinstance(event, Step):
                steps += 1
            elif isinstance(event, InnerStep):
                inner_steps[event.peer] += 1
        return Heard(steps, inner_steps)

    def until_trained(self, peers: int, steps: int, since: Heard | None = None, started_after: float = 0.0) -> Heard:
        """Waits until so many peers have taken inner steps and the data nodes so many steps, since then or at all."""
        before = since or Heard()
        now = Heard()

        def trained() -> bool:
            nonlocal now
            now = self.heard(started_after)
            return now.trained_since(before) >= peers and now.steps - before.steps >= steps

        until(trained, lambda: f"{peers} peers do not train:\n{self.compose('logs', '--no-color', '--tail=15')}")
        return now

    def take_down(self) -> None:
        """Removes containers, volumes and the network; the image stays, as the next build's cache."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=1")

    def _events(self, started_after: float) -> Iterator[Event]:
        wanted = f'grep -HE \'^."event":"(step|inner_step)"\' {LOGS}/*.jsonl'
        for container in self.containers():
            said = subprocess.run(
                ["docker", "exec", container, "sh", "-c", wanted],
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT_S,
            )
            if said.returncode != 0:  # it stops or starts just now, or nothing has been logged yet
                continue
            for file, _, line in (line.partition(":") for line in said.stdout.splitlines()):
                started_ms = int(Path(file).name.split("-")[1].split(".")[0])  # see node/observability/event_json.py
                with contextlib.suppress(ProtocolViolation):  # a line that is being written
                    event = event_from_json(line)
                    if event is not None and started_ms > started_after * 1000:
                        yield event
            return


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """A swarm that is not up yet, and is gone at the end."""
    swarm = Lab()
    try:
        yield swarm
    finally:
        swarm.take_down()


def until(holds: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    give_up = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        assert time.monotonic() < give_up, otherwise()
        time.sleep(POLL_S)


def _compose() -> tuple[str, ...]:
    """The compose that is here: the engine's plugin, else the program of its own."""
    if shutil.which("docker") and _quietly("docker", "compose", "version") is None:
        return "docker", "compose"
    return ("docker-compose",) if shutil.which("docker-compose") else ()


def _answers() -> bool:
    return shutil.which("docker") is not None and _quietly("docker", "version", "--format={{.Server.Version}}") is None


def _quietly(*command: str, limit_s: float = COMMAND_LIMIT_S) -> str | None:
    """None when it succeeds, else its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else ((done.stderr or done.stdout).strip().splitlines() or ["no reason"])[-1]


def _run(*command: str, limit_s: float = COMMAND_LIMIT_S) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SKIPSTONE_IMAGE": IMAGE, "SKIPSTONE_CHECKPOINT_EVERY": "10"},
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


HEALTH_CHECK = ("python", "/opt/skipstone/docker/healthcheck.py")
LIMIT_S = BUILD_LIMIT_S + 5 * WAIT_LIMIT_S

pytestmark = [pytest.mark.docker, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture
def swarm() -> Iterator[Lab]:
    with engine(), lab() as swarm:
        yield swarm


def test_a_swarm_of_containers_goes_on_when_they_come_and_go(swarm: Lab) -> None:
    swarm.compose("build", limit_s=BUILD_LIMIT_S)

    swarm.compose("up", "--detach", "--no-build")
    assert len(swarm.containers()) == 6
    swarm.until_trained(peers=0, steps=1)
    swarm.until_trained(peers=6, steps=5)

    swarm.kill(swarm.containers("stage")[0])
    assert len(swarm.containers()) == 5
    swarm.until_trained(peers=5, steps=5, since=swarm.heard())

    swarm.compose("up", "--detach", "--no-build", "--scale", "stage=5")  # the killed one comes back, too
    assert len(swarm.containers()) == 7
    seven = swarm.until_trained(peers=7, steps=5, since=swarm.heard())
    assert len(seven.inner_steps) == 7, "the one that came back is the peer it was, and nobody shares an identity"

    check_what_it_says(swarm, set(seven.inner_steps))

    moment = time.time()
    swarm.compose("restart", "--timeout=30")
    again = swarm.until_trained(peers=7, steps=5, started_after=moment)
    assert set(again.inner_steps) == set(seven.inner_steps), "all are the peers they were"

    swarm.compose("stop", "--timeout=30")
    print(swarm.compose("run", "--rm", "--no-deps", "bootstrap", "check", LOGS))  # fails if a microbatch counted twice


def check_what_it_says(swarm: Lab, peers: set[str]) -> None:
    """`status` from inside a container, and the health of each."""
    (data,) = swarm.containers("data")
    said = json.loads(swarm.inside(data, "skipstone", "status", "--json").splitlines()[-1])
    assert said["step"] > 0
    assert said["waiting_for"] == []
    assert {peer["peer"] for peer in said["peers"]} == peers
    for container in swarm.containers():
        swarm.inside(container, *HEALTH_CHECK)
