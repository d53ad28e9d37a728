"""Documents are packed whole, each once, into microbatches that have room for them and cost about the same."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.vocabulary.types import MAX_DOCUMENTS
from swarm.workload.packing import ABOVE, STRATA, Capacity, DocumentPiece, Packing, in_turns, pack, worst_run

SHARE = 1 / 3000
MOST = 4096
SHORT = Capacity(MOST // 4, MOST, SHARE)
LENGTHS = st.lists(st.integers(1, 3 * MOST), max_size=80)


def packed(lengths: Sequence[int], capacity: Capacity = SHORT, level: float = 0.0) -> Packing:
    return pack(lengths, {index for index, length in enumerate(lengths) if length > capacity.sequence}, capacity, level)


@given(LENGTHS)
def test_every_token_is_in_one_microbatch_that_has_room_for_it_and_what_fits_is_not_cut(lengths: list[int]) -> None:
    found = packed(lengths)
    pieces = {piece for of in found.microbatches for piece in of}
    assert all((index, 0, length) in pieces for index, length in enumerate(lengths) if length <= SHORT.sequence)
    tokens = sorted((piece.document, at) for of in found.microbatches for piece in of for at in range(*piece[1:]))
    assert tokens == [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    for of, cost in zip(found.microbatches, found.costs, strict=True):
        sizes = [piece.stop - piece.start for piece in of]
        assert of
        assert list(of) == sorted(of)
        assert sum(sizes) <= MOST
        assert max(sizes) <= SHORT.sequence
        assert cost == pytest.approx(sum(map(SHORT.cost, sizes)))


def test_the_rest_of_a_document_may_be_cut_and_a_microbatch_has_no_more_than_a_message_can_name() -> None:
    (whole,) = pack([SHORT.sequence], (), SHORT).microbatches
    assert whole == (DocumentPiece(0, 0, SHORT.sequence),)
    (cut,) = pack([SHORT.sequence], (0,), SHORT).microbatches
    assert len(cut) == 2
    found = pack([1] * (2 * MAX_DOCUMENTS + 1), (), Capacity(1, 10 * MAX_DOCUMENTS, SHARE)).microbatches
    assert max(map(len, found)) <= MAX_DOCUMENTS
    assert sum(map(len, found)) == 2 * MAX_DOCUMENTS + 1


def drawn(kind: str, count: int = 1200) -> list[int]:
    chance = random.Random(kind)
    match kind:
        case "equal":
            return [MOST // 4] * count
        case "uniform":
            return [chance.randint(1, MOST // 4) for _ in range(count)]
        case "two sorts":
            return [chance.choice((30, MOST // 4)) for _ in range(count)]
        case "long":
            return [min(8 * MOST, max(1, int(chance.lognormvariate(7, 1.5)))) for _ in range(count)]
        case _:
            return [min(MOST // 4, max(1, int(chance.lognormvariate(5, 1.3)))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["equal", "uniform", "two sorts", "log-normal", "long"])
def test_costs_are_equal_where_microbatches_have_four_times_the_longest_document(kind: str) -> None:
    found = packed(drawn(kind)).costs
    mean = sum(found) / len(found)
    assert max(found) / mean <= 1.04
    assert sum((one - mean) ** 2 for one in found) / len(found) / mean**2 <= 0.002


def test_no_more_microbatches_than_needed_but_room_is_left_empty_beside_long_documents() -> None:
    for kind in ("uniform", "log-normal"):
        lengths = drawn(kind)
        assert len(packed(lengths).microbatches) <= -(-sum(lengths) // MOST) + 1
    lengths, capacity = [8191] * 23 + [50] * 39_000, Capacity(8192, 32_768, SHARE)
    found, fewest = packed(lengths, capacity).costs, -(-sum(lengths) // capacity.tokens)
    assert fewest < len(found) <= 1.26 * fewest
    assert max(found) * len(found) / sum(found) < 1.05


def test_a_block_of_more_long_documents_costs_as_much_as_the_block_before() -> None:
    before = packed([100] * 1000 + [8000] * 20)
    lengths = [100] * 900 + [8000] * 22
    found, without = packed(lengths, level=before.level), packed(lengths)
    assert max(found.costs) <= 1.001 * ABOVE * before.level
    assert max(without.costs) > 1.015 * before.level


def test_long_documents_alone_fill_microbatches_and_cost_alike() -> None:
    """There is no short text that would even them out, and four of their longest pieces do not fill a microbatch."""
    chance = random.Random(3)
    found = packed([chance.randint(2000, 30_000) for _ in range(60)])
    tokens = [sum(piece.stop - piece.start for piece in of) for of in found.microbatches]
    assert min(tokens) > 0.97 * MOST
    assert max(found.costs) * len(found.costs) / sum(found.costs) <= 1.02
    assert sum(map(len, found.microbatches)) <= 6.5 * len(tokens), "short pieces lack what came before"


def test_a_block_begins_with_what_the_block_before_cost_and_goes_on_by_and_by() -> None:
    """Its documents may not be cut, so that nothing else evens out the step."""
    lengths = drawn("log-normal", 6000)
    natural = packed(lengths)
    mean = sum(natural.costs) / len(natural.costs)
    for level in (0.93 * mean, 1.04 * mean):
        found = packed(lengths, level=level)
        assert found.costs[0] == pytest.approx(level, rel=0.02)
        assert worst_run(found.costs, level) <= 1.01 < 1.03 < worst_run(natural.costs, level)
        assert found.level == pytest.approx(found.costs[-1], rel=0.01)
        assert abs(found.level - mean) < 0.5 * abs(level - mean), "the next one has less to even out"
        assert sorted(piece.stop - piece.start for of in found.microbatches for piece in of) == sorted(lengths)


@given(st.lists(st.floats(1, 100), max_size=70), st.floats(1, 100) | st.just(0.0), st.randoms())
def test_each_has_its_turn_once(costs: list[float], level: float, chance: random.Random) -> None:
    ranks = list(range(len(costs)))
    chance.shuffle(ranks)
    order, _ = in_turns(costs, ranks, level)
    assert sorted(order) == list(range(len(costs)))


def test_of_so_many_in_a_row_one_is_of_each_stratum() -> None:
    costs = [float(place) for place in range(10 * STRATA)]
    order, level = in_turns(costs, random.Random(1).sample(range(len(costs)), len(costs)))
    assert level == 0.0
    for start in range(len(order) - STRATA + 1):
        assert sorted(place // 10 for place in order[start : start + STRATA]) == list(range(STRATA))
    assert any(abs(one - other) > 20 for one, other in pairwise(order))
    assert order != in_turns(costs, list(range(len(costs))))[0], "chance decides within a stratum"


def test_the_few_that_cost_much_less_do_not_come_together() -> None:
    """Seven that cost nothing in a row would make the eighth many times as dear as their mean."""
    costs = [100.0 + place / 10 for place in range(72)] + [20.0] * 4
    order, _ = in_turns(costs, list(range(76)), 110.0)
    few = [at for at, place in enumerate(order) if costs[place] == 20.0]
    assert min(later - earlier for earlier, later in pairwise(few)) > STRATA


def test_a_run_counts_what_came_before_the_block() -> None:
    assert worst_run([1.0] * 20) == 1.0
    assert worst_run([1.0] * 20, 1.0) == 1.0
    assert worst_run([2.0] + [1.0] * 20, 1.0) == 16 / 9
    assert worst_run([1.0, 3.0]) == 1.5
