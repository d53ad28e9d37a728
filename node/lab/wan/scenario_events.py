"""What can happen in a scenario: one frozen dataclass for each, with the time it happens at.

Whoever adds a kind hands a reader for it to `scenario.read_scenario` and carries it out beside `Laboratory.carry_out`,
which knows those below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from node.lab.emulation.link_shape import ShapeChange, Site


class Happening(Protocol):
    """Something that happens in a scenario."""

    NAME: ClassVar[str]

    @property
    def at_s(self) -> float:
        """Seconds after the swarm's first step."""
        ...


@dataclass(frozen=True, slots=True)
class Reshape:
    """Peers get another link."""

    NAME: ClassVar[str] = "shape"
    at_s: float
    """Seconds after the swarm's first step, here and below."""
    peers: tuple[int, ...]
    profile: str | None
    """Its link first; None to change the one they have."""
    change: ShapeChange


@dataclass(frozen=True, slots=True)
class Kill:
    """Peers are killed with SIGKILL, and all they have started with them."""

    NAME: ClassVar[str] = "kill"
    at_s: float
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Peers are asked to leave in good order."""

    NAME: ClassVar[str] = "stop"
    at_s: float
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A peer joins."""

    NAME: ClassVar[str] = "start"
    at_s: float
    stage: int
    site: Site


@dataclass(frozen=True, slots=True)
class Freeze:
    """Peers stand still (SIGSTOP to every process of theirs) for a while."""

    NAME: ClassVar[str] = "freeze"
    at_s: float
    peers: tuple[int, ...]
    for_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between the sides any more, and nobody is told."""

    NAME: ClassVar[str] = "partition"
    at_s: float
    sides: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Heal:
    """A partition ends."""

    NAME: ClassVar[str] = "heal"
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplaceOne:
    """A peer drawn by lot is killed, and another one with the same link joins for its stage. A module's last replica is
    spared."""

    NAME: ClassVar[str] = "replace"
    at_s: float


def named(peers: Sequence[int]) -> str:
    """In words."""
    numbers = ", ".join(str(peer) for peer in peers)
    return f"peer {numbers}" if len(peers) == 1 else f"peers {numbers}"
