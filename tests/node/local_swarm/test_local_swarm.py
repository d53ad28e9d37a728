"""The processes of a local swarm."""

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.local_swarm import local_swarm, swarm_progress
from node.local_swarm.child_process import MAX_STDERR_LINES, ChildEnd, ChildProcess, SpawnedProcess
from node.local_swarm.forked_nodes import ForkServer, may_fork
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSetup, LocalSwarmOptions, assign_modules, match_limits, node_command
from node.observability import events
from node.observability.events import BusySeconds as Busy
from protocol.libp2p.child_process import with_packages
from protocol.manifest.join_link import parse_link
from protocol.manifest.manifest import Manifest, manifest_from_table
from protocol.manifest.signing import read_signed_manifest
from swarm.vocabulary.errors import ConfigError, OutOfMemory
from swarm.vocabulary.types import ModuleId

ROOT = Path(__file__).parent.parent.parent.parent
STAND_IN = (sys.executable, str(Path(__file__).parent / "stand_in_node.py"))


def manifest(blocks: tuple[int, ...] = (0, 1, 1)) -> Manifest:
    model = {"vocabulary": 257, "hidden": 16, "heads": 2, "kv_heads": 1, "feed_forward": 32, "sequence": 16}
    parts = {"model": model, "stages": {"blocks": blocks}, "training": {"rows": 1, "inner_tokens": 16}}
    return manifest_from_table({"protocol": 2, "name": "test", **parts})


def local_swarm_of(peers: int, *, steps: int | None = None, stop_limit_s: float = 20.0) -> LocalSwarm:
    options = LocalSwarmOptions(peers=peers, steps=steps)
    return LocalSwarm(manifest(), options, command=STAND_IN, stop_limit_s=stop_limit_s)


async def until_step(swarm: LocalSwarm, step: int) -> list[events.Event]:
    seen: list[events.Event] = []
    async for event in swarm.events():
        seen.append(event)
        if isinstance(event, events.Step) and event.step >= step:
            break
    return seen


async def rest(swarm: LocalSwarm) -> list[events.Event]:
    return [event async for event in swarm.events()]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("peers", "blocks", "expected"),
    [
        (3, (0, 1, 1), [0, 1, 2]),
        (4, (0, 1, 2), [0, 1, 2, 2]),
        (6, (0, 2, 4), [0, 1, 2, 2, 1, 2]),
        (5, (4, 1, 1), [0, 1, 2, 0, 0]),
        (2, (1,), [0, 0]),
    ],
)
def test_every_stage_has_a_peer_and_others_go_to_most_blocks(
    peers: int, blocks: tuple[int, ...], expected: list[int]
) -> None:
    assert [module.stage for module in assign_modules(peers, blocks)] == expected
    assert " ".join(map(str, assign_modules(7, (0, 1, 2), (1, 2, 2)))) == "0.0 1.0 1.1 2.0 2.1 2.0 2.1"


def test_too_few_peers_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ConfigError, match="2 peers cannot host 3 stages") as raised:
        assign_modules(2, (0, 1, 1))
    assert "--peers 3" in raised.value.hint
    with pytest.raises(ConfigError, match="4 peers cannot host 5 modules"):
        assign_modules(4, (0, 1, 2), (1, 2, 2))


def test_the_largest_memory_is_where_most_is_needed() -> None:
    run = manifest((0, 1, 9, 3))
    modules = [ModuleId(0), ModuleId(1), ModuleId(2), ModuleId(3), ModuleId(2)]
    assert match_limits(run, modules, []) == [None] * 5
    assert match_limits(run, modules, [10**8]) == [10**8] * 5
    limits = match_limits(run, modules, [10**8 + each for each in (90, 10, 30, 20, 80)])
    assert limits == [10**8 + each for each in (30, 10, 80, 20, 90)]
    with pytest.raises(OutOfMemory, match=r"module 1\.0 takes .* under --memory-limit"):
        match_limits(run, modules, [7])
    with pytest.raises(ConfigError, match="2 memory limits do not match 5 peers"):
        match_limits(run, modules, [1, 2])


