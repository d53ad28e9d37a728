"""`benchmarks/codec_training.py` computes what it says, in sizes that take a second."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.codec_boundaries import BOUNDARIES, POLICIES, measure_boundaries
from benchmarks.codec_learner import Boundaries, Learner, Task, Text, manifest_of
from benchmarks.codec_rounds import Leftover, Rounds, Way
from benchmarks.codec_training import ARMS, TASK, rounds_of_all_seeds
from benchmarks.parity_reference import OuterReference, Rule
from node.averaging.anchor.outer_step import OuterRule
from node.data.feed import open_documents
from node.solo.trainer import WholeModel
from swarm.vocabulary.types import Codec


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20_000)
    return dataclasses.replace(
        TASK,
        source=f"path:{tmp_path / 'text'}",
        stages=(0, 1, 1),
        hidden=16,
        heads=2,
        feed_forward=32,
        sequence=16,
        rows=2,
        steps=10,
        warmup_steps=1,
        held_out_microbatches=2,
    )


def options(**changed: object) -> argparse.Namespace:
    usual = {"seeds": [1], "workers": 2, "rounds": 3, "inner_steps": 2, "common_steps": 2, "rules": ["mild"]}
    return argparse.Namespace(**{**usual, "arms": list(ARMS), **changed})


def test_without_a_codec_the_gradients_are_those_of_the_whole_model(task: Task) -> None:
    manifest = manifest_of(task, 1)
    learner, model = Learner(manifest), WholeModel(manifest, torch.device("cpu"))
    microbatch = Text(manifest, open_documents(manifest), 1).a_step()[0]
    loss, gradients = learner._gradients(microbatch)
    expected_loss, expected = model.gradients(microbatch)
    assert loss == expected_loss
    for (_, ours), (_, theirs) in zip(learner.model.modules(), model.modules(), strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(gradients[mine], expected[its], strict=True))
    assert learner.boundary_bytes == 2 * 3 * microbatch.size * 16 * 4


def test_codecs_stand_at_every_boundary_in_both_directions(task: Task) -> None:
    manifest = manifest_of(task, 1)
    microbatch = Text(manifest, open_documents(manifest), 1).a_step()[0]
    sizes = {}
    for name in ("int8", "int4 activations, int8 gradients", "none"):
        learner = Learner(manifest, BOUNDARIES[name])
        learner.step([microbatch])
        sizes[name] = learner.boundary_bytes
    elements = microbatch.size * 16
    assert sizes["int8"] == 2 * 3 * elements * 33 // 32
    assert sizes["int4 activations, int8 gradients"] == 3 * elements * 33 // 32 + 3 * elements * 34 // 64


def workers_of(task: Task) -> list[Learner]:
    """Equal, then a step apart."""
    manifest = manifest_of(task, 1)
    workers = [Learner(manifest) for _ in range(3)]
    text = Text(manifest, open_documents(manifest), 3)
    for worker, microbatch in zip(workers, text.a_step(), strict=True):
        worker.step([microbatch])
    return workers


def test_rounds_without_a_codec_are_those_of_the_reference(task: Task) -> None:
    start = Learner(manifest_of(task, 1)).vector()
    workers = workers_of(task)
    expected = OuterReference(start, Rule(1, 1e-3, 0.0, 0.8, 0.5)).step([w.vector() for w in workers], [1, 1, 1])
    rounds = Rounds(workers, OuterRule(0.8, 0.5), Way(), Way())
    rounds.anchor[:] = start
    rounds.average()
    np.testing.assert_allclose(rounds.anchor, expected, rtol=0, atol=1e-6)
    assert all(np.array_equal(worker.vector(), rounds.anchor) for worker in workers)


@pytest.mark.parametrize("leftover", [Leftover.LATER, Leftover.STAYS])
def test_what_was_left_out_comes_in_the_rounds_after(task: Task, leftover: Leftover) -> None:
    """Nobody trains after the first round; the anchor still gets ever nearer to the mean of the workers."""
    start = Learner(manifest_of(task, 1)).vector()
    workers = workers_of(task)
    mean = np.mean([worker.vector() for worker in workers], axis=0)
    rounds = Rounds(workers, OuterRule(1.0, 0.0), Way(Codec.TOP_K_2, leftover), Way())
    rounds.anchor[:] = start
    away = [float(np.linalg.norm(rounds.anchor - mean))]
    for _ in range(12):
        rounds.average()
        away.append(float(np.linalg.norm(rounds.anchor - mean)))
    assert away[0] > away[1] > away[6] > away[12]
    assert away[12] < 0.75 * away[0]
    rounds.stand()
    assert all(np.array_equal(worker.vector(), rounds.anchor) for worker in workers)


def test_a_download_through_a_codec_changes_the_state_and_without_one_does_not(task: Task) -> None:
    workers = workers_of(task)
    rounds = Rounds(workers, OuterRule(1.0, 0.0), Way(), Way())
    before = rounds.anchor.copy()
    assert rounds.download(Codec.NONE) == before.nbytes
    assert np.array_equal(workers[1].vector(), before)
    rounds.download(Codec.INT4)
    assert np.array_equal(workers[1].vector(), rounds.anchor)
    assert not np.array_equal(rounds.anchor, before)


def test_the_table_of_rounds(task: Task) -> None:
    last = list(rounds_of_all_seeds(options(seeds=[1, 2]), task))[-1]
    assert [list(seed["mild"]) for seed in last["seeds"]] == [list(ARMS)] * 2
    table = last["summary"]["mild"]
    assert table["none"]["behind"] == 0
    assert table["top_k_2, later"]["out_ratio"] > 50
    first = last["seeds"][0]["mild"]
    assert first["int4"]["behind"] == pytest.approx(first["int4"]["loss"] - first["none"]["loss"])
    assert isinstance(table["int4, later"]["met"], bool)


def test_the_table_of_boundaries(task: Task) -> None:
    last = list(measure_boundaries(options(), task))[-1]
    table = last["summary"]
    assert list(table["boundaries"]) == [*BOUNDARIES, "none, other order"]
    assert list(table["everywhere"]) == list(POLICIES)
    assert table["boundaries"]["none, other order"]["behind"] != 0
    assert table["everywhere"]["int4 everywhere"]["state_bytes"] < table["everywhere"]["none everywhere"]["state_bytes"]
    assert POLICIES["hybrid with int4"].boundaries == Boundaries(Codec.INT8, Codec.INT8)
