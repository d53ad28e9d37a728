"""The benchmark of idle time, which passes in virtual time: what is put off is all done, and costs those who wait
little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.emulated_pipeline import FillingWorld, Setting
from benchmarks.filling import BARS, compared, put_off, run, summary

SECONDS = 15.0


def test_putting_weights_off_pays_where_steps_wait_for_each_other() -> None:
    found = put_off([50], [1], SECONDS, kept=0.8)["50"]
    assert found["ratio"] >= BARS["50"]
    assert found["held"] <= 1.1
    assert found["busy"][1] > found["busy"][0]


def test_all_that_was_put_off_is_computed_by_the_step() -> None:
    world = FillingWorld(Setting(0.02, 1, puts_off=True), kept=0.8)
    world.run(SECONDS)
    for peer in world.stage_peers:
        computed = sum(end - begun for spans in (peer.account.busy, peer.account.idle_work) for begun, end in spans)
        visits = peer._added
        assert visits > 50
        assert computed >= peer._ground.service_s(peer.id) * (visits - 8)
        assert len(peer._pending) <= 8


@pytest.mark.parametrize("hears", [True, False])
def test_filling_costs_those_who_wait_little(hears: bool) -> None:
    bare = Setting(0.05, 1, staleness=2, window=6)
    filled = replace(bare, fills=True, hears=hears)
    figures = compared([run(filled, SECONDS, 1.0)], [run(bare, SECONDS, 1.0)])
    assert figures["foreground"] >= 0.95
    assert figures["busy"] >= 0.9


def test_rows_are_summed_up_by_arm() -> None:
    row = {"arm": "headers", "chunk_ms": 2, "body_ms": 20, "busy": 0.9, "wait_ms": 1.0}
    rows = [row | {"foreground": pace} for pace in (1.0, 0.98, 0.9)]
    (found,) = summary(rows)
    assert found["foreground"] == [0.98, 0.9]
    assert found["settings"] == 3
