"""What a run's page says has changed since its last picture."""

from node.observability.status import PeerStatus, RoundStatus, Status, SwarmStatus
from node.web.server import GONE_S, next_picture


def peer(name: str, module: str, number: int = 0, *, answers: bool = True) -> PeerStatus:
    said = Status(last_round=RoundStatus(members=2)) if answers else None
    return PeerStatus(peer=name, module=module, state="serving", round=number, answered=said)


def changes(*moments: tuple[PeerStatus, ...]) -> list[str]:
    picture = None
    for second, peers in enumerate(moments):
        picture = next_picture(picture, SwarmStatus.of("9f86", "demo", 2, peers), (), float(second))
    assert picture is not None
    return [each.text for each in picture.happened]


def test_peers_come_fall_silent_and_go() -> None:
    one, two = peer("aaaaaa", "1.0"), peer("bbbbbb", "1.0")
    silent = peer("bbbbbb", "1.0", answers=False)
    assert changes((one,), (one, two), (one, silent), (one, two), (one,)) == [
        "bbbbbb of module 1.0 has joined",
        "bbbbbb of module 1.0 does not answer",
        "bbbbbb of module 1.0 answers again",
        "bbbbbb of module 1.0 has gone",
    ]


def test_a_round_is_said_once_though_a_replica_lags() -> None:
    before = (peer("aaaaaa", "1.0", 4), peer("bbbbbb", "1.0", 4))
    ahead = (peer("aaaaaa", "1.0", 5), peer("bbbbbb", "1.0", 4))
    assert changes(before, ahead, ahead, ahead) == ["module 1.0: round 5 of 2 peers"]


def test_a_peer_that_has_gone_is_shown_for_a_while() -> None:
    there, nobody = SwarmStatus.of("9f86", "demo", 2, (peer("a", "1.0"),)), SwarmStatus.of("9f86", "demo", 2, ())
    gone = next_picture(next_picture(None, there, (), 0.0), nobody, (), 1.0)
    assert [each.peer for each in gone.gone] == ["a"]
    assert next_picture(gone, there, (), 2.0).gone == ()
    assert next_picture(gone, nobody, (), 1.0 + GONE_S).gone == ()
