"""The exponentially weighted moving average: the one way in which anything that is measured again and again is smoothed
(times of peers, round trips, speeds).

It stands alone because the transport, the planner and the workers use it, and know nothing of each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ewma:
    """A running average, exponentially weighted; the first samples count alike, so that it is soon an average."""

    weight: float = 0.1
    """Of a new sample, once there are many; as in SWARM (Ryabinin et al. 2023, section 3.2) where nothing else is
    said."""
    mean: float = 0.0
    """0 before the first sample."""
    samples: int = 0

    @property
    def gain(self) -> float:
        """The weight that the next sample will have."""
        return max(self.weight, 1 / (self.samples + 1))

    def add(self, sample: float) -> None:
        """Takes a sample in."""
        self.mean += self.gain * (sample - self.mean)
        self.samples += 1
