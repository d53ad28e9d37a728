"""A shelf of fetched files with a bound on their bytes: what is due is fetched, what was not used for longest goes."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from swarm.vocabulary.errors import ConfigError, ResourceExhausted, SkipstoneError

logger = logging.getLogger(__name__)

SHARE_OF_ONE: Final = 4
"""A file may have the bound's quarter: two that are being read, training and held-out text, one that is fetched ahead,
and one more always find room."""

Fetch = Callable[[str], Path]
"""Fetches a file by its name. Raises SkipstoneError."""


class FileShelf:
    """Files by name, fetched when they are asked for, or ahead. May be used by several threads.

    Args:
        fetch: called outside of the event loop, for one name once at a time.
        sizes: in bytes, of all files that there are.
        most_bytes: of the files on the shelf and those that are being fetched, together.

    Raises:
        ConfigError: a file is larger than the bound allows.
    """

    def __init__(self, fetch: Fetch, sizes: Mapping[str, int], most_bytes: int) -> None:
        for name, size in sizes.items():
            if size * SHARE_OF_ONE > most_bytes:
                raise ConfigError(
                    f"data.source: {name} has {size} bytes, more than a quarter of the {most_bytes} that are kept",
                    hint="Make shards of the data set once with `skipstone tokenize`, and use tokens:FOLDER.",
                )
        self._fetch, self._sizes, self._most = fetch, sizes, most_bytes
        self._kept: OrderedDict[str, Path] = OrderedDict()
        """The one that was not used for longest first."""
        self._readers: Counter[str] = Counter()
        self._fetching: set[str] = set()
        self._ahead: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """Of the files that are here or on their way."""
        with self._changed:
            return self._bytes()

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """The file, which stays until the end of the block; waits while it is fetched.

        Raises:
            SkipstoneError: it cannot be fetched.
            ResourceExhausted: the shelf is full of files that are being read.
        """
        path = self._taken(name)
        try:
            yield path
        finally:
            with self._changed:
                self._readers[name] -= 1
                self._changed.notify_all()

    def expect(self, name: str) -> None:
        """Begins to fetch a file that is due soon, if there is room and none is on its way for this already."""
        with self._changed:
            under_way = self._ahead is not None and self._ahead.is_alive()
            if under_way or name in self._kept or name in self._fetching or not self._make_room(name):
                return
            self._fetching.add(name)
            self._ahead = threading.Thread(target=self._bring_ahead, args=(name,), name="hub", daemon=True)
            self._ahead.start()

    def _taken(self, name: str) -> Path:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: name not in self._fetching)
                if name in self._kept:
                    self._kept.move_to_end(name)
                    self._readers[name] += 1
                    return self._kept[name]
                if not self._make_room(name):
                    raise ResourceExhausted(f"no room for {name} among the {self._most} bytes of files that are kept")
                self._fetching.add(name)
            self._bring(name)

    def _bring_ahead(self, name: str) -> None:
        try:
            self._bring(name)
        except SkipstoneError as error:  # whoever reads it tries again, and says so
            logger.debug("%s was not fetched ahead: %s", name, error)

    def _bring(self, name: str) -> None:
        path = None
        try:
            path = self._fetch(name)
        finally:
            with self._changed:
                self._fetching.discard(name)
                if path is not None:
                    self._kept[name] = path
                self._changed.notify_all()

    def _make_room(self, name: str) -> bool:
        """Removes what is not read, as far as needed; called under the lock."""
        for old in list(self._kept):
            if self._bytes() + self._sizes[name] <= self._most:
                break
            if not self._readers[old]:
                self._kept.pop(old).unlink(missing_ok=True)
        return self._bytes() + self._sizes[name] <= self._most

    def _bytes(self) -> int:
        return sum(self._sizes[name] for name in (*self._kept, *self._fetching))
