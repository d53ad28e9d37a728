"""The order of the rows of a data set that is read file by file, and which data node reads what of it.

An epoch walks the files in an order of its own, and a file's rows as they lie in it. A row's place in the epoch is its
file's rank and its number there, so that how many rows a file has need not be known before it is fetched. What stands
near each other in a file stays near: only the packer's blocks, of about a million tokens, are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from swarm.vocabulary.types import PeerId

ROWS: Final = 2**32
"""More than a file has."""
FILES_EACH: Final = 16
"""Files for each data node from which on whole files are dealt: of fewer, one data node in a million might get none."""

Wanted = Callable[[str], bool]
Owner = Callable[[str, tuple[PeerId, ...]], PeerId]
"""The data node of a name among these (`node.data.documents.owner`)."""


class FileStream(Protocol):
    """Rows by file."""

    @property
    def files(self) -> Sequence[str]:
        """Their names, in an order that is the same on every machine."""
        ...

    def rows(self, file: str, start: int) -> Generator[Callable[[], bytes]]:
        """What reads the file's rows, from number `start` on."""
        ...

    def expect(self, file: str) -> None:
        """Says that the file's rows are due next."""
        ...


@dataclass(frozen=True, slots=True)
class Due:
    """A document whose turn it is."""

    position: int
    """In the epoch's order."""
    name: str
    read: Callable[[], bytes]
    """Raises OSError when it cannot be read, and is left out."""


def due_rows(
    stream: FileStream,
    orders: Callable[[int], npt.NDArray[np.int64]],
    start: tuple[int, int, bool],
    wanted: tuple[Wanted, Wanted],
    *,
    ahead: bool,
) -> Iterator[Due]:
    """The wanted rows of an epoch, named `FILE@NUMBER`.

    Args:
        orders: the order in which an epoch walks the files.
        start: the epoch, the position, and whether the row there is read wanted or not, as one that was begun is.
        wanted: of files, and of rows. A file is left when it is not wanted any more.
        ahead: whether the wanted file after each is fetched meanwhile.
    """
    epoch, position, is_begun = start
    of_files, of_rows = wanted
    order = orders(epoch)
    first, number = divmod(position, ROWS)
    for rank in range(first, len(order)):
        file = stream.files[int(order[rank])]
        begun = position if is_begun and rank == first else -1
        if begun < 0 and not of_files(file):
            continue
        at = number if rank == first else 0
        with closing(stream.rows(file, at)) as rows:
            for row, read in enumerate(rows, at):
                place, name = rank * ROWS + row, f"{file}@{row}"
                if ahead and row == at:  # not earlier: the two would share the link, and the first document wait
                    later = (stream.files[int(index)] for index in chain(order[rank + 1 :], orders(epoch + 1)))
                    if (following := next(filter(of_files, later), None)) is not None:
                        stream.expect(following)
                if place != begun and not of_files(file):
                    break
                if place == begun or of_rows(name):
                    yield Due(place, name, read)


class FileShare:
    """A data node's share of a data set that is dealt by files: whole files, or rows where there are few files.

    The rule follows from the live data nodes and the number of files, so that all data nodes with the same view follow
    the same one, and no row is two's.
    """

    def __init__(self, own: PeerId, files: int, owner: Owner) -> None:
        self._own, self._files = own, files
        self._owner = owner
        self._of_file = lru_cache(maxsize=1024)(owner)

    def has_file(self, file: str, data_nodes: tuple[PeerId, ...]) -> bool:
        """Whether something of the file may be its own."""
        return not self._by_files(data_nodes) or self._of_file(file, data_nodes) == self._own

    def has_row(self, name: str, data_nodes: tuple[PeerId, ...]) -> bool:
        """Whether a row of a file, by its name `FILE@NUMBER`, is its own."""
        if self._by_files(data_nodes):
            return self._of_file(name.rpartition("@")[0], data_nodes) == self._own
        return self._owner(name, data_nodes) == self._own

    def _by_files(self, data_nodes: tuple[PeerId, ...]) -> bool:
        return self._files >= FILES_EACH * len(data_nodes)
