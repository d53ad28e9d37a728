"""The findings of checks, and the bounds that keep a check from failing or hanging."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.concurrency.task_groups import aside
from swarm.vocabulary.errors import SkipstoneError


class Level(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    """Not checked; `found` says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "found": self.found, "fix": self.fix}


async def bounded(check: str, look: Callable[[], Sequence[Finding]], limit_s: float) -> Sequence[Finding]:
    """Runs a blocking check. Our own errors, the system's, and a timeout become findings."""
    return await bounded_async(check, lambda: aside(look, limit_s + 1), limit_s)


async def bounded_async(
    check: str, look: Callable[[], Awaitable[Sequence[Finding]]], limit_s: float
) -> Sequence[Finding]:
    """Runs a check on the event loop, as `bounded`."""
    try:
        async with asyncio.timeout(limit_s):
            return await look()
    except TimeoutError:
        fix = "Try again when the machine is less busy."
        return [Finding(check, Level.FAIL, f"gave no result within {limit_s:g} s", fix)]
    except SkipstoneError as error:
        return [Finding(check, Level.FAIL, str(error), error.hint)]
    except OSError as error:
        return [Finding(check, Level.FAIL, f"{error.strerror or error}", "Check the permissions of this user.")]
