"""The store of a replica's anchors: the current one, and older ones for whoever is half through downloading them.

An anchor's arrays are as large as the module, so they are written again and again instead of allocated. At most
`STATES` pairs of them are here at once: the current anchor, up to two lent out to be written (a staged result that must
not be lost, and the next one), and older anchors in what room is left. Rounds come first: when room is short, a lease
on an older anchor ends, and its reader starts again with a newer one. Arrays out of which bytes are being sent are
never written; when even their room is needed they are let go of, and their memory is free when the sending ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from node.averaging.anchor.anchor import Anchor, Vector, anchor_state
from node.averaging.anchor.layout import Layout
from node.checkpoint.state import AnchorState
from swarm.vocabulary.errors import OutOfMemory, ResourceExhausted, StateError

STATES: Final = 4
"""In memory at once, lent ones included."""
LENT_AT_MOST: Final = 2


class AnchorStore:
    """Anchors with the memory of their arrays. Used from the event loop and one other thread; no method blocks for
    longer than allocating arrays takes.
    """

    def __init__(self, current: Anchor, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a monotonic clock in seconds; leases end by it."""
        self._lock = threading.RLock()  # a saved state may be let go of anywhere, in here too
        self._now = now
        self._current = current
        self._older: list[Anchor] = []  # the newest last
        self._leased_until: dict[bytes, float] = {}
        self._pins: Counter[int] = Counter()
        self._lent: list[weakref.ref[Vector]] = []
        self._returned: tuple[Vector, Vector] | None = None

    @property
    def current(self) -> Anchor:
        return self._current

    @property
    def layout(self) -> Layout:
        return self._current.layout

    def get(self, digest: bytes) -> Anchor | None:
        """The current anchor or an older one that is still here; to read its arrays, pin it."""
        with self._lock:
            return self._find(digest)

    @contextmanager
    def pinned(self, anchor: Anchor) -> Iterator[Anchor]:
        """Keeps the arrays of the anchor from being written within the block. For as long as one chunk takes to send,
        not for a download.

        Raises:
            StateError: the anchor is not here any more.
        """
        with self._lock:
            if self._find(anchor.version.digest) is not anchor:
                raise StateError(f"the state of round {anchor.version.round} is not kept any more")
            self._pins[id(anchor)] += 1
        try:
            yield anchor
        finally:
            self._unpin(anchor)

    def _unpin(self, anchor: Anchor) -> None:
        with self._lock:
            self._pins[id(anchor)] -= 1
            if not self._pins[id(anchor)]:
                del self._pins[id(anchor)]

    def saved(self) -> AnchorState:
        """The current anchor in its saved form, whose arrays are not written for as long as anybody has it: a
        checkpoint may take longer to write than two rounds.
        """
        with self._lock:
            anchor = self._current
            state = anchor_state(anchor)
            self._pins[id(anchor)] += 1
        weakref.finalize(state, self._unpin, anchor)
        return state

    def lease(self, digest: bytes, seconds: float) -> bool:
        """Keeps this anchor for so long from now, unless a round needs its room. False when it is not here."""
        with self._lock:
            if self._find(digest) is None:
                return False
            self._leased_until[digest] = max(self._leased_until.get(digest, 0.0), self._now() + seconds)
            return True

    def spare(self) -> tuple[Vector, Vector]:
        """Parameters and momentum to be written for the next anchor; what they contain is of no use. [elements] each,
        float32.

        They come back with `put` or `give_back`; dropping the last reference to the first of them does, too.

        Raises:
            ResourceExhausted: two pairs are lent already, or this machine has no memory for another.
        """
        with self._lock:
            if self._alive() >= LENT_AT_MOST:
                raise ResourceExhausted(
                    f"{LENT_AT_MOST} anchors of this module are being made already; give one back before the next"
                )
            pair = self._returned or self._recycled() or self._allocated()
            self._returned = None
            self._lent.append(weakref.ref(pair[0]))
            return pair

    def give_back(self, parameters: Vector, momentum: Vector) -> None:
        """Takes back vectors from `spare` that will not become an anchor."""
        with self._lock:
            self._forget_lent(parameters)
            self._returned = (parameters, momentum)

    def put(self, anchor: Anchor) -> None:
        """Makes an anchor the current one; the arrays belong to the store."""
        with self._lock:
            if anchor is self._current:
                return
            self._forget_lent(anchor.parameters)
            self._older.append(self._current)
            self._current = anchor
            self._older = [a for a in self._older[:-1] if self._is_leased(a)] + self._older[-1:]
            self._make_room(0)

    # ---- all below with the lock held ------------------------------------------------------------------------------

    def _find(self, digest: bytes) -> Anchor | None:
        return next((a for a in (self._current, *self._older) if a.version.digest == digest), None)

    def _is_leased(self, anchor: Anchor) -> bool:
        return self._leased_until.get(anchor.version.digest, 0.0) > self._now()

    def _is_pinned(self, anchor: Anchor) -> bool:
        return self._pins[id(anchor)] > 0

    def _alive(self) -> int:
        self._lent = [ref for ref in self._lent if ref() is not None]
        return len(self._lent)

    def _forget_lent(self, parameters: Vector) -> None:
        self._lent = [ref for ref in self._lent if ref() is not None and ref() is not parameters]

    def _recycled(self) -> tuple[Vector, Vector] | None:
        """The arrays of the oldest anchor that nobody has a lease on, or, when there is no room for more, a lease."""
        idle = [a for a in self._older if not self._is_pinned(a)]
        chosen = next((a for a in idle if not self._is_leased(a)), None)
        if chosen is None and self._is_full(1):
            chosen = next(iter(idle), None)
        if chosen is None:
            return None
        self._drop(chosen)
        return chosen.parameters, chosen.momentum

    def _allocated(self) -> tuple[Vector, Vector]:
        self._make_room(1)
        elements = self._current.layout.elements
        try:
            return np.empty(elements, np.float32), np.empty(elements, np.float32)
        except MemoryError:
            raise OutOfMemory(f"no memory for another state of this module ({elements * 8} bytes)") from None

    def _is_full(self, more: int) -> bool:
        held = 1 + len(self._older) + self._alive() + (self._returned is not None)
        return held + more > STATES

    def _make_room(self, more: int) -> None:
        if self._is_full(more):
            self._returned = None
        while self._older and self._is_full(more):
            self._drop(self._older[0])

    def _drop(self, anchor: Anchor) -> None:
        self._older = [a for a in self._older if a is not anchor]
        self._leased_until.pop(anchor.version.digest, None)
