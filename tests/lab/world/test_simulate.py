"""`skipstone simulate`: every arm reports the same figures, and a schedule is replayed as it is given."""

import json
from pathlib import Path

import pytest

from lab.simulate import read_instance, read_schedule, simulated
from swarm.vocabulary.errors import ConfigError

TWENTY = Path(__file__).parent / "twenty_peers.json"
SECONDS = 60.0


def schedule(tmp_path: Path, stages: tuple[int, ...]) -> Path:
    """One path for each data node, through the first peer of each stage."""
    table = json.loads(TWENTY.read_text())
    paths = [{"data_node": peer, "peers": [table["stages"][at][0] for at in stages]} for peer in table["stages"][0]]
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({"paths": paths}))
    return path


@pytest.mark.parametrize("arm", ["ours", "swarm", "greedy"])
def test_arms_complete_microbatches_and_count_their_visits(arm: str) -> None:
    done = simulated(read_instance(TWENTY), arm, SECONDS, 1)
    assert done.completed > 20
    assert done.pace == done.completed / SECONDS
    assert (done.visits_least, done.visits_most) == (min(done.visits.values()), max(done.visits.values()))
    assert set(done.visits) == {"1", "2", "3", "4", "5"}
    assert done.planning_cpu_seconds > 0


def test_the_microbatches_of_a_data_node_that_overstates_its_visits_are_counted_apart() -> None:
    honest, lied = (simulated(read_instance(TWENTY), "ours", SECONDS, 1, lie=lie) for lie in (1.0, 10.0))
    assert honest.honest == honest.completed
    assert 0 < lied.honest < lied.completed


def test_a_schedule_is_replayed(tmp_path: Path) -> None:
    done = simulated(read_instance(TWENTY), f"replay:{schedule(tmp_path, (1, 2, 4))}", SECONDS, 1)
    assert done.completed > 10
    assert done.visits["3"] == done.visits["5"] == 0 < done.visits["1"]


def test_what_is_no_arm_or_no_schedule_is_said_in_a_sentence(tmp_path: Path) -> None:
    problem = read_instance(TWENTY)
    with pytest.raises(ConfigError, match="'fastest' is not an arm"):
        simulated(problem, "fastest", SECONDS, 1)
    with pytest.raises(ConfigError, match="illegal path"):
        read_schedule(schedule(tmp_path, (1, 2)), problem)
    with pytest.raises(ConfigError, match="cannot read"):
        read_schedule(tmp_path / "none.json", problem)
