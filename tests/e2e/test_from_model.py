"""A swarm that starts from an existing model: one node has the folder, the others get their modules by content."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.cli.manifests import starting_from
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import CatchingUp
from node.start.cut_model import open_start
from tests.e2e.small_run import (
    Watch,
    assert_same_parameters,
    small_run,
    solo_losses,
    write_text,
)
from tests.node.start.tiny_models import write_folder

pytestmark = pytest.mark.e2e

STEPS = 20


async def test_a_swarm_that_starts_from_a_model_equals_one_process(tmp_path: Path) -> None:
    """With tied embeddings, norms of heads and biases, and with rounds, so that the first anchor is built upon."""
    write_folder(tmp_path / "model", "qwen3, tied, with biases", tie_word_embeddings=True)
    base = small_run(write_text(tmp_path / "text"), blocks=(0, 2, 2), inner_steps=4)
    manifest = starting_from(tmp_path / "model", base, is_default=False, keeps_blocks=True)
    solo = solo_losses(manifest, tmp_path / "solo", STEPS, start=open_start(manifest, tmp_path / "model"))
    options = LocalSwarmOptions(
        peers=3, steps=STEPS, threads=1, checkpoint_dir=tmp_path / "swarm", model=tmp_path / "model"
    )
    async with LocalSwarm(manifest, options) as swarm:
        watch = Watch(swarm)
        await watch.to_the_end(swarm)
    assert watch.losses() == pytest.approx(solo, abs=1e-4)
    assert solo[-1] < solo[0] - 0.3, "nothing was learnt, so that equal losses would show nothing"
    fetched = {event.module: event.total_bytes for event in watch.seen if isinstance(event, CatchingUp)}
    assert fetched.keys() == {"1.0", "2.0"}, "the first node alone has the folder"
    assert_same_parameters(manifest, tmp_path / "swarm", tmp_path / "solo")
