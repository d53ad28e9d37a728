"""`solo` trains, reports, stops when asked, and its checkpoint gives the loss it had."""

import asyncio
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kit import evaluate, loss_of
from node.checkpoint.folder import gather_modules, load_newest
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.local_paths import LocalPathOptions
from node.export.open_model import evaluate_model
from node.local_swarm.default_manifest import default_manifest
from node.model.initialization import digest_of_tensors, parameters_of
from node.model.shapes import writes
from node.observability.event_json import event_to_json
from node.solo.trainer import SOLO, CheckpointPlan, SoloTrainer, WholeModel, solo_peer, train_solo
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import CorruptSnapshot, StateError
from swarm.vocabulary.types import ModuleId
from tests.node.checkpoint.saved_states import SteppedStorage, folder_at
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")
TEXT = b"the quick brown fox jumps over the lazy dog. "


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}").write_bytes(TEXT * 50)
    return small_manifest(data__source=f"path:{tmp_path / 'text'}", training__inner={"learning_rate": 0.02})


def train(manifest: Manifest, steps: int, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    ticks = iter(range(10_000))
    torch.set_num_threads(1)
    summary = train_solo(
        manifest,
        steps=steps,
        device=CPU,
        on_event=lambda event: events.append(json.loads(event_to_json(event))),
        monotonic=lambda: float(next(ticks)),
        **options,
    )
    return json.loads(event_to_json(summary)), events


def losses_of(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


def test_the_loss_falls_and_every_step_is_reported(manifest: Manifest) -> None:
    summary, events = train(manifest, 40)
    steps = events[:-1]
    assert [event["step"] for event in steps] == list(range(1, 41))
    assert [event["tokens"] for event in steps] == [64 * step for step in range(1, 41)]
    assert {event["event"] for event in steps} == {"step"}
    assert steps[0]["tokens_per_s"] == pytest.approx(64)  # the clock goes on by one second a step
    assert events[-1] == summary
    counts = {"started": 80, "completed": 80, "abandoned": 0, "duplicated": 0}
    losses = {"loss_first": steps[0]["loss"], "loss_last": steps[-1]["loss"]}
    sums = {"tokens": 2560, "tokens_per_s": pytest.approx(64), "microbatches": counts}
    assert summary == {"event": "summary", "steps": 40, "peers": [], **losses, **sums}
    assert summary["loss_first"] == pytest.approx(5.55, abs=0.1)
    assert summary["loss_last"] < 4


def test_a_step_is_that_of_one_model_on_one_large_batch(manifest: Manifest) -> None:
    """Cutting into stages and microbatches changes nothing: against one graph, one loss and one optimizer a module."""
    model = WholeModel(manifest, CPU)
    other = copy.deepcopy(model)
    documents = open_documents(manifest)
    loss = SoloTrainer(manifest, model, documents).step(lambda: False)

    feed = TrainingFeed(manifest, documents, SOLO)
    microbatches = [feed.next() for _ in range(manifest.microbatches_per_step)]
    hidden = other.embedding(torch.cat([microbatch.tokens for microbatch in microbatches]))
    for stack in other.stacks:
        hidden = stack(hidden)
    whole = other.head(hidden, torch.cat([microbatch.labels for microbatch in microbatches]))
    whole.backward()
    inner = manifest.training.inner
    for _, parts in other.modules():
        named = [(name, parameter) for part in parts for name, parameter in part.named_parameters()]
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in named], 1.0)
        rate, decay, slow = inner.learning_rate / 2, inner.weight_decay, 2 * sum(manifest.stages.blocks)
        groups = [  # in the first of two warm-up steps
            {"params": [p for name, p in named if p.dim() == 2 and not writes(name)], "weight_decay": decay},
            {"params": [p for name, p in named if writes(name)], "lr": rate / slow, "weight_decay": slow * decay},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, lr=rate, betas=(inner.beta1, inner.beta2), eps=inner.epsilon).step()

    assert loss == pytest.approx(whole.item(), abs=1e-5)
    for (_, parts), (_, others) in zip(model.modules(), other.modules(), strict=True):
        for part, expected in zip(parts, others, strict=True):
            for name, parameter in part.named_parameters():
                # Adam's first step divides a gradient by its own size, so where that is near 0 rounding shows.
                torch.testing.assert_close(
                    parameter, expected.get_parameter(name), atol=2e-3, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_a_checkpoint_gives_the_held_out_loss_of_the_trained_model(manifest: Manifest, tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "checkpoint", manifest=manifest)
    train(manifest, 40, saves=CheckpointPlan(folder))
    trained = WholeModel(manifest, CPU)
    gathered = gather_modules(folder.path)
    for module, parts in trained.modules():
        for name, parameter in parameters_of(*parts).items():
            parameter.copy_(gathered.module(module)[name])
    untrained = WholeModel(manifest, CPU).head
    assert digest_of_tensors(parameters_of(trained.head)) != digest_of_tensors(parameters_of(untrained))
    told = LocalPathOptions(text=tmp_path / "text")
    measured = asyncio.run(evaluate_model(str(folder.path), 5, local_path_options=told))
    expected = evaluate(partial(loss_of, trained), held_out_microbatches(manifest, 5))
    sizes = measured.pop("sizes")
    assert measured == {**expected, "subsets": [{"stages": [1, 2], "loss": expected["loss"]}]}
    assert (sizes["microbatches"], sizes["tokens"], sizes["documents"]) == (5, 32, 0)
    assert measured["loss"] < 4
    assert (measured["tokens"], measured["microbatches"]) == (5 * 32, 5)


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"name": "muon"}, id="muon"),
        # Interrupted while the refresh of one of the seven matrices is under way, and those of others are.
        pytest.param({"name": "soap", "refresh_steps": 4, "refresh_lag": 3}, id="soap"),
    ],
)
def test_an_interrupted_run_goes_on_unchanged(manifest: Manifest, tmp_path: Path, inner: dict[str, Any]) -> None:
    """Interrupted in the middle of a step: its first microbatch is computed again."""
    manifest = small_manifest(data__source=manifest.data.source, training__inner={"learning_rate": 0.02, **inner})
    whole = losses_of(train(manifest, 16)[1])
    folder = folder_at(tmp_path / "checkpoint", manifest=manifest)
    asked = iter([False] * 13 + [True])
    summary, events = train(manifest, 16, saves=CheckpointPlan(folder), should_stop=lambda: next(asked))
    assert (summary["steps"], summary["microbatches"]["completed"]) == (len(events) - 1, 13) == (6, 13)
    before = losses_of(events)
    summary, events = train(manifest, 16, saves=CheckpointPlan(folder))
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(7, 17))
    assert [*before, *(event["loss"] for event in steps)] == pytest.approx(whole, abs=1e-6)
    assert (summary["tokens"], summary["microbatches"]["completed"]) == (16 * 64, 32)
    assert any(event.get("message") == "resumes at step 6, 384 tokens" for event in events)


