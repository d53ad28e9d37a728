"""Which replicas a data node leaves out for the losses of what went through them, and which it does not."""

from collections.abc import Callable
from random import Random

import pytest

from swarm.routing.attribution import AT_LEAST, EARLIEST, LossOutliers, Outlier
from swarm.vocabulary.types import Hop, ModuleId, Path, PeerId

ROUND = 20  # Microbatches from one round to the next, of each replica
DATA_NODE = PeerId("data")
Harm = Callable[[frozenset[str]], float]


def path_through(*peers: str) -> Path:
    """Named as `stage letter`: a1 is a replica of stage 1."""
    return Path(DATA_NODE, tuple(Hop(ModuleId(int(peer[1:])), PeerId(peer)) for peer in peers))


def falling(number: int) -> float:
    return 0.3 + 5.2 * 0.985**number


def found_by(
    outliers: LossOutliers,
    harm: Harm,
    stages: list[list[str]],
    *,
    random: Random,
    microbatches: int = 400,
    noise: float = 0.05,
    usual: Callable[[int], float] = falling,
) -> list[tuple[int, Outlier]]:
    """Microbatches on random paths; a replica that is left out gets no more."""
    found: list[tuple[int, Outlier]] = []
    out: set[str] = set()
    for number in range(microbatches):
        peers = [random.choice([peer for peer in replicas if peer not in out] or replicas) for replicas in stages]
        loss = usual(number) * random.lognormvariate(0, noise) + harm(frozenset(peers))
        outlier = outliers.returned(path_through(*peers), loss)
        if outlier is not None:
            found.append((number, outlier))
            out.add(outlier.peer)
    return found


def peers_of(found: list[tuple[int, Outlier]]) -> list[str]:
    return [str(outlier.peer) for _, outlier in found]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_honest_replicas_stay(seed: int, noise: float) -> None:
    stages = [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]
    assert not found_by(LossOutliers(ROUND), lambda peers: 0.0, stages, random=Random(seed), noise=noise)


@pytest.mark.parametrize("seed", range(20))
def test_who_spoils_what_goes_through_it_is_left_out_soon(seed: int) -> None:
    stages = [["a1", "b1", "c1"], ["a2", "b2", "c2"]]
    found = found_by(LossOutliers(ROUND), lambda peers: 3.0 if "b1" in peers else 0.0, stages, random=Random(seed))
    assert peers_of(found) == ["b1"]
    assert found[0][0] < EARLIEST + 12 * AT_LEAST, "the run is not known at its beginning"
    assert "above" in found[0][1].why


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("joins_at", [0, 20, 100, 300])
def test_a_newcomer_that_starts_where_the_run_was_a_round_ago_stays(seed: int, joins_at: int) -> None:
    """What it stands on is a round old, and in a young run that is far behind."""
    random, outliers = Random(seed), LossOutliers(ROUND)
    peers = ["a1", "b1"]
    span = ROUND * 3
    for number in range(600):
        chosen = random.choice(peers if number < joins_at else [*peers, "c1"])
        behind = number - number % span if chosen == "c1" and number < joins_at + 2 * span else number
        loss = falling(max(0, behind - (span if behind < number else 0))) * random.lognormvariate(0, 0.05)
        assert outliers.returned(path_through(chosen), loss) is None, number


@pytest.mark.parametrize("seed", range(20))
def test_a_newcomer_of_a_run_that_is_far_is_found_as_well(seed: int) -> None:
    """The losses before it came are no reason to believe it, and none to blame those who were there."""
    random, outliers = Random(seed), LossOutliers(ROUND)
    assert not found_by(outliers, lambda peers: 0.0, [["a1", "b1"]], random=random, microbatches=100)
    harm: Harm = lambda peers: 2.0 if "c1" in peers else 0.0  # noqa: E731
    late = lambda number: falling(100 + number)  # noqa: E731
    assert peers_of(found_by(outliers, harm, [["a1", "b1", "c1"]], random=random, usual=late)) == ["c1"]


def test_who_was_only_there_when_the_loss_was_high_is_not_blamed() -> None:
    random, outliers = Random(0), LossOutliers(ROUND)
    assert not found_by(outliers, lambda peers: 0.0, [["a1", "b1"]], random=random, microbatches=60)
    assert not found_by(outliers, lambda peers: 0.0, [["a1"]], random=random, usual=lambda number: falling(60 + number))
    assert outliers.returned(path_through("b1"), falling(260)) is None


@pytest.mark.parametrize("seed", range(10))
def test_of_two_that_share_all_paths_the_honest_one_is_cleared_once_the_other_is_away(seed: int) -> None:
    random, outliers = Random(seed), LossOutliers(ROUND)
    first: Outlier | None = None
    for number in range(400):
        peers = random.choice([("a1", "a2"), ("b1", "b2")])
        loss = falling(number) * random.lognormvariate(0, 0.05) + (3.0 if "a1" in peers else 0.0)
        first = outliers.returned(path_through(*peers), loss)
        if first is not None:
            break
    assert first.peer in ("a1", "a2"), "they cannot be told from each other"
    harm: Harm = lambda peers: 3.0 if "a1" in peers else 0.0  # noqa: E731
    stages = [[peer for peer in replicas if peer != first.peer] for replicas in (["a1", "b1"], ["a2", "b2"])]
    assert peers_of(found_by(outliers, harm, stages, random=random)) == ([] if first.peer == "a1" else ["a1"])


@pytest.mark.parametrize("seed", range(20))
def test_who_spoils_only_what_another_has_touched_is_as_likely_to_go(seed: int) -> None:
    """An honest replica may be excluded, but the liar as likely; what it spoils ends either way."""
    stages = [["a1", "b1"], ["a2", "b2"]]
    harm: Harm = lambda peers: 3.0 if {"a1", "a2"} <= peers else 0.0  # noqa: E731
    found = peers_of(found_by(LossOutliers(ROUND), harm, stages, random=Random(seed), microbatches=300))
    assert len(found) <= 1
    assert set(found) <= {"a1", "a2"}


def test_who_does_it_again_is_found_again_but_not_a_modules_only_replica() -> None:
    assert not found_by(LossOutliers(ROUND), lambda peers: 5.0, [["a1"], ["a2"]], random=Random(0))
    random, outliers = Random(0), LossOutliers(ROUND)
    harm: Harm = lambda peers: 3.0 if "b1" in peers else 0.0  # noqa: E731
    for _ in range(12):
        assert found_by(outliers, harm, [["a1", "b1"]], random=random, usual=lambda number: 0.5)
