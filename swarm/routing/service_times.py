"""How long a peer takes for a microbatch: what was measured here first, what the peer announces until then.

A sample is the time a microbatch spent at the peer, out and back, on this machine's own clock; it is divided by the
queue it found there, so that it estimates the service time alone. Exponential average as in SWARM (Ryabinin et al.
2023, section 3.2: weight 0.1 for the new sample), started at the first sample instead of at zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.vocabulary.types import PeerId, Reasoned

NEW_SAMPLE_WEIGHT = 0.1
MAX_PEERS = 20_000
UNKNOWN_TOKENS_PER_S = 1000.0
"""Assumed of a peer that has neither been measured nor announced a speed; only its order among equals matters."""


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Smoothed seconds per token, and its mean absolute deviation."""

    seconds_per_token: float
    deviation: float
    samples: int


class Estimates:
    """Service times of peers, bounded; the longest unused are forgotten."""

    def __init__(self) -> None:
        self._times: OrderedDict[PeerId, ServiceTime] = OrderedDict()

    def observe(self, peer: PeerId, seconds: float, tokens: int, queue: int) -> None:
        """A microbatch of `tokens` tokens spent `seconds` at the peer, which had `queue` others of ours before it."""
        sample = max(0.0, seconds) / max(1, tokens) / (1 + max(0, queue))
        known = self._times.get(peer)
        if known is None:
            self._times[peer] = ServiceTime(sample, sample / 2, 1)
            while len(self._times) > MAX_PEERS:
                self._times.popitem(last=False)
            return
        error = sample - known.seconds_per_token
        self._times[peer] = replace(
            known,
            seconds_per_token=known.seconds_per_token + NEW_SAMPLE_WEIGHT * error,
            deviation=known.deviation + NEW_SAMPLE_WEIGHT * (abs(error) - known.deviation),
            samples=known.samples + 1,
        )
        self._times.move_to_end(peer)

    def penalize(self, peer: PeerId, seconds: float, tokens: int) -> None:
        """The peer failed after `seconds`: it counts as having been that slow, so that failing never looks like
        speed."""
        self.observe(peer, seconds, tokens, 0)

    def longest_unmeasured(self, peers: Sequence[PeerId]) -> PeerId:
        """Of these, one that was never measured, else the one whose last measurement is the oldest.

        Raises:
            ValueError: there are none.
        """
        unmeasured = next((peer for peer in peers if peer not in self._times), None)
        return unmeasured or min(peers, key=list(self._times).index)

    def measured(self, peer: PeerId) -> ServiceTime | None:
        return self._times.get(peer)

    def seconds(self, peer: PeerId, tokens: int, announced_tokens_per_s: float) -> Reasoned[float]:
        """Expected seconds for `tokens` tokens, out and back, with an empty queue."""
        known = self._times.get(peer)
        if known is not None:
            return Reasoned(known.seconds_per_token * tokens, f"measured {known.samples} times")
        if announced_tokens_per_s > 0:
            return Reasoned(tokens / announced_tokens_per_s, "announced")
        return Reasoned(tokens / UNKNOWN_TOKENS_PER_S, "unknown")
