"""Nodes that host several modules, beside nodes of one module; and runs of one stage."""

import asyncio
import dataclasses
import gc
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from node.context.options import NodeOptions
from node.export.swarm_source import open_swarm
from node.export.writer import export
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions
from node.model.shapes import parameter_shapes
from node.observability.events import (
    Abandoned,
    CaughtUp,
    Completed,
    Event,
    InnerStep,
    NodeStatus,
    NodeSummary,
    Note,
    PeerChange,
    RoundCommitted,
    Step,
    Waiting,
)
from node.routing.launcher import STRAGGLER
from node.runtime import hosting
from node.runtime.leave_socket import ask_to_leave
from node.runtime.limits import write_limits
from node.runtime.node import run_node
from protocol.identity.keys import Identity
from protocol.manifest.join_link import parse_link
from protocol.manifest.signing import sign_manifest
from protocol.transport.link import Link
from swarm.vocabulary.types import ModuleId
from swarm.workload.limits import Limits
from tests.e2e.small_run import (
    PATIENCE_S,
    Watch,
    checked,
    events_of,
    peers_of,
    small_run,
    whole_lines,
    write_documents,
    write_text,
)
from tests.kit.events import KeptEvents

pytestmark = pytest.mark.e2e


def completed_in(logs: Path) -> list[Completed]:
    return [event for event in events_of(logs) if isinstance(event, Completed)]


async def test_whole_path_nodes_and_nodes_of_one_module_train_though_one_of_each_is_killed(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), inner_steps=4)
    stages = ("0-2", "0-2", "1", "2")
    listing = (sys.executable, "-P", "-m", "tests.e2e.sent_tensors", str(tmp_path / "sent"))
    options = LocalSwarmOptions(peers=4, stages=stages, threads=1, log_dir=tmp_path / "logs")
    deployments: Deployments = lambda index: Deployment(command=None if index else listing)  # noqa: E731
    async with LocalSwarm(manifest, options, deployments=deployments) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        own = peers_of(swarm.peers[0], 3)
        for index in (1, 2):
            lost = swarm.peers[index].peer
            swarm.kill(index, signal.SIGKILL)
            await watch.until(lambda event, lost=lost: event == PeerChange(lost, "down", getattr(event, "reason", "")))
            await watch.step(swarm.progress.step + 6)
        swarm.request_stop()
        await watch.to_the_end(swarm)
        assert {index: end.exit_code for index, end in swarm.ends.items()} == {0: 0, 1: 137, 2: 137, 3: 0}
    assert checked(tmp_path / "logs")["logs"] == 3 + 3 + 1 + 1
    sent = [line.split() for line in whole_lines(tmp_path / "sent")]
    assert not own & {receiver for _, receiver in sent}, "nothing is sent to a peer of the same process"
    done = [e for e in events_of(tmp_path / "logs") if isinstance(e, Completed) and e.peer in own]
    at_home = {e.microbatch for e in done if all(hop.rpartition("@")[2] in own for hop in e.hops)}
    assert at_home - {microbatch for microbatch, _ in sent}, "no microbatch stayed in the node"


