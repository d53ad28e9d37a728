"""The rule by which microbatches of any size make inner steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRule:
    """The tokens of an inner step. It is complete when less than half of a largest microbatch is missing.

    Args:
        inner_tokens: a multiple of `microbatch_tokens`.
        microbatch_tokens: of one microbatch, at most.
    """

    inner_tokens: int
    microbatch_tokens: int = 1

    def is_complete(self, tokens: int, steps: int = 1) -> bool:
        """Whether so many tokens are enough for so many steps."""
        return 2 * tokens >= 2 * steps * self.inner_tokens - self.microbatch_tokens
