"""The store of a replica's anchors: the current one, and older ones for whoever is half through downloading them.

Anchors share the arrays of the fragments that they have in common and are never written again, so an older one takes
the memory of one fragment a round, and whoever reads an anchor may go on when it is not kept any more. At most `STATES`
are here at once: the current anchor, up to two in the making (a staged result that must not be lost, and the next one),
and older anchors in what room is left. Rounds come first: an older anchor that nobody has a lease on goes when the next
one is begun, and when room is short, a lease ends, and its reader starts again with a newer anchor.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from node.averaging.anchor.anchor import Anchor, anchor_state
from node.averaging.anchor.layout import Layout
from node.averaging.anchor.shared_vector import SharedVector, StateVectors, Vector, empty_part, empty_vector
from node.averaging.anchor.spare_arrays import SpareArrays
from node.checkpoint.state import AnchorState
from swarm.vocabulary.errors import ResourceExhausted

STATES: Final = 4
"""In memory at once, those in the making included."""
LENT_AT_MOST: Final = 2


class AnchorStore:
    """The anchors of one replica. Used from the event loop and one other thread; no method blocks for longer
    than allocating arrays takes.
    """

    def __init__(self, current: Anchor, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a monotonic clock in seconds; leases end by it."""
        self._lock = threading.Lock()
        self._now = now
        self._current = current
        self._older: list[Anchor] = []  # the newest last
        self._leased_until: dict[bytes, float] = {}
        self._lent: list[weakref.ref[Vector]] = []
        """To be written for the next anchors: an array of each."""
        parts = [self.layout.range_of(*fragment) for fragment in self.layout.fragments]
        self._arrays = SpareArrays(max(part.stop - part.start for part in parts))

    @property
    def current(self) -> Anchor:
        return self._current

    @property
    def layout(self) -> Layout:
        return self._current.layout

    def get(self, digest: bytes) -> Anchor | None:
        """The current anchor or an older one that is still here."""
        with self._lock:
            return self._find(digest)

    def saved(self) -> AnchorState:
        """The current anchor in its saved form, which is not written however long its checkpoint takes."""
        return anchor_state(self._current)

    def lease(self, digest: bytes, seconds: float) -> bool:
        """Keeps this anchor for so long from now, unless a round needs its room. False when it is not here."""
        with self._lock:
            if self._find(digest) is None:
                return False
            self._leased_until[digest] = max(self._leased_until.get(digest, 0.0), self._now() + seconds)
            return True

    def spare(self, part: slice | None = None) -> StateVectors:
        """Parameters and momentum of a part, or of all, to be written for the next anchor. Older anchors may go for it.

        They count until `put`, `give_back`, or the last reference to them is dropped.

        Raises:
            ResourceExhausted: two are being made already, or this machine has no memory for another.
        """
        with self._lock:
            if self._alive() >= LENT_AT_MOST:
                raise ResourceExhausted(
                    f"{LENT_AT_MOST} anchors of this module are being made already; give one back before the next"
                )
            self._older = [anchor for anchor in self._older if self._is_leased(anchor)]
            self._make_room(1)
            pair = (self._empty(part), self._empty(part))
            self._lent.append(weakref.ref(pair[0].arrays[0]))
            return pair

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None:
        """Takes note that vectors from `spare` will not become an anchor."""
        with self._lock:
            self._forget_lent(parameters)

    def put(self, anchor: Anchor) -> None:
        """Makes an anchor the current one; its arrays are not to be written any more."""
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

    def _alive(self) -> int:
        self._lent = [ref for ref in self._lent if ref() is not None]
        return len(self._lent)

    def _forget_lent(self, parameters: SharedVector) -> None:
        theirs = {id(array) for array in parameters.arrays}
        self._lent = [ref for ref in self._lent if (array := ref()) is not None and id(array) not in theirs]

    def _empty(self, part: slice | None) -> SharedVector:
        return empty_vector(self._current.layout) if part is None else empty_part(part, self._arrays)

    def _make_room(self, more: int) -> None:
        while self._older and 1 + len(self._older) + self._alive() + more > STATES:
            self._drop(self._older[0])

    def _drop(self, anchor: Anchor) -> None:
        self._older = [a for a in self._older if a is not anchor]
        self._leased_until.pop(anchor.version.digest, None)