def test_a_skipped_stage_steps_when_it_has_seen_its_tokens(manifest: Manifest, tmp_path: Path) -> None:
    """Of two microbatches in each step of stage 0, each of the two other stages sees one."""
    skipping = small_manifest(data__source=manifest.data.source, stages__per_path=1)
    folder = folder_at(tmp_path / "checkpoint", manifest=skipping)
    summary, events = train(skipping, 7, saves=CheckpointPlan(folder))
    assert summary["microbatches"]["completed"] == 14
    saved = [load_newest(folder, solo_peer(ModuleId(stage))).header for stage in range(3)]
    assert [header.steps for header in saved] == [7, 3, 3]
    assert (saved[1].counters.visits, saved[1].counters.tokens) == (6, 6 * 32)
    assert losses_of(events) != pytest.approx(losses_of(train(manifest, 7)[1]), abs=1e-3)


def test_one_process_visits_equally_whatever_the_ratio(manifest: Manifest) -> None:
    source = manifest.data.source
    runs = [small_manifest(data__source=source, stages__per_path=1, stages__visit_ratio=ratio) for ratio in (1.0, 2.0)]
    first, second = (losses_of(train(run, 3)[1]) for run in runs)
    assert first == second


def test_a_path_may_go_through_its_stages_in_any_order(manifest: Manifest) -> None:
    model = WholeModel(manifest, CPU)
    (text,) = held_out_microbatches(manifest, 1)
    loss, gradients = model.gradients(text, (2, 1))
    assert loss == pytest.approx(loss_of(model, text, (2, 1)), abs=1e-6)
    assert loss != pytest.approx(loss_of(model, text, (1, 2)), abs=1e-6)
    assert set(gradients) == {model.embedding, model.head, *model.stacks}
    assert set(model.gradients(text, (2,))[1]) == {model.embedding, model.head, model.stacks[1]}


def test_modules_saved_at_different_steps_go_back_to_the_last_common_one(manifest: Manifest, tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "checkpoint", manifest=manifest)
    train(manifest, 4, saves=CheckpointPlan(folder))
    train(manifest, 6, saves=CheckpointPlan(folder))
    for file in (folder.path / "solo-2.0").glob("state-2.*"):
        file.unlink()
    _, again = train(manifest, 5, saves=CheckpointPlan(folder))
    assert [event["step"] for event in again if event["event"] == "step"] == [5]


