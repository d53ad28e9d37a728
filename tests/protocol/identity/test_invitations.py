"""Only peers that the author has invited may act as data nodes."""

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
HOP, OPEN = (Guests(RUN, AUTHOR.peer, (INVITER.peer,), is_open) for is_open in (False, True))


def grant(issuer: Identity = AUTHOR, run: RunId = RUN, uses: int = 1) -> Grant:
    return Grant.issue(issuer, run, uses, EXPIRES)


@pytest.mark.parametrize("issuer", [AUTHOR, INVITER], ids=["author", "inviter"])
def test_a_guest_of_the_author_or_of_an_inviter_is_invited_until_the_invitation_expires(issuer: Identity) -> None:
    invitation = grant(issuer).invitation(RUN, GUEST.peer)
    assert HOP.is_invited(GUEST.peer, invitation, NOW)
    assert HOP.fault(GUEST.peer, invitation, EXPIRES) == EXPIRED
    assert HOP.fault(issuer.peer, b"", NOW) is None, "needs no invitation"


@pytest.mark.parametrize(
    ("peer", "invitation", "fault"),
    [
        (GUEST.peer, b"", NOT_INVITED),
        (GUEST.peer, bytes(INVITATION_BYTES), EXPIRED),
        (GUEST.peer, grant(STRANGER).invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, grant(run=OTHER_RUN).invitation(RUN, GUEST.peer), FORGED),
        (STRANGER.peer, grant().invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, replace(grant(), uses=0).invitation(RUN, GUEST.peer), FORGED),
        (GUEST.peer, replace(grant(), seed=bytes(32)).invitation(RUN, GUEST.peer), FORGED),
    ],
    ids=["none", "expired", "another author", "another run", "another peer", "other terms", "another key"],
)
def test_others_are_not(peer: PeerId, invitation: bytes, fault: str) -> None:
    assert HOP.fault(peer, invitation, NOW) == fault
    assert OPEN.fault(peer, invitation, NOW) is None
    assert not OPEN.is_invited(peer, invitation, NOW)


def test_the_first_peers_have_the_uses_of_an_invitation() -> None:
    shared, peers = grant(uses=2), [Identity.generate().peer for _ in range(3)]
    faults = [HOP.fault(peer, shared.invitation(RUN, peer), NOW) for peer in (*peers, *peers)]
    assert faults == [None, None, USED_UP, None, None, USED_UP]


def test_both_results_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[bytes] = []
    verify = invitations.verify
    monkeypatch.setattr(invitations, "verify", lambda *given: verified.append(given[0]) or verify(*given))
    good = grant(uses=0).invitation(RUN, GUEST.peer)
    forged = [good[:-3] + bytes([good[-3] ^ 1]) + number.to_bytes(2) for number in range(REMEMBERED)]
    for invitation in (good, good, *forged, forged[-1]):
        HOP.fault(GUEST.peer, invitation, NOW)
    assert len(verified) == 2 + len(forged), "the good one takes two"
    assert HOP.is_invited(GUEST.peer, good, NOW)
    assert len(verified) == 4 + len(forged), "was forgotten"
