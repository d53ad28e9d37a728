"""A source of JSON Lines: every line of the files is a document (https://jsonlines.org).

It stands alone because files of text need no index of lines.
"""

from __future__ import annotations

import errno
from array import array
from typing import Final

from node.data.formats.document_names import MAX_DOCUMENTS, PlacedNames
from node.data.formats.listing import Listing
from swarm.vocabulary.errors import ConfigError

LINE_BYTES: Final = 2**20
"""A longer line is left out: no document needs more memory than this allows."""
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


def _line_starts(listing: Listing, name: str) -> array[int]:
    """Where the lines of a file begin that have something in them. Holds a piece of a line, however long that is."""
    starts, at, is_begin = array("Q"), 0, True
    with listing.open(name) as file:
        while (piece := file.readline(LINE_BYTES)) and len(starts) <= MAX_DOCUMENTS:
            if is_begin and piece.strip():
                starts.append(at)
            at, is_begin = at + len(piece), piece.endswith(b"\n")
    return starts
