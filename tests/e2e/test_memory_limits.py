"""Peers that are told how much memory they have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.local_swarm.setup import node_command
from node.model.memory_need import needs_of
from node.observability.events import NodeStatus, Step
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import ModuleId
from tests.e2e.home_node import environment, joined
from tests.e2e.small_run import PATIENCE_S, small_run, write_text

pytestmark = pytest.mark.e2e

DATA, SMALL, LARGE = (ModuleId(stage) for stage in range(3))


async def ended(folder: Path, target: str, *options: str) -> tuple[int, str]:
    """The exit code and standard error of a node that cannot stay."""
    process = await asyncio.create_subprocess_exec(
        *node_command(),
        *("join", target, "--identity", str(folder / "none.key"), "--listen", "127.0.0.1", "--json", "--yes"),
        *options,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    async with asyncio.timeout(PATIENCE_S):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize("first", ["large", "small"])
async def test_stages_go_to_those_that_have_room_for_them(tmp_path: Path, first: str) -> None:
    """The large stage takes more than the small peer has, and the large peer has room for either."""
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 12))
    needs = needs_of(manifest, DEFAULT_SLOTS)
    limits = {"small": (needs[SMALL].all + needs[LARGE].all) // 2, "large": 8 * needs[LARGE].all}
    goes_to = {"small": SMALL, "large": LARGE}
    run = tmp_path / "run.toml"
    run.write_bytes(sign_manifest(manifest, Identity.load_or_create(tmp_path / "data.key")).text)
    second = next(name for name in limits if name != first)
    async with joined(tmp_path, "data", str(run), "--stage", "0") as data:
        link = (await data.until(NodeStatus, lambda status: status.state == "serving")).link
        for nowhere in (min(needs[SMALL].all, needs[LARGE].all) - 1, 1000):
            code, said = await ended(tmp_path, link, "--no-data", "--memory-limit", str(nowhere))
            told = [line for line in said.splitlines() if line.startswith("error: ")]
            assert code == 71
            assert len(told) == 1
            assert f"the smallest, {SMALL}, takes" in told[0]
            assert f"under --memory-limit {nowhere}" in told[0]
            assert "Traceback" not in said
        async with (
            joined(tmp_path, first, link, "--no-data", "--memory-limit", str(limits[first])) as one,
        ):
            took = await one.until(NodeStatus, lambda status: status.state == "serving")
            assert took.module == str(goes_to[first])
            async with joined(tmp_path, second, link, "--no-data", "--memory-limit", str(limits[second])) as other:
                took = await other.until(NodeStatus, lambda status: status.state == "serving")
                assert took.module == str(goes_to[second])
                await data.until(Step, lambda step: step.step >= 3)
