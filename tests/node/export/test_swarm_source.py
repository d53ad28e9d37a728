"""Which state of a module is taken for its model, and what is said when there is none."""

from __future__ import annotations

import pytest

from node.export.swarm_source import state_to_take
from swarm.vocabulary.errors import NoQuorum, Unreachable
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId

MODULE = ModuleId(2)
A, B, C = (PeerId(name) for name in "abc")


def version(number: int, digest: int = 1) -> AnchorVersion:
    return AnchorVersion(number, 10 * number, 100 * number, 0, bytes([digest]) * 32)


def test_the_state_of_most_is_taken_from_those_who_stand_on_it() -> None:
    announced = {A: version(7), B: version(8), C: version(8)}
    assert state_to_take(MODULE, announced, 50) == (version(8), (B, C))


def test_of_two_that_differ_the_one_with_more_work_is_taken() -> None:
    assert state_to_take(MODULE, {A: version(7), B: version(8)}, 50) == (version(8), (B,))


def test_a_module_that_nobody_serves_is_named() -> None:
    with pytest.raises(Unreachable, match=r"nobody serves module 2\.0"):
        state_to_take(MODULE, {}, 50)


def test_replicas_that_do_not_agree_are_no_source() -> None:
    with pytest.raises(NoQuorum, match=r"module 2\.0: 3 replicas stand on 3 states"):
        state_to_take(MODULE, {A: version(7), B: version(8), C: version(8, 2)}, 50)


def test_initial_weights_are_not_handed_out_as_a_model() -> None:
    with pytest.raises(NoQuorum, match="no round yet") as caught:
        state_to_take(MODULE, {A: version(0), B: version(0)}, 50)
    assert "after 50 inner steps" in caught.value.hint
    assert state_to_take(MODULE, {A: version(0), B: version(0)}, 50, is_model=True) == (version(0), (A, B))
