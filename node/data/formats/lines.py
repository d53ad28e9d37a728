"""A source of JSON Lines: every line of the files is a document (https://jsonlines.org).

It stands alone because files of text need no index of lines.
"""

from __future__ import annotations

import errno
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from node.data.formats.listing import Listing
from swarm.vocabulary.errors import ConfigError

LINE_BYTES: Final = 2**20
"""A longer line is left out: no document needs more memory than this allows."""
MAX_LINES: Final = 2**24
"""Of all files together: the index takes 8 bytes for each, and the order of an epoch 16."""
SUFFIX: Final = ".jsonl"


class LineSource:
    """A source of the lines of a listing's `.jsonl` files, or of its one file; those that are empty are none. Documents
    are named `NAME@OFFSET`. Opening one reads all files once, to find where lines begin.
    """

    def __init__(self, listing: Listing) -> None:
        """Raises ConfigError: a file cannot be read, there is no line, or there are too many."""
        self.listing = listing
        names = listing.names if len(listing.names) == 1 else [name for name in listing.names if name.endswith(SUFFIX)]
        try:
            self.names = PlacedNames(names, [_line_starts(listing, name) for name in names])
        except OSError as error:
            raise ConfigError(f"{listing.root}: {error.strerror}: {error.filename}") from None
        if not self.names:
            raise ConfigError(
                f"{listing.root}: there is no line in it that could be a conversation",
                hint=f"Name a file of JSON Lines, or a folder with {SUFFIX} files.",
            )

    def read(self, name: str) -> bytes:
        base, _, offset = name.rpartition("@")
        with self.listing.open(base) as file:
            file.seek(int(offset))
            line = file.readline(LINE_BYTES + 1)
        if len(line.rstrip(b"\r\n")) > LINE_BYTES:
            raise OSError(errno.EFBIG, f"the line has more than {LINE_BYTES} bytes", name)
        return line


class PlacedNames(Sequence[str]):
    """Names `FILE@START`, of documents of several files that begin at these places; made when they are asked for."""

    def __init__(self, files: Sequence[str], starts: Sequence[array[int]]) -> None:
        self._files = files
        self._starts = starts
        self._ends = list(accumulate(map(len, starts)))
        """For each file, how many lines it and those before it have."""
        if len(self) > MAX_LINES:
            raise ConfigError(
                f"data.source has {len(self)} documents, more than {MAX_LINES}", hint="Name a part of it."
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        file = bisect_right(self._ends, number)
        return f"{self._files[file]}@{self._starts[file][number - (self._ends[file - 1] if file else 0)]}"


def _line_starts(listing: Listing, name: str) -> array[int]:
    """Where the lines of a file begin that have something in them. Holds a piece of a line, however long that is."""
    starts, at, is_begin = array("Q"), 0, True
    with listing.open(name) as file:
        while (piece := file.readline(LINE_BYTES)) and len(starts) <= MAX_LINES:
            if is_begin and piece.strip():
                starts.append(at)
            at, is_begin = at + len(piece), piece.endswith(b"\n")
    return starts
