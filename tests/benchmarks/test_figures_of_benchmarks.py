"""What benchmarks make of what they measure, and that their arms do what they say."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import codecs, head_to_head, skipping
from node.data.feed import TrainingFeed, open_documents
from swarm.vocabulary.types import Codec


def test_loss_is_the_mean_over_a_window_of_tokens_before_a_time() -> None:
    half = head_to_head.WINDOW // 2
    steps = [(0.0, half, 9.0), (20.0, half, 5.0), (40.0, half, 3.0), (60.0, half, 1.0)]
    seen = head_to_head.Seen(steps, [(70.0, 4 * half, 0, 0.0)])
    assert seen.loss_at(45.0) == pytest.approx(4.0)
    assert seen.loss_at(19.0) == pytest.approx(9.0)
    assert seen.loss_at(69.0) == pytest.approx(2.0), "the next step is late"
    assert seen.loss_at(71.0) is None, "the run is shorter"
    assert (seen.when(4 * half), seen.when(4 * half + 1)) == (60.0, None)


def test_bytes_are_those_of_whole_rounds() -> None:
    steps = [(float(number), 10, 1.0) for number in range(26)]  # rounds of 100 tokens, after which 1000 bytes are sent
    samples = [(float(number), 10 * number, 1000 * (number // 10), 0.02 * number) for number in range(26)]
    found = head_to_head.Seen(steps, samples, [100.0, 300.0]).figures(100)
    assert (found["rounds_counted"], found["bytes_per_token"]) == (2, 10.0)
    assert (found["cpu_ms_per_token"], found["memory_mb"]) == (2.0, 300)


def test_a_bar_compares_the_longest_time_that_both_have_reached() -> None:
    ours = {"loss_after_15_s": 4.0, "loss_after_30_s": 3.0, "loss_after_55_s": 2.0}
    theirs = {"loss_after_15_s": 3.0, "loss_after_30_s": 3.5, "loss_after_55_s": None}
    costs = {"bytes_per_token": 300.0, "cpu_ms_per_token": 0.5}
    found = head_to_head.bars({head_to_head.OURS: ours | costs, "hivemind-local": theirs | costs})
    assert found.keys() == {"hivemind-local"}
    assert found["hivemind-local"]["loss_after_30_s"] == {"ours": 3.0, "theirs": 3.5, "met": True}
    assert "loss_after_55_s" not in found["hivemind-local"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} and then some more of it, " * 40)
    return tmp_path


@pytest.mark.parametrize("name", skipping.ARMS)
def test_every_stage_is_visited_equally_often(name: str) -> None:
    task = skipping.Task(steps=40, microbatches=11, warmup_steps=1)
    arm = skipping.ARMS[name]
    choose = arm.choose(skipping.manifest_of(task, 1, arm.visited))
    visits = Counter(stage for number in range(task.paths) for stage in choose(number))
    assert len(visits) == skipping.STAGES - 1
    assert len(set(visits.values())) == 1


def test_arms_at_equal_time_are_dealt_what_a_data_node_would_deal() -> None:
    speeds = skipping.capacities(1)
    rates = {}
    for name, (visited, ratio) in skipping.TIMED_ARMS.items():
        shares = skipping.shares_of(name, speeds)
        paths = [skipping.stages_at(shares, turn) for turn in range(2000)]
        visits = Counter(stage for path in paths for stage in path)
        assert max(visits.values()) <= 1.02 * ratio * min(visits.values())
        assert {len(path) for path in paths} == {visited - 1}
        rates[name] = skipping.rate_of(shares, speeds)
    assert rates["full"] == pytest.approx(min(speeds))
    assert rates["full"] < rates["3/4"] < rates["3/4, r 1.5"]


def test_codecs_stand_at_every_boundary_and_without_one_nothing_changes(text: Path) -> None:
    size = {"hidden": 16, "sequence": 16, "rows": 2, "microbatches": 1, "data": {"source": f"path:{text}"}}
    manifest = codecs.run_of("codecs", [0, 1, 1], **size)
    microbatch = TrainingFeed(manifest, open_documents(manifest), codecs.READER).next()
    plain, coded = codecs.Coded(manifest, Codec.NONE), codecs.Coded(manifest, Codec.INT8)
    assert plain.gradients(microbatch)[0] == plain.model.gradients(microbatch)[0]
    coded.gradients(microbatch)
    elements = microbatch.size * 16
    assert (plain.sent_bytes, coded.sent_bytes) == (2 * 3 * 4 * elements, 2 * 3 * elements * 33 // 32)
