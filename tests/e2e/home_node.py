"""Nodes that a test starts one by one: in the places of a `HomeNetwork`, or all on the loopback of this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from node.local_swarm.setup import node_command
from node.observability.event_json import event_from_json
from node.observability.events import Event, Reach
from tests.e2e.home_network import HomeNetwork

PATIENCE_S = 120.0

Kind = TypeVar("Kind")


@dataclass(eq=False)
class WatchedNode:
    """A node whose events are read as they come."""

    seen: list[Event] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            event = event_from_json(line)
            if event is not None:
                self.seen.append(event)
                self._news.set()

    async def until(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """The first event of that kind that is wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.seen:
                    if isinstance(event, kind) and wanted(event):
                        return event
                self._news.clear()
                await self._news.wait()

    async def reached(self) -> Reach:
        """How it found that others reach it."""
        return await self.until(Reach)


@asynccontextmanager
async def node_at(
    network: HomeNetwork, where: int | str, folder: Path, link: str, *, stage: int = 1, options: tuple[str, ...] = ()
) -> AsyncIterator[WatchedNode]:
    """A node in that place, which nobody has told an address; stopped in good order at the end."""
    arguments = ("join", link, "--json", "--stop-on-eof", "--stage", str(stage), "--threads", "1", *options)
    identity = ("--identity", str(folder / f"{where}.key"))
    async with watched_node(*network.inside(where), *node_command(), *arguments, *identity) as node:
        yield node


@asynccontextmanager
async def joined(folder: Path, name: str, target: str, *options: str) -> AsyncIterator[WatchedNode]:
    """A node of this name on the loopback, with its key in the folder; stopped in good order at the end."""
    words = ("join", target, "--identity", str(folder / f"{name}.key"), "--listen", "127.0.0.1", "--threads", "1")
    told = ("--advertise", "127.0.0.1", "--json", "--stop-on-eof", "--yes")
    async with watched_node(*node_command(), *words, *told, *options) as node:
        yield node


@asynccontextmanager
async def watched_node(*command: str) -> AsyncIterator[WatchedNode]:
    """A node that this command starts with `--json --stop-on-eof`; stopped in good order at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    node = WatchedNode()
    reading = asyncio.create_task(node.read(process.stdout))
    try:
        yield node
        process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


async def asks(network: HomeNetwork, where: int | str, *arguments: str) -> tuple[int | None, dict[str, Any]]:
    """What a command with `--json` says there, and its exit code."""
    process = await asyncio.create_subprocess_exec(
        *network.inside(where),
        *node_command(),
        *arguments,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert b"Traceback" not in errors, errors.decode()
    return process.returncode, json.loads(out)


async def answering(network: HomeNetwork, link: str, reached: Reach) -> dict[str, Any]:
    """What a visitor on a public host is told by the node at home; its record may need a moment to get around."""
    addresses = [reached.address] if reached.address else []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, status = await asks(network, 1, "status", link)
            found = [peer for peer in status["peers"] if peer["peer"] == reached.peer]
            if found and found[0]["answered"] and found[0]["addresses"] == addresses:
                return dict(found[0])


def finding(report: dict[str, Any], check: str) -> dict[str, str]:
    return next(line for line in report["checks"] if line["check"] == check)


def environment() -> dict[str, str]:
    packages = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}
