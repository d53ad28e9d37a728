"""Moving averages, tables of the latest entries, pauses between retries, and temporary exclusions of peers."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from swarm.vocabulary.types import PeerId


@dataclass(slots=True)
class Ewma:
    """An exponentially weighted mean. The first samples count equally, so that it converges quickly."""

    weight: float = 0.1  # Weight of a new sample after the first ones (SWARM, Ryabinin et al. 2023, section 3.2)
    mean: float = 0.0  # 0 before the first sample
    samples: int = 0

    @property
    def gain(self) -> float:
        return max(self.weight, 1 / (self.samples + 1))

    def raised(self, share: float) -> float:  # The sample that raises the mean by this share
        return self.mean * (1 + share / self.gain)

    def add(self, sample: float) -> None:
        self.mean += self.gain * (sample - self.mean)
        self.samples += 1


Key = TypeVar("Key")
Item = TypeVar("Item")


class Latest(OrderedDict[Key, Item]):
    """A table of the `most` entries that were set last. Setting one more drops the oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, item: Item) -> None:
        super().__setitem__(key, item)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


MOST_DOUBLINGS: Final = 16
REMEMBERED: Final = 256  # Peers per list


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A pause that doubles with every consecutive failure, up to a bound."""

    first_s: float
    longest_s: float
    free: int = 0  # Failures without a pause

    def seconds(self, failures: int) -> float:
        if failures <= self.free:
            return 0.0
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - self.free - 1, MOST_DOUBLINGS))


@dataclass(frozen=True, slots=True)
class _Record:
    count: int
    latest: float
    pause_s: float


class Exclusions:
    """Temporary exclusions of peers for one kind of offence, longer each time; forgotten after `forgiven_after_s`."""

    def __init__(
        self,
        backoff: ExponentialBackoff,
        forgiven_after_s: float = math.inf,
        *,
        jitter: Callable[[], float] = lambda: 0.0,
        remembered: int = REMEMBERED,
    ) -> None:
        self._backoff, self._forgiven_after_s = backoff, forgiven_after_s
        self._jitter = jitter
        self._records = Latest[PeerId, _Record](remembered)

    def add(self, peer: PeerId, now: float) -> float:
        """Records a peer's offence. Returns the seconds for which the peer is excluded."""
        before = self._records.get(peer)
        stale = before is None or now - before.latest > self._forgiven_after_s + before.pause_s
        count = 1 if before is None or stale else before.count + 1
        pause_s = self._backoff.seconds(count) * (1 - self._jitter() / 2)
        self._records[peer] = _Record(count, now, pause_s)
        return pause_s

    def forgive(self, peer: PeerId) -> None:
        self._records.pop(peer, None)

    def excluded(self, now: float) -> frozenset[PeerId]:
        records = tuple(self._records.items())  # also called by threads
        return frozenset(peer for peer, record in records if now - record.latest < record.pause_s)

    def left_s(self, peer: PeerId, now: float) -> float:
        record = self._records.get(peer)
        return 0.0 if record is None else max(0.0, record.latest + record.pause_s - now)