def test_it_saves_on_the_way_and_a_failure_there_is_only_said(manifest: Manifest, tmp_path: Path) -> None:
    writes: list[str] = []

    def once(step: str) -> None:
        writes.append(step)
        if len(writes) == 1:
            raise OSError(28, "No space left on device")

    folder = folder_at(tmp_path / "checkpoint", SteppedStorage(once), manifest)
    summary, events = train(manifest, 6, saves=CheckpointPlan(folder, 2.5))
    assert summary["steps"] == 6
    (note,) = (event for event in events if event["event"] == "note")
    assert note["level"] == "warning"
    assert "No space left" in note["message"]
    assert len(list((folder.path / "solo-0.0").glob("*.json"))) == 2


def test_a_checkpoint_without_a_whole_step_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "checkpoint", manifest=manifest)
    train(manifest, 2, saves=CheckpointPlan(folder))
    (folder.path / "solo-1.0" / "state-1.safetensors").write_bytes(b"")
    with pytest.raises(CorruptSnapshot, match=r"solo-1\.0"):
        train(manifest, 4, saves=CheckpointPlan(folder))


def test_diverging_is_said(manifest: Manifest) -> None:
    wild = small_manifest(data__source=manifest.data.source)
    model = WholeModel(wild, CPU)
    with torch.no_grad():
        model.head.lm_head.weight.fill_(float("inf"))
    with pytest.raises(StateError, match="diverged"):
        SoloTrainer(wild, model, open_documents(wild)).step(lambda: False)


def with_experts(manifest: Manifest, **changes: Any) -> Manifest:
    experts = {"stages__experts": (1, 2, 1), "model__attention": "documents", "data__source": manifest.data.source}
    return small_manifest(training__inner={"learning_rate": 0.02}, **experts, **changes)


def test_a_microbatch_trains_the_experts_of_its_route(manifest: Manifest) -> None:
    routed = with_experts(manifest)
    model = WholeModel(routed, CPU)
    assert [module for module, _ in model.modules()] == list(routed.modules())
    first, second, shared = model.stacks
    feed = TrainingFeed(routed, open_documents(routed), SOLO)
    texts = {text.route: text for text in (feed.next() for _ in range(8))}
    assert texts.keys() == {(0, 0), (1, 0)}
    for route, expert in (((0, 0), first), ((1, 0), second)):
        assert model.gradients(texts[route])[1].keys() == {model.embedding, model.head, expert, shared}


def test_all_experts_take_the_steps_of_stage_zero(manifest: Manifest) -> None:
    routed = with_experts(manifest)
    model = WholeModel(routed, CPU)
    before = [digest_of_tensors(parameters_of(stack)) for stack in model.stacks]
    assert before[0] == before[1], "experts start alike"
    trainer = SoloTrainer(routed, model, open_documents(routed))
    for _ in range(20):
        trainer.step(lambda: False)
    steps = [hosted.optimizer.steps for hosted in trainer._hosted]
    assert steps[0] == steps[3] == 20
    assert 38 <= sum(steps[1:3]) <= 42, "documents are dealt by chance, so not quite alike"
    assert len({*before, *(digest_of_tensors(parameters_of(stack)) for stack in model.stacks)}) == 5, "and part ways"


@pytest.mark.parametrize("which", ["experts", "skips"])
def test_what_was_saved_between_steps_goes_on_unchanged(manifest: Manifest, tmp_path: Path, which: str) -> None:
    inner = {"data__source": manifest.data.source, "training__inner": {"learning_rate": 0.02}}
    run = with_experts(manifest) if which == "experts" else small_manifest(stages__per_path=1, **inner)
    whole = losses_of(train(run, 8)[1])
    folder = folder_at(tmp_path / "saved", manifest=run)
    train(run, 4, saves=CheckpointPlan(folder))
    events = train(run, 8, saves=CheckpointPlan(folder))[1]
    assert "resumes at step 4" in events[0]["message"]
    assert losses_of(events) == pytest.approx(whole[4:], abs=1e-6)


def test_the_held_out_loss_of_experts_is_told_by_route_and_leaves_the_prefix_out(manifest: Manifest) -> None:
    routed = with_experts(manifest)
    texts = list(held_out_microbatches(routed, 60))
    assert routed.route_prefix == 256
    assert all(0 < text.scored <= text.size for text in texts)
    report = evaluate(partial(loss_of, WholeModel(routed, CPU)), texts)
    assert report["routes"].keys() == {"1.0,2.0", "1.1,2.0"}
    by_route = sum(of["tokens"] for of in report["routes"].values())
    assert report["tokens"] == sum(text.scored for text in texts) == by_route
    assert report["loss"] == pytest.approx(5.55, abs=0.1)
    assert "routes" not in evaluate(partial(loss_of, WholeModel(manifest, CPU)), held_out_microbatches(manifest, 2))


def test_the_default_run_learns() -> None:
    """Its first steps; what becomes of it in a minute is measured, not tested."""
    manifest = default_manifest(seed=1)
    assert manifest.stages.count >= 4
    summary, _ = train(manifest, 6)
    assert summary["loss_first"] == pytest.approx(5.6, abs=0.1)
    assert summary["loss_last"] < 5.0