def test_the_setup_is_what_a_first_node_and_the_others_need(tmp_path: Path) -> None:
    setup = LocalSetup(manifest(), LocalSwarmOptions(peers=4, steps=7))
    first, second, *_, last = setup.peers
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_signed_manifest(Path(setup.arguments(first)[1]).read_bytes(), setup.run).author == first.peer
    assert parse_link(setup.arguments(second)[1]) == setup.link
    assert setup.link.peers[0] == f"/ip4/127.0.0.1/tcp/{first.dht_port}/p2p/{first.peer}"
    assert len({port for peer in setup.peers for port in (peer.port, peer.dht_port)}) == 8
    assert "--steps" in setup.arguments(first)
    assert "--steps" not in setup.arguments(second)
    assert (second.stage, last.stage) == (1, 1)
    assert "--checkpoint-dir" not in setup.arguments(first)
    setup.remove()
    assert not list(tmp_path.iterdir())


def test_a_node_listens_and_is_found_where_it_is_placed(tmp_path: Path) -> None:
    setup = LocalSetup(manifest(), LocalSwarmOptions(peers=3), lambda index: Deployment(host=f"10.0.0.{index}"))
    arguments = setup.arguments(setup.peers[2])
    assert {arguments[arguments.index(option) + 1] for option in ("--listen", "--advertise")} == {"10.0.0.2"}
    assert [address.split("/")[2] for address in setup.link.peers] == ["10.0.0.0", "10.0.0.1"]
    setup.remove()


