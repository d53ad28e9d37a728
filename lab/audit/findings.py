"""The findings of the checks: where a line stands, whose life a log tells of, and what was found.

It stands alone because every check makes findings, and none knows another.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a log file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(slots=True, eq=False)
class Life:
    """The log of one process of one peer."""

    peer: str
    began_ms: int
    now_ms: int = 0
    """When the line was written that was read last, by this peer's clock; so are the others."""
    ended_ms: int | None = None
    """None when the log has no clean end: the process was killed, or its disk was full."""

    @property
    def ended_well(self) -> bool:
        return self.ended_ms is not None


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of what must hold. `spot` is where it shows first."""

    rule: str
    spot: Spot | None
    message: str


@dataclass(slots=True)
class Findings:
    """The findings of one check."""

    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def violate(self, rule: str, spot: Spot | None, message: str) -> None:
        self.violations.append(Violation(rule, spot, message))

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by
