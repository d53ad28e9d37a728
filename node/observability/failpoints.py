"""Failpoints: with SKIPSTONE_CRASH_AT=NAME:N the process kills itself when it reaches NAME for the N-th time."""

import os
import signal
from collections.abc import Mapping
from typing import Final

from swarm.vocabulary.errors import ConfigError

VARIABLE: Final = "SKIPSTONE_CRASH_AT"

POINTS: Final[Mapping[str, str]] = {
    "arrived": "a microbatch's tensor has arrived, unacknowledged",
    "before forward": "a forward pass is accepted",
    "after forward": "the output is computed, not yet sent",
    "before loss": "a microbatch is back at its data node, before the loss",
    "after loss": "the loss is computed, the gradient not yet sent",
    "before backward": "a gradient is accepted",
    "gradient added": "in the middle of a backward pass",
    "after backward": "the gradient for the previous hop is computed, not yet sent",
    "before replay": "before recomputing a microbatch of a lost replica",
    "after replay": "the microbatch is recomputed, the result not yet sent",
    "sent": "the next peer has the tensor, but has not passed it on",
    "before completed": "a data node is about to log a microbatch as completed",
    "after completed": "it is logged, but no hop knows",
    "piece sent": "sending pieces during a round",
    "piece arrived": "receiving pieces during a round",
    "reduced": "a piece is summed, but no other peer has the sum",
    "staged": "a round's result is complete, not yet committed",
    "committing": "the anchor is new, the replica's parameters are still old",
    "committed": "anchor and parameters are new, but no other peer knows",
    "before write": "before writing any file of a checkpoint",
    "before sync": "the file is written, not yet synced to disk",
    "before rename": "the file is synced, not yet renamed",
    "after rename": "the file is renamed, the folder not yet synced",
    "chunk arrived": "downloading a missed anchor",
    "draining": "a leaving node has announced that it drains",
}


def crash_point(name: str) -> None:
    """Kills the process at the N-th call, if SKIPSTONE_CRASH_AT names this failpoint."""
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # SIGKILL, so that no handler or `finally` softens the crash


def _calls_left(value: str | None) -> dict[str, int]:
    """Parses SKIPSTONE_CRASH_AT into failpoint and count; empty if it is not set. Raises ConfigError."""
    # An unknown point must fail: a crash that never happens would look like success.
    if not value:
        return {}
    point, _, number = value.rpartition(":")
    if point not in POINTS or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{VARIABLE}={value!r} names no crash point", hint="Write it as NAME:N.")
    return {point: int(number)}


_left = _calls_left(os.environ.get(VARIABLE))  # Read once at import, before any point is reached
