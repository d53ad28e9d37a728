"""The benchmark of data sets of the hub shows what it says, on a small one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hub import Task, measured


def test_all_of_it_is_measured(tmp_path: Path) -> None:
    found = measured(Task(files=36, rows=10, row_bytes=20, megabits=1000), tmp_path)
    assert found["first document"]["bytes"] * 36 == found["whole set"]["bytes"]
    assert found["disk"]["most_with_those_under_way"] <= found["disk"]["allowed"]
    of_two = found["two data nodes"]
    assert of_two["rows_of_a"] + of_two["rows_of_b"] == 360
    assert of_two["rows_of_both"] == of_two["rows_of_none"] == 0
    assert of_two["bytes_of_a"] + of_two["bytes_of_b"] < 1.1 * found["whole set"]["bytes"]
    assert found["resumed"]["equal"]
    assert found["resumed"]["bytes_until_first"] == found["first document"]["bytes"]
