"""Training in one process without any network: the baseline, and what a swarm of one replica a stage must reproduce.

It has the swarm's own parts: modules cut by stage, a visit for each, an accumulator for each part, an optimizer for
each module, the data in the order in which a single data node reads it, the stages that the planner gives a data node's
first, second, ... microbatch, and in a run with experts the modules of the microbatch's route. A module that is visited
less takes its inner step when it has seen the tokens of one, as in a swarm, and a microbatch's next one already meets
the new parameters.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, Protocol

import torch
from torch import nn

from node.averaging.anchor.anchor import tensors_of
from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.outer_step import outer_rule
from node.checkpoint.folder import CheckpointFolder, Gathered, Problem
from node.data.documents import Documents
from node.data.feed import TrainingFeed, open_documents
from node.data.packing import Microbatch
from node.experts.router import Router
from node.model import passes as visit
from node.model.device import device_errors, flushed_denormals
from node.model.initialization import parameters_of
from node.model.memory_need import require_room
from node.model.moments import MomentType
from node.model.optimizer import Accumulator, Addition, inner_optimizer
from node.model.parts import BlockStack, EmbeddingPart, HeadPart, build_block_stack, build_embedding, build_head
from node.network.loss_report import answer_of, held_out_loss, summed_loss
from node.observability.events import Event, MicrobatchCounts, Note, Step, Summary
from node.pipeline.admission import path_rules
from node.solo.solo_checkpoint import CheckpointPlan, Hosted, SoloReplica, load_solo, save_solo
from node.start.cut_model import CutModel
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import module_at
from swarm.routing.planner import visited_stages
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, StateError
from swarm.vocabulary.statistics import Ewma
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Route

log = logging.getLogger(__name__)

SOLO: Final = PeerId("solo")
"""Stands for the data node in microbatch ids."""


def train_solo(
    manifest: Manifest,
    *,
    steps: int,
    device: torch.device,
    on_event: Callable[[Event], None],
    saves: CheckpointPlan | None = None,
    router: Router | None = None,
    start: CutModel | None = None,
    moments: MomentType = MomentType.FLOAT32,
    should_stop: Callable[[], bool] = lambda: False,
    monotonic: Callable[[], float] = time.monotonic,
) -> Summary:
    """Trains for `steps` inner steps, or until `should_stop` says so between two microbatches; returns the summary.

    `on_event` gets a `Step` after every step and the summary at the end. What is in the checkpoint is gone on from; it
    is written now and then and at the end. `steps` counts those before a resume.

    Raises:
        ConfigError: its data or its router is not here (see `open_documents`), or it starts from an existing model that
            is not `start`.
        StateError: the loss or a gradient is not finite, or the last checkpoint could not be written.
        CorruptSnapshot: there is a checkpoint, and no step of it is whole.
    """
    with flushed_denormals():  # as a node computes
        model = WholeModel(manifest, device, moments)
        model.begin(start)
        trainer = SoloTrainer(manifest, model, open_documents(manifest, router=router), moments=moments)
        keeper = _Keeper(saves, trainer, on_event, monotonic)
        keeper.resume()
        progress = _Progress(trainer, monotonic)
        while trainer.steps < steps:
            loss = trainer.step(should_stop)
            if loss is None:
                break
            on_event(progress.stepped(loss))
            keeper.save_if_due()
        keeper.save()
    summary = progress.summary()
    on_event(summary)
    return summary


class Measurable(Protocol):
    """A model whose loss can be measured."""

    def loss(self, microbatch: Microbatch) -> float:
        """The mean loss, nats per token that is predicted."""
        ...


def evaluate(model: Measurable, microbatches: Iterable[Microbatch]) -> dict[str, Any]:
    """The mean loss over the microbatches' tokens: `{"loss": nats per token, "tokens": n, "microbatches": n}`. In a run
    with experts also `routes`: of each, such as `1.0,2.1`, the same.

    Raises:
        ConfigError: there is no microbatch.
    """
    texts = list(microbatches)
    losses = [(model.loss(microbatch), microbatch.scored) for microbatch in texts]
    if not losses:
        raise ConfigError("a loss was asked for over no microbatch", hint="Ask for at least 1.")
    return answer_of(held_out_loss([text.route for text in texts], losses))


class WholeModel:
    """All parts of a run on one device."""

    def __init__(self, manifest: Manifest, device: torch.device, moments: MomentType = MomentType.FLOAT32) -> None:
        """Raises OutOfMemory where there is no room for it, with such moments as a trainer is to keep."""
        self.device = device
        self._manifest = manifest
        require_room(manifest, manifest.modules(), device, 1, moments)
        with device_errors():
            self.embedding: EmbeddingPart = build_embedding(manifest).to(device)
            self.head: HeadPart = build_head(manifest, self.embedding).to(device)
            self._stack_of = {
                module: build_block_stack(manifest, module).to(device) for module in manifest.modules()[1:]
            }
        self.stacks: list[BlockStack] = list(self._stack_of.values())
        """In order of stage and expert."""
        self.all_stages = range(1, manifest.stages.count)
        """The stages after stage 0, in order: a full path."""

    def modules(self) -> list[tuple[ModuleId, tuple[nn.Module, ...]]]:
        """Each module's parts, in order of stage and expert."""
        stacks = [(module, (stack,)) for module, stack in self._stack_of.items()]
        return [(ModuleId(0), (self.embedding, self.head)), *stacks]

    def _path(self, microbatch: Microbatch, stages: Sequence[int] | None) -> list[BlockStack]:
        """What the microbatch goes through after the embedding, by its route."""
        visited = self.all_stages if stages is None else stages
        return [self._stack_of[module_at(microbatch.route, stage)] for stage in visited]

    @torch.no_grad()
    def loss(self, microbatch: Microbatch, stages: Sequence[int] | None = None) -> float:
        """The mean loss in nats per token that is predicted, without a graph, of a path through these stages (None for
        all)."""
        hidden = self._hidden(microbatch, stages)
        loss = float(self.head(hidden, microbatch.labels.to(self.device)).item())
        return microbatch.per_label(loss)

    @torch.no_grad()
    def token_losses(self, microbatch: Microbatch) -> torch.Tensor:
        """The loss of each token in nats, float32 [rows, tokens] on the CPU, of a path through all stages; 0 where none
        is predicted."""
        logits, labels = self.head.logits(self._hidden(microbatch, None)), microbatch.labels.to(self.device)
        return nn.functional.cross_entropy(logits.mT, labels, reduction="none").cpu()

    def _hidden(self, microbatch: Microbatch, stages: Sequence[int] | None) -> torch.Tensor:
        """What the head reads, [rows, tokens, hidden]."""
        documents = microbatch.documents
        hidden: torch.Tensor = self.embedding(microbatch.tokens.to(self.device), documents)
        for stack in self._path(microbatch, stages):
            hidden = stack(hidden, documents)
        return hidden

    def gradients(
        self, microbatch: Microbatch, stages: Sequence[int] | None = None
    ) -> tuple[float, dict[nn.Module, tuple[torch.Tensor, ...]]]:
        """Computes the loss of a path through these stages (None for all), and the gradients of each part on it. Each
        stage's graph is freed as soon as it has been used.
        """
        stacks = self._path(microbatch, stages)
        documents = microbatch.documents
        visits = [visit.forward(self.embedding, microbatch.tokens.to(self.device), documents)]
        for stack in stacks:
            visits.append(visit.forward(stack, visits[-1].result, documents))
        end = visit.forward(self.head, visits[-1].result, microbatch.labels.to(self.device))
        found = visit.backward(self.head, end)
        gradients: dict[nn.Module, tuple[torch.Tensor, ...]] = {self.head: found.parameters}
        for part in [*reversed(stacks), self.embedding]:
            found = visit.backward(part, visits.pop(), found.source)
            gradients[part] = found.parameters
        return end.result.item(), gradients

    @torch.no_grad()
    def begin(self, start: CutModel | None) -> None:
        """Takes over the weights of the existing model from which the run starts, if it does.

        Raises:
            ConfigError: it does, and `start` is None or another model.
        """
        if self._manifest.start is None:
            return
        if start is None:
            raise ConfigError(
                "this run starts from an existing model, and nobody has said where its folder lies",
                hint="Say it with --model DIR.",
            )
        for module, parts in self.modules():
            anchor = start.anchor(module)
            saved = tensors_of(anchor.layout, anchor.parameters)
            for name, parameter in parameters_of(*parts).items():
                parameter.copy_(saved[name])

    @torch.no_grad()
    def load(self, gathered: Gathered) -> None:
        """Takes over every module's parameters.

        Raises:
            StateError: they are of another model.
        """
        for module, parts in self.modules():
            saved, parameters = gathered.modules[module], parameters_of(*parts)
            if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in parameters.items()}:
                raise StateError(f"the checkpoint's module {module} is not that of the model its manifest describes")
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


