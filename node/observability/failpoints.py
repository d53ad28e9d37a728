"""Failpoints: with SKIPSTONE_CRASH_AT=NAME:N the process kills itself when it reaches NAME for the N-th time."""

import os
import signal
from typing import Final

from swarm.vocabulary.errors import ConfigError

VARIABLE: Final = "SKIPSTONE_CRASH_AT"

# Each names the moment in the code that calls `crash_point` with it.
POINTS: Final = frozenset(
    (
        *("arrived", "before forward", "after forward", "before loss", "after loss", "before backward"),
        *("gradient added", "after backward", "before replay", "after replay", "sent", "before completed"),
        *("after completed", "piece sent", "piece arrived", "reduced", "staged", "committing", "committed"),
        *("before write", "before sync", "before rename", "after rename", "chunk arrived", "draining"),
    )
)


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
