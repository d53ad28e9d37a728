"""Training in one process: the baseline that a swarm with one replica per stage must reproduce."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from node.averaging.anchor.anchor import AnchorStore, restored_anchor, tensors_of
from node.averaging.anchor.outer_step import LocalReplica, OuterRule, anchor_of, outer_rule, step_alone
from node.checkpoint import folder as checkpoints
from node.checkpoint.saver import capture_module, restore_module
from node.checkpoint.state import Agreed, DataState, ReplicaState
from node.data.documents import Documents
from node.data.feed import TrainingFeed, open_documents
from node.data.packing import Microbatch
from node.experts.router import Router
from node.model import passes as visit
from node.model.device import device_errors, flushed_denormals
from node.model.initialization import parameters_of
from node.model.memory_need import require_memory
from node.model.moments import MomentType
from node.model.optimizer import Accumulator, Addition, InnerOptimizer, StepFigures
from node.model.passes import BlockStack, EmbeddingPart, HeadPart, build_block_stack, build_embedding, build_head
from node.network.loss_report import summed_loss
from node.observability.events import Event, MicrobatchCounts, Note, Step, Summary
from node.pipeline.admission import path_rules
from node.start.cut_model import CutModel
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import module_at
from swarm.routing.planner import AlikeStages
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot, ResourceExhausted, StateError
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Route

log = logging.getLogger(__name__)

SOLO: Final = PeerId("solo")


def train_solo(
    manifest: Manifest,
    *,
    steps: int,
    device: torch.device,
    on_event: Callable[[Event], None],
    saves: "CheckpointPlan | None" = None,
    router: Router | None = None,
    start: CutModel | None = None,
    moments: MomentType = MomentType.FLOAT32,
    should_stop: Callable[[], bool] = lambda: False,
    monotonic: Callable[[], float] = time.monotonic,
) -> Summary:
    """Trains for `steps` inner steps or until `should_stop`. Raises ConfigError, StateError, CorruptSnapshot."""
    with flushed_denormals():  # as nodes do
        model = WholeModel(manifest, device, moments)
        model.begin(start)
        trainer = SoloTrainer(manifest, model, open_documents(manifest, router=router), moments=moments)
        if saves is not None:
            for problem in trainer.resume(saves.folder):
                on_event(Note("warning", f"skipped a damaged snapshot: {problem}"))
            if trainer.steps:
                on_event(Note("info", f"resumes at step {trainer.steps}, {trainer.tokens} tokens"))
        began = last = saved_at = monotonic()
        tokens_before = tokens = trainer.tokens
        rate, losses = Ewma(), list[float]()
        while trainer.steps < steps and (loss := trainer.step(should_stop)) is not None:
            now = monotonic()
            rate.add((trainer.tokens - tokens) / max(now - last, 1e-9))
            last, tokens = now, trainer.tokens
            losses = [*losses[:1], loss]  # keep the first and the last
            on_event(Step(trainer.steps, loss, tokens, rate.mean, peer=""))
            if saves is not None and now - saved_at >= saves.every_s:
                saved_at = now
                try:
                    trainer.save(saves.folder)
                except (StateError, ResourceExhausted) as error:  # training continues
                    on_event(Note("warning", f"{error}. {error.hint}"))
        if saves is not None:
            trainer.save(saves.folder)
    counts = MicrobatchCounts(started=trainer.microbatches, completed=trainer.microbatches)
    mean = (tokens - tokens_before) / max(last - began, 1e-9)
    first_loss, last_loss = (losses[0], losses[-1]) if losses else (None, None)
    summary = Summary(trainer.steps, first_loss, last_loss, trainer.tokens, mean, counts, peers=())
    on_event(summary)
    return summary


class WholeModel:
    """All modules of a run on one device."""

    def __init__(self, manifest: Manifest, device: torch.device, moments: MomentType = MomentType.FLOAT32) -> None:
        self.device = device
        self._manifest = manifest
        require_memory(manifest, manifest.modules(), device, 1, moments)
        with device_errors():
            self.embedding: EmbeddingPart = build_embedding(manifest).to(device)
            self.head: HeadPart = build_head(manifest, self.embedding).to(device)
            self._stack_of = {of: build_block_stack(manifest, of).to(device) for of in manifest.modules()[1:]}
        self.stacks: list[BlockStack] = list(self._stack_of.values())
        self.all_stages = range(1, manifest.stages.count)

    def modules(self) -> list[tuple[ModuleId, tuple[nn.Module, ...]]]:
        stacks = [(module, (stack,)) for module, stack in self._stack_of.items()]
        return [(ModuleId(0), (self.embedding, self.head)), *stacks]

    def path(self, microbatch: Microbatch, stages: Sequence[int] | None) -> list[BlockStack]:
        visited = self.all_stages if stages is None else stages
        return [self._stack_of[module_at(microbatch.route, stage)] for stage in visited]

    def gradients(
        self, microbatch: Microbatch, stages: Sequence[int] | None = None
    ) -> tuple[float, dict[nn.Module, tuple[torch.Tensor, ...]]]:
        """Computes the loss on a path through `stages` (None for all), and the gradients by part of the model."""
        stacks = self.path(microbatch, stages)
        documents = microbatch.documents
        visits = [visit.forward(self.embedding, microbatch.tokens.to(self.device), documents)]
        for stack in stacks:
            visits.append(visit.forward(stack, visits[-1].result, documents))
        end = visit.forward(self.head, visits[-1].result, microbatch.labels.to(self.device))
        found = visit.backward(self.head, end)
        gradients: dict[nn.Module, tuple[torch.Tensor, ...]] = {self.head: found.parameters}
        for part in [*reversed(stacks), self.embedding]:  # backward in reverse order; popping a visit frees its graph
            found = visit.backward(part, visits.pop(), found.source)
            gradients[part] = found.parameters
        return end.result.item(), gradients

    @torch.no_grad()
    def begin(self, start: CutModel | None) -> None:
        """Copies the weights of the model from which the run starts. Raises ConfigError if `start` is missing."""
        if self._manifest.start is None:
            return
        if start is None:
            raise ConfigError("the run starts from a model whose folder is not set", hint="Set it with --model DIR.")
        for module, parts in self.modules():
            anchor = start.anchor(module)
            saved = tensors_of(anchor.layout, anchor.parameters)
            for name, parameter in parameters_of(*parts).items():
                parameter.copy_(saved[name])


ChooseStages = Callable[[int], Sequence[int]]  # Maps a microbatch's number to the stages that it visits


def planned_stages(manifest: Manifest) -> ChooseStages:
    """Returns a function that chooses each microbatch's stages as the planner of a data node does."""
    return AlikeStages(path_rules(manifest))


