"""A replica that computes and contributes honestly, and sends something else than the mean of what it was sent."""

from pathlib import Path

import pytest

from node.observability.events import Event, ReplicaAccused, RoundCommitted
from tests.e2e.lying import with_liars
from tests.e2e.small_run import Watch, small_run, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", [pytest.param("mean-reversed", marks=pytest.mark.long), "mean-elsewhere"])
async def test_a_reducer_that_lies_is_named_by_all_and_rounds_go_on_without_it(tmp_path: Path, kind: str) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 2), inner_steps=5, staleness=1)
    async with with_liars(manifest, kind, tmp_path / "logs") as (swarm, [liar], honest):
        watch = Watch(swarm)
        named: set[str] = set()

        def by_all(event: Event) -> bool:
            if isinstance(event, ReplicaAccused) and event.peer in honest:
                assert event.accused == liar, event
                named.add(event.peer)
            return named == honest

        await watch.until(by_all)
        await watch.until(lambda event: isinstance(event, RoundCommitted) and set(event.members) == honest)
        await swarm.stop()
    proofs = {event.proof for event in watch.seen if isinstance(event, ReplicaAccused) and event.peer in honest}
    assert (proofs == {""}) == (kind == "mean-reversed")
    assert {end.exit_code for end in swarm.ends.values()} == {0}