ChooseStages = Callable[[int], Sequence[int]]
"""The stages that a microbatch visits, in their order, by its number."""


def planned_stages(manifest: Manifest) -> ChooseStages:
    """The stages of a path, as the planner of a data node chooses them."""
    rules = path_rules(manifest)
    return lambda number: visited_stages(rules, number)


class SoloTrainer:
    """Inner steps of all modules, each as soon as it is due. Each module is alone, and takes its outer step as a lone
    replica of a swarm does.

    Args:
        choose: None for what the manifest says.
        moments: the form of AdamW's.
    """

    def __init__(
        self,
        manifest: Manifest,
        model: WholeModel,
        documents: Documents,
        choose: ChooseStages | None = None,
        moments: MomentType = MomentType.FLOAT32,
    ) -> None:
        self._manifest, self._moments = manifest, moments
        self._choose = choose or planned_stages(manifest)
        self._model = model
        self._documents = documents
        self._accumulators = {part: Accumulator(part) for _, parts in model.modules() for part in parts}
        self._hosted = [self._host(manifest, module, parts) for module, parts in model.modules()]
        self._feed = TrainingFeed(manifest, documents, SOLO)
        self._at = self._feed.cursor
        self.steps = 0
        self.microbatches = 0
        """Completed."""
        self.tokens = 0
        """Trained on."""
        self._turns: Counter[Route] = Counter()
        self._completed = 0
        """At stage 0's last step."""

    def save(self, folder: CheckpointFolder) -> None:
        """Saves the model as it was after stage 0's last step, and the text's position there. Errors as `save_solo`.

        What a stage has accumulated towards a step that is not due yet is not saved, as in a swarm.
        """
        save_solo(folder, self._hosted, microbatches=self._completed, steps=self.steps, at=self._at)

    def resume(self, folder: CheckpointFolder) -> tuple[Problem, ...]:
        """Goes on from what is in the folder, if anything is; returns what had to be passed over. Errors as
        `load_solo`."""
        position, problems = load_solo(folder, self._hosted)
        if position is not None:
            self.microbatches, self.tokens = position.completed, self._hosted[0].optimizer.tokens
            self.steps = position.steps_done(self._manifest.microbatches_per_step)
            self._completed = self.microbatches
            self._feed = TrainingFeed(self._manifest, self._documents, SOLO, position.cursor)
            self._at = position.cursor
        return problems

    def step(self, should_stop: Callable[[], bool]) -> float | None:
        """Trains until stage 0 has taken an inner step; returns the mean loss of its microbatches, or None when asked
        to stop before.

        Raises:
            StateError: the loss or a gradient is not finite.
        """
        losses: list[tuple[float, int]] = []
        before, stage_zero = self.steps, self._hosted[0]
        while self.steps == before:
            if should_stop():
                return None
            text = self._feed.next()
            losses.append((self._microbatch(text), text.scored))
            self.steps += stage_zero.optimizer.due
            for hosted in self._hosted:
                if hosted.optimizer.due:
                    figures = hosted.optimizer.step()
                    hosted.visits += figures.visits[0]
                    hosted.replica.after_inner_step(figures.tokens)
        self._at, self._completed = self._feed.cursor, self.microbatches
        return summed_loss(losses).loss

    def _host(self, manifest: Manifest, module: ModuleId, parts: tuple[nn.Module, ...]) -> Hosted:
        training = manifest.training
        sums = [self._accumulators[part] for part in parts]
        optimizer = inner_optimizer(manifest, module, sums, moments=self._moments)
        local = LocalReplica(parts, training.fragments, optimizer)
        every = -(-training.inner_steps // len(local.layout.fragments))
        return Hosted(module, parts, optimizer, SoloReplica(local, outer_rule(manifest), every))

    def _microbatch(self, microbatch: Microbatch) -> float:
        # Counted by route, as a data node counts: else routes that alternate would always skip the same stages.
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
                    hint="Make a run with a lower training.inner.learning_rate or a longer warm-up.",
                )
        self.microbatches += 1
        self.tokens += microbatch.size
        return loss


