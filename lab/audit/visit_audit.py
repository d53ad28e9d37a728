"""The check of exactly once: each completed microbatch counts once at every stage of its final path, over all replicas,
and nowhere else.

A Retracted takes away the Visit of the same replica before it, if there is one. (A replica that was never told that its
gradient counts reports the taking back alone.) A missing visit is tolerated when it was lost with a process: the
replica's, whose log then has no clean end, or the data node's, which could not tell the replica any more. Those are
counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lab.audit.findings import Findings, Life, Spot
from node.observability.events import (
    Abandoned,
    Completed,
    Continued,
    Event,
    MicrobatchCounts,
    NodeSummary,
    Retracted,
    Visit,
)
from swarm.vocabulary.types import PeerId, short


@dataclass(frozen=True, slots=True)
class _Counted:
    peer: str
    module: str
    spot: Spot
    life: Life

    @property
    def stage(self) -> str:
        return _stage(self.module)


@dataclass(frozen=True, slots=True)
class _Done:
    hops: tuple[str, ...]
    spot: Spot
    life: Life


@dataclass(frozen=True, slots=True)
class _Account:
    counts: MicrobatchCounts
    spot: Spot


class VisitCheck:
    """The check as a fold: takes events in the order of each log, then judges."""

    def __init__(self) -> None:
        self._findings = Findings()
        self._lives: defaultdict[str, list[Life]] = defaultdict(list)
        self._visits: defaultdict[str, list[_Counted]] = defaultdict(list)
        self._completed: dict[str, _Done] = {}
        self._abandoned: dict[str, Spot] = {}
        self._tallies: defaultdict[int, MicrobatchCounts] = defaultdict(MicrobatchCounts)
        self._before: defaultdict[int, MicrobatchCounts] = defaultdict(MicrobatchCounts)
        """What data nodes that were resumed from a checkpoint began to count from."""
        self._accounts: dict[int, _Account] = {}

    def begin(self, life: Life) -> None:
        """Begins another log."""
        self._lives[life.peer].append(life)

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        """Takes one event of the log."""
        match event:
            case Visit(peer, module, microbatch):
                self._visits[microbatch].append(_Counted(peer, module, spot, life))
                self._findings.count("visits")
            case Retracted(peer, _, microbatch):
                self._take_back(life, peer, microbatch)
            case Completed(_, microbatch, hops):
                self._complete(microbatch, _Done(hops, spot, life))
            case Abandoned(microbatch, _):
                self._abandoned[microbatch] = spot
                self._tally(life, MicrobatchCounts(abandoned=1))
                self._findings.count("abandoned")
            case Continued(_, microbatches):
                self._before[id(life)] = microbatches
            case NodeSummary() if event.module is not None and _stage(event.module) == "0":
                self._accounts[id(life)] = _Account(event.microbatches, spot)

    def judge(self) -> Findings:
        """The violations, and how much there was."""
        for number, account in self._accounts.items():
            self._judge_account(account, self._before[number], self._tallies[number])
        # A killed data node leaves no figures: what of its microbatches was under way then is not known, and not
        # counted.
        self._findings.count("started", sum(tally.completed + tally.abandoned for tally in self._tallies.values()))
        for microbatch, done in self._completed.items():
            self._judge_completed(microbatch, done)
        self._judge_visits_of_others()
        return self._findings

    # ---- taking --------------------------------------------------------------------------------------------------

    def _take_back(self, life: Life, peer: str, microbatch: str) -> None:
        self._findings.count("retracted")
        counted = self._visits[microbatch]
        for at in reversed(range(len(counted))):
            if counted[at].peer == peer and counted[at].life is life:
                del counted[at]
                return

    def _complete(self, microbatch: str, done: _Done) -> None:
        self._tally(done.life, MicrobatchCounts(completed=1))
        self._findings.count("completed")
        before = self._completed.setdefault(microbatch, done)
        if before is not done:
            self._findings.violate("completed once", done.spot, f"{microbatch} is completed again, after {before.spot}")

    def _tally(self, life: Life, counts: MicrobatchCounts) -> None:
        self._tallies[id(life)] = self._tallies[id(life)].plus(counts)

    # ---- judging -------------------------------------------------------------------------------------------------

    def _judge_account(self, account: _Account, before: MicrobatchCounts, tally: MicrobatchCounts) -> None:
        """Of a data node that stopped in good order: its figures against its own lines."""
        counts = account.counts
        for what, said, logged in (
            ("completed", counts.completed - before.completed, tally.completed),
            ("abandoned", counts.abandoned - before.abandoned, tally.abandoned),
        ):
            if said != logged:
                message = f"the data node says {said} {what}, its log has {logged}"
                self._findings.violate("account", account.spot, message)
        under_way = counts.started - counts.completed - counts.abandoned
        if under_way < 0:
            message = f"{counts.started} started, but {counts.completed} completed and {counts.abandoned} abandoned"
            self._findings.violate("account", account.spot, message)
        if counts.duplicated:
            self._findings.violate("account", account.spot, f"{counts.duplicated} microbatches completed twice")
        self._findings.count("started", max(0, under_way))
        self._findings.count("under way at the end", max(0, under_way))

    def _judge_completed(self, microbatch: str, done: _Done) -> None:
        if microbatch in self._abandoned:
            message = f"{microbatch} is completed and also abandoned at {self._abandoned[microbatch]}"
            self._findings.violate("completed once", done.spot, message)
        wanted = {"0": ("0.0", done.life.peer)}
        for hop in done.hops:
            module, _, peer = hop.partition("@")
            if _stage(module) in wanted:
                message = f"the path of {microbatch} visits stage {_stage(module)} twice: {' '.join(done.hops)}"
                self._findings.violate("one expert a stage", done.spot, message)
            wanted[_stage(module)] = module, peer
        by_stage: defaultdict[str, list[_Counted]] = defaultdict(list)
        for counted in self._visits.get(microbatch, ()):
            by_stage[counted.stage].append(counted)
        for stage, found in by_stage.items():
            self._judge_stage(microbatch, stage, found, wanted.get(stage))
        for stage in wanted.keys() - by_stage.keys():
            self._judge_missing(microbatch, stage, wanted[stage][1], done)

    def _judge_stage(self, microbatch: str, stage: str, found: list[_Counted], wanted: tuple[str, str] | None) -> None:
        first = found[0]
        if wanted is None:
            message = f"{microbatch} counts at stage {stage}, which its path skipped"
            self._findings.violate("exactly once", first.spot, message)
        elif len(found) > 1:
            where = ", ".join(str(counted.spot) for counted in found)
            message = f"{microbatch} counts {len(found)} times at stage {stage}: {where}"
            self._findings.violate("exactly once", found[1].spot, message)
        elif first.peer != wanted[1]:
            message = f"{microbatch} counts at stage {stage} by {first.peer}, but its path names {wanted[1]}"
            self._findings.violate("exactly once", first.spot, message)
        elif first.module != wanted[0]:
            message = f"{microbatch} counts at module {first.module}, but its path names {wanted[0]}"
            self._findings.violate("exactly once", first.spot, message)

    def _judge_missing(self, microbatch: str, stage: str, peer: str, done: _Done) -> None:
        lives = self._lives.get(peer, [])
        if lives and not all(life.ended_well for life in (*lives, done.life)):
            self._findings.count("lost with a killed peer")
            return
        why = "" if lives else "; there is no log of that peer"
        message = f"{microbatch} does not count at stage {stage} by {peer}, which its path names{why}"
        self._findings.violate("exactly once", done.spot, message)

    def _judge_visits_of_others(self) -> None:
        """A visit is told of only after its data node has written that the microbatch is complete."""
        known = {short(PeerId(peer)) for peer in self._lives}
        for microbatch, found in self._visits.items():
            if not found or microbatch in self._completed:
                continue
            if microbatch.partition("#")[0] not in known:
                self._findings.count("visits for data nodes without a log", len(found))
                continue
            message = f"{microbatch} counts at stage {found[0].stage}, but no data node has completed it"
            self._findings.violate("exactly once", found[0].spot, message)


def _stage(module: str) -> str:
    return module.partition(".")[0]
