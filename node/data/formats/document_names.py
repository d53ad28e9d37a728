"""Names of documents that are made when they are asked for: there may be millions of them."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from swarm.vocabulary.errors import ConfigError

MAX_DOCUMENTS: Final = 2**24
"""The order of an epoch takes 16 bytes for each, an index of where they begin 8."""


class DocumentNames(Sequence[str]):
    """Of documents in several files, one file after the other.

    Args:
        counts: how many documents each file has.
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self._ends = array("q", accumulate(counts))
        """For each file, how many documents it and those before it have."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        file = bisect_right(self._ends, number)
        return self.name_of(file, number - (self._ends[file - 1] if file else 0))

    @abstractmethod
    def name_of(self, file: int, number: int) -> str:
        """The name of a file's document; both counted from 0."""


class PlacedNames(DocumentNames):
    """Names `FILE@START`, of documents that begin at these places.

    Raises:
        ConfigError: there are more than MAX_DOCUMENTS.
    """

    def __init__(self, files: Sequence[str], starts: Sequence[array[int]]) -> None:
        super().__init__(map(len, starts))
        self._files, self._starts = files, starts
        if len(self) > MAX_DOCUMENTS:
            raise ConfigError(
                f"data.source has {len(self)} documents, more than {MAX_DOCUMENTS}", hint="Name a part of it."
            )

    def name_of(self, file: int, number: int) -> str:
        return f"{self._files[file]}@{self._starts[file][number]}"


class RowNames(DocumentNames):
    """Row numbers as names."""

    def __init__(self, rows: int) -> None:
        super().__init__([rows])

    def name_of(self, file: int, number: int) -> str:
        return str(number)