class _Progress:
    """Turns steps into events."""

    def __init__(self, trainer: SoloTrainer, monotonic: Callable[[], float]) -> None:
        self._trainer = trainer
        self._monotonic = monotonic
        self._began = self._last = monotonic()
        self._tokens = self._tokens_before = trainer.tokens
        self._rate = Ewma()
        self._losses: list[float] = []  # the first and the last

    def stepped(self, loss: float) -> Step:
        now, tokens = self._monotonic(), self._trainer.tokens
        self._rate.add((tokens - self._tokens) / max(now - self._last, 1e-9))
        self._last, self._tokens = now, tokens
        self._losses = [*self._losses[:1], loss]
        return Step(self._trainer.steps, loss, tokens, self._rate.mean, peer="")

    def summary(self) -> Summary:
        """The rate is the mean since the start; losses are of the steps since then, None when there was none."""
        first, last = (self._losses[0], self._losses[-1]) if self._losses else (None, None)
        rate = (self._tokens - self._tokens_before) / max(self._last - self._began, 1e-9)
        completed = self._trainer.microbatches
        counts = MicrobatchCounts(started=completed, completed=completed)
        return Summary(self._trainer.steps, first, last, self._trainer.tokens, rate, counts, peers=())


class _Keeper:
    """Saves a solo run now and then, and finds what an earlier one has saved. Does nothing without a folder."""

    def __init__(
        self,
        plan: CheckpointPlan | None,
        trainer: SoloTrainer,
        on_event: Callable[[Event], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._trainer = trainer
        self._on_event = on_event
        self._monotonic = monotonic
        self._saved_at = monotonic() if plan is not None else 0.0

    def resume(self) -> None:
        if self._plan is None:
            return
        for problem in self._trainer.resume(self._plan.folder):
            self._note("warning", f"damaged snapshot passed over: {problem}")
        if self._trainer.steps:
            self._note("info", f"resumes at step {self._trainer.steps}, {self._trainer.tokens} tokens")

    def save_if_due(self) -> None:
        """A save that fails on the way is a warning, and training goes on."""
        if self._plan is None or self._monotonic() - self._saved_at < self._plan.every_s:
            return
        self._saved_at = self._monotonic()
        try:
            self.save()
        except (StateError, ResourceExhausted) as error:
            self._note("warning", f"{error}. {error.hint}")

    def save(self) -> None:
        if self._plan is not None:
            self._trainer.save(self._plan.folder)

    def _note(self, level: Literal["info", "warning"], message: str) -> None:
        self._on_event(Note(level, message))
