"""What a solo run tells of itself: an event after each step, and one at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from node.model.optimizer import StepFigures
from swarm.vocabulary.ewma import Ewma
from swarm.vocabulary.types import ModuleId

Event = dict[str, Any]
"""One line of `--json`."""


class Trained(Protocol):
    """How far a solo run is (`node.solo.trainer.SoloTrainer`)."""

    @property
    def figures(self) -> Mapping[ModuleId, StepFigures]:
        """Of each module's last inner step."""
        ...

    @property
    def steps(self) -> int: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class SoloProgress:
    """Turns steps into events."""

    def __init__(self, trainer: Trained, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._began = self._last = monotonic()
        self._tokens = self._tokens_before = trainer.tokens
        self._rate = Ewma()
        self._losses: list[float] = []  # the first and the last

    def step_event(self, loss: float, trainer: Trained) -> Event:
        now = self._monotonic()
        self._rate.add((trainer.tokens - self._tokens) / max(now - self._last, 1e-9))
        self._last, self._tokens = now, trainer.tokens
        self._losses = [*self._losses[:1], loss]
        return {
            "event": "step",
            "step": trainer.steps,
            "loss": loss,
            "tokens": trainer.tokens,
            "tokens_per_s": self._rate.mean,
            "learning_rate": trainer.figures[ModuleId(0)].learning_rate,
            "gradient_norm": math.hypot(*(figures.gradient_norm for figures in trainer.figures.values())),
        }

    def summary_event(self, trainer: Trained) -> Event:
        """`tokens_per_s` is the mean since the start; losses are of the steps since then, None when there was none."""
        completed = trainer.microbatches
        return {
            "event": "summary",
            "steps": trainer.steps,
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": self._losses[-1] if self._losses else None,
            "tokens": trainer.tokens,
            "tokens_per_s": (self._tokens - self._tokens_before) / max(self._last - self._began, 1e-9),
            "microbatches": {"started": completed, "completed": completed, "abandoned": 0, "duplicated": 0},
            "peers": [],
        }
