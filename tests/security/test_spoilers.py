"""A replica that spoils what goes through it, and keeps to all rules otherwise: real processes."""

from pathlib import Path
from statistics import median

import pytest

from node.observability.events import Completed, Event, Note, Step
from swarm.vocabulary.types import PeerId, short
from tests.e2e.lying import with_liars
from tests.e2e.small_run import Watch, events_of, small_run, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def number_of(event: Completed) -> int:
    return int(event.microbatch.rpartition("#")[2])


async def test_data_nodes_go_round_a_replica_whose_microbatches_have_greater_losses(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 2), inner_steps=5, staleness=1)
    logs = tmp_path / "logs"

    def excludes(event: Event) -> bool:
        return isinstance(event, Note) and "excluded from paths" in event.message

    async with with_liars(manifest, "spoils", logs, honest=1) as (swarm, [liar], _):  # two convict it in rounds first
        watch = Watch(swarm)
        found = await watch.until(excludes)
        assert isinstance(found, Note)
        assert short(PeerId(liar)) in found.message
        await watch.step(swarm.progress.step + 40)
        await swarm.stop()
    events = events_of(logs)
    alarm = next(index for index, event in enumerate(events) if excludes(event))
    in_flight = manifest.microbatches_per_step * (1 + manifest.training.staleness)
    before = [number_of(event) for event in events[:alarm] if isinstance(event, Completed)]
    completed = [event for event in events[alarm:] if isinstance(event, Completed)]
    launched_later = [event for event in completed if number_of(event) > max(before) + in_flight]
    assert len(launched_later) > 3 * in_flight
    assert not any(liar in hop for event in launched_later for hop in event.hops)
    losses = [event.loss for event in events[alarm:] if isinstance(event, Step)]
    assert median(losses[-10:]) < 3.0, "of 5.5 at the start"
