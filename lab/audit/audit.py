"""The audit as a whole: logs in, one report out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.audit.findings import Findings, Life, Spot, Violation
from lab.audit.round_audit import RoundCheck
from lab.audit.route_audit import RouteCount
from lab.audit.token_audit import TokenCheck
from lab.audit.visit_audit import VisitCheck
from node.observability.event_json import event_from_json, ms_of
from node.observability.events import Ended, Event, Started
from swarm.vocabulary.errors import ProtocolViolation

Line = tuple[Spot, bytes]


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on a folder of logs."""

    logs: int
    ended_well: int
    torn: int
    """Logs whose last line is cut off: their process was killed while it wrote."""
    counts: dict[str, int]
    violations: tuple[Violation, ...]
    by_route: dict[str, Any] = field(default_factory=dict)
    """Of a run with experts: completed microbatches by module and by route (`RouteCount.as_json`)."""

    def as_json(self) -> dict[str, Any]:
        """The JSON object for `--json`."""
        return {
            "ok": not self.violations,
            "logs": self.logs,
            "ended_well": self.ended_well,
            "torn": self.torn,
            **self.counts,
            **self.by_route,
            "violations": [
                {"rule": found.rule, "at": None if found.spot is None else str(found.spot), "message": found.message}
                for found in self.violations
            ],
        }


class LogCheck:
    """The reader of logs, one after the other, a peer's in the order of their start."""

    def __init__(self) -> None:
        self._checks = (VisitCheck(), RoundCheck(), TokenCheck())
        self._routes = RouteCount()
        self._own = Findings()
        self._lives: list[Life] = []
        self._torn = 0

    def read(self, lines: Iterable[Line]) -> None:
        """Reads all lines of one process, of all its parts in order, each with its line end if it has one.

        A last line that is cut off is what a killed process leaves; any other line that is no event is a violation.
        """
        life: Life | None = None
        parts = 0
        cut: Spot | None = None
        for spot, line in lines:
            if cut is not None:
                self._own.violate("log", cut, "a line is cut off, and others follow it")
            cut = None if line.endswith(b"\n") else spot
            event = None if cut is not None else self._event(spot, line)
            if isinstance(event, Started):
                parts += 1
                if event.part != parts:
                    self._own.violate("log", spot, f"part {parts} of this log is missing")
                    parts = event.part
                life = life or self._begin(event)
            elif life is None:
                if cut is None:
                    self._own.violate("log", spot, "the log does not begin with `started`")
                    return
            elif isinstance(event, Ended):
                life.ended_ms = event.unix_ms
            elif event is not None:
                life.now_ms = life.began_ms + ms_of(line)
                for check in self._checks:
                    check.take(life, spot, event)
                self._routes.take(event)
        self._torn += cut is not None

    def _event(self, spot: Spot, line: bytes) -> Event | None:
        """None for a line that is wrong, and for an event of a later version."""
        try:
            return event_from_json(line)
        except ProtocolViolation as error:
            self._own.violate("log", spot, str(error))
            return None

    def report(self) -> Report:
        """The verdict on all that has been read."""
        if not self._lives:
            self._own.violate("log", None, "there is no log")
        found = [self._own, *(check.judge() for check in self._checks)]
        counts = {what: number for findings in found for what, number in findings.counts.items()}
        counts |= self._routes.counts
        violations = tuple(violation for findings in found for violation in findings.violations)
        ended_well = sum(life.ended_well for life in self._lives)
        return Report(len(self._lives), ended_well, self._torn, counts, violations, self._routes.as_json())

    def _begin(self, started: Started) -> Life:
        life = Life(started.peer, started.unix_ms)
        self._lives.append(life)
        for check in self._checks:
            check.begin(life)
        return life


def check_logs(logs: Sequence[Iterable[Line]]) -> Report:
    """Judges the logs, which are in the order of their processes' start."""
    check = LogCheck()
    for lines in logs:
        check.read(lines)
    return check.report()