async def test_workers_of_whole_paths_share_the_documents_by_path_and_meet_in_rounds_only(tmp_path: Path) -> None:
    made = small_run(write_documents(tmp_path / "text"), blocks=(0, 1), attention="documents", inner_steps=4)
    manifest = made.model_copy(update={"stages": made.stages.model_copy(update={"experts": 2, "workers": "paths"})})
    options = LocalSwarmOptions(peers=3, stages=("0-1",) * 3, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)
        await watch.under_way(swarm)
        nodes = {peer: node.index for node in swarm.peers for peer in peers_of(node, 2)}
        before = set[str]()

        def active() -> set[int]:
            return {nodes[e.peer] for e in completed_in(tmp_path / "logs") if e.microbatch not in before}

        while active() < {0, 1, 2}:
            await watch.step(swarm.progress.step + 1)
        swarm.kill(2)
        await watch.until(lambda event: isinstance(event, Note) and "ended with exit code" in event.message)
        before = {event.microbatch for event in completed_in(tmp_path / "logs")}
        while active() < {0, 1}:
            await watch.step(swarm.progress.step + 1)
        await watch.until(lambda e: isinstance(e, RoundCommitted) and e.module == "0.0" and len(e.members) > 1)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    checked(tmp_path / "logs")
    done = [(event, *event.hops[0].split("@")) for event in completed_in(tmp_path / "logs")]
    assert all(nodes[peer] == nodes[event.peer] for event, _, peer in done), "a path left its node"
    paths = {(nodes[peer], module) for _, module, peer in done}
    assert len({node for node, _ in paths}) == len(paths), "a worker has one path"
    assert {module for _, module in paths} == {"1.0", "1.1"}
    assert active() == {0, 1}


async def test_a_run_of_one_stage_goes_on_when_a_node_is_killed_and_another_joins(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(2,), inner_steps=4)
    options = LocalSwarmOptions(peers=3, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)

        async def round_of(*indices: int) -> RoundCommitted:
            members = {swarm.peers[index].peer for index in indices}
            # A node that has just joined is a member of rounds before it contributes.
            event = await watch.until(
                lambda event: isinstance(event, RoundCommitted) and {*event.members} == {*event.contributors} == members
            )
            assert isinstance(event, RoundCommitted)
            return event

        first = await round_of(0, 1, 2)
        assert first.module == "0.0"
        swarm.kill(1)
        later = await round_of(0, 2)
        added = swarm.start_peer(0)
        await watch.until(lambda event: isinstance(event, CaughtUp) and event.peer == swarm.peers[added].peer)
        last = await round_of(0, 2, added)
        assert first.round < later.round < last.round
        async with open_swarm(swarm.link, lambda *progress: None) as source:
            await export(source, tmp_path / "model")
            assert list(source.versions) == [ModuleId(0)]
        swarm.request_stop()
        await watch.to_the_end(swarm)
    losses = watch.losses()
    assert min(losses[-5:]) < losses[0] - 0.5
    assert {index: end.exit_code for index, end in swarm.ends.items() if end.exit_code} == {1: 137}
    assert checked(tmp_path / "logs")["completed"] > 0
    reasons = {event.reason for event in events_of(tmp_path / "logs") if isinstance(event, Abandoned)}
    assert reasons <= {STRAGGLER}, "on a busy machine one may be a straggler; none is lost"


class Heard(KeptEvents):
    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        async with asyncio.timeout(PATIENCE_S):
            while (found := next(filter(wanted, self.events), None)) is None:
                await asyncio.sleep(0.05)
        return found

    async def more_steps(self, count: int) -> None:
        done = sum(isinstance(event, Step) for event in self.events)
        await self.until(lambda event: isinstance(event, Step) and event.step >= done + count)


async def test_a_node_hosts_an_unserved_module_until_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = Counter[str](), Link.send

    async def counted(self: Link, message: object, *rest: object) -> None:
        sent[type(message).__name__] += 1
        await send(self, message, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "send", counted)
    monkeypatch.setattr(hosting, "ALONE_S", 1.0)
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=40)
    path, key = tmp_path / "run.toml", tmp_path / "first.key"
    own = Identity.create(key)
    path.write_bytes(sign_manifest(manifest, own).text)
    heard, heard_later = Heard(), Heard()

    def run(heard: Heard, stop: asyncio.Event, **options: Any) -> Coroutine[Any, Any, None]:
        here = {"listen": "127.0.0.1", "device": "cpu", "log_dir": tmp_path / "logs"}
        return run_node(NodeOptions(**here, **options), heard, stop)

    async with asyncio.TaskGroup() as tasks:
        stop, stop_later = asyncio.Event(), asyncio.Event()
        first = tasks.create_task(run(heard, stop, link=None, manifest_path=path, identity_path=key))
        await heard.more_steps(3)
        notes = [event.message for event in heard.events if isinstance(event, Note)]
        assert "module 1.0: nobody serves it, so this node hosts it as well" in notes
        assert not sent, "all paths are in one process"
        [link, *_] = [event.link for event in heard.events if isinstance(event, NodeStatus)]
        later = {"link": parse_link(link), "manifest_path": None, "identity_path": tmp_path / "later.key", "stage": "1"}
        tasks.create_task(run(heard_later, stop_later, **later))
        given_up = await heard.until(lambda event: isinstance(event, NodeSummary) and event.module == "1.0")
        assert isinstance(given_up, NodeSummary)
        assert given_up.peer == own.for_module(1).peer
        await heard.more_steps(3)
        stop.set()
        await first
        stop_later.set()
    assert sent["Forward"] > 0
    assert checked(tmp_path / "logs")["ended_well"] == 3


