"""The convener's record of each invitee, and the ways in which its attempt can end."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.vocabulary.averaging_messages import DeclineReason, Entry
from swarm.vocabulary.types import AnchorVersion, PeerId


@dataclass(frozen=True, slots=True)
class Settled:
    """The attempt has led to a commit: this version holds from now on."""

    version: AnchorVersion
    holders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The attempt has failed, and the next one has to do without these."""

    without: frozenset[PeerId]
    why: str
    accuser: PeerId | None = None
    """The only one that has something against them."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The attempt has failed, and the convener pauses."""

    why: str


Verdict = Settled | TryAgain | GivenUp


class Answer(enum.Enum):
    """An invitee's answer."""

    NONE = 1
    ACCEPTED = 2
    ENTERED = 3
    ELSEWHERE = 4
    """It follows another convener."""
    NOT_YET = 5
    """It stands elsewhere or is getting ready. It is given the time that a silent one is given: else one that catches
    up would come too late for every round where rounds are short."""
    PAST = 6
    """It has committed this round already."""
    REFUSED = 7


WITH_US = (Answer.ACCEPTED, Answer.ENTERED)
ASKED_AGAIN = (Answer.NONE, Answer.ELSEWHERE, Answer.NOT_YET)
DECLINED = {
    DeclineReason.OTHER_CONVENER: Answer.ELSEWHERE,
    DeclineReason.OTHER_ANCHOR: Answer.NOT_YET,
    DeclineReason.NOT_READY: Answer.NOT_YET,
    DeclineReason.PAST: Answer.PAST,
}


@dataclass(slots=True)
class Invitee:
    """What the convener knows of one replica that it invited."""

    heard: float
    answer: Answer = Answer.NONE
    lost: bool = False
    """Its link broke and nothing has come since."""
    entry: Entry | None = None
    prepared: AnchorVersion | None = None
    waiting_for: frozenset[PeerId] = frozenset()
    rejected: frozenset[PeerId] = frozenset()

    def silent(self, now: float, patience_s: float) -> bool:
        return now - self.heard > (patience_s / 2 if self.lost else patience_s)
