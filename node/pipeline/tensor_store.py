"""The tensors that go with custody's holdings, and when their buffers may be used again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocol.codecs import Encoded
from swarm.pipeline.custody_states import Key


@dataclass(slots=True, eq=False)
class Load:
    """The tensors of one holding, given back when custody has forgotten it and no task uses them any more."""

    ticket: int
    input: Encoded | None = None
    gradient: Encoded | None = None
    output: Encoded | None = None
    users: int = 0
    forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody will look at it again."""
        return self.forgotten and not self.users

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Ends one use that was announced by counting `users` up."""
        try:
            yield
        finally:
            self.users -= 1


class TensorStore:
    """One load for each holding that has tensors, by key."""

    def __init__(self) -> None:
        self._loads: dict[Key, Load] = {}
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, key: Key) -> Load:
        return self._loads[key]

    def of(self, key: Key) -> Load:
        """The holding's load; a new one, with a ticket of its own, when there is none yet."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = Load(next(self._tickets))
        return load

    def forget(self, key: Key) -> Load | None:
        """Takes it out; None when the holding had no tensors."""
        load = self._loads.pop(key, None)
        if load is not None:
            load.forgotten = True
        return load
