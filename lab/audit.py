"""The audit of a run's event logs, for `skipstone check`: do the reports of all nodes add up?

Visits: a completed microbatch counts once at every stage of its final path; a killed peer may lack visits.
Anchors: rounds never fall within a log. Two digests of a round are a fork, as after a partition, which must heal: all
other peers join one side. Replicas that leave together hold the same anchor, or the one before.
Tokens: they count when their microbatch is completed, and steps have no gaps.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.observability.event_json import MAX_LINE_BYTES, event_from_json
from node.observability.events import (
    Abandoned,
    CaughtUp,
    Completed,
    Continued,
    Ended,
    Event,
    MicrobatchCounts,
    NodeStatus,
    NodeSummary,
    Restored,
    Retracted,
    RoundCommitted,
    Started,
    Step,
    Visit,
)
from swarm.vocabulary.errors import ConfigError, ProtocolViolation
from swarm.vocabulary.types import PeerId, Route, short

# Replicas that leave within this time of the last one are compared.
END_MS = 60_000
JOINING = "joining"
# `ms` is always the last key, so the time needs no JSON parser.
_MS_AT_END = re.compile(rb',"ms":(\d{1,15})}\s*$')
_LOG_NAME = re.compile(r"(?P<life>.+-(?P<began>\d+))(?:\.(?P<part>\d+))?\.jsonl")


@dataclass(frozen=True, slots=True)
class Spot:
    """Position in an event log: file name and line number, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


Line = tuple[Spot, bytes]


@dataclass(slots=True, eq=False)
class Life:
    """Start, current time and end of one process of a peer, from its event log."""

    peer: str
    began_ms: int
    now_ms: int = 0
    ended_ms: int | None = None

    @property
    def ended_well(self) -> bool:
        return self.ended_ms is not None


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule of the audit, and the first log line that shows it."""

    rule: str
    spot: Spot | None
    message: str


class LogCheck:
    """One check of the audit: receives the events of all logs, log by log, then looks for violations."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.counts: dict[str, int] = {}

    def begin(self, life: Life) -> None:
        """Called before the first event of each log."""

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        """Receives the next event from the log of the process `life`."""

    def judge(self) -> None:
        """Called after the last log: adds the violations of rules that need all logs."""

    def violate(self, rule: str, spot: Spot | None, message: str) -> None:
        self.violations.append(Violation(rule, spot, message))

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by


@dataclass(frozen=True, slots=True)
class _Counted:
    peer: str
    module: str
    spot: Spot
    life: Life


@dataclass(frozen=True, slots=True)
class _Done:
    hops: tuple[str, ...]
    spot: Spot
    life: Life


