"""The learning rate of an inner step: a pure function, so that every replica has the same one without asking."""

from __future__ import annotations

import math

from protocol.manifest import ScheduleSection, TrainingSection


def learning_rate(training: TrainingSection, step: int) -> float:
    """Of inner step `step`, counted from 1.

    Rises linearly and reaches its peak at step `warmup_steps`; then stays (constant) or falls to `final_ratio` of the peak
    at step `total_steps` and stays there.
    """
    schedule, peak = training.schedule, training.inner.learning_rate
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    return peak * _ratio(schedule, step)


def _ratio(schedule: ScheduleSection, step: int) -> float:
    """Of the peak, after the warm-up."""
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
    remaining = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.final_ratio + (1 - schedule.final_ratio) * remaining
