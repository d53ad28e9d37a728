"""What benchmarks make of what they measure, and that their arms do what they say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import codecs, filling, kfac, optimizers, rounds_live, skipping
from node.data.feed import TrainingFeed, open_documents
from node.model.blocks import Linear
from swarm.vocabulary.types import Codec

# ---- rounds ----------------------------------------------------------------------------------------------------------

SETTING = rounds_live.Setting(peers=4, parameters=10_000_000, inner_steps=6, codec="int8", forward_s=0.1)
ROUNDS = [rounds_live.Round(10.0 * number, 10.0 * number + 2.0, 4) for number in range(1, 8)]


def homes(slowed: float) -> list[float]:
    """Ten a second between rounds, and so many times that from a round's beginning until a visit after its end."""
    found, at = list[float](), 0.0
    while at < 100.0:
        found.append(at)
        in_a_round = at >= 10.0 and at % 10.0 < 2.0 + SETTING.visit_s
        at = round(at + (0.1 / slowed if in_a_round else 0.1), 6)
    return found


@pytest.mark.parametrize("slowed", [1.0, 0.8, 0.5])
def test_the_ratio_is_that_of_the_paces(slowed: float) -> None:
    home = homes(slowed)
    computed = [(at - SETTING.visit_s, SETTING.visit_s) for at in home]
    found = rounds_live.compare(rounds_live.Seen(home, computed, ROUNDS), SETTING)
    assert found["pace_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["median_ratio"] == pytest.approx(slowed, abs=0.02)
    assert found["rounds"] == len(ROUNDS) - 2, "not the first, and not the last, with nothing after it"
    assert found["computed_of_home"] == pytest.approx(1.0, abs=0.04)


# ---- idle time -------------------------------------------------------------------------------------------------------


def test_all_that_was_put_off_is_computed_by_the_step() -> None:
    world = filling.FillingWorld(filling.Setting(0.02, 1, puts_off=True), kept=0.8)
    world.run(15.0)
    for peer in world.stage_peers:
        computed = sum(end - begun for spans in (peer.account.busy, peer.account.idle_work) for begun, end in spans)
        assert peer._added > 50
        assert computed >= peer._ground.service_s(peer.id) * (peer._added - 8)
        assert len(peer._pending) <= 8


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} and then some more of it, " * 40)
    return tmp_path


@pytest.fixture
def small(text: Path) -> optimizers.Task:
    return optimizers.Task(14, 1, 16, 2, 24, 16, 2, held_out_microbatches=2, source=f"path:{text}")


def test_the_best_learning_rates_are_compared_where_they_reach_adamws_last_loss() -> None:
    def run(arm: str, rate: float, *losses: float) -> dict[str, Any]:
        curve = [[10 * at, 2.0 * at, loss] for at, loss in enumerate(losses)]
        row = {"arm": arm, "seed": 1, "rate": rate, "loss": losses[-1], "curve": curve}
        return row | {"idle_s": 1.0}

    runs = [run("adamw", 0.1, 5, 4, 3), run("adamw", 0.2, 5, 4, 3.5), run("muon", 0.1, 5, 2, 1), run("soap", 0.1, 5, 4)]
    adamw, muon, soap = optimizers.best_of(runs)
    assert (adamw["rate"], adamw["steps_share"]) == (0.1, 1.0)
    assert muon["steps_share"] == pytest.approx((10 * 2 / 3) / 20)
    assert muon["seconds_share"] == pytest.approx((2 * 2 / 3) / 4)
    assert optimizers.summary([adamw, muon, soap])["soap"]["steps_share"] is None


def test_curvature_takes_effect_after_the_lag_in_steps_as_long_as_adamws(small: optimizers.Task) -> None:
    manifest = optimizers.manifest_of(small, optimizers.ARMS["adamw"], 1, 0.01)
    plain, stale = optimizers.Trainer(manifest, optimizers.ARMS["adamw"]), kfac.KfacTrainer(manifest, 5, 3)
    for step in range(4):
        layers = [[one for one in t.model.stacks[0].modules() if isinstance(one, Linear)] for t in (plain, stale)]
        before = [layer.weight.detach().clone() for layer in layers[1]]
        plain.next_step()
        stale.next_step()
        for old, one, other in zip(before, *layers, strict=True):
            assert torch.equal(one.weight, other.weight) == (step < 3)
            kept = old * (1 - manifest.training.inner.weight_decay * 0.01)
            lengths = [float((layer.weight.detach() - kept).norm()) for layer in (one, other)]
            assert lengths[0] == pytest.approx(lengths[1], rel=0.3 if step == 3 else 1e-6)


@pytest.mark.parametrize("name", skipping.ARMS)
def test_every_stage_is_visited_equally_often(name: str) -> None:
    task = skipping.Task(steps=40, microbatches=11, warmup_steps=1)
    visited, chosen = skipping.ARMS[name]
    choose = chosen(skipping.manifest_of(task, 1, visited))
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


# ---- codecs ----------------------------------------------------------------------------------------------------------


def test_codecs_stand_at_every_boundary_and_without_one_nothing_changes(text: Path) -> None:
    size = {"hidden": 16, "sequence": 16, "rows": 2, "microbatches": 1, "data": {"source": f"path:{text}"}}
    manifest = codecs.run_of("codecs", [0, 1, 1], **size)
    microbatch = TrainingFeed(manifest, open_documents(manifest), codecs.READER).next()
    plain, coded = codecs.Coded(manifest, Codec.NONE), codecs.Coded(manifest, Codec.INT8)
    assert plain.gradients(microbatch)[0] == plain.model.gradients(microbatch)[0]
    coded.gradients(microbatch)
    elements = microbatch.size * 16
    assert (plain.sent_bytes, coded.sent_bytes) == (2 * 3 * 4 * elements, 2 * 3 * elements * 33 // 32)