class VisitCheck(LogCheck):
    """Check that each completed microbatch counts exactly once at each stage of its path."""

    def __init__(self) -> None:
        super().__init__()
        self._lives: defaultdict[str, list[Life]] = defaultdict(list)
        self._visits: defaultdict[str, list[_Counted]] = defaultdict(list)
        self._completed: dict[str, _Done] = {}
        self._abandoned: dict[str, Spot] = {}
        # By the identity of the life: one entry per process.
        self._tallies: defaultdict[int, MicrobatchCounts] = defaultdict(MicrobatchCounts)
        self._before: defaultdict[int, MicrobatchCounts] = defaultdict(MicrobatchCounts)
        self._accounts: dict[int, tuple[Spot, MicrobatchCounts]] = {}
        self._without_log: set[str] = set()

    def begin(self, life: Life) -> None:
        self._lives[life.peer].append(life)

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        match event:
            case Visit(peer, module, microbatch):
                self._visits[microbatch].append(_Counted(peer, module, spot, life))
                self.count("visits")
            case Retracted(peer, _, microbatch):
                self._take_back(life, peer, microbatch)
            case Completed(_, microbatch, hops):
                self._complete(microbatch, _Done(hops, spot, life))
            case Abandoned(microbatch, _):
                self._abandoned[microbatch] = spot
                self._tally(life, MicrobatchCounts(abandoned=1))
                self.count("abandoned")
            case Continued(_, microbatches) if id(life) not in self._accounts:  # not after a pause
                self._before[id(life)] = microbatches
            case NodeSummary() if event.module is not None and _stage(event.module) == "0":
                self._accounts[id(life)] = (spot, event.microbatches)

    def judge(self) -> None:
        for number, (spot, counts) in self._accounts.items():
            self._judge_account(spot, counts, self._before[number], self._tallies[number])
        # A killed data node leaves no summary, so its microbatches in flight are not counted.
        self.count("started", sum(tally.completed + tally.abandoned for tally in self._tallies.values()))
        for microbatch, done in self._completed.items():
            self._judge_completed(microbatch, done)
        self._judge_visits_of_others()
        if self._without_log:
            self.count("peers without a log", len(self._without_log))

    def _take_back(self, life: Life, peer: str, microbatch: str) -> None:
        self.count("retracted")
        counted = self._visits[microbatch]
        # Only the latest visit of the same process can be retracted.
        for at in reversed(range(len(counted))):
            if counted[at].peer == peer and counted[at].life is life:
                del counted[at]
                return

    def _complete(self, microbatch: str, done: _Done) -> None:
        self._tally(done.life, MicrobatchCounts(completed=1))
        self.count("completed")
        before = self._completed.setdefault(microbatch, done)
        if before is not done:
            self.violate("completed once", done.spot, f"{microbatch} is completed again after {before.spot}")

    def _tally(self, life: Life, counts: MicrobatchCounts) -> None:
        self._tallies[id(life)] = self._tallies[id(life)].plus(counts)

    def _judge_account(
        self, spot: Spot, counts: MicrobatchCounts, before: MicrobatchCounts, tally: MicrobatchCounts
    ) -> None:
        """Compares the microbatch counts in a data node's final summary with those in its event log."""
        for what, said, logged in (
            ("completed", counts.completed - before.completed, tally.completed),
            ("abandoned", counts.abandoned - before.abandoned, tally.abandoned),
        ):
            if said != logged:
                message = f"the data node reports {said} {what}, but its log has {logged}"
                self.violate("account", spot, message)
        in_flight = counts.started - counts.completed - counts.abandoned
        if in_flight < 0:
            message = f"{counts.started} started, but {counts.completed} completed and {counts.abandoned} abandoned"
            self.violate("account", spot, message)
        if counts.duplicated:
            self.violate("account", spot, f"{counts.duplicated} microbatches completed twice")
        self.count("started", max(0, in_flight))
        self.count("under way at the end", max(0, in_flight))

    def _judge_completed(self, microbatch: str, done: _Done) -> None:
        if microbatch in self._abandoned:
            message = f"{microbatch} is completed and also abandoned at {self._abandoned[microbatch]}"
            self.violate("completed once", done.spot, message)
        # `hops` leaves out stage 0, which is the data node itself.
        wanted = {"0": ("0.0", done.life.peer)}
        for hop in done.hops:
            module, _, peer = hop.partition("@")
            if _stage(module) in wanted:
                message = f"the path of {microbatch} visits stage {_stage(module)} twice: {' '.join(done.hops)}"
                self.violate("one expert a stage", done.spot, message)
            wanted[_stage(module)] = module, peer
        by_stage: defaultdict[str, list[_Counted]] = defaultdict(list)
        for counted in self._visits.get(microbatch, ()):
            by_stage[_stage(counted.module)].append(counted)
        for stage, found in by_stage.items():
            self._judge_stage(microbatch, stage, found, wanted.get(stage))
        for stage in wanted.keys() - by_stage.keys():
            self._judge_missing(microbatch, stage, wanted[stage][1], done)

    def _judge_stage(self, microbatch: str, stage: str, found: list[_Counted], wanted: tuple[str, str] | None) -> None:
        first, spot = found[0], found[0].spot
        if wanted is None:
            message = f"at stage {stage}, which its path skipped"
        elif len(found) > 1:
            spot = found[1].spot
            message = f"{len(found)} times at stage {stage}: {', '.join(str(counted.spot) for counted in found)}"
        elif first.peer != wanted[1]:
            message = f"at stage {stage} by {first.peer}, but its path names {wanted[1]}"
        elif first.module != wanted[0]:
            message = f"at module {first.module}, but its path names {wanted[0]}"
        else:
            return
        self.violate("exactly once", spot, f"{microbatch} counts {message}")

    def _judge_missing(self, microbatch: str, stage: str, peer: str, done: _Done) -> None:
        lives = self._lives.get(peer, [])
        if lives and not all(life.ended_well for life in (*lives, done.life)):
            self.count("lost with a killed peer")
            return
        if not lives:
            self._without_log.add(peer)
            self.count("unknown visits of peers without a log")
            return
        message = f"{microbatch} does not count at stage {stage} by {peer}, which its path names"
        self.violate("exactly once", done.spot, message)

    def _judge_visits_of_others(self) -> None:
        """Finds visits of microbatches that no data node completed, since a completion is logged before its visits."""
        known = {short(PeerId(peer)) for peer in self._lives}
        for microbatch, found in self._visits.items():
            if not found or microbatch in self._completed:
                continue
            if microbatch.partition("#")[0] not in known:
                self.count("visits for data nodes without a log", len(found))
                continue
            message = f"{microbatch} counts at stage {_stage(found[0].module)}, but no data node has completed it"
            self.violate("exactly once", found[0].spot, message)