class SoloTrainer:
    """Trainer in one process: takes inner steps of each module when due, and outer steps like a lone replica."""

    def __init__(
        self,
        manifest: Manifest,
        model: WholeModel,
        documents: Documents,
        choose: ChooseStages | None = None,
        moments: MomentType = MomentType.FLOAT32,
    ) -> None:
        self._manifest = manifest
        self._choose = choose or planned_stages(manifest)
        self._model = model
        self._documents = documents
        self._accumulators = {part: Accumulator(part) for _, parts in model.modules() for part in parts}
        rule, fragments, inner_steps = outer_rule(manifest), manifest.training.fragments, manifest.training.inner_steps
        self._hosted: list[SoloReplica] = []
        for module, parts in model.modules():
            sums = [self._accumulators[part] for part in parts]
            local = LocalReplica(parts, fragments, InnerOptimizer(manifest, module, sums, moments=moments))
            # Fragments take turns, so that each is averaged once per `inner_steps`.
            every = -(-inner_steps // len(local.layout.fragments))
            self._hosted.append(SoloReplica(module, parts, local, rule, every))
        self._feed = TrainingFeed(manifest, documents, SOLO)
        self._at = self._feed.cursor
        self.steps = 0
        self.microbatches = 0
        self.tokens = 0
        self._turns: Counter[Route] = Counter()
        self._completed = 0

    def save(self, folder: checkpoints.CheckpointFolder) -> None:
        """Saves the model as of stage 0's last step. Gradients not yet applied are dropped, as in a swarm."""
        done = self._completed  # microbatches since the last step are trained again after a resume
        data = DataState(self._at, next_number=done, completed=done, abandoned=0, duplicated=0, steps=self.steps)
        for each in self._hosted:
            state = capture_module(
                each.parts, each.optimizer, visits=each.visits, tokens=each.optimizer.tokens, agreed=each.agreed()
            )
            checkpoints.write_snapshot(folder, solo_peer(each.module), each.module, replace(state, data=data))
        for each in self._hosted:  # last, so that a crash leaves one complete save
            checkpoints.remove_older(folder, solo_peer(each.module))

    def resume(self, folder: checkpoints.CheckpointFolder) -> tuple[str, ...]:
        """Restores the last complete save, if any; returns damaged files. Raises CorruptSnapshot, StateError."""
        checkpoints.check_run(folder)
        problems: list[str] = []
        saved = [
            _by_position(checkpoints.whole_snapshots(folder, solo_peer(each.module), problems)) for each in self._hosted
        ]
        common = set(saved[0]).intersection(*saved)  # saved one after the other: all must have the position
        if not common:
            if problems or any(saved):
                named = "; ".join(problems) or "its modules were saved at different times"
                raise CorruptSnapshot(f"{folder.path}: no save of the run is complete: {named}")
            return ()
        for each, headers in zip(self._hosted, saved, strict=True):
            state = checkpoints.read_state(folder.of(solo_peer(each.module)), headers[max(common)])
            restore_module(each.parts, each.optimizer, state)
            each.restore(state)
        position = saved[0][max(common)].data
        assert position is not None, "`_by_position` keeps only headers with a position"
        self.microbatches = self._completed = position.completed
        self.tokens = self._hosted[0].optimizer.tokens
        self.steps = position.steps_done(self._manifest.microbatches_per_step)
        self._feed = TrainingFeed(self._manifest, self._documents, SOLO, position.cursor)
        self._at = position.cursor
        return tuple(problems)

    def step(self, should_stop: Callable[[], bool]) -> float | None:
        """Trains until an inner step of stage 0; returns the mean loss, None if asked to stop. Raises StateError."""
        losses: list[tuple[float, int]] = []
        before, stage_zero = self.steps, self._hosted[0]
        while self.steps == before:
            if should_stop():
                return None
            text = self._feed.next()
            losses.append((self._microbatch(text), text.scored))
            self.steps += stage_zero.optimizer.due  # stage 0 sees every microbatch, so its steps are the run's
            for hosted in self._hosted:
                if hosted.optimizer.due:
                    hosted.stepped(hosted.optimizer.step())
        self._at, self._completed = self._feed.cursor, self.microbatches
        return summed_loss(losses).loss

    def _microbatch(self, microbatch: Microbatch) -> float:
        # Count by route as a data node does: alternating routes would always skip the same stages.
        turn = self._turns[microbatch.route] if microbatch.route else self.microbatches
        self._turns[microbatch.route] += 1
        found, gradients = self._model.gradients(microbatch, self._choose(turn))
        loss = microbatch.per_label(found)
        name = MicrobatchId(SOLO, self.microbatches)
        for part, of_part in gradients.items():
            addition = self._accumulators[part].add(name, microbatch.size, of_part, microbatch.scored)
            if addition is not Addition.ADDED:
                raise StateError(
                    f"training has diverged: microbatch {name} has loss {loss}, and {addition.value}",
                    hint="Lower training.inner.learning_rate or lengthen the warm-up.",
                )
        self.microbatches += 1
        self.tokens += microbatch.size
        return loss


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    folder: checkpoints.CheckpointFolder
    every_s: float = math.inf


class SoloReplica:
    """A module's only replica and its anchor. Takes a due outer step just before the next inner step."""

    def __init__(
        self, module: ModuleId, parts: tuple[nn.Module, ...], local: LocalReplica, rule: OuterRule, every: int
    ) -> None:
        self.module, self.parts, self.optimizer, self.visits = module, parts, local.optimizer, 0
        self.store = AnchorStore(anchor_of(local))
        self._local, self._rule, self._every = local, rule, every
        self._steps = self._tokens = 0
        self.optimizer.before_step = self._before_inner_step

    def stepped(self, figures: StepFigures) -> None:
        self.visits += figures.visits[0]
        self._steps += 1
        self._tokens += figures.tokens

    def _before_inner_step(self) -> None:
        if self._steps >= self._every:
            step_alone(self._local, self.store, self._rule, self._steps, self._tokens)
            self._steps = self._tokens = 0

    def agreed(self) -> Agreed:
        return Agreed(self.store.saved(), self._steps, self._tokens)

    def restore(self, state: ReplicaState) -> None:
        """Restores the anchor from a checkpoint, after the parameters were restored. Raises CorruptSnapshot."""
        self.visits = state.counters.visits
        if state.anchor is not None:
            self.store = AnchorStore(restored_anchor(self._local.layout, state.anchor))
            self._steps, self._tokens = state.counters.steps_since_anchor, state.counters.tokens_since_anchor


def solo_peer(module: ModuleId) -> PeerId:
    return PeerId(f"solo-{module}")


def _by_position(newest_first: Iterable[checkpoints.Header]) -> dict[int, checkpoints.Header]:
    found: dict[int, checkpoints.Header] = {}
    for header in newest_first:
        if header.data is not None:
            found.setdefault(header.data.completed, header)
    return found
