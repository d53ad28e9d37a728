"""The bounded record store of one DHT node.

hivemind's own storage is not used: it has no size limit, a stored value that is *refused* as older still moves the
newer one's removal forward (so a replay deletes an honest record early), and its bookkeeping grows with every attempt.

The bounds, and who gives way when one is reached:

* A key has room for a fixed number of owners. When it is full a newcomer is refused, because records that are there
  already are the swarm that works now, and identities cost nothing: any rule that lets strangers push others out lets a
  flood push out everybody. Newcomers still reach the swarm, since peers hand each other their records on their links
  too.
* Keys outside the run do not exist, so the keys are as many as the run's modules, and a flood of one leaves the others
  alone.
* An owner may stand under a few keys at a time (it moves between modules). One more pushes out its own oldest, nobody
  else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_RECORDS = 16_384
MAX_OWNERS_OF_KEY = 256
MIN_OWNERS_OF_KEY = 8
MAX_KEYS_OF_OWNER = 8


def owners_per_key(keys: int) -> int:
    """The number of owners one of `keys` keys has room for, so that together they stay near MAX_RECORDS."""
    return max(MIN_OWNERS_OF_KEY, min(MAX_OWNERS_OF_KEY, MAX_RECORDS // keys))


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored record. `value` is opaque here; it was validated before."""

    value: bytes
    expires_at: float


@dataclass(slots=True)
class RecordStore:
    """Records by key and owner until they expire. `now` returns Unix time in seconds."""

    now: Callable[[], float]
    owners_of_key: int = MAX_OWNERS_OF_KEY
    max_records: int = MAX_RECORDS
    longest_s: float = math.inf
    """What expires later than so many seconds from now is not kept any more: this machine's clock was ahead when it
    came."""
    _rooms: dict[Any, dict[str, Kept]] = field(default_factory=dict)
    _keys_of: dict[str, dict[Any, None]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def put(self, key: Any, owner: str, kept: Kept) -> bool:
        """Stores a record; whether it was taken: it is newer than what the owner has here, or there is room for it."""
        if not self._holds(kept):
            return False
        present = self._rooms.get(key, {}).get(owner)
        if present is not None:
            is_newer = kept.expires_at > present.expires_at or not self._holds(present)
            if is_newer:
                self._rooms[key][owner] = kept
            return is_newer
        if self._is_full(key):
            self._drop_expired()
            if self._is_full(key):
                return False
        if len(self._keys_of.get(owner, ())) >= MAX_KEYS_OF_OWNER:
            oldest = min(self._keys_of[owner], key=lambda key: self._rooms[key][owner].expires_at)
            self._remove(oldest, owner)
        self._rooms.setdefault(key, {})[owner] = kept
        self._keys_of.setdefault(owner, {})[key] = None
        self._count += 1
        return True

    def of_key(self, key: Any) -> dict[str, Kept]:
        """The unexpired records under a key."""
        return {owner: kept for owner, kept in self._rooms.get(key, {}).items() if self._holds(kept)}

    def keys(self) -> Iterator[Any]:
        self._drop_expired()
        return iter(tuple(self._rooms))

    def _holds(self, kept: Kept) -> bool:
        return 0 < kept.expires_at - self.now() <= self.longest_s

    def _is_full(self, key: Any) -> bool:
        return len(self._rooms.get(key, ())) >= self.owners_of_key or self._count >= self.max_records

    def _drop_expired(self) -> None:
        for key, room in tuple(self._rooms.items()):
            for owner, kept in tuple(room.items()):
                if not self._holds(kept):
                    self._remove(key, owner)

    def _remove(self, key: Any, owner: str) -> None:
        del self._rooms[key][owner], self._keys_of[owner][key]
        if not self._rooms[key]:
            del self._rooms[key]
        if not self._keys_of[owner]:
            del self._keys_of[owner]
        self._count -= 1
