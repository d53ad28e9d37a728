"""The benchmark of K-FAC in idle time: its schedule passes in virtual time and delays nobody by more than a chunk, and
its arithmetic takes curvature over when the schedule says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import kfac
from benchmarks.emulated_pipeline import Account
from benchmarks.kfac_schedule import (
    KfacPeer,
    KfacWorld,
    Profile,
    SecondOrder,
    longest_delay_s,
    over_links,
    period,
    pipeline,
    run,
    run_arms,
)
from benchmarks.kfac_training import Cycle, KfacTrainer, measure, measured_profile
from benchmarks.optimizers import ARMS, Task, Trainer, best_of, manifest_of
from node.model.blocks import Linear

STEPS = 8
CHUNK_S = 0.002
BERT = kfac.PROFILES["BERT-Base"]


def test_the_formula_is_that_of_the_papers_figure() -> None:
    assert BERT.work_over_bubble(4, 4) == pytest.approx((4 * 25.55 + 71.67) / (3 * 26.2))
    assert kfac.modelled(BERT, 4, 4)["model_period"] == 3
    assert BERT.utilisation(4, 4, None) == pytest.approx(4 / 7)
    assert BERT.utilisation(4, 4, 3) <= 1


@pytest.mark.parametrize("microbatches", [4, 12])
def test_a_refresh_takes_as_many_steps_as_its_work_has_room_in(microbatches: int) -> None:
    arms = run_arms(pipeline(BERT, 4, microbatches, CHUNK_S), BERT, STEPS)
    bare, filled, in_step = arms["bare"], arms["bubbles"], arms["in step"]
    assert bare.utilisation == pytest.approx(BERT.utilisation(4, microbatches, None), abs=0.01)
    assert BERT.work_over_bubble(4, microbatches) - 1 < filled.period < BERT.work_over_bubble(4, microbatches) + 2
    assert filled.utilisation > bare.utilisation + 0.1
    assert filled.step_ms < in_step.step_ms
    assert filled.delay_ms <= 1e3 * CHUNK_S + 1e-6
    assert bare.delay_ms == bare.idle_work == in_step.idle_work == 0


def test_more_idle_time_and_fewer_microbatches_refresh_sooner() -> None:
    few, many = (pipeline(BERT, 4, count, CHUNK_S) for count in (4, 12))
    periods = [run(each, SecondOrder(BERT), STEPS).period for each in (over_links(few, 100, 1), few, many)]
    assert periods == sorted(set(periods))


def test_what_a_refresh_takes_is_what_was_computed() -> None:
    world = KfacWorld(pipeline(BERT, 3, 3, CHUNK_S), SecondOrder(BERT))
    world.run_steps(STEPS)
    for peer in world.stage_peers:
        assert isinstance(peer, KfacPeer)
        computed_ms = 1e3 * sum(end - begin for begin, end in peer.account.idle_work)
        assert (len(peer.begun) - 1) * BERT.refresh_ms(3) <= computed_ms + 1e-6
        assert computed_ms <= len(peer.begun) * BERT.refresh_ms(3) + 1e-6
        assert len(peer.begun) > 1
        assert 0 < peer.most_kept <= 6


def test_weights_that_are_put_off_wait_for_one_piece_at_most() -> None:
    even = replace(pipeline(BERT, 3, 4, CHUNK_S), puts_off=True)
    world = KfacWorld(even, SecondOrder(BERT))
    world.run_steps(STEPS)
    for peer in world.stage_peers:
        assert isinstance(peer, KfacPeer)
        assert peer.queue.idle_waiting - peer._is_queued <= len(peer._pending) <= even.per_step
        assert len(peer.begun) > 1


def test_delays_are_those_by_idle_work() -> None:
    account = Account(idle_work=[(0.0, 1.0), (1.0, 2.0), (5.0, 6.0)], waits=[(0.5, 1.0), (5.5, 0.25), (3.0, 1.0)])
    assert longest_delay_s(account) == pytest.approx(1.0)
    assert longest_delay_s(Account(waits=[(0.0, 1.0)])) == 0
    assert period([0, 1, 4, 7]) == 3
    assert period([3]) == math.inf


@pytest.fixture
def small(tmp_path: Path) -> Task:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} and then some more of it, " * 40)
    return Task(12, 1, 16, 2, 24, 16, 2, held_out_microbatches=2, source=f"path:{tmp_path}")


def test_curvature_takes_effect_after_the_lag(small: Task) -> None:
    manifest = manifest_of(small, ARMS["adamw"], 1, 0.01)
    plain, stale = Trainer(manifest, ARMS["adamw"]), KfacTrainer(manifest, Cycle(5, 3))
    for step in range(5):
        plain.step()
        stale.step()
        pairs = zip(plain.model.stacks[0].parameters(), stale.model.stacks[0].parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == (step < 3), step


def test_a_step_is_as_long_as_adamws_and_goes_where_the_factors_say(small: Task) -> None:
    manifest = manifest_of(small, ARMS["adamw"], 1, 0.01)
    plain, turned = Trainer(manifest, ARMS["adamw"]), KfacTrainer(manifest, Cycle(1, 0))
    layers = [[each for each in one.model.stacks[0].modules() if isinstance(each, Linear)] for one in (plain, turned)]
    seen: list[torch.Tensor] = []
    layers[1][0].register_forward_hook(lambda layer, values, output: seen.append(values[0].flatten(0, -2)))
    before = [layer.weight.detach().clone() for layer in layers[1]]
    plain.step()
    turned.step()
    decay = 1 - turned.kfac._inner.weight_decay * 0.01
    for old, one, other in zip(before, *layers, strict=True):
        lengths = [float((layer.weight.detach() - old * decay).norm()) for layer in (one, other)]
        assert lengths[0] == pytest.approx(lengths[1], rel=0.05)
    inputs = torch.cat(seen).T @ torch.cat(seen)
    damped = inputs + math.sqrt(1e-3) * inputs.trace() / len(inputs) * torch.eye(len(inputs))
    inverses = turned.kfac._factors[layers[1][0].weight].inverses
    assert inverses is not None
    assert torch.allclose(inverses[0].float() @ damped, torch.eye(len(inputs)), atol=1e-2)


def test_what_is_found_can_be_drawn(small: Task, tmp_path: Path) -> None:
    rows = list(kfac.on_paper([2], [1, 2], 4))
    assert [(row["model"], row["microbatches"]) for row in rows] == [
        ("BERT-Base", 2),
        ("BERT-Base", 4),
        ("BERT-Large", 2),
    ]
    runs = [measure(small, arm, 1, 0.01) for arm in ("adamw", "at once", "5")]
    assert len({run["loss"] for run in runs}) == 3
    report = {"schedule": {"paper": rows}, "training": {"best": best_of(runs), "runs": runs}}
    kfac.draw(json.loads(json.dumps(report)), tmp_path / "kfac.png")
    assert (tmp_path / "kfac.png").stat().st_size > 1000


def test_the_profile_of_a_stage_is_measured(small: Task) -> None:
    profile = measured_profile(small, repeats=2)
    assert isinstance(profile, Profile)
    assert min(profile.forward_ms, profile.backward_ms, profile.curvature_ms, profile.inversion_ms) > 0