@dataclass(frozen=True, slots=True)
class _Entry:
    round: int
    digest: str
    fetched: bool
    spot: Spot
    life: Life
    at_ms: int

    @property
    def anchor(self) -> tuple[int, str]:
        return self.round, self.digest


History = list[_Entry]


class RoundCheck(LogCheck):
    """Check that round numbers never fall, and that the replicas of a module agree on each round's anchor."""

    def __init__(self) -> None:
        super().__init__()
        self._histories: defaultdict[str, dict[str, History]] = defaultdict(dict)
        self._last_lives: dict[str, Life] = {}
        self._last_modules: dict[str, str] = {}
        self._left_ms: dict[str, int] = {}
        self._joining: set[str] = set()

    def begin(self, life: Life) -> None:
        self._last_lives[life.peer] = life
        self._last_modules.pop(life.peer, None)
        self._left_ms.pop(life.peer, None)
        self._joining.discard(life.peer)

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        match event:
            case RoundCommitted():
                self.count("commits")
                fetched = False
            case CaughtUp() | Restored():
                self.count(event.NAME)
                fetched = True
            case NodeStatus(peer, module, state) if module is not None:
                self._last_modules[peer] = module
                (self._joining.add if state == JOINING else self._joining.discard)(peer)
                return
            case NodeSummary():
                self._left_ms[life.peer] = life.now_ms
                return
            case _:
                return
        history = self._histories[event.module].setdefault(event.peer, [])
        if history and history[-1].life is life and history[-1].round > event.round:
            message = f"module {event.module} goes back from round {history[-1].round} to {event.round}"
            self.violate("rounds go forward", spot, message)
        history.append(_Entry(event.round, event.digest, fetched, spot, life, life.now_ms))

    def judge(self) -> None:
        for module, histories in self._histories.items():
            for number in sorted({held.round for history in histories.values() for held in history}):
                self._judge_round(module, number, histories)
            self._judge_end(module, histories)

    def _judge_round(self, module: str, number: int, histories: dict[str, History]) -> None:
        sides: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for peer, history in histories.items():
            for at, held in enumerate(history):
                if held.round == number:
                    sides[held.digest].setdefault(peer, at)
        self.count("rounds")
        if len(sides) == 1:
            return
        # One side suffices: the others must have joined it.
        unhealed = [self._not_joined(module, digest, sides, histories) for digest in sides]
        fewest = min(unhealed, key=len)
        if not fewest:
            self.count("forks healed")
            return
        digests = ", ".join(f"{digest[:12]} by {len(peers)}" for digest, peers in sides.items())
        message = (
            f"module {module} has {len(sides)} anchors of round {number}: {digests}; {', '.join(fewest)} never joined"
        )
        spot = next(held.spot for held in histories[fewest[0]] if held.round == number)
        self.violate("one digest a round", spot, message)

    def _not_joined(
        self, module: str, digest: str, sides: dict[str, dict[str, int]], histories: dict[str, History]
    ) -> list[str]:
        """Returns the peers that, after a fork, never joined the side of `digest` by fetching one of its anchors.

        Killed peers, and peers that moved or stopped before they served, need not join.
        """
        lineage = {held.anchor for peer, at in sides[digest].items() for held in histories[peer][at:]}
        apart = []
        for other, peers in sides.items():
            if other == digest:
                continue
            for peer, at in peers.items():
                life = histories[peer][at].life
                later = (held for held in histories[peer][at + 1 :] if held.fetched or held.life is not life)
                joined = any(held.anchor in lineage for held in later)
                if not joined and self._last_lives[peer].ended_well and self._held_it(peer, module):
                    apart.append(peer)
        return apart

    def _judge_end(self, module: str, histories: dict[str, History]) -> None:
        ends = {}
        for peer, history in histories.items():
            ended_ms = self._last_lives[peer].ended_ms
            if ended_ms is not None and history[-1].life is self._last_lives[peer] and self._held_it(peer, module):
                ends[peer] = (ended_ms, history[-1])
        last_ms = max((ended_ms for ended_ms, _ in ends.values()), default=0)
        together = {peer: held for peer, (ended_ms, held) in ends.items() if last_ms - ended_ms <= END_MS}
        for peer, held in sorted(together.items()):
            # Rounds after the peer left are not its fault.
            left_ms = self._left_ms.get(peer, ends[peer][0])
            others = [[each for each in histories[other] if each.at_ms <= left_ms] for other in together]
            newest = max((history[-1] for history in others if history), key=lambda each: each.round, default=held)
            before = {
                each.anchor
                for history in others
                if history and history[-1].round == newest.round
                for each in history
                if each.round == newest.round - 1
            }
            one_behind = held.round == newest.round - 1 and (not before or held.anchor in before)
            if held.round <= newest.round and held.anchor != newest.anchor and not one_behind:
                message = (
                    f"at the end {peer} holds module {module} at round {held.round} ({held.digest[:12]}),"
                    f" others at round {newest.round} ({newest.digest[:12]})"
                )
                self.violate("the same end", held.spot, message)

    def _held_it(self, peer: str, module: str) -> bool:
        """Whether the peer still served the module when its last process ended."""
        return self._last_modules.get(peer, module) == module and peer not in self._joining


