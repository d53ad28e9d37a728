"""Failpoints: with SKIPSTONE_CRASH_AT=NAME:N the process kills itself at the N-th visit of the point NAME."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ConfigError

VARIABLE: Final = "SKIPSTONE_CRASH_AT"

POINTS: Final[Mapping[str, str]] = {
    "arrived": "a microbatch's tensor is here, and nobody has been told",
    "before forward": "a forward has been accepted",
    "after forward": "its output is computed, and not sent",
    "before loss": "a microbatch has come to the end of its way out",
    "after loss": "its loss is known, and no gradient is on its way back",
    "before backward": "a gradient has been accepted",
    "gradient added": "in the middle of a backward pass",
    "after backward": "the gradient for the hop before is computed, and not sent",
    "before replay": "a microbatch of a lost replica is about to be computed anew",
    "after replay": "that has been done, and nothing sent",
    "sent": "a tensor is with the next peer, which has not passed it on",
    "before completed": "a data node is about to write that a microbatch is complete",
    "after completed": "it has, and has told no hop",
    "piece sent": "in the middle of a round's exchange",
    "piece arrived": "likewise",
    "reduced": "the sum of a piece is ready, and with nobody else",
    "staged": "a round's result is complete, and not committed",
    "committing": "the new anchor is in its place, the replica's parameters are the old ones",
    "committed": "both are, and nobody has been told",
    "before write": "a checkpoint's file is about to be written, as all below",
    "before sync": "it is written, but not durable",
    "before rename": "it is durable, but has its name not yet",
    "after rename": "it has its name, which is not durable",
    "chunk arrived": "in the middle of catching up",
    "draining": "a node that leaves has said so",
}


@dataclass(slots=True)
class _Fuse:
    point: str
    left: int


def crash_point(name: str) -> None:
    """Ends the process here if it was started to do so."""
    if _fuse is not None and name == _fuse.point:
        _fuse.left -= 1
        if _fuse.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def crash_at(point: str, nth: int) -> str:
    """The environment variable's value for a failpoint. Raises ConfigError for a point that is none."""
    if point not in POINTS:
        raise ConfigError(f"{point!r} is no crash point", hint=f"There are {', '.join(POINTS)}.")
    return f"{point}:{nth}"


def _fuse_of(environment: Mapping[str, str]) -> _Fuse | None:
    """Parses the variable. Raises ConfigError: a crash that silently never comes would look like success."""
    value = environment.get(VARIABLE)
    if not value:
        return None
    point, _, number = value.rpartition(":")
    if point not in POINTS or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{VARIABLE}={value!r} names no crash point", hint="Write NAME:N.")
    return _Fuse(point, int(number))


_fuse = _fuse_of(os.environ)