def paused_states() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("skipstone-paused-*"))


def parameters_alive() -> int:
    gc.collect()
    return sum(type(each) is nn.Parameter for each in gc.get_objects())


async def test_a_paused_node_lets_its_module_go_and_goes_on_where_it_was(tmp_path: Path) -> None:
    before = paused_states()
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1), inner_steps=4)
    path, keys = tmp_path / "run.toml", [tmp_path / "data.key", tmp_path / "hop.key"]
    path.write_bytes(sign_manifest(manifest, Identity.create(keys[0])).text)
    data, hop, stop = Heard(), Heard(), asyncio.Event()
    here: dict[str, Any] = {"listen": "127.0.0.1", "device": "cpu", "log_dir": tmp_path / "logs"}

    async def asked(key: Path, request: str) -> None:
        await ask_to_leave(key, PATIENCE_S, request)

    def paused(event: Event, why: str = "by `skipstone pause`") -> bool:
        return isinstance(event, Note) and f"is paused: {why}" in event.message

    async with asyncio.TaskGroup() as tasks:
        own = NodeOptions(link=None, manifest_path=path, identity_path=keys[0], stage="0", **here)
        tasks.create_task(run_node(own, data, stop))
        await data.until(lambda event: isinstance(event, NodeStatus) and event.state == "serving")
        [link, *_] = [event.link for event in data.events if isinstance(event, NodeStatus)]
        beside = NodeOptions(link=parse_link(link), manifest_path=None, identity_path=keys[1], stage="1", **here)
        settings = tmp_path / "settings.toml"
        tasks.create_task(run_node(dataclasses.replace(beside, settings=settings), hop, stop))
        await data.more_steps(3)
        waited = sum(isinstance(event, Waiting) for event in data.events)
        both = parameters_alive()
        await asked(keys[1], "pause")
        await hop.until(paused)
        assert parameters_alive() <= both - len(parameter_shapes(manifest, ModuleId(1)))
        await data.until(lambda _: sum(isinstance(event, Waiting) for event in data.events) > waited)
        last = max(event.step for event in hop.events if isinstance(event, InnerStep))
        await asked(keys[1], "resume")
        await hop.until(lambda event: isinstance(event, InnerStep) and event.step == last + 1)
        await data.more_steps(3)
        ours = psutil.Process().name()
        write_limits(settings, Limits(programs=(ours,)))
        await hop.until(partial(paused, why=f"{ours} runs"))
        await asked(keys[1], "resume")  # only its owner's pause: the limits still say no
        write_limits(settings, Limits(upload=500))
        await data.more_steps(3)
        await asked(keys[0], "pause 1")  # it goes on by itself
        await data.until(paused)
        steps = [event for event in data.events if isinstance(event, Step)]
        await data.until(lambda event: isinstance(event, Step) and event.step == steps[-1].step + 3)
        stop.set()
    tokens = [event.tokens for event in data.events if isinstance(event, Step)]
    assert tokens == sorted(tokens)
    assert paused_states() == before
    assert checked(tmp_path / "logs")["ended_well"] == 2
