"""Whether an invitation is followed: the rule that makes competing conveners come down to one."""

from __future__ import annotations

from swarm.round_messages import MAX_ATTEMPTS, DeclineReason, Invitation, RoundId
from swarm.rounds.outlook import Outlook
from swarm.rounds.rules import plausible_round, precedence
from swarm.rounds.taking_part import Participation, Phase
from swarm.vocabulary import AnchorVersion, PeerId


def can_be_meant(sender: PeerId, attempt: RoundId, outlook: Outlook) -> bool:
    """Whether it deserves an answer: from the convener itself, with numbers that can be, and not from a repeated offender."""
    plausible = plausible_round(outlook.version, attempt.number) and 0 <= attempt.attempt < MAX_ATTEMPTS
    return attempt.convener == sender and plausible and sender not in outlook.offences.excluded(outlook.now)


def refusal_of(invitation: Invitation, part: Participation | None, outlook: Outlook) -> DeclineReason | None:
    """Why we do not follow; None when we do.

    Args:
        part: what we take part in now.
    """
    attempt = invitation.round
    if attempt.number <= outlook.version.round:
        return DeclineReason.PAST
    if invitation.base != outlook.version:
        return DeclineReason.OTHER_ANCHOR
    if outlook.lag.catching is not None or attempt == outlook.ballots.ended:
        return DeclineReason.NOT_READY
    if (attempt.number, attempt.attempt) < outlook.ballots.highest or attempt.convener in outlook.ballots.refused:
        return DeclineReason.OTHER_CONVENER
    if part is not None and not _prefers(attempt, part, outlook):
        return DeclineReason.OTHER_CONVENER
    return None


def _prefers(other: RoundId, part: Participation, outlook: Outlook) -> bool:
    """Whether an attempt takes precedence over the one we are in."""
    current = part.round
    if (other.number, other.attempt) == (current.number, current.attempt):
        return part.roster is None and _precedence(other, outlook.version) < _precedence(current, outlook.version)
    if other.convener == current.convener:
        return True
    return part.phase is not Phase.FINISHING and not part.loyal(outlook.now)


def _precedence(attempt: RoundId, base: AnchorVersion) -> bytes:
    return precedence(attempt.module, base, attempt.number, attempt.convener)
