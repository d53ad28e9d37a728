"""The record of the attempts from one anchor: the highest, who is left out of the next, their rosters, how they
ended.
"""

from __future__ import annotations

from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.averaging_messages import MAX_ATTEMPTS, Commit, Roster, RoundId
from swarm.vocabulary.statistics import ExponentialBackoff
from swarm.vocabulary.types import ModuleId, PeerId

ATTEMPTS_AT_ONCE = 4
"""So many without a pause; then the convener gives up for a while."""
ATTEMPTS = 16
"""For one round number. Then the next number is taken, and everybody is asked again."""
LONGEST_PAUSE_S = 30.0
_ROSTERS = 4
_COMMITS = 8

assert ATTEMPTS <= MAX_ATTEMPTS


class AttemptLog:
    """The attempts at the next round. Kept from one anchor to the next; the commits we announced are kept longer, for
    those who ask late.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._backoff = ExponentialBackoff(rules.answer_s, LONGEST_PAUSE_S)
        self._commits: dict[RoundId, Commit] = {}
        self._failures = 0
        self.highest: tuple[int, int] = (0, 0)
        """(number, attempt) that we followed from this anchor."""
        self.left_out: set[PeerId] = set()
        self.refused: set[PeerId] = set()
        """Conveners whose roster we did not accept: they are not followed again at this round."""
        self.doubted: set[PeerId] = set()
        """Who alone had something against another member."""
        self.rosters: list[Roster] = []
        """Of the exchanges we began from this anchor, the latest few."""
        self.quiet_until = 0.0
        self.due_since: float | None = None
        self.ended: RoundId | None = None
        """The latest attempt that ended without a commit here."""

    def next_attempt(self, module: ModuleId, own: PeerId, number: int) -> RoundId:
        """Names the next attempt. The number stays the same from attempt to attempt, so that the pseudo-gradients do,
        unless a version of that number has turned up meanwhile, or the attempts have been too many."""
        highest, attempt = self.highest
        if number > highest:
            return RoundId(module, number, 0, own)
        return (
            RoundId(module, highest, attempt + 1, own)
            if attempt + 1 < ATTEMPTS
            else RoundId(module, highest + 1, 0, own)
        )

    def follow(self, attempt: RoundId) -> None:
        if attempt.number > self.highest[0]:
            self._forgive()
        self.highest = max(self.highest, (attempt.number, attempt.attempt))
        self.due_since = None

    def began(self, roster: Roster) -> None:
        self.rosters = [*self.rosters, roster][-_ROSTERS:]

    def failed(self, now: float) -> None:
        """Notes a failed attempt; a convener that gives up makes a longer and longer pause."""
        self._failures += 1
        self.pause(now, self._backoff.seconds(self._failures))

    def pause(self, now: float, seconds: float) -> None:
        self.quiet_until = max(self.quiet_until, now + seconds)
        self.due_since = None

    def announced(self, commit: Commit) -> None:
        self._commits[commit.round] = commit
        while len(self._commits) > _COMMITS:
            del self._commits[next(iter(self._commits))]

    def commit_of(self, attempt: RoundId) -> Commit | None:
        return self._commits.get(attempt)

    def new_anchor(self) -> None:
        self._failures = 0
        self.highest, self.quiet_until, self.due_since, self.ended = (0, 0), 0.0, None, None
        self._forgive()
        self.rosters = []

    def _forgive(self) -> None:
        self.left_out.clear()
        self.refused.clear()
        self.doubted.clear()
