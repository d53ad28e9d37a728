"""What visits cost, how large microbatches are, and what devices share of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.workload.device_shares import CUTTING, _deal, deal, deal_whole, pieces
from swarm.workload.microbatch_sizes import LATEST, MicrobatchSizes, Size, SizeSummary, VisitCost, summary_of

SHARE = 1 / 3000


def test_a_speed_is_the_same_for_short_and_long_documents() -> None:
    assert VisitCost().speed() == 0.0
    chance, model = random.Random(7), VisitCost()
    for _ in range(60):
        lengths = tuple(chance.randint(20, 4000) for _ in range(chance.randint(4, 20)))
        seconds = 1e-5 * sum(length + SHARE * length**2 for length in lengths)
        model.add(Size(sum(lengths), lengths).cost_with(SHARE), seconds * chance.uniform(0.9, 1.1))
    assert model.speed() == pytest.approx(1e5, rel=0.05)


def test_one_visit_that_was_held_up_changes_little_and_a_peer_that_becomes_slower_says_so_soon() -> None:
    model = VisitCost()
    for _ in range(100):
        model.add(512, 0.25)
    assert model.speed() == pytest.approx(2048)
    model.add(512, 1000.0)
    assert model.speed() > 2048 / 1.2
    for _ in range(20):
        model.add(512, 0.5)
    assert model.speed() < 2048 / 1.7


def test_a_cost_is_in_usual_microbatches_and_before_the_first_the_largest_is_usual() -> None:
    sizes = MicrobatchSizes(100)
    assert (sizes.cost, sizes.summary()) == (100, SizeSummary())
    assert sizes.add(Size(90, (40, 50), 90.0)) == 1.0
    assert sizes.add(Size(90, (90,), 110.0)) == pytest.approx(1.1)
    assert sizes.cost == 100.0
    of_rows = MicrobatchSizes(100)
    assert of_rows.add(Size(90, ())) == 1.0
    assert of_rows.cost == 90.0


def test_a_summary_has_means_spreads_and_what_is_left_empty_and_forgets_what_is_long_ago() -> None:
    sizes = MicrobatchSizes(100)
    sizes.add(Size(100, (100,), 1000.0))
    for _ in range(LATEST):
        sizes.add(Size(10, (10,), 10.0))
    assert sizes.summary().cost == 10.0
    found = summary_of([Size(90, (40, 50), 100.0), Size(80, (80,), 300.0)], 100)
    assert found == SizeSummary(2, 85.0, pytest.approx(5 / 85), 200.0, pytest.approx(0.5), 1.5, pytest.approx(0.15))


costs = st.lists(st.floats(1, 1e6), min_size=1, max_size=40)
devices = st.integers(1, 8)


@given(costs, devices)
def test_every_document_is_dealt_once(costs: list[float], devices: int) -> None:
    found = deal(costs, devices).value
    assert sorted([*found.cut, *(index for held in found.whole for index in held)]) == list(range(len(costs)))
    assert sum(found.shares) == pytest.approx(1.0 if found.cut else 0.0)
    assert deal(costs, devices, float("inf")).value.cut == (), "where nothing can be cut"
    assert sum(found.loads) == pytest.approx(sum(costs) + CUTTING * sum(costs[index] for index in found.cut))


@given(costs, devices)
def test_it_is_as_good_as_the_better_of_no_cuts_and_all_documents_cut(costs: list[float], devices: int) -> None:
    found = deal(costs, devices).value
    assert max(found.loads) <= max(deal_whole(costs, devices).loads) * (1 + 1e-9)
    assert max(found.loads) <= max(_deal(costs, devices, frozenset(range(len(costs))), CUTTING).loads) * (1 + 1e-9)


def test_a_document_of_more_than_a_share_is_cut_and_the_reason_says_what_that_saves() -> None:
    found = deal([100.0, 10.0, 10.0, 7.0], 2).value
    assert found.cut == (0,)
    assert found.unevenness == pytest.approx(1.0)
    assert deal([3.0, 1.0], 2).reason == "1 cut; without that the largest load is 1.50 of the mean"
    assert deal([1.0, 1.0], 2).reason == "whole documents; the largest load is 1.00 of the mean"


def test_microbatches_of_log_normal_documents_are_dealt_to_two_devices_within_two_hundredths() -> None:
    choice = random.Random(5)
    for _ in range(200):
        lengths, capacity = [], 32768
        while capacity > 0:
            lengths.append(min(capacity, 8192, max(1, int(choice.lognormvariate(7.5, 1.2)))))
            capacity -= lengths[-1]
        found = deal([length + length**2 / 3070 for length in lengths], 2).value
        assert found.unevenness <= 1.02 or max(found.loads) <= sum(found.loads) / 2 * (1 + CUTTING)


@given(st.integers(2, 20_000), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(lambda of: sum(of) > 0.01))
def test_pieces_are_all_tokens_once(tokens: int, weights: list[float]) -> None:
    dealt = pieces(tokens, [weight / sum(weights) for weight in weights])
    assert sorted(token for held in dealt for part in held for token in part) == list(range(tokens))
    assert all(part for held in dealt for part in held)


@given(st.integers(2000, 20_000), st.lists(st.floats(0.1, 1.0), min_size=2, max_size=8))
def test_a_share_is_one_in_tokens_and_in_attention(tokens: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    for share, held in zip(shares, pieces(tokens, shares), strict=True):
        assert sum(map(len, held)) == pytest.approx(share * tokens, abs=3)
        assert sum(part.stop**2 - part.start**2 for part in held) == pytest.approx(share * tokens**2, abs=6 * tokens)
