"""`status` and `eval` of a running swarm, and who may not join it."""

from __future__ import annotations

import asyncio
import io
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from node.cli.views.status_view import status_headline, status_table
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.network.client import query_evaluation, query_status
from node.network.loss_report import WHOLE_MODEL, AskedPaths
from protocol.identity.keys import Identity
from protocol.manifest.join_link import JoinLink
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError, ManifestError, Unreachable
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = pytest.mark.e2e


async def test_a_running_swarm_tells_of_itself(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1))
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=3, threads=1)) as swarm:
        watch = Watch(swarm)
        await watch.step(3)
        status = await query_status(swarm.link)
        assert status.run == swarm.link.run
        assert sorted(str(peer.module) for peer in status.peers) == ["0.0", "1.0", "2.0"]
        assert all(peer.state == "serving" and peer.answered is not None for peer in status.peers)
        assert status.step is not None
        assert status.step >= 3
        assert status.loss is not None
        assert 0 < status.loss < 7
        assert status.microbatches.duplicated == 0
        shown = Console(record=True, width=200, file=io.StringIO())
        shown.print(status_headline(status), status_table(status))
        assert all(peer.peer[-6:] in shown.export_text(clear=False) for peer in status.peers)
        before = await query_evaluation(swarm.link, 2)
        assert before["microbatches"] == 2
        assert before["tokens"] == 2 * manifest.microbatch_tokens
        assert math.isfinite(before["loss"])
        assert [subset["stages"] for subset in before["subsets"]] == [[1, 2]]
        with pytest.raises(Unreachable, match="within 1 s"):
            await query_status(JoinLink(_another_run(tmp_path), swarm.link.peers), patience_s=1.0)


async def test_any_part_of_a_running_swarm_can_be_measured(tmp_path: Path) -> None:
    """Of a run whose own paths skip a stage: the whole model, more than a path of training, and parts of it."""
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), per_path=1)
    options = LocalSwarmOptions(peers=3, threads=1)
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)
        await watch.step(3)
        for paths, stages in ((WHOLE_MODEL, [[1, 2]]), (AskedPaths(1), [[1]]), (AskedPaths(1, True), [[1], [2]])):
            answer = await query_evaluation(swarm.link, 1, paths)
            assert [subset["stages"] for subset in answer["subsets"]] == stages
            assert all(0 < subset["loss"] < 7 for subset in answer["subsets"])
        with pytest.raises(ConfigError, match="2 after stage 0"):
            await query_evaluation(swarm.link, 1, AskedPaths(3))


async def test_a_manifest_of_another_run_is_refused_at_once(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    signed = sign_manifest(manifest, Identity.generate())
    tampered = tmp_path / "tampered.toml"
    tampered.write_bytes(signed.text.replace(b"seed = 11", b"seed = 12"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "node", "join", str(tampered), "--identity", str(tmp_path / "key")),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == ManifestError.exit_code
    assert b"signature" in errors
    assert b"Traceback" not in errors


def _another_run(tmp_path: Path) -> str:
    return sign_manifest(small_run(tmp_path / "text", blocks=(0, 2)), Identity.generate()).run
