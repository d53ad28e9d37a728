"""What the contenders of `benchmarks.hop` have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass

SAMPLES_PER_ROUND = 4
"""Of each contender, one after the other; the first of them, which finds cold caches after the others' turns, is not
counted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds from handing over the input until the output is there, and until the input's gradient is."""

    forward_s: float
    forward_backward_s: float


def threads_of_each_peer() -> int:
    """Two peers share this machine's cores, whichever library they use."""
    return max(1, (os.cpu_count() or 1) // 2)
