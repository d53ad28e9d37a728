"""The benchmark of plans: its rows hold together, and what was searched once is not searched again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning
from swarm.simulation.instance import from_json

TWENTY = Path(__file__).parent.parent / "swarm" / "simulation" / "twenty_peers.json"


def test_a_row_and_its_search_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instance, kept = from_json(json.loads(TWENTY.read_text())), tmp_path / "searched.json"
    first = planning.row(instance, planning.Searches(kept, 0.1))
    assert first["bound_s"] <= first["search_s"] <= min(first["planned_s"], first["earliest_return_s"])
    assert first["planned_over_search"] == first["planned_s"] / first["search_s"]
    assert first["over_uplinks_over_planned"] >= 1

    def no_search(*_: object, **__: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(planning, "searched", no_search)
    again = planning.row(instance, planning.Searches(kept, 0.1))
    assert _but_cpu(again) == _but_cpu(first)
    with pytest.raises(AssertionError, match="searched again"):
        planning.row(instance, planning.Searches(kept, 5.0))
    planning.show([first, again])
    assert "geometric mean" in capsys.readouterr().out


def _but_cpu(row: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how fast the machine is just now."""
    return {key: value for key, value in row.items() if not key.startswith("cpu_ms")}
