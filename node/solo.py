"""A run in one process without any network: the baseline, and what a swarm of one replica a stage must reproduce.

It has the swarm's own parts: modules cut by stage, a visit for each, an accumulator for each part, an optimizer for each
module, the data in the order in which a single data node reads it. Paths are full: every stage, in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from node.averaging.lone import LoneReplica
from node.averaging.outer import outer_rule
from node.averaging.replica import LocalReplica
from node.checkpoint import CheckpointFolder, load_module, read_manifest, save_module
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.model import visit
from node.model.build import build_block_stack, build_embedding, build_head
from node.model.parts import BlockStack, EmbeddingPart, HeadPart
from node.optimization import Accumulator, Addition, InnerOptimizer, StepFigures
from protocol.manifest import Manifest, manifest_from_table, parse_toml
from swarm.errors import ConfigError, StateError
from swarm.vocabulary import MicrobatchId, ModuleId, PeerId

Event = dict[str, Any]
"""One line of `--json`."""

SOLO: Final = PeerId("solo")
"""Stands for the data node in microbatch ids."""
_RATE_MEMORY: Final = 0.9
"""Share of the old value in the smoothed tokens per second: about the last ten steps count."""


def train_solo(
    manifest: Manifest,
    *,
    steps: int,
    device: torch.device,
    threads: int | None,
    on_event: Callable[[Event], None],
    checkpoint: CheckpointFolder | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    monotonic: Callable[[], float] = time.monotonic,
) -> Event:
    """Trains for `steps` inner steps, or until `should_stop` says so between two microbatches; returns the summary event.

    `on_event` gets a `step` event after every step and the summary at the end. `threads` is the number of CPU threads of
    torch, its own choice when None. The checkpoint is written at the end.

    Raises:
        ConfigError: the run has several experts a stage, or its data is not here (see `open_documents`).
        StateError: the loss or a gradient is not finite, or the checkpoint could not be written.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    model = WholeModel(manifest, device)
    trainer = SoloTrainer(manifest, model, TrainingFeed(manifest, open_documents(manifest), SOLO))
    progress = _Progress(monotonic)
    while progress.steps < steps:
        loss = trainer.step(should_stop)
        if loss is None:
            break
        on_event(progress.step_event(loss, trainer))
    if checkpoint is not None:
        model.save(checkpoint, steps=progress.steps, tokens=trainer.tokens)
    summary = progress.summary_event(trainer)
    on_event(summary)
    return summary


def evaluate_checkpoint(path: Path, microbatches: int, device: torch.device | None = None) -> Event:
    """Mean loss of a checkpoint over held-out text: `{"loss": nats per token, "tokens": n, "microbatches": n}`.

    Raises:
        ConfigError: no checkpoint there, or the run's data is not here.
        ManifestError, CorruptSnapshot, StateError: the checkpoint is damaged or incomplete.
    """
    table = parse_toml(read_manifest(path))
    table.pop("signature", None)  # who signed the run matters to those who join it, not to a loss
    manifest = manifest_from_table(table)
    model = WholeModel(manifest, device or torch.device("cpu"))
    model.load(path)
    return evaluate(model, held_out_microbatches(manifest, microbatches))


def evaluate(model: WholeModel, microbatches: Iterable[Microbatch]) -> Event:
    """Mean loss over the microbatches, which are all of one size, in the form `evaluate_checkpoint` returns.

    Raises:
        ConfigError: there is no microbatch.
    """
    losses, tokens = [], 0
    for microbatch in microbatches:
        losses.append(model.loss(microbatch))
        tokens += microbatch.size
    if not losses:
        raise ConfigError("a loss was asked for over no microbatch", hint="Ask for at least 1.")
    return {"loss": math.fsum(losses) / len(losses), "tokens": tokens, "microbatches": len(losses)}


