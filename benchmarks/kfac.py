"""K-FAC in a pipeline's idle time, as PipeFisher has it (Osawa et al. 2022, arXiv:2211.14133): how many steps a refresh
takes in the bubbles alone, and what curvature that stale is worth.

    python benchmarks/kfac.py [--only schedule training] [--depths 4 8 16] [--microbatches 1 2] [--schedule-steps 12]
        [--steps 120] [--seeds 1 2 3] [--rates 6e-3] [--periods 1 5 10 20] [--text FILE]
        [--output FILE] [--plot FILE]

`schedule` (`benchmarks.kfac_schedule`): in virtual time, through the node's own queue. `paper`: equal devices without
latency, which take what the paper's authors measured of one transformer block; stages times so many microbatches a step
(multiples of the stages, `--microbatches`). `work_over_bubble` and what begins with `model_` follow from the same times
by the formula of the authors' figure; `period` is what the queue made of it: steps from one refresh to the next.
`utilisation` is the share of the time that devices compute, `step` the step's time over that without K-FAC, and
`in_step` the same with the same refreshes computed in the step. `delay_ms`: the longest that a pass waited for a chunk
of idle work; `kept`: the most microbatches of which inputs and gradients were kept. `chunks`: the smallest pipeline
with other chunks, up to whole factors. `links`: 4 stages of unlike peers over links so many ms long one way, 8
microbatches a step, weights' gradients at once or put off; medians of 3 seeds. `measured`: the blocks that are trained
below as stages, by their times on one core of this machine.

`training` (`benchmarks.kfac_training`): a small model on the processor, K-FAC with AdamW's step length against AdamW;
arms are called by the refresh period, after which curvature is that many steps old when it is first used; `at once`
uses that of the step itself. Each arm has each learning rate and seed; `best`, `summary`, `runs` are those of
`benchmarks.optimizers`.

Prints one JSON object; progress goes to stderr. What `--output` has already and `--only` does not name stays there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.kfac_schedule import Profile, Refreshed, over_links, pipeline, run_arms
from benchmarks.kfac_training import ADAMW, AT_ONCE, measure, measured_profile
from benchmarks.optimizers import Task, best_of, summary
from node.model.device import flush_denormals

PROFILES: Final = {
    "BERT-Base": Profile(9.75, 16.45, 25.55, 71.67, 6.81),
    "BERT-Large": Profile(16.10, 26.95, 43.50, 126.70, 14.73),
}
"""One block on a P100, 32 sequences of 128 a microbatch: measured by the paper's authors, and rounded; the columns
time_f, time_b, time_kron, time_inv, time_prec of prof/bert-base_time_memory_p100.csv and prof/bert-large_... in
github.com/kazukiosawa/pipe-fisher, from which scripts/plot_throughput.py draws the paper's figure of (curvature +
inversion) / bubble."""
FIRST: Final = "BERT-Base"
SMALLEST: Final = 4
CHUNKS_MS: Final = (2, 5, 13, 36)
"""What the node does and its bound; a curvature factor of one microbatch, and half of the inversions, whole."""
LATENCIES_MS: Final = (0, 20, 50)
LINK_SEEDS: Final = (1, 2, 3)
LINK_MICROBATCHES: Final = 8


def row_of(profile: Profile, arms: Mapping[str, Refreshed]) -> dict[str, float]:
    """What was found of one pipeline."""
    bare, filled, in_step = arms["bare"], arms["bubbles"], arms["in step"]
    return {
        "period": filled.period,
        "utilisation": filled.utilisation,
        "bare_utilisation": bare.utilisation,
        "step": filled.step_ms / bare.step_ms,
        "in_step": in_step.step_ms / bare.step_ms,
        "step_ms": filled.step_ms,
        "delay_ms": filled.delay_ms,
        "kept": filled.kept,
        "precondition": profile.precondition_ms / bare.step_ms,
    }


def modelled(profile: Profile, stages: int, microbatches: int) -> dict[str, float]:
    """The same by the formula of the paper's figure."""
    ratio = profile.work_over_bubble(stages, microbatches)
    return {
        "work_over_bubble": ratio,
        "model_period": math.ceil(ratio),
        "model_utilisation": profile.utilisation(stages, microbatches, math.ceil(ratio)),
        "model_bare_utilisation": profile.utilisation(stages, microbatches, None),
    }


