"""Path choice in real swarms, cell by cell: our planner against SWARM's rule and a greedy one, with emulated machines
and links.

    python benchmarks/paths_live.py [--cells A1 A2 B1 B3 C E] [--seeds 1 2 3] [--arms ours swarm greedy] [--seconds 30]
    [--at-once 1] [--runs FILE] [--add FILE ...] [--keep DIR]

Real processes, sockets and TLS on this machine, but every node is `tests/e2e/emulated.py`: computations and links take
the time that they would take on machines that are up to four times slower than others, in three regions. So what is
measured is the choice of paths, and not the cores. `benchmarks/live_cells.py` has the cells: in each the swarm is
another one, and the bars are what is asked of ours there.

Every arm has a swarm of its own on the same ground (seed), one after the other in an order by chance; what peers
announce of their speed is wrong by up to a factor of two in all of them; windows, tries, repair and codecs are the
same. A swarm is warmed up until every replica has had ten visits and a minimum of seconds is over, then measured. Of
each swarm is told: `x`, the microbatches that may be under way over those that the bound needs if nobody waits (the
knee); `share_of_bound`, of what the weakest stage could do if all its replicas were always busy; `share_measured`, of
its visits, which should be above 0.95; `machine_load`, of this machine's cores, which should stay below 0.7, or the
emulated times are not true; `hops_between_regions`. Of each cell: ratios of arms by seed, their geometric mean with its
90 % bootstrap interval, and the bars.

Prints one JSON object; progress and a table go to stderr. `--add` reports earlier outputs (or files of `--runs`)
together with what is run now, so that a long measurement can be taken in pieces; without seeds nothing is run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live_cells import ARMS, CELLS, make_ground
from benchmarks.live_report import Run, figures, report, table
from benchmarks.live_swarm import Pacing, SideBySide, Trial, observe, tell
from tests.e2e.small_run import small_run, write_text

SHOWN = ("step_s", "tokens_per_s", "share_of_bound", "x", "x_mean", "share_measured", "hops_between_regions")
SHOWN_LATER = ("tokens_after_change", "recovered_s", "machine_load", "swarm_load", "abandoned", "failures", "warm_s")


def trials(cells: Sequence[str], seeds: Sequence[int], arms: Sequence[str] | None, folder: Path) -> list[Trial]:
    """Seed by seed and cell by cell; the order of the arms is by chance, the same whenever this is called."""
    planned = []
    for seed in seeds:
        for name in cells:
            cell, ground = CELLS[name], make_ground(seed, CELLS[name].links)
            chosen = list(arms or cell.arms)
            random.Random(f"order {name} {seed}").shuffle(chosen)
            planned += [
                Trial(name, cell, arm, seed, ground, folder / f"{name}-{seed}-{place}-{arm}")
                for place, arm in enumerate(chosen)
            ]
    return planned


async def measure(options: argparse.Namespace, folder: Path) -> list[Run]:
    """All trials, so many at once as were asked for."""
    text = write_text(folder / "text")
    tokens = small_run(text).microbatch_tokens
    pacing = Pacing(options.seconds, options.warm[0], options.warm[1])

    async def run(trial: Trial, others: SideBySide) -> Run:
        (trial.folder / "logs").mkdir(parents=True)
        found = figures(trial, await observe(trial, text, pacing, others), tokens)
        shown = {key: found[key] for key in (*SHOWN, *SHOWN_LATER) if key in found}
        tell(f"{trial.cell_name}, seed {trial.seed}, {trial.arm}: {shown}")
        if options.runs is not None:
            with options.runs.open("a") as file:
                file.write(json.dumps(found) + "\n")
        return found

    runs: list[Run] = []
    left = trials(options.cells, options.seeds, options.arms, folder)
    while left:
        batch, left = left[: options.at_once], left[options.at_once :]
        others = SideBySide(len(batch))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(trial, others)) for trial in batch]
        except* RuntimeError as failed:  # a node has not come up; the rest of a long measurement is worth having
            tell(f"left out: {[trial.folder.name for trial in batch]}, for {failed.exceptions}")
        else:
            runs += [task.result() for task in tasks]
    return runs


def earlier(files: Sequence[Path]) -> list[Run]:
    """The runs of earlier outputs, or of files that `--runs` wrote."""
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [run for one in found for run in one.get("runs", [one])]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=["A1", "A2", "B1", "B3", "C", "E"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), help="those of each cell when absent")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5], help="of speeds, regions and delays")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each swarm is measured")
    parser.add_argument(
        "--warm", nargs=2, type=float, default=[20.0, 45.0], metavar=("LEAST", "MOST"), help="seconds before that"
    )
    parser.add_argument("--at-once", type=int, default=1, help="swarms side by side; more only while the load is low")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="earlier outputs")
    parser.add_argument("--runs", type=Path, help="file to which the figures of each swarm are added when it has ended")
    parser.add_argument("--keep", type=Path, help="new folder for the nodes' logs; a temporary one when absent")
    return parser.parse_args(words)


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory(prefix="skipstone-paths-") as temporary:
        folder = options.keep or Path(temporary) / "run"
        folder.mkdir(parents=True)
        runs = earlier(options.add) + (asyncio.run(measure(options, folder)) if options.seeds else [])
    cells = report(runs)
    tell(table(cells))
    grounds = {seed: make_ground(seed).table() for seed in sorted({run["seed"] for run in runs})}
    settings: dict[str, Any] = {"seconds": options.seconds, "warm": options.warm, "at_once": options.at_once}
    print(json.dumps({"benchmark": "paths_live", **settings, "cells": cells, "grounds": grounds, "runs": runs}))


if __name__ == "__main__":
    main()
