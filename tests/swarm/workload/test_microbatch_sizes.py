"""What is usual among a data node's microbatches, and how far they are apart."""

from __future__ import annotations

import pytest

from swarm.workload.microbatch_sizes import LATEST, MicrobatchSizes, Size, SizeSummary, summary_of


def test_before_the_first_the_largest_is_usual() -> None:
    sizes = MicrobatchSizes(100)
    assert (sizes.tokens, sizes.squares, sizes.summary()) == (100, 0, SizeSummary())


def test_a_cost_is_told_in_usual_ones() -> None:
    sizes = MicrobatchSizes(100)
    assert sizes.add(Size(90, (40, 50), 90.0)) == 1.0
    assert sizes.add(Size(90, (90,), 110.0)) == pytest.approx(1.1)
    assert (sizes.tokens, sizes.squares) == (90.0, (40**2 + 50**2 + 90**2) / 2)


def test_equal_ones_are_all_usual() -> None:
    sizes = MicrobatchSizes(64)
    assert {sizes.add(Size(64, (), 70.5)) for _ in range(3 * LATEST)} == {1.0}
    assert sizes.summary() == SizeSummary(LATEST, 64.0, 0.0, 70.5, 0.0, 0.0, 0.0)


def test_what_is_long_ago_is_forgotten() -> None:
    sizes = MicrobatchSizes(100)
    sizes.add(Size(100, (100,), 1000.0))
    for _ in range(LATEST):
        sizes.add(Size(10, (10,), 10.0))
    assert sizes.summary().cost == 10.0


def test_a_summary_has_means_spreads_and_what_is_left_empty() -> None:
    found = summary_of([Size(90, (40, 50), 100.0), Size(80, (80,), 300.0)], 100)
    assert found == SizeSummary(2, 85.0, pytest.approx(5 / 85), 200.0, pytest.approx(0.5), 1.5, pytest.approx(0.15))


def test_a_text_that_costs_nothing_divides_by_nothing() -> None:
    assert MicrobatchSizes(8).add(Size(0, (), 0.0)) == 1.0