def on_paper(depths: Sequence[int], multiples: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    """The pipelines of the paper's figure; of the larger model with as many microbatches as stages."""
    for name, profile in PROFILES.items():
        for stages in depths:
            for multiple in multiples if name == FIRST else multiples[:1]:
                count = stages * multiple
                arms = run_arms(pipeline(profile, stages, count, CHUNKS_MS[0] / 1e3), profile, steps)
                place = {"model": name, "stages": stages, "microbatches": count}
                yield place | modelled(profile, stages, count) | row_of(profile, arms)


def of_chunks(steps: int) -> Iterator[dict[str, Any]]:
    """What the length of chunks costs."""
    for chunk_ms in CHUNKS_MS:
        profile = PROFILES[FIRST]
        arms = run_arms(pipeline(profile, SMALLEST, SMALLEST, chunk_ms / 1e3), profile, steps)
        yield {"chunk_ms": chunk_ms} | row_of(profile, arms)


def over_all_links(steps: int) -> Iterator[dict[str, Any]]:
    """Unlike peers and long links; medians of the seeds."""
    profile = PROFILES[FIRST]
    for one_way_ms in LATENCIES_MS:
        for puts_off in (False, True):
            rows = []
            for seed in LINK_SEEDS:
                even = pipeline(profile, SMALLEST, LINK_MICROBATCHES, CHUNKS_MS[0] / 1e3)
                setting = dataclasses.replace(over_links(even, one_way_ms, seed), puts_off=puts_off)
                rows.append(row_of(profile, run_arms(setting, profile, steps)))
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            yield {"one_way_ms": one_way_ms, "puts_off": puts_off} | medians


def as_measured(profile: Profile, steps: int) -> Iterator[dict[str, Any]]:
    """The blocks of the training as stages."""
    for count in (SMALLEST, 2 * SMALLEST):
        arms = run_arms(pipeline(profile, SMALLEST, count, CHUNKS_MS[0] / 1e3), profile, steps)
        place = {"stages": SMALLEST, "microbatches": count, "profile": dataclasses.asdict(profile)}
        yield place | modelled(profile, SMALLEST, count) | row_of(profile, arms)


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Periods and utilisation over microbatches a step, and the curves of the best learning rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    periods, shares, losses = (figure.add_subplot(1, 3, place + 1) for place in range(3))
    rows = [row for row in report.get("schedule", {}).get("paper", ()) if row["model"] == FIRST]
    for colour, stages in enumerate(dict.fromkeys(row["stages"] for row in rows)):
        own = [row for row in rows if row["stages"] == stages]
        at, style = [row["microbatches"] / stages for row in own], {"color": f"C{colour}"}
        periods.plot(at, [row["work_over_bubble"] for row in own], "--", label=f"{stages} stages, the paper's", **style)
        periods.plot(at, [row["period"] for row in own], "o", label=f"{stages} stages, in the queue", **style)
        shares.plot(at, [row["bare_utilisation"] for row in own], "--", label=f"{stages} stages", **style)
        shares.plot(at, [row["utilisation"] for row in own], "o-", label=f"{stages} stages, filled", **style)
    periods.set(xlabel="microbatches a step / stages", ylabel="steps of a refresh; (curvature + inversion) / bubble")
    shares.set(xlabel="microbatches a step / stages", ylabel="share of the time that devices compute", ylim=(0, 1))
    training = report.get("training", {"runs": (), "best": ()})
    for colour, arm in enumerate(dict.fromkeys(row["arm"] for row in training["best"])):
        best = {row["seed"]: row["rate"] for row in training["best"] if row["arm"] == arm}
        curves = [
            run["curve"] for run in training["runs"] if run["arm"] == arm and best.get(run["seed"]) == run["rate"]
        ]
        points = [(of[0][0], statistics.median(each[2] for each in of)) for of in zip(*curves, strict=True)]
        label = arm if arm == ADAMW else f"K-FAC, {arm}"
        losses.plot(*zip(*points[3:], strict=True), color=f"C{colour}", label=label, linewidth=1.3)
    losses.set(xlabel="inner steps", ylabel="held-out loss, nats a byte; median of the seeds")
    for axes in (periods, shares, losses):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=100)


def tell(row: object) -> None:
    print(row, file=sys.stderr, flush=True)


def schedules(options: argparse.Namespace, task: Task) -> Iterator[dict[str, Any]]:
    """All of virtual time, after each pipeline what there is by then."""
    steps = options.schedule_steps
    parts = {
        "paper": on_paper(options.depths, options.microbatches, steps),
        "chunks": of_chunks(steps),
        "links": over_all_links(steps),
        "measured": as_measured(measured_profile(task), steps),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for part, rows in parts.items():
        for row in rows:
            found.setdefault(part, []).append(row)
            tell(row)
            yield found


def trainings(options: argparse.Namespace, task: Task) -> Iterator[dict[str, Any]]:
    """All arms, after each run what there is by then."""
    runs: list[dict[str, Any]] = []
    settings = dataclasses.asdict(task) | {"source": task.source.partition(":")[0]}
    arms = (ADAMW, AT_ONCE, *map(str, options.periods))
    for seed, arm, rate in itertools.product(options.seeds, arms, options.rates):
        runs.append(measure(task, arm, seed, rate))
        tell({key: runs[-1][key] for key in ("arm", "seed", "rate", "loss")})
        best = best_of(runs)
        yield {"task": settings, "summary": summary(best), "best": best, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["schedule", "training"], choices=["schedule", "training"])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2], help="a step, in multiples of stages")
    parser.add_argument("--schedule-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-3])
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--text", type=Path, help="read this instead of the standard library's source")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="draw into this PNG (needs the extra `plot`)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    source = "python-stdlib" if options.text is None else f"path:{options.text}"
    size = {"hidden": 64, "feed_forward": 176, "sequence": 64, "rows": 8, "held_out_microbatches": 6}
    task = Task(options.steps, source=source, **size)
    has_some = options.output is not None and options.output.exists()
    report: dict[str, Any] = json.loads(options.output.read_text()) if has_some else {}

    def keep() -> None:
        if options.output is not None:
            options.output.write_text(json.dumps(report, indent=1) + "\n")

    for part in options.only:
        for found in (schedules if part == "schedule" else trainings)(options, task):
            report[part] = found
            keep()
    if options.plot is not None:
        draw(report, options.plot)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
