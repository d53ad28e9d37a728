"""What the swarms of `benchmarks/paths_live.py` say: the figures of one, the ratios of pairs, and whether the bars are
held. Pure.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benchmarks.live_cells import (
    ABROAD,
    AFTER_TOKENS,
    ARMS,
    CELLS,
    RECOVERED_S,
    SLOWED_BY,
    STEP_S,
    TOKENS_PER_S,
    Bar,
    Cell,
    Ground,
)
from benchmarks.live_swarm import Seen, Trial
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightMark

COUNTED_AFTER_S: Final = 30.0
"""In which the tokens after a change are counted."""
PACE_S: Final = 10.0
"""Over which a pace is taken."""
RECOVERED: Final = 0.95
"""Of what is left."""
DRAWS: Final = 2000
INTERVAL: Final = (0.05, 0.95)

Run = dict[str, Any]
"""The figures of one swarm, as they are printed."""


# ---- one swarm -------------------------------------------------------------------------------------------------------


def figures(trial: Trial, seen: Seen, tokens: int) -> Run:
    """Args: tokens: of one microbatch."""
    cell, ground, per_path = trial.cell, trial.ground, trial.cell.visited(ARMS[trial.arm])
    within = [mark for marks in seen.flights.values() for mark in marks if seen.begun <= mark.at < seen.ended]
    home = [mark for mark in within if mark.kind == HOME]
    seconds = seen.ended - seen.begun
    per_s = len(home) / seconds
    visits = Counter(seen.indices[peer] for mark in home for peer in mark.peers)
    measured = sum(measured_visits(marks, seen.begun, seen.ended) for marks in seen.flights.values())
    flying = sum(mean_in_flight(marks, seen.begun, seen.ended) for marks in seen.flights.values())
    run: Run = {
        "cell": trial.cell_name,
        "arm": trial.arm,
        "seed": trial.seed,
        TOKENS_PER_S: round(per_s * tokens, 1),
        "bound_tokens_per_s": round(ground.bound_per_s(per_path) * tokens, 1),
        "share_of_bound": round(per_s / ground.bound_per_s(per_path), 3),
        "x": round(cell.in_flight / ground.knee(per_path), 3),
        "x_mean": round(flying / ground.knee(per_path), 3),
        "round_trip_s": round(flying / per_s, 3) if home else None,
        "share_measured": round(measured / max(1, visits.total()), 3),
        ABROAD: round(share_abroad(trial.ground, seen), 3),
        "machine_load": None if seen.machine_load is None else round(seen.machine_load, 3),
        "swarm_load": None if seen.swarm_load is None else round(seen.swarm_load, 3),
        "visits_per_stage": by_stage(ground, visits),
        "visits_per_replica": {index: visits[index] for index, stage in enumerate(ground.stages) if stage},
        "completed": len(home),
        "abandoned": sum(mark.kind == LOST for mark in within),
        "failures": seen.failures,
        "warm_s": round(seen.warm_s, 1),
        "cold_replicas": list(seen.cold),
    }
    if cell.staleness == 0:
        run |= _steps(cell, seen)
    if cell.changes == "once":
        run |= _after_change(trial, seen, tokens)
    return run


def _steps(cell: Cell, seen: Seen) -> Run:
    steps = {index: steps_s(marks, cell.per_step, seen.begun, seen.ended) for index, marks in seen.flights.items()}
    every = [seconds for own in steps.values() for seconds in own]
    mean = statistics.fmean(statistics.fmean(own) for own in steps.values() if own) if every else None
    return {
        STEP_S: None if mean is None else round(mean, 3),
        "step_s_median": round(statistics.median(every), 3) if every else None,
        "steps": len(every),
    }


def steps_s(marks: Sequence[FlightMark], per_step: int, begun: float, ended: float) -> list[float]:
    """Seconds of the whole steps of one data node within this time."""
    home = [mark.at for mark in marks if mark.kind == HOME]
    ends = [at for at in home[per_step - 1 :: per_step] if begun <= at < ended]
    return [later - before for before, later in itertools.pairwise(ends)]


def mean_in_flight(marks: Sequence[FlightMark], begun: float, ended: float) -> float:
    """Microbatches of one data node under way, on average over this time."""
    flying, since, area = 0, begun, 0.0
    for mark in marks:
        if begun < mark.at < ended:
            area += flying * (mark.at - since)
            since = mark.at
        if mark.at < ended:
            flying += 1 if mark.kind == LAUNCHED else -1
    return (area + flying * (ended - since)) / (ended - begun)


def measured_visits(marks: Sequence[FlightMark], begun: float, ended: float) -> int:
    """How many visits one data node's rule was told of within this time."""
    counts = [(mark.at, mark.measured) for mark in marks]
    before = max((count for at, count in counts if at < begun), default=0)
    return max((count for at, count in counts if at < ended), default=0) - before


def share_abroad(ground: Ground, seen: Seen) -> float:
    """Of the ways between peers those that lead to another region; data nodes are the ends of each path."""
    abroad = ways = 0
    for data_node, marks in seen.flights.items():
        for mark in marks:
            if mark.kind == HOME and seen.begun <= mark.at < seen.ended:
                stops = [data_node, *(seen.indices[peer] for peer in mark.peers), data_node]
                ways += len(stops) - 1
                abroad += sum(ground.regions[a] != ground.regions[b] for a, b in itertools.pairwise(stops))
    return abroad / max(1, ways)


def by_stage(ground: Ground, visits: Counter[int]) -> dict[int, int]:
    counted: Counter[int] = Counter()
    for index, number in visits.items():
        counted[ground.stages[index]] += number
    return dict(sorted(counted.items()))


