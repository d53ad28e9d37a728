"""One replica of three lies where members of a round once believed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.observability.events import InnerStep
from tests.e2e.lying import with_liar
from tests.e2e.round_watch import watching
from tests.e2e.small_run import events_of, small_run, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODULE = "1.0"
ROUNDS = 7
SCHEDULE = {"kind": "cosine", "warmup_steps": 5, "total_steps": 5000, "final_ratio": 0.0}


@pytest.mark.parametrize(
    "kind",
    [
        "forged-rosters",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("tokens", "last-number", "steps")),
    ],
)
async def test_a_liar_ends_neither_rounds_nor_the_model_nor_the_learning_rate(tmp_path: Path, kind: str) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 2), inner_steps=5, staleness=1, schedule=SCHEDULE)
    logs = tmp_path / "logs"
    async with with_liar(manifest, kind, logs) as (swarm, _, honest), watching(swarm, MODULE) as watch:
        first = (await watch.all_together(honest, after=0)).round
        await watch.all_at(honest, first + ROUNDS)
        await watch.loss_below(3.5)  # of 5.5 at the start; a schedule that has run out learns nothing
        await swarm.stop()
        assert {swarm.ends[index].exit_code for index in range(3)} == {0}
        held = watch.digests(honest)
        assert {number: len(digests) for number, digests in held.items()} == dict.fromkeys(held, 1)
        assert max(watch.round_of(peer) for peer in honest) < 1000, "the liar's number is nobody's"
    events = events_of(logs)
    steps = [event.step for event in events if isinstance(event, InnerStep) and event.peer in honest]
    assert max(steps) < 1000