@dataclass(slots=True)
class _Account:
    step: int = 0
    tokens: int | None = 0
    completed: int = 0


class TokenCheck(LogCheck):
    """Check that a data node's tokens match its completed microbatches, and that its steps have no gaps."""

    def __init__(self) -> None:
        super().__init__()
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        account = self._accounts[id(life)]
        match event:
            # After a resume, and in old logs, the tokens are unknown until the next step.
            case Continued() | Completed(tokens=None):
                account.tokens = None
            case Completed(tokens=int(tokens)):
                account.completed += tokens
            case Step() if event.peer == life.peer:
                # A resumed data node may start at any step.
                if account.step and event.step != account.step + 1:
                    self.violate("steps go forward", spot, f"step {event.step} follows step {account.step}")
                counted = None if account.tokens is None else event.tokens - account.tokens
                if counted is not None and counted != account.completed:
                    self.violate("tokens", spot, f"{counted} tokens counted for {account.completed} completed ones")
                account.step, account.tokens, account.completed = event.step, event.tokens, 0


def is_rerouted(event: Event | None) -> bool:
    """Whether the event is the completion of a microbatch that visited an expert outside its route."""
    if not isinstance(event, Completed) or event.route is None:
        return False
    own = {f"{stage}.{expert}" for stage, expert in enumerate(event.route, start=1)}
    return not own.issuperset(hop.partition("@")[0] for hop in event.hops)


