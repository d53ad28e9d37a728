"""The findings of checks, and the bounds that keep a check from failing or hanging."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.concurrency.daemon_thread import aside
from swarm.vocabulary.errors import SkipstoneError


class Level(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """A node works, but not as well as it could."""
    FAIL = "fail"
    """A node does not work, or others cannot use it."""
    SKIP = "skip"
    """Not looked at, and `found` says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    fix: str = ""
    """What to do about it; empty where there is nothing to do."""

    def as_json(self) -> dict[str, str]:
        """Keys as in docs/REACHABILITY.md."""
        return {"check": self.check, "level": self.level.value, "found": self.found, "fix": self.fix}


async def bounded(check: str, look: Callable[[], Sequence[Finding]], limit_s: float) -> Sequence[Finding]:
    """The findings of a blocking check. What it raises of our own or the system's, and its taking too long, are
    findings too.
    """
    return await _caught(check, lambda: aside(look, limit_s + 1), limit_s)


async def bounded_async(
    check: str, look: Callable[[], Awaitable[Sequence[Finding]]], limit_s: float
) -> Sequence[Finding]:
    """The findings of a check that runs on the event loop, bounded likewise."""
    return await _caught(check, look, limit_s)


async def _caught(check: str, look: Callable[[], Awaitable[Sequence[Finding]]], limit_s: float) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(limit_s):
            return await look()
    except TimeoutError:
        return [
            Finding(
                check, Level.FAIL, f"gave no result within {limit_s:g} s", "Try again when the machine is less busy."
            )
        ]
    except SkipstoneError as error:
        return [Finding(check, Level.FAIL, str(error), error.hint)]
    except OSError as error:
        return [Finding(check, Level.FAIL, f"{error.strerror or error}", "Check the permissions of this user.")]
