"""Documents are dealt to a node's devices evenly, and none is cut unless that saves time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.workload.device_shares import CUTTING, deal, deal_cut, deal_whole, pieces

costs = st.lists(st.floats(1, 1e6), min_size=1, max_size=40)
devices = st.integers(1, 8)


@given(costs, devices)
def test_every_document_is_dealt_once(costs: list[float], devices: int) -> None:
    found = deal(costs, devices).value
    assert sorted([*found.cut, *(index for held in found.whole for index in held)]) == list(range(len(costs)))
    assert sum(found.shares) == pytest.approx(1.0 if found.cut else 0.0)
    assert sum(found.loads) == pytest.approx(sum(costs) + CUTTING * sum(costs[index] for index in found.cut))


@given(costs, devices)
def test_it_is_as_good_as_the_better_of_no_cuts_and_all_documents_cut(costs: list[float], devices: int) -> None:
    found = deal(costs, devices).value
    assert max(found.loads) <= max(deal_whole(costs, devices).loads) * (1 + 1e-9)
    assert max(found.loads) <= max(deal_cut(costs, devices).loads) * (1 + 1e-9)


@given(costs, devices)
def test_nothing_is_cut_where_nothing_can_be(costs: list[float], devices: int) -> None:
    assert deal(costs, devices, float("inf")).value.cut == ()


def test_a_document_of_more_than_a_share_is_cut_and_the_rest_is_dealt_around_it() -> None:
    found = deal([100.0, 10.0, 10.0, 7.0], 2).value
    assert found.cut == (0,)
    assert found.unevenness == pytest.approx(1.0)


def test_even_documents_are_not_cut() -> None:
    assert deal([50.0, 50.0, 30.0, 30.0], 2).value.cut == ()


def test_the_reason_says_what_cutting_saves() -> None:
    assert deal([3.0, 1.0], 2).reason == "1 cut; without that the largest load is 1.50 of the mean"
    assert deal([1.0, 1.0], 2).reason == "whole documents; the largest load is 1.00 of the mean"


def test_microbatches_of_log_normal_documents_are_dealt_to_two_devices_within_two_hundredths() -> None:
    choice = random.Random(5)
    for _ in range(200):
        lengths, room = [], 32768
        while room > 0:
            lengths.append(min(room, 8192, max(1, int(choice.lognormvariate(7.5, 1.2)))))
            room -= lengths[-1]
        found = deal([length + length**2 / 3070 for length in lengths], 2).value
        assert found.unevenness <= 1.02 or max(found.loads) <= sum(found.loads) / 2 * (1 + CUTTING)


@given(st.integers(2, 20_000), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(lambda of: sum(of) > 0.01))
def test_pieces_are_all_tokens_once(tokens: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    dealt = pieces(tokens, shares)
    assert sorted(token for held in dealt for part in held for token in part) == list(range(tokens))
    assert all(part for held in dealt for part in held)


@given(st.integers(2000, 20_000), st.lists(st.floats(0.1, 1.0), min_size=2, max_size=8))
def test_a_share_is_one_in_tokens_and_in_attention(tokens: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    for share, held in zip(shares, pieces(tokens, shares), strict=True):
        assert sum(map(len, held)) == pytest.approx(share * tokens, abs=3)
        seen = sum(part.stop**2 - part.start**2 for part in held)
        assert seen == pytest.approx(share * tokens**2, abs=6 * tokens)