def test_with_a_checkpoint_folder_the_peers_are_the_same_every_time(tmp_path: Path) -> None:
    options = LocalSwarmOptions(peers=4, checkpoint_dir=tmp_path / "out", checkpoint_every_s=5.0)
    setups = [LocalSetup(manifest(), options) for _ in range(2)]
    for setup in setups:
        setup.remove()
        arguments = setup.arguments(setup.peers[-1])
        assert arguments[arguments.index("--checkpoint-dir") + 1] == str(tmp_path / "out")
        assert arguments[arguments.index("--checkpoint-every") + 1] == "5.0"
    first, second = ([peer.peer for peer in setup.peers] for setup in setups)
    assert first == second
    assert [stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out" / "identities").iterdir()] == [0o600] * 4


def test_its_ports_are_those_of_the_last_time_or_as_asked(tmp_path: Path) -> None:
    options = LocalSwarmOptions(peers=3, checkpoint_dir=tmp_path / "out")

    def ports(**changes: int) -> list[int]:
        setup = LocalSetup(manifest((0, 1)), dataclasses.replace(options, **changes))
        setup.remove()
        return [port for peer in setup.peers for port in (peer.port, peer.dht_port)]

    assert (ports(), ports(port_base=4001)) == (ports(), [*range(4001, 4007)])


async def test_it_runs_to_its_steps_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with local_swarm_of(4, steps=5) as swarm:
        steps = []
        async for event in swarm.events():
            if isinstance(event, events.Step):
                steps.append(event.step)
            if swarm.progress.is_over:
                swarm.request_stop()
    assert steps == [1, 2, 3, 4, 5]
    summary = swarm_progress.summarize(swarm.progress)
    assert (summary.steps, summary.loss_first, summary.loss_last, summary.tokens) == (5, 5.0, 1.0, 500)
    assert summary.microbatches.completed == 5
    assert [peer.exit_code for peer in summary.peers] == [0, 0, 0, 0]
    assert [peer.module for peer in summary.peers] == ["0.0", "1.0", "2.0", "1.0"]
    assert not list(tmp_path.iterdir())


async def test_leaving_the_block_stops_the_nodes_in_good_order() -> None:
    async with local_swarm_of(3) as swarm:
        await until_step(swarm, 2)
    assert {end.exit_code for end in swarm.ends.values()} == {0}
    assert len(swarm.ends) == 3
    assert next(iter(swarm.ends)) == 0, "data nodes are asked first"
    assert all(peer.summary for peer in swarm.progress.peers.values())


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_error_or_cancellation_in_the_block_comes_out_as_it_is_and_kills_the_nodes(
    tmp_path: Path, error: type[BaseException]
) -> None:
    swarm = local_swarm_of(3)

    async def fail() -> None:
        async with swarm:
            await until_step(swarm, 1)
            if error is asyncio.CancelledError:
                failing.cancel()
                await rest(swarm)
            raise error

    failing = asyncio.create_task(fail())
    with pytest.raises(error):
        await failing
    if error is ZeroDivisionError:
        assert set(swarm.ends) == {0, 1, 2}
    assert not list(tmp_path.iterdir())


async def test_a_node_that_is_killed_is_reported_and_the_others_go_on() -> None:
    async with local_swarm_of(3) as swarm:
        seen = await until_step(swarm, 2)
        swarm.kill(1)
        while 1 not in swarm.ends:
            seen += await until_step(swarm, swarm.progress.step + 1)
        seen += await until_step(swarm, swarm.progress.step + 2)
        replacement = swarm.start_peer(1)
        while swarm.progress.peers[replacement].state != "serving":
            await until_step(swarm, swarm.progress.step + 1)
        await swarm.stop()
        seen += await rest(swarm)
    assert swarm.ends[1].exit_code == 137
    assert {index: end.exit_code for index, end in swarm.ends.items() if index != 1} == {0: 0, 2: 0, 3: 0}
    assert any(isinstance(event, events.Note) and "exit code 137" in event.message for event in seen)
    with pytest.raises(Exception, match="stopping"):
        swarm.start_peer(1)


async def test_what_a_crashed_node_said_and_lines_that_are_no_events_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_STAND_IN", "crash:2 chatter:0")
    async with local_swarm_of(3, steps=3) as swarm:
        seen = await until_step(swarm, 3)
        while 2 not in swarm.ends:
            await asyncio.wait([swarm._nodes[2]])
        swarm.request_stop()
        seen += await rest(swarm)
    messages = [event.message for event in seen if isinstance(event, events.Note)]
    assert any("ended with exit code 71" in message for message in messages)
    assert any("the cat is on fire" in message for message in messages)
    assert any("not JSON: b'hello there'" in message for message in messages)


@pytest.mark.parametrize("how", ["deaf:1", "stopped"])
async def test_a_node_that_does_not_end_is_killed_at_the_limit(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("SKIPSTONE_STAND_IN", how)
    async with local_swarm_of(3, stop_limit_s=0.4) as swarm:
        await until_step(swarm, 1)
        if how == "stopped":
            swarm.kill(1, signal.SIGSTOP)
        await swarm.stop()
    assert {index: end.exit_code for index, end in swarm.ends.items()} == {0: 0, 1: 137, 2: 0}


async def test_a_command_that_cannot_be_started_is_a_failed_node() -> None:
    async with LocalSwarm(manifest(), LocalSwarmOptions(peers=3), command=["/nonexistent"]) as swarm:
        seen = await rest(swarm)
    assert {end.exit_code for end in swarm.ends.values()} == {71}
    assert any(isinstance(event, events.Note) and "cannot start" in event.message for event in seen)


async def test_unread_events_are_bounded_and_progress_is_not_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_swarm, "MAX_UNREAD_EVENTS", 3)
    async with local_swarm_of(3, steps=20) as swarm:
        await asyncio.wait([swarm._nodes[0]])
        await swarm.stop()
        assert len(await rest(swarm)) == 3
    assert swarm.progress.step == 20
    assert not any(isinstance(event, events.InnerStep) for event in swarm._unread)


OWNER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_local_swarm import local_swarm_of, until_step

async def main():
    async with local_swarm_of(3) as swarm:
        await until_step(swarm, 1)
        print(*(child.pid for child in swarm._children.values()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_nodes_stop_when_their_owner_is_killed(tmp_path: Path) -> None:
    code = OWNER.format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE, env=environment)
    pids = [int(pid) for pid in (await owner.stdout.readline()).split()]
    assert len(pids) == 3
    owner.kill()
    await owner.wait()
    for pid in pids:
        await gone(pid)


SPAWNS_A_GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('grandchild', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""


def python(code: str) -> ChildProcess:
    return ChildProcess(SpawnedProcess([sys.executable, "-c", code], os.environ))


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie (this machine's init may be slow to reap)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    while runs(pid):
        await asyncio.sleep(0.01)


async def test_it_stops_when_asked_and_its_output_is_read() -> None:
    child = python("import sys; print('hello', flush=True); sys.stdin.read(); print('bye'); sys.exit(3)")
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        child.ask_to_stop()

    end = await child.follow(on_line)
    assert (lines, end.exit_code) == ([b"hello", b"bye"], 3)
    child.signal_group(signal.SIGKILL)  # too late, and harmless


async def test_stderr_is_kept_bounded() -> None:
    end = await python("import sys; [print(n, 'x' * 5000, file=sys.stderr) for n in range(500)]; 1/0").follow(print)
    assert (end.exit_code, len(end.stderr)) == (1, MAX_STDERR_LINES)
    assert end.stderr[-1].startswith("ZeroDivisionError")
    assert max(map(len, end.stderr)) <= 1000


async def test_an_endless_line_is_dropped_and_the_next_one_read() -> None:
    lines: list[bytes] = []
    await python("print('x' * 1_000_000); print('after')").follow(lines.append)
    assert lines[-1] == b"after"
    assert max(map(len, lines)) <= 128 * 1024


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"])
async def test_what_a_child_has_started_ends_with_it(then: str) -> None:
    child = python(SPAWNS_A_GRANDCHILD.format(then=then))
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        if len(lines) == 2 and "sleep" in then:
            os.kill(child.pid, signal.SIGKILL)  # the child alone, not its group

    await child.follow(on_line)
    await gone(next(int(line) for line in lines if line.isdigit()))


async def test_cancelling_kills_it() -> None:
    child = python(SPAWNS_A_GRANDCHILD.format(then="time.sleep(600)"))
    started = asyncio.Event()
    following = asyncio.create_task(child.follow(lambda _: started.set()))
    await started.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    await gone(child.pid)


class Swarm:
    """Feeds events and keeps the state and what was told outward."""

    def __init__(self, *stages: int, target: int | None = None) -> None:
        self.state = swarm_progress.SwarmProgress(stages=max(stages) + 1, target=target)
        self.told: list[events.Event] = []
        for index, stage in enumerate(stages):
            self.state = swarm_progress.peer_started(self.state, index, stage, f"peer-{index}")

    def take(self, index: int, event: events.Event, now: float = 0.0) -> None:
        progressed = swarm_progress.apply(self.state, index, event, now)
        self.state = progressed.state
        self.told += progressed.events

    def step(self, index: int, step: int, loss: float, tokens: int, now: float = 0.0) -> None:
        self.take(index, events.Step(step, loss, tokens, 10.0, f"peer-{index}"), now)

    def exits(self, index: int, code: int) -> None:
        progressed = swarm_progress.peer_exited(self.state, index, code)
        self.state = progressed.state
        self.told += progressed.events

    @property
    def steps(self) -> list[events.Step]:
        return [event for event in self.told if isinstance(event, events.Step)]


def test_a_step_is_done_when_every_data_node_has_reported_it_and_its_loss_is_weighted_by_tokens() -> None:
    swarm = Swarm(0, 1)
    swarm.step(0, 1, 5.0, 100, now=10.0)
    swarm.step(0, 2, 4.0, 200, now=12.0)
    assert swarm.steps == [events.Step(1, 5.0, 100, 10.0, "peer-0"), events.Step(2, 4.0, 200, 50.0, "peer-0")]
    assert (swarm.state.loss_first, swarm.state.loss_last) == (5.0, 4.0)
    swarm = Swarm(0, 1, 0)
    swarm.step(0, 1, 5.0, 300)
    assert not swarm.steps
    swarm.step(2, 1, 1.0, 100)
    (step,) = swarm.steps
    assert (step.step, step.loss, step.tokens, step.peer) == (1, pytest.approx(4.0), 400, "swarm")


def test_a_data_node_that_dies_is_not_waited_for_but_its_work_counts() -> None:
    swarm = Swarm(0, 0)
    swarm.step(0, 1, 4.0, 100)
    swarm.step(1, 1, 2.0, 100)
    swarm.step(1, 2, 2.0, 200)
    swarm.exits(0, 137)
    assert [step.step for step in swarm.steps] == [1, 2]
    assert (swarm.state.tokens, swarm.state.peers[0].state) == (300, "failed")
    swarm.step(1, 3, 1.0, 300)
    assert swarm.steps[-1].step == 3


def test_a_silent_data_node_is_left_behind_after_max_lag_and_taken_up_again() -> None:
    swarm = Swarm(0, 0)
    for step in range(1, swarm_progress.MAX_LAG + 3):
        swarm.step(0, step, 3.0, 10 * step)
    assert swarm.steps[-1].step == swarm_progress.MAX_LAG + 2
    swarm.step(1, 1, 9.0, 10)
    assert swarm.state.tokens == 10 * (swarm_progress.MAX_LAG + 2) + 10
    swarm.step(1, swarm_progress.MAX_LAG + 2, 9.0, 20)
    swarm.step(0, swarm_progress.MAX_LAG + 3, 3.0, 10 * (swarm_progress.MAX_LAG + 3))
    assert swarm.steps[-1].step == swarm_progress.MAX_LAG + 2, "now it keeps up, so it is waited for"
    swarm.step(1, swarm_progress.MAX_LAG + 3, 1.0, 30)
    assert (swarm.steps[-1].step, swarm.steps[-1].loss) == (swarm_progress.MAX_LAG + 3, 2.0)
    assert not swarm.state.pending


def test_who_came_late_goes_on_counting_when_those_before_it_are_gone() -> None:
    swarm = Swarm(0, 0)
    for step in range(1, 31):
        swarm.step(0, step, 5.0, 10 * step)
    swarm.step(1, 1, 4.0, 10)
    assert swarm.state.step == 30
    swarm.exits(0, -9)
    swarm.step(1, 2, 3.0, 20)
    swarm.step(1, 3, 2.0, 30)
    assert [(step.step, step.loss) for step in swarm.steps[-2:]] == [(31, 3.0), (32, 2.0)]
    assert swarm.state.tokens == 330


def test_the_run_is_over_at_its_target_or_without_data_nodes() -> None:
    swarm = Swarm(0, 1, target=1)
    assert not swarm.state.is_over
    swarm.step(0, 1, 3.0, 10)
    assert swarm.state.is_over
    swarm = Swarm(0, 1)
    swarm.exits(1, 1)
    assert not swarm.state.is_over
    swarm.exits(0, 1)
    assert swarm.state.is_over


def test_what_a_peer_says_of_itself_is_kept() -> None:
    swarm = Swarm(0, 1)
    swarm.take(1, events.NodeStatus("12D3x", "1.0", "serving", "127.0.0.1:1", "link"))
    swarm.take(1, events.InnerStep("12D3x", "1.0", 7, 4, 1.0, 1e-3))
    swarm.take(1, events.Load("12D3x", "1.0", 4, 3, math.nan))
    peer = swarm.state.peers[1]
    assert (peer.peer, peer.module, peer.state, peer.inner_steps) == ("12D3x", "1.0", "serving", 7)
    assert peer.tokens_per_s is None
    swarm.take(1, events.NodeStatus("12D3x", "2.0", "joining", "127.0.0.1:1", "link"))
    assert swarm.state.peers[1].stage == 2, "it has moved"
    swarm.take(1, events.NodeStatus("12D3x", None, "visiting", "127.0.0.1:1", "link"))
    assert swarm.state.peers[1].stage == 2


def test_several_data_nodes_wait_for_one_module_once() -> None:
    swarm = Swarm(0, 0)
    swarm.take(0, events.Waiting("2.0", "no peer"))
    swarm.take(1, events.Waiting("2.0", "no peer"))
    swarm.take(0, events.Resumed("2.0"))
    swarm.take(1, events.Resumed("2.0"))
    assert swarm.told == [events.Waiting("2.0", "no peer"), events.Resumed("2.0")]
    assert not swarm.state.waiting


def test_other_events_pass_through_and_notes_are_bounded() -> None:
    swarm = Swarm(0)
    change = events.PeerChange("12D3y", "down", "gone")
    swarm.take(0, change)
    assert swarm.told == [change]
    for number in range(swarm_progress.MAX_NOTES + 3):
        swarm.state = swarm_progress.noted(swarm.state, events.Note("info", str(number)), 0.0).state
    assert [note.message for _, note in swarm.state.notes] == [str(n) for n in range(3, swarm_progress.MAX_NOTES + 3)]


def test_the_summary_adds_up() -> None:
    swarm = Swarm(0, 1, 0)
    for step in range(1, 4):
        swarm.step(0, step, 6.0 - step, 100 * step, now=float(step))
        swarm.step(2, step, 6.0 - step, 100 * step, now=float(step))
    for index in (0, 2):
        counts = events.MicrobatchCounts(10, 9, 1, 0)
        swarm.take(index, events.NodeSummary(f"peer-{index}", "0.0", 3, 5.0, 3.0, 300, 1.0, counts, 9, Busy()))
        swarm.exits(index, 0)
    swarm.exits(1, 137)
    summary = swarm_progress.summarize(swarm.state)
    assert (summary.steps, summary.loss_first, summary.loss_last, summary.tokens) == (3, 5.0, 3.0, 600)
    assert summary.tokens_per_s == pytest.approx(200.0)
    assert summary.microbatches == events.MicrobatchCounts(20, 18, 2, 0)
    peers = [(peer.peer, peer.accumulated, peer.exit_code) for peer in summary.peers]
    assert peers == [("peer-0", 9, 0), ("peer-1", 0, 137), ("peer-2", 9, 0)]
    empty = swarm_progress.summarize(swarm_progress.SwarmProgress(stages=2))
    assert (empty.steps, empty.loss_first, empty.tokens_per_s, empty.peers) == (0, None, 0.0, ())


def test_what_is_lost_with_its_last_peers_is_counted_once_a_module() -> None:
    swarm = Swarm(0, 1, 1)
    swarm.take(0, events.LastPeer("peer-0", "0.0", "saved"))
    swarm.take(1, events.LastPeer("peer-1", "1.0", None))
    swarm.take(2, events.LastPeer("peer-2", "1.0", None))
    assert swarm.state.lost == {"1.0"}
    assert not swarm.state.notes


FORKS = pytest.mark.skipif(not may_fork(node_command()), reason="nodes are forked on Linux only")


@pytest.fixture
def waiting(tmp_path: Path) -> list[str]:
    os.mkfifo(tmp_path / "instance.json")
    return ["simulate", "--instance", str(tmp_path / "instance.json")]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(with_packages(os.environ, str(ROOT), OMP_NUM_THREADS="1"))
    yield server
    server.close()


async def forked(server: ForkServer, *arguments: str) -> ChildProcess:
    return ChildProcess(await server.start(arguments))


async def run(server: ForkServer, *arguments: str) -> tuple[ChildEnd, list[bytes]]:
    said: list[bytes] = []
    return await (await forked(server, *arguments)).follow(said.append), said


@FORKS
async def test_it_does_what_the_command_does_and_ends_with_its_exit_code(server: ForkServer) -> None:
    well, wrong = await asyncio.gather(run(server, "--version"), run(server, "no-such-command"))
    assert well[0].exit_code == 0
    assert well[1][0].startswith(b"skipstone ")
    assert wrong[0].exit_code == 2
    assert any("no-such-command" in line for line in wrong[0].stderr)


@FORKS
async def test_it_leads_a_group_and_holds_its_own_descriptors_only(server: ForkServer, waiting: list[str]) -> None:
    first, second = await forked(server, *waiting), await forked(server, *waiting)
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(child.follow(lambda _: None)) for child in (first, second)]
        for child in (first, second):
            assert os.getpgid(child.pid) == child.pid
        async with asyncio.timeout(30):  # its streams, and nothing of the server's or of the other's
            while len(shared(second.pid)) > 3:
                await asyncio.sleep(0.02)
        first.signal_group(signal.SIGKILL)
        second.terminate()
    assert [end.result().exit_code for end in ends] == [128 + signal.SIGKILL, 128 + signal.SIGTERM]
    await gone(first.pid)
    await gone(second.pid)


@FORKS
async def test_nodes_outlive_their_server_and_end_with_their_exit_codes(server: ForkServer, waiting: list[str]) -> None:
    """The last of this module: it ends the server that the tests share."""
    child = await forked(server, *waiting)
    following = asyncio.create_task(child.follow(lambda _: None))
    server.close()
    child.terminate()
    assert (await following).exit_code == 128 + signal.SIGTERM
    await gone(child.pid)
    assert await server.start(["--version"]) is None


def shared(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {target for target in found if target.startswith(("socket:", "pipe:"))}
