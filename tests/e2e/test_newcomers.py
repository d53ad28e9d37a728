"""Newcomers that come at the same moment and are told no module."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.experts.router import router_file
from node.observability.events import Completed, NodeStatus
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from tests.e2e.home_network import WatchedNode, joined
from tests.e2e.round_watch import LogTail
from tests.e2e.small_run import run_of_experts

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

EXPERTS = 4
NEWCOMERS = 5


class OnOwnPath:
    """The routes of which a microbatch has come home from the expert that it was meant for."""

    def __init__(self) -> None:
        self.routes: set[tuple[int, ...]] = set()

    def are_all(self, event: Completed) -> bool:
        if event.route is not None and [hop.partition("@")[0] for hop in event.hops] == [f"1.{event.route[0]}"]:
            self.routes.add(event.route)
        return len(self.routes) == EXPERTS


def serves(node: WatchedNode) -> str | None:
    said = [event.module for event in node.seen if isinstance(event, NodeStatus) and event.state == "serving"]
    return said[-1] if said else None


async def test_five_newcomers_at_once_serve_all_of_four_experts(tmp_path: Path) -> None:
    manifest, router = run_of_experts(tmp_path / "text", experts=(EXPERTS,))
    run, logs = tmp_path / "run.toml", tmp_path / "logs"
    run.write_bytes(sign_manifest(manifest, Identity.load_or_create(tmp_path / "data.key")).text)
    router_file(run).write_bytes(router.to_bytes())
    logged = ("--log-dir", str(logs))
    async with joined(tmp_path, "data", str(run), "--stage", "0", *logged) as data:
        link = (await data.until(NodeStatus, lambda status: status.state == "serving")).link
        tail, found = LogTail(logs, Completed), OnOwnPath()
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(joined(tmp_path, f"newcomer-{number}", link, *logged))
                for number in range(NEWCOMERS)
            ]
            await tail.until(lambda _, event: found.are_all(event))
            tail.close()
            for node in nodes:
                await node.until(NodeStatus, lambda status: status.state == "serving")
            served = [serves(node) for node in nodes]
    assert {f"1.{expert}" for expert in range(EXPERTS)} <= set(served), served
    report = json.loads(CliRunner().invoke(app, ["check", str(logs), "--json"]).stdout)
    assert report["ok"], report["violations"]
    assert (report["logs"], report["ended_well"]) == (1 + NEWCOMERS, 1 + NEWCOMERS)