def _after_change(trial: Trial, seen: Seen, tokens: int) -> Run:
    per_path, at = trial.cell.visited(ARMS[trial.arm]), seen.changed_at[0]
    victim = min(trial.ground.replicas(trial.ground.weakest), key=trial.ground.visit_s)
    left = trial.ground.slowed(victim, SLOWED_BY).bound_per_s(per_path)
    home = sorted(mark.at for marks in seen.flights.values() for mark in marks if mark.kind == HOME)
    before_s = at - seen.begun
    counted = count_between(home, at, at + COUNTED_AFTER_S)
    return {
        "slowed_replica": victim,
        "left_tokens_per_s": round(left * tokens, 1),
        "tokens_per_s_before": round(count_between(home, at - before_s, at) / before_s * tokens, 1),
        AFTER_TOKENS: counted * tokens,
        "share_of_left": round(counted / (left * COUNTED_AFTER_S), 3),
        RECOVERED_S: recovered_s(home, at, seen.ended, left),
    }


def recovered_s(home: Sequence[float], at: float, ended: float, left_per_s: float) -> float:
    """Seconds from a change until the pace, over the ten seconds that follow, is back at so much of what is left, once
    it has fallen below; all that were measured if it never is, and 0 if it never fell."""
    moments = [at + 0.5 * k for k in range(int(2 * (ended - PACE_S - at)) + 1)]
    enough = [count_between(home, t, t + PACE_S) >= RECOVERED * left_per_s * PACE_S for t in moments]
    if all(enough):
        return 0.0
    fell = enough.index(False)
    back = next((k for k in range(fell, len(moments)) if enough[k]), None)
    return round(ended - at if back is None else moments[back] - at, 1)


def count_between(times: Sequence[float], begin: float, end: float) -> int:
    """Args: times: in order."""
    return bisect_left(times, end) - bisect_left(times, begin)


# ---- all of them -----------------------------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """By cell: the arms' figures by seed, the ratios of pairs, and the bars."""
    run_cells = {run["cell"] for run in runs}
    return {name: _of_cell(name, [run for run in runs if run["cell"] == name]) for name in CELLS if name in run_cells}


def _of_cell(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    cell = CELLS[name]
    shown = dict.fromkeys(
        (cell.figure, *(bar.figure for bar in cell.bars), "share_of_bound", "x", "x_mean", "share_measured", ABROAD)
    )
    run_arms = {run["arm"] for run in runs}
    arms = [arm for arm in ARMS if arm in run_arms]
    pairs = itertools.combinations(arms, 2)
    return {
        "about": cell.about,
        "arms": {arm: {key: _by_seed(runs, arm, key) for key in shown} for arm in arms},
        "ratios": {f"{one} / {other}": compared(runs, cell.figure, one, other) for one, other in pairs},
        "bars": [_held(bar, runs) for bar in cell.bars],
    }


def _by_seed(runs: Iterable[Run], arm: str, figure: str) -> dict[int, Any]:
    """The mean, where a seed was run more than once."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if run["arm"] == arm and run.get(figure) is not None:
            found.setdefault(run["seed"], []).append(run[figure])
    return {seed: round(statistics.fmean(values), 3) for seed, values in sorted(found.items())}


def compared(runs: Sequence[Run], figure: str, one: str, other: str) -> dict[str, Any]:
    """One arm's figure over another's, seed by seed, and all together."""
    ours, theirs = _by_seed(runs, one, figure), _by_seed(runs, other, figure)
    paired = {seed: round(ours[seed] / theirs[seed], 3) for seed in ours if theirs.get(seed)}
    if not paired or min(paired.values()) <= 0:
        return {"by_seed": paired}
    mean = {"by_seed": paired, "geometric_mean": round(statistics.geometric_mean(paired.values()), 3)}
    if len(paired) == 1:  # one pair says nothing of others
        return mean
    low, high = bootstrap(list(paired.values()), statistics.geometric_mean)
    return {**mean, "interval": [round(low, 3), round(high, 3)]}


def bootstrap(values: Sequence[float], of: Callable[[list[float]], float], seed: int = 0) -> tuple[float, float]:
    """The 90 % percentile interval of a figure of some values (Efron 1979)."""
    rng = random.Random(seed)
    drawn = sorted(of(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    low, high = (drawn[min(DRAWS - 1, math.floor(share * DRAWS))] for share in INTERVAL)
    return low, high


def _held(bar: Bar, runs: Sequence[Run]) -> dict[str, Any]:
    if bar.against is None:
        values = _by_seed(runs, bar.arm, bar.figure)
        value = statistics.median(values.values()) if values else None
    else:
        value = compared(runs, bar.figure, bar.arm, bar.against).get("geometric_mean")
    names = bar.arm if bar.against is None else f"{bar.arm} / {bar.against}"
    held = None if value is None else (value >= bar.limit if bar.at_least else value <= bar.limit)
    kind = "at least" if bar.at_least else "at most"
    return {"figure": bar.figure, "of": names, kind: bar.limit, "is": value, "held": held}


def table(cells: dict[str, Any]) -> str:
    """The ratios as a table for people."""
    rows = ["cell | arms | geometric mean (90 %) | by seed", "---|---|---|---"]
    for name, cell in cells.items():
        for pair, ratio in cell["ratios"].items():
            mean, interval = ratio.get("geometric_mean", "-"), ratio.get("interval", ["-", "-"])
            by_seed = ", ".join(f"{value}" for value in ratio["by_seed"].values())
            rows.append(f"{name} {CELLS[name].figure} | {pair} | {mean} ({interval[0]} to {interval[1]}) | {by_seed}")
    return "\n".join(rows)