class WholeModel:
    """All parts of a run on one device."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        if manifest.stages.experts != 1:
            raise ConfigError(
                f"stages.experts is {manifest.stages.experts}: one process trains one path, with one expert a stage",
                hint="Use a manifest with stages.experts = 1.",
            )
        self.device = device
        self.embedding: EmbeddingPart = build_embedding(manifest).to(device)
        self.head: HeadPart = build_head(manifest).to(device)
        self.stacks: list[BlockStack] = [build_block_stack(manifest, m).to(device) for m in manifest.modules()[1:]]

    def modules(self) -> list[tuple[ModuleId, tuple[nn.Module, ...]]]:
        """Each module's parts, in order of stage."""
        stacks = [(ModuleId(stage), (stack,)) for stage, stack in enumerate(self.stacks, start=1)]
        return [(ModuleId(0), (self.embedding, self.head)), *stacks]

    @torch.no_grad()
    def loss(self, microbatch: Microbatch) -> float:
        """Mean nats per token, without a graph."""
        hidden = self.embedding(microbatch.tokens.to(self.device))
        for stack in self.stacks:
            hidden = stack(hidden)
        return float(self.head(hidden, microbatch.labels.to(self.device)).item())

    def gradients(self, microbatch: Microbatch) -> tuple[float, dict[nn.Module, tuple[torch.Tensor, ...]]]:
        """The loss, and each part's gradients of it. Each stage's graph is freed as soon as it has been used."""
        visits = [visit.forward(self.embedding, microbatch.tokens.to(self.device))]
        for stack in self.stacks:
            visits.append(visit.forward(stack, visits[-1].result))
        end = visit.forward(self.head, visits[-1].result, microbatch.labels.to(self.device))
        found = visit.backward(self.head, end)
        gradients: dict[nn.Module, tuple[torch.Tensor, ...]] = {self.head: found.parameters}
        for part in [*reversed(self.stacks), self.embedding]:
            found = visit.backward(part, visits.pop(), found.source)
            gradients[part] = found.parameters
        return end.result.item(), gradients

    def save(self, folder: CheckpointFolder, *, steps: int, tokens: int) -> None:
        """Writes every module's file."""
        for module, parts in self.modules():
            save_module(folder, module, *parts, steps=steps, tokens=tokens)

    def load(self, path: Path) -> None:
        """Reads every module's file; they must be of one run.

        Raises:
            CorruptSnapshot, StateError: a file is missing, damaged, or of another run or model than the rest.
        """
        runs = {load_module(path, module, *parts).run for module, parts in self.modules()}
        if len(runs) != 1:
            raise StateError(f"the files in {path} are of {len(runs)} runs")


class SoloTrainer:
    """Whole inner steps of all modules at once. Each module is alone, and takes its outer step as a lone replica of a swarm does."""

    def __init__(self, manifest: Manifest, model: WholeModel, feed: TrainingFeed) -> None:
        self._microbatches_per_step = manifest.microbatches_per_step
        self._microbatch_tokens = manifest.microbatch_tokens
        self._model = model
        self._feed = feed
        self._accumulators = {part: Accumulator(part) for _, parts in model.modules() for part in parts}
        self._replicas = [self._lone_replica(manifest, parts) for _, parts in model.modules()]
        self.microbatches = 0
        """Completed."""
        self.tokens = 0
        self.figures: list[StepFigures] = []
        """Of the last step, for each module."""

    def step(self, should_stop: Callable[[], bool]) -> float | None:
        """Takes one inner step and returns the mean loss of its microbatches, or None when asked to stop before its end.

        Raises:
            StateError: the loss or a gradient is not finite.
        """
        losses = []
        for _ in range(self._microbatches_per_step):
            if should_stop():
                return None
            losses.append(self._microbatch(self._feed.next()))
        self.figures = [self._step(optimizer, replica) for optimizer, replica in self._replicas]
        return math.fsum(losses) / len(losses)

    def _lone_replica(self, manifest: Manifest, parts: tuple[nn.Module, ...]) -> tuple[InnerOptimizer, LoneReplica]:
        training = manifest.training
        optimizer = InnerOptimizer(training, [self._accumulators[part] for part in parts])
        local = LocalReplica(parts, training.fragments, optimizer)
        return optimizer, LoneReplica(local, outer_rule(manifest), training.inner_steps)

    def _step(self, optimizer: InnerOptimizer, replica: LoneReplica) -> StepFigures:
        figures = optimizer.step()
        replica.after_inner_step(figures.visits[0] * self._microbatch_tokens)
        return figures

    def _microbatch(self, microbatch: Microbatch) -> float:
        loss, gradients = self._model.gradients(microbatch)
        name = MicrobatchId(SOLO, self.microbatches)
        for part, accumulator in self._accumulators.items():
            addition = accumulator.add(name, microbatch.size, gradients[part])
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

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.steps = 0
        self._monotonic = monotonic
        self._began = self._last = monotonic()
        self._tokens = 0
        self._rate = 0.0
        self._losses: list[float] = []  # the first and the last

    def step_event(self, loss: float, trainer: SoloTrainer) -> Event:
        now = self._monotonic()
        rate = (trainer.tokens - self._tokens) / max(now - self._last, 1e-9)
        self._rate = rate if self.steps == 0 else _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * rate
        self._last, self._tokens = now, trainer.tokens
        self.steps += 1
        self._losses = [*self._losses[:1], loss]
        return {
            "event": "step",
            "step": self.steps,
            "loss": loss,
            "tokens": trainer.tokens,
            "tokens_per_s": self._rate,
            "learning_rate": trainer.figures[0].learning_rate,
            "gradient_norm": math.hypot(*(figures.gradient_norm for figures in trainer.figures)),
        }

    def summary_event(self, trainer: SoloTrainer) -> Event:
        """`tokens_per_s` is the mean over the whole training; losses are None when there was no step."""
        completed = trainer.microbatches
        return {
            "event": "summary",
            "steps": self.steps,
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": self._losses[-1] if self._losses else None,
            "tokens": trainer.tokens,
            "tokens_per_s": self._tokens / max(self._last - self._began, 1e-9),
            "microbatches": {"started": completed, "completed": completed, "abandoned": 0, "duplicated": 0},
            "peers": [],
        }
