"""The rule by which microbatches of any size make inner steps.

It stands alone because the data node that launches, the replicas that step, the single process and the check of logs
have to agree about it without a word.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRule:
    """The tokens of an inner step.

    A step is complete when less than half of a largest microbatch is missing. Microbatches of one size make steps of
    exactly `inner_tokens`; of nearly one size steps of as many microbatches, in whatever order they come, so that all
    replicas have the same ones in a step. What a step has too much or too little is not carried over.

    Args:
        inner_tokens: a multiple of `microbatch_tokens`.
        microbatch_tokens: of one microbatch, at most.
    """

    inner_tokens: int
    microbatch_tokens: int = 1

    def is_complete(self, tokens: int, steps: int = 1) -> bool:
        """Whether so many tokens are enough for so many steps."""
        return 2 * tokens >= 2 * steps * self.inner_tokens - self.microbatch_tokens