class RouteCount(LogCheck):
    """Counts of completed microbatches by module and route, in a run with experts."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: Counter[str] = Counter()
        self._routes: Counter[Route] = Counter()
        self._rerouted: Counter[Route] = Counter()

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        if not isinstance(event, Completed) or event.route is None:
            return
        modules = [hop.partition("@")[0] for hop in event.hops]
        self._modules.update(modules)
        self._routes[event.route] += 1
        self._rerouted[event.route] += is_rerouted(event)
        self.count("rerouted", is_rerouted(event))

    def as_json(self) -> dict[str, Any]:
        """Returns the completed microbatches by module and by route, for JSON; empty for a run without experts."""
        if not self._routes:
            return {}
        routes = [
            {"experts": list(route), "completed": count, "rerouted": self._rerouted[route]}
            for route, count in sorted(self._routes.items())
        ]
        return {"modules": dict(sorted(self._modules.items())), "routes": routes}


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Result of an audit: counts of events by kind, and violations."""

    logs: int
    ended_well: int
    torn: int
    counts: dict[str, int]
    violations: tuple[Violation, ...]
    by_route: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
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


class Audit:
    """Audit of event logs: reads all logs, each peer's in the order of process starts, then looks for violations."""

    def __init__(self) -> None:
        self._own = LogCheck()
        self._routes = RouteCount()
        self._checks = (self._own, VisitCheck(), RoundCheck(), TokenCheck(), self._routes)
        self._lives: list[Life] = []
        self._torn = 0

    def read(self, lines: Iterable[Line]) -> None:
        """Reads all lines of one process's event log, with line ends. Only the last line may be truncated."""
        life: Life | None = None
        parts = 0
        cut: Spot | None = None
        for spot, line in lines:
            # Only a killed process truncates a line, and only its last one.
            if cut is not None:
                self._own.violate("log", cut, "a line is truncated, but others follow it")
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
                life.now_ms = life.began_ms + _ms_of(line)
                for check in self._checks:
                    check.take(life, spot, event)
        self._torn += cut is not None

    def _event(self, spot: Spot, line: bytes) -> Event | None:
        """Parses a log line. None if it is malformed, which is a violation, or from a later version."""
        try:
            return event_from_json(line)
        except ProtocolViolation as error:
            self._own.violate("log", spot, str(error))
            return None

    def report(self) -> AuditReport:
        if not self._lives:
            self._own.violate("log", None, "no log found")
        for check in self._checks:
            check.judge()
        counts = {what: number for check in self._checks for what, number in check.counts.items()}
        violations = tuple(violation for check in self._checks for violation in check.violations)
        ended_well = sum(life.ended_well for life in self._lives)
        return AuditReport(len(self._lives), ended_well, self._torn, counts, violations, self._routes.as_json())

    def _begin(self, started: Started) -> Life:
        life = Life(started.peer, started.unix_ms)
        self._lives.append(life)
        for check in self._checks:
            check.begin(life)
        return life


def _ms_of(line: bytes) -> int:
    """Extracts a log line's time in milliseconds since the start of the log; 0 if it has none."""
    found = _MS_AT_END.search(line)
    return int(found[1]) if found else 0


def check_logs(logs: Sequence[Iterable[Line]]) -> AuditReport:
    """Audits event logs, given in the order in which their processes started."""
    audit = Audit()
    for lines in logs:
        audit.read(lines)
    return audit.report()


def check_folder(folder: Path) -> AuditReport:
    """Audits the event logs in a folder. Raises ConfigError if they cannot be read."""
    return check_logs([_lines_of(parts) for parts in _lives_in(folder)])


def _lives_in(folder: Path) -> list[list[Path]]:
    """Returns the log files of each process, in the order in which the processes started."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="Choose the folder that --log-dir named.")
    found: dict[tuple[int, str], list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        name = _LOG_NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault((int(name["began"]), name["life"]), []).append((int(name["part"] or 1), path))
    return [[path for _, path in sorted(parts)] for _, parts in sorted(found.items())]


def _lines_of(parts: list[Path]) -> Iterator[tuple[Spot, bytes]]:
    """Yields the lines of one process's log files. An overlong line is split into pieces, which fail to parse."""
    for path in parts:
        try:
            with path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE_BYTES):
                    number += 1
                    yield Spot(path.name, number), line
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _stage(module: str) -> str:
    return module.partition(".")[0]
