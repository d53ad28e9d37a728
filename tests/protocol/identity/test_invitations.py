"""Only peers that the author has invited may act as data nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.identity import invitations
from protocol.identity.invitations import EXPIRED, FORGED, NOT_INVITED, REMEMBERED, USED_UP, Grant, Guests
from protocol.identity.keys import Identity
from swarm.vocabulary.types import INVITATION_BYTES, PeerId, RunId

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
AUTHOR, INVITER, GUEST, STRANGER = (Identity.generate() for _ in range(4))
EXPIRES = 1_800_000_000
NOW = EXPIRES - 1.0


def grant(issuer: Identity = AUTHOR, run: RunId = RUN, uses: int = 1) -> Grant:
    return Grant.issue(issuer, run, uses, EXPIRES)


def guests(*, is_open: bool = False) -> Guests:
    return Guests(RUN, AUTHOR.peer, (INVITER.peer,), is_open)


@pytest.mark.parametrize("issuer", [AUTHOR, INVITER])
def test_a_guest_of_the_author_or_of_an_inviter_is_invited_until_the_invitation_expires(issuer: Identity) -> None:
    hop, invitation = guests(), grant(issuer).invitation(RUN, GUEST.peer)
    assert len(invitation) == INVITATION_BYTES
    assert hop.fault(GUEST.peer, invitation, NOW) is None
    assert hop.is_invited(GUEST.peer, invitation, NOW)
    assert hop.fault(GUEST.peer, invitation, EXPIRES) == EXPIRED
    assert hop.fault(issuer.peer, b"", NOW) is None, "needs no invitation"


@pytest.mark.parametrize(
    ("peer", "invitation", "fault"),
    [
        (GUEST.peer, b"", NOT_INVITED),
        (GUEST.peer, bytes(INVITATION_BYTES), EXPIRED),
        (GUEST.peer, grant(STRANGER).invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, grant(run=OTHER_RUN).invitation(OTHER_RUN, GUEST.peer), FORGED),
        (GUEST.peer, grant(run=OTHER_RUN).invitation(RUN, GUEST.peer), FORGED),
        (STRANGER.peer, grant().invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, replace(grant(), uses=0).invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, replace(grant(), expires=EXPIRES + 1).invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, replace(grant(), seed=bytes(32)).invitation(RUN, GUEST.peer), FORGED),
    ],
)
def test_others_are_not(peer: PeerId, invitation: bytes, fault: str) -> None:
    assert guests().fault(peer, invitation, NOW) == fault
    assert not guests().is_invited(peer, invitation, NOW)
    assert guests(is_open=True).fault(peer, invitation, NOW) is None
    assert not guests(is_open=True).is_invited(peer, invitation, NOW)


def test_the_first_peers_have_the_uses_of_an_invitation() -> None:
    hop, shared = guests(), grant(uses=2)
    peers = [Identity.generate().peer for _ in range(3)]
    faults = [hop.fault(peer, shared.invitation(RUN, peer), NOW) for peer in (*peers, *peers)]
    assert faults == [None, None, USED_UP, None, None, USED_UP]
    unlimited = grant(uses=0)
    assert all(hop.fault(peer, unlimited.invitation(RUN, peer), NOW) is None for peer in peers)


def test_both_results_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[bytes] = []
    verify = invitations.verify
    monkeypatch.setattr(invitations, "verify", lambda *given: verified.append(given[0]) or verify(*given))
    hop, good = guests(), grant(uses=0).invitation(RUN, GUEST.peer)
    forged = [good[:-2] + number.to_bytes(2) for number in range(REMEMBERED + 1)]
    for invitation in (good, *forged, good, *forged[-REMEMBERED:]):
        hop.fault(GUEST.peer, invitation, NOW)
    assert len(verified) == 2 + len(forged), "the good one takes two"
    hop.fault(GUEST.peer, forged[0], NOW)
    assert len(verified) == 3 + len(forged), "was forgotten"


def test_a_grant_is_text_in_a_link_and_hides_its_secrets() -> None:
    given = grant(uses=3)
    assert Grant.parse(str(given)) == given
    assert repr(given) == f"Grant(uses=3, expires={EXPIRES})"
    for text in ("", str(given)[:-2], str(given) + "AAAA", "%" * 142, "A" * 10_000):
        with pytest.raises(ValueError, match=r"."):
            Grant.parse(text)
