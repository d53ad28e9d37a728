"""The check of anchors: all replicas of a module that have reached a round hold the same digest.

The rules, over the events `round`, `caught_up` and `restored`, of which each says that a peer now holds (round, digest)
of a module:

* rounds go forward: within one log the round of a peer and module never becomes smaller.
* one digest a round: two digests for one (module, round) are a fork, which a partition of the network can bring about.
  It has healed when there is one side that all peers of the other sides have joined: each of them later reports
  `caught_up` or `restored`, or in another life anything, with a (round, digest) that the first side has held at that
  round or later. A fork that has not healed is a violation. Peers whose last log has no clean end hold nothing any
  more, and need not have joined; nor need those that have moved to another module, or were started again and stopped
  before they served.
* the same end: of the replicas of a module that stopped in good order, those that did so within END_MS of the last one
  hold the same digest of the newest round that there was when they left it (`node_summary`; what follows, the end of
  links and of the DHT, may take seconds, in which others go on); one that is a single round behind is let
  pass if it holds what the others held then, because a node that is asked to stop while a round is being applied may go
  before it has it. One that is two behind has missed a whole round unnoticed, which catching up is there to prevent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lab.audit.findings import Findings, Life, Spot
from node.observability.events import CaughtUp, Event, NodeStatus, NodeSummary, Restored, RoundCommitted

END_MS = 60_000
JOINING = "joining"


@dataclass(frozen=True, slots=True)
class _Held:
    """A peer holds an anchor from here on."""

    round: int
    digest: str
    fetched: bool
    """Taken over from others, not made in a round of its own."""
    spot: Spot
    life: Life
    at_ms: int

    @property
    def anchor(self) -> tuple[int, str]:
        return self.round, self.digest


History = list[_Held]


class RoundCheck:
    """The check as a fold: takes events in the order of each log, a peer's logs in the order of their start, then
    judges.
    """

    def __init__(self) -> None:
        self._findings = Findings()
        self._histories: defaultdict[str, dict[str, History]] = defaultdict(dict)
        """By module, then by peer."""
        self._last_lives: dict[str, Life] = {}
        self._last_modules: dict[str, str] = {}
        """What each peer hosted at the end of its last log, where it says so."""
        self._left_ms: dict[str, int] = {}
        """When each peer left the module that it hosted last."""
        self._joining: set[str] = set()
        """Who says at the end of its last log that it does not serve yet: what it has restored is behind, and nobody
        uses it."""

    def begin(self, life: Life) -> None:
        """Begins another log."""
        self._last_lives[life.peer] = life
        self._last_modules.pop(life.peer, None)
        self._left_ms.pop(life.peer, None)
        self._joining.discard(life.peer)

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        """Takes one event of the log."""
        match event:
            case RoundCommitted():
                self._findings.count("commits")
                fetched = False
            case CaughtUp() | Restored():
                self._findings.count(event.NAME)
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
            self._findings.violate("rounds go forward", spot, message)
        history.append(_Held(event.round, event.digest, fetched, spot, life, life.now_ms))

    def judge(self) -> Findings:
        """The violations, and how much there was."""
        for module, histories in self._histories.items():
            for number in sorted({held.round for history in histories.values() for held in history}):
                self._judge_round(module, number, histories)
            self._judge_end(module, histories)
        return self._findings

    # ---- forks ---------------------------------------------------------------------------------------------------

    def _judge_round(self, module: str, number: int, histories: dict[str, History]) -> None:
        sides: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for peer, history in histories.items():
            for at, held in enumerate(history):
                if held.round == number:
                    sides[held.digest].setdefault(peer, at)
        self._findings.count("rounds")
        if len(sides) == 1:
            return
        unhealed = [self._not_joined(module, digest, sides, histories) for digest in sides]
        fewest = min(unhealed, key=len)
        if not fewest:
            self._findings.count("forks healed")
            return
        digests = ", ".join(f"{digest[:12]} by {len(peers)}" for digest, peers in sides.items())
        message = (
            f"module {module} has {len(sides)} anchors of round {number}: {digests}; {', '.join(fewest)} never joined"
        )
        spot = next(held.spot for held in histories[fewest[0]] if held.round == number)
        self._findings.violate("one digest a round", spot, message)

    def _not_joined(
        self, module: str, digest: str, sides: dict[str, dict[str, int]], histories: dict[str, History]
    ) -> list[str]:
        """The peers that would still have to join the side of `digest`."""
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

    # ---- the end -------------------------------------------------------------------------------------------------

    def _judge_end(self, module: str, histories: dict[str, History]) -> None:
        ends = {}
        for peer, history in histories.items():
            ended_ms = self._last_lives[peer].ended_ms
            if ended_ms is not None and history[-1].life is self._last_lives[peer] and self._held_it(peer, module):
                ends[peer] = (ended_ms, history[-1])
        last_ms = max((ended_ms for ended_ms, _ in ends.values()), default=0)
        together = {peer: held for peer, (ended_ms, held) in ends.items() if last_ms - ended_ms <= END_MS}
        for peer, held in sorted(together.items()):
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
                self._findings.violate("the same end", held.spot, message)

    def _held_it(self, peer: str, module: str) -> bool:
        """Whether the peer had a part in the module at its end."""
        return self._last_modules.get(peer, module) == module and peer not in self._joining
