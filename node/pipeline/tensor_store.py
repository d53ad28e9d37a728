"""The store of the tensors that go with custody's holdings, and of when their buffers may be used again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocol.codecs import Encoded
from swarm.pipeline.custody_events import Key
from swarm.vocabulary.pipeline_messages import Backward, Forward, MicrobatchTensor


@dataclass(slots=True, eq=False)
class Load:
    """The tensors of one holding, given back when custody has forgotten it and no task uses them any more."""

    ticket: int
    input: Encoded | None = None
    gradient: Encoded | None = None
    output: Encoded | None = None
    documents: tuple[int, ...] = ()
    """Of its microbatch, kept for as long as its gradient may have to be taken back; and so are the labels."""
    labels: int = 0
    users: int = 0
    forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it is forgotten and no task uses it any more."""
        return self.forgotten and not self.users

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Ends one use that was announced by counting `users` up."""
        try:
            yield
        finally:
            self.users -= 1


class TensorStore:
    """The loads of the holdings that have tensors, by key; and what has arrived, until custody has decided about it."""

    def __init__(self) -> None:
        self._loads: dict[Key, Load] = {}
        self._arrived: dict[tuple[Key, type[MicrobatchTensor]], Encoded] = {}
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

    def arrived(self, message: MicrobatchTensor, tensor: Encoded) -> None:
        """Keeps the tensor of a message of which custody hears next."""
        self._arrived[place_of(message)] = tensor

    def take_input(self, key: Key) -> Load:
        """The holding's load, with the input that has just arrived, if one has."""
        load = self.of(key)
        load.input = self._arrived.pop((key, Forward), load.input)
        return load

    def take_gradient(self, key: Key) -> Load:
        """The holding's load, with the gradient of its output that has just arrived, if one has."""
        load = self.of(key)
        load.gradient = self._arrived.pop((key, Backward), load.gradient)
        return load

    def reject(self, message: MicrobatchTensor) -> Encoded | None:
        """Gives back the tensor of the message, if no load has taken it: a second copy, or of a holding that is
        gone.
        """
        return self._arrived.pop(place_of(message), None)

    def forget(self, key: Key) -> Load | None:
        """Removes and returns a holding's load; None when the holding had no tensors."""
        load = self._loads.pop(key, None)
        if load is not None:
            load.forgotten = True
        return load


def place_of(message: MicrobatchTensor) -> tuple[Key, type[MicrobatchTensor]]:
    """The holding that the tensor of a message is for, and whether it is its input or its gradient."""
    return Key(message.microbatch, message.position), type(message)
