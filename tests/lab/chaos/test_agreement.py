"""When replicas stand together, by anchors that are written by hand."""

from __future__ import annotations

from lab.chaos.recovery import stand_together
from lab.experiment.log_watch import Held


def anchors(*names: str, module: str = "1.0") -> tuple[Held, ...]:
    """`4x` is the anchor of round 4 with the digest x."""
    return tuple(Held(module, int(name[:-1]), name[-1]) for name in names)


def test_one_anchor_each() -> None:
    assert stand_together([])
    assert stand_together([anchors("4x")])
    assert stand_together([anchors("3w", "4x"), anchors("4x"), anchors("2v", "4x")])
    assert stand_together([anchors("4x"), anchors("9y", module="2.0")]), "modules have rounds of their own"


def test_who_is_just_applying_a_round_is_with_the_others() -> None:
    assert stand_together([anchors("3w", "4x"), anchors("2v", "3w")])
    assert not stand_together([anchors("3w", "4x"), anchors("2v")]), "two rounds behind"


def test_sides_that_have_parted_do_not_stand_together() -> None:
    assert not stand_together([anchors("3w", "4x"), anchors("3w", "4y")])
    assert not stand_together([anchors("4x", "5z"), anchors("3w", "4y")]), "one behind, but elsewhere"
    assert stand_together([anchors("4x", "5z"), anchors("4y", "5z")]), "one again"
