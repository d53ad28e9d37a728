"""Stages by convention: the ring of a single process, and the parts of a trained model that are run on purpose."""

from __future__ import annotations

import math

from swarm.routing.path_rules import PathRules
from swarm.vocabulary.errors import ConfigError


def ring_stages(rules: PathRules, turn: int) -> tuple[int, ...]:
    """The stages that microbatch `turn` visits where the skipped ones move on like a ring, in order.

    Over any `skippable` microbatches in a row every stage is visited equally often.
    """
    skips = rules.skippable - rules.per_path
    skipped = {(turn * skips + k) % rules.skippable for k in range(skips)}
    return tuple(stage for stage in range(1, rules.stages) if stage - 1 not in skipped)


def all_stages(stages: int) -> tuple[int, ...]:
    """A full path through a model of so many stages: all but stage 0, which is on every path and not listed."""
    return tuple(range(1, stages))


def spread_stages(rules: PathRules, shift: int = 0) -> tuple[int, ...]:
    """`rules.per_path` of the stages after stage 0, as evenly spread over the depth as whole numbers allow; the same
    for everybody.

    `shift` moves the choice on by so many stages, like a ring. Over `skippable` shifts, every stage is chosen equally
    often.
    """
    skippable = rules.skippable
    # Bresenham's line: stage i is visited where the multiple of per_path / skippable passes a whole number.
    return tuple(i + 1 for i in range(skippable) if (i + shift) * rules.per_path % skippable < rules.per_path)


def ring_of_subsets(rules: PathRules) -> tuple[tuple[int, ...], ...]:
    """All the different choices of `spread_stages`, in order of shift. Every stage is in equally many of them."""
    skippable = rules.skippable
    different = skippable // math.gcd(skippable, rules.per_path) if skippable else 1
    return tuple(spread_stages(rules, shift) for shift in range(different))


def chosen_subsets(stages: int, per_path: int | None, *, every: bool) -> tuple[tuple[int, ...], ...]:
    """The paths on which a model of so many stages is to be measured.

    Args:
        per_path: how many stages after stage 0 each visits; None for all of them.
        every: whether the whole ring of choices is asked for, and not only the first.

    Raises:
        ConfigError: there are not so many stages, or none was asked for.
    """
    if per_path is None:
        return (all_stages(stages),)
    if not min(1, stages - 1) <= per_path <= stages - 1:
        raise ConfigError(
            f"{per_path} stages per path were asked for; this run has {stages - 1} after stage 0",
            hint=f"Ask for 1 to {stages - 1}.",
        )
    rules = PathRules(stages, per_path)
    return ring_of_subsets(rules) if every else (spread_stages(rules),)
