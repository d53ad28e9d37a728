"""The short form of `benchmarks/soak.py`."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.soak import Soak, verdict
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from tests.e2e.small_run import small_run, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STAGES, PEERS = 3, 6


async def test_a_swarm_under_churn_goes_on_and_adds_up(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), inner_steps=8, staleness=1)
    logs = tmp_path / "logs"
    options = LocalSwarmOptions(peers=PEERS, steps=None, threads=1, log_dir=logs)
    async with LocalSwarm(manifest, options) as swarm:
        soak = Soak(swarm, STAGES, random.Random(3))
        await soak.run(every_s=None, tokens=5_000)
        before = swarm.progress.tokens
        await soak.run(every_s=4.0, until_s=18.0)
        assert swarm.progress.tokens > before
        await swarm.stop()
    assert soak.failures() == {}
    assert soak.account.killed + soak.account.joined > 3
    assert soak.account.rounds > 0
    checked = verdict(logs)
    assert checked["exit_code"] == 0, json.dumps(checked, indent=1)
