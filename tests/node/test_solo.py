"""`solo` trains, reports, stops when asked, and its checkpoint gives the loss it had."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import CheckpointFolder
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.default_manifest import default_manifest
from node.export.evaluation import evaluate_model
from node.model.initial import digest_of
from node.solo import SOLO, SoloTrainer, WholeModel, evaluate, train_solo
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.signed_manifest import sign_manifest
from swarm.errors import ConfigError, StateError
from swarm.vocabulary import RunId
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")
TEXT = b"the quick brown fox jumps over the lazy dog. "


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "text").write_bytes(TEXT * 3000)
    return small_manifest(data__source=f"path:{tmp_path / 'text'}", training__inner={"learning_rate": 0.02})


def train(manifest: Manifest, steps: int, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    ticks = iter(range(10_000))
    summary = train_solo(
        manifest,
        steps=steps,
        device=CPU,
        threads=None,
        on_event=events.append,
        monotonic=lambda: float(next(ticks)),
        **options,
    )
    return summary, events


def test_the_loss_falls_and_every_step_is_reported(manifest: Manifest) -> None:
    summary, events = train(manifest, 40)
    steps = events[:-1]
    assert [event["step"] for event in steps] == list(range(1, 41))
    assert [event["tokens"] for event in steps] == [64 * step for step in range(1, 41)]
    assert {event["event"] for event in steps} == {"step"}
    assert steps[0]["tokens_per_s"] == pytest.approx(64)  # the clock goes on by one second a step
    assert events[-1] == summary
    assert summary == {
        "event": "summary",
        "steps": 40,
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "tokens": 2560,
        "tokens_per_s": pytest.approx(64),
        "microbatches": {"started": 80, "completed": 80, "abandoned": 0, "duplicated": 0},
        "peers": [],
    }
    assert summary["loss_first"] == pytest.approx(5.55, abs=0.1)
    assert summary["loss_last"] < 4


def test_it_is_deterministic(manifest: Manifest) -> None:
    losses = [[event.get("loss") for event in train(manifest, 5)[1]] for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_step_is_that_of_one_model_on_one_large_batch(manifest: Manifest) -> None:
    """Cutting into stages and microbatches changes nothing: against one graph, one loss and one optimizer a module."""
    model = WholeModel(manifest, CPU)
    other = copy.deepcopy(model)
    documents = open_documents(manifest)
    loss = SoloTrainer(manifest, model, TrainingFeed(manifest, documents, SOLO)).step(lambda: False)

    feed = TrainingFeed(manifest, documents, SOLO)
    microbatches = [feed.next() for _ in range(manifest.microbatches_per_step)]
    hidden = other.embedding(torch.cat([microbatch.tokens for microbatch in microbatches]))
    for stack in other.stacks:
        hidden = stack(hidden)
    whole = other.head(hidden, torch.cat([microbatch.labels for microbatch in microbatches]))
    whole.backward()
    inner = manifest.training.inner
    for _, parts in other.modules():
        parameters = [parameter for part in parts for parameter in part.parameters()]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": inner.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        rate = inner.learning_rate / 2  # the first of two warm-up steps
        torch.optim.AdamW(groups, lr=rate, betas=(inner.beta1, inner.beta2), eps=inner.epsilon).step()

    assert loss == pytest.approx(whole.item(), abs=1e-5)
    for (_, parts), (_, others) in zip(model.modules(), other.modules(), strict=True):
        for part, expected in zip(parts, others, strict=True):
            for name, parameter in part.named_parameters():
                # Adam's first step divides a gradient by its own size, so where that is near 0 rounding shows.
                torch.testing.assert_close(
                    parameter, expected.get_parameter(name), atol=2e-3, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_it_stops_when_asked_and_counts_what_it_did(manifest: Manifest) -> None:
    asked = iter([False] * 5 + [True])
    summary, events = train(manifest, 40, should_stop=lambda: next(asked))
    assert summary["steps"] == len(events) - 1 == 2
    assert summary["microbatches"]["completed"] == 5


def test_no_steps_are_no_losses(manifest: Manifest) -> None:
    summary, _ = train(manifest, 0)
    assert (summary["loss_first"], summary["loss_last"], summary["tokens_per_s"]) == (None, None, 0)


def test_a_checkpoint_gives_the_held_out_loss_of_the_trained_model(manifest: Manifest, tmp_path: Path) -> None:
    signed = sign_manifest(manifest, Identity.generate())
    folder = CheckpointFolder(tmp_path / "checkpoint", signed.run, signed.text)
    train(manifest, 40, checkpoint=folder)
    trained = WholeModel(manifest, CPU)
    trained.load(folder.path)
    assert digest_of(trained.head) != digest_of(WholeModel(manifest, CPU).head)
    measured = asyncio.run(evaluate_model(str(folder.path), 5))
    assert measured == evaluate(trained, held_out_microbatches(manifest, 5))
    assert measured["loss"] < 4
    assert (measured["tokens"], measured["microbatches"]) == (5 * 32, 5)


def test_files_of_two_runs_are_no_checkpoint(manifest: Manifest, tmp_path: Path) -> None:
    model = WholeModel(manifest, CPU)
    for letter in "ab":
        model.save(CheckpointFolder(tmp_path / letter, RunId(letter * 64), b""), steps=1, tokens=1)
    (tmp_path / "a" / "module-2.0.safetensors").replace(tmp_path / "b" / "module-2.0.safetensors")
    with pytest.raises(StateError, match="2 runs"):
        model.load(tmp_path / "b")


def test_a_loss_over_nothing_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="no microbatch"):
        evaluate(WholeModel(manifest, CPU), [])


def test_diverging_is_said(manifest: Manifest) -> None:
    wild = small_manifest(data__source=manifest.data.source)
    model = WholeModel(wild, CPU)
    with torch.no_grad():
        model.head.lm_head.weight.fill_(float("inf"))
    with pytest.raises(StateError, match="diverged"):
        SoloTrainer(wild, model, TrainingFeed(wild, open_documents(wild), SOLO)).step(lambda: False)


def test_several_experts_are_not_for_one_process(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="experts"):
        WholeModel(small_manifest(stages__experts=2), CPU)


def test_the_default_run_learns() -> None:
    """Its first steps; what becomes of it in a minute is measured, not tested."""
    manifest = default_manifest(seed=1)
    assert manifest.stages.count >= 4
    summary, _ = train(manifest, 6)
    assert summary["loss_first"] == pytest.approx(5.6, abs=0.1)
    assert summary["loss_last"] < 5.0
