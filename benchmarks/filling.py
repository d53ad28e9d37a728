"""What idle time is worth: weight gradients that are put off against those computed at once, and the cost of filling.

    python benchmarks/filling.py [--seeds 1 2 3] [--seconds 60] [--latencies 0 20 50 100] [--output FILE]

Devices and links are emulated in virtual time, so that other work on this machine changes nothing; what decides is the
node's own: custody, flights, planner (`swarm.simulation.pipeline_world`) and the queue before the compute device
(`swarm.pipeline.compute_queue`). A data node and four stages of one peer each, which are 0.8 to 1.2 times as fast as
others; forward, the input's gradient and the weights' gradients take 30 ms each, the head 10 ms; links so many ms one
way, and 2 ms more for a tensor's body, both with a log-normal jitter of 0.3.

`put_off`: steps of 8 microbatches wait for each other (staleness 0). `ratio` is the pace with weight gradients put off
over that with all computed at once, of the same ground; `held` the most bytes of graphs and of what is kept for weight
gradients at the stage with the most, as a ratio of the two.

`running_freely`: staleness 2, windows of 4 and 6 at once and put off: which of them idle time is better used for.

`filling`: staleness 2 and a window that leaves the devices idle half of the time, and work without end for idle time in
chunks of `chunk_ms`, for tensors that take `body_ms` on their link after their header. `foreground` is the pace with
idle work over that without; `busy` the share of the time that devices compute, idle work included, and `base` without;
`wait_ms` by how much the 99th percentile of a job's waiting grows. `headers`: as the node does it, which expects a
tensor when it has its header; `deaf`: without that. `summary` has the medians, and the worst, over all such settings.

`stage`: a real stage of two blocks of 256 on one core of this machine, in processor seconds: `kept`, the bytes that are
kept for the weights' gradients over those of the graph; `time`, of both halves over a whole backward, and `first`, of
the first half over it, all with adding the gradients to their sums; `chunk_ms`, the 99th percentile of a chunk, and
`longest_chunk_ms`.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.emulated_pipeline import FillingWorld, Setting, share_of_time, stage_peer
from swarm.pipeline.compute_queue import ComputeQueue, IdleWork
from swarm.vocabulary.types import MicrobatchId, ModuleId, Reasoned

CHUNKS_S: Final = (0.002, 0.005)
BODIES_S: Final = (0.002, 0.020, 0.170)
WARM_S: Final = 5.0
BARS: Final = {"0": 1.15, "20": 1.15, "50": 1.15, "100": 1.10}


@dataclass(frozen=True, slots=True)
class Seen:
    """What an arm did while it was measured."""

    pace: float
    """Microbatches a second."""
    busy: float
    """Share of the time of the stages' devices."""
    idle_work: float
    wait_s: float
    """99th percentile."""
    held: float
    """The most graphs at a stage."""


def run(setting: Setting, seconds: float, kept: float) -> Seen:
    """Runs one arm for so many virtual seconds after a warm-up."""
    world = FillingWorld(setting, kept)
    world.run(WARM_S)
    before = len(world.ledger.completed)
    world.run(seconds)
    peers, span = world.stage_peers, (WARM_S, WARM_S + seconds)
    waits = sorted(wait for peer in peers for came, wait in peer.account.waits if came >= WARM_S)
    return Seen(
        (len(world.ledger.completed) - before) / seconds,
        share_of_time([peer.account.busy for peer in peers], *span),
        share_of_time([peer.account.idle_work for peer in peers], *span),
        waits[int(0.99 * (len(waits) - 1))],
        max(peer.account.most_held for peer in peers),
    )


def put_off(latencies: Sequence[int], seeds: Sequence[int], seconds: float, kept: float) -> dict[str, Any]:
    """Both arms at staleness 0; medians over the seeds."""
    found = {}
    for one_way_ms in latencies:
        pairs = [
            [run(Setting(one_way_ms / 1e3, seed, puts_off=arm), seconds, kept) for arm in (False, True)]
            for seed in seeds
        ]
        found[str(one_way_ms)] = {
            "ratio": statistics.median(later.pace / at_once.pace for at_once, later in pairs),
            "bar": BARS.get(str(one_way_ms)),
            "ratios": [later.pace / at_once.pace for at_once, later in pairs],
            "held": statistics.median(later.held / at_once.held for at_once, later in pairs),
            "busy": [statistics.median(arm.busy + arm.idle_work for arm in arms) for arms in zip(*pairs, strict=True)],
        }
        tell(f"put off, {one_way_ms} ms: {found[str(one_way_ms)]}")
    return found


def running_freely(latencies: Sequence[int], seeds: Sequence[int], seconds: float, kept: float) -> dict[str, Any]:
    """Microbatches a second and the most graphs of arms that do not wait for steps."""
    arms = {"window 4": (4, False), "window 6": (6, False), "window 4, put off": (4, True)}
    found: dict[str, Any] = {}
    for one_way_ms in latencies:
        found[str(one_way_ms)] = {}
        for name, (window, puts_off) in arms.items():
            seen = [run(Setting(one_way_ms / 1e3, seed, 2, window, puts_off), seconds, kept) for seed in seeds]
            found[str(one_way_ms)][name] = {
                "pace": statistics.median(each.pace for each in seen),
                "held": statistics.median(each.held for each in seen),
            }
        tell(f"running freely, {one_way_ms} ms: {found[str(one_way_ms)]}")
    return found


def filling(latencies: Sequence[int], seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Arms with and without work for idle time, which heed headers or do not."""
    found: list[dict[str, Any]] = []
    for one_way_ms in latencies:
        for window in (2, 3, 4, 6):
            for body_s in BODIES_S:
                plain = [Setting(one_way_ms / 1e3, seed, 2, window, body_s=body_s) for seed in seeds]
                bare = [run(setting, seconds, 1.0) for setting in plain]
                base = statistics.median(each.busy for each in bare)
                if not 0.35 <= base <= 0.65:
                    continue
                row = {"one_way_ms": one_way_ms, "window": window, "body_ms": round(1e3 * body_s), "base": base}
                for chunk_s in CHUNKS_S:
                    for name, hears in (("headers", True), ("deaf", False)):
                        arm = {"fills": True, "hears": hears, "chunk_s": chunk_s}
                        filled = [run(replace(setting, **arm), seconds, 1.0) for setting in plain]
                        given = {"arm": name, "chunk_ms": round(1e3 * chunk_s)}
                        found.append(row | given | compared(filled, bare))
                        tell(f"filling: {found[-1]}")
    return {"runs": found, "summary": summary(found)}


def compared(filled: Sequence[Seen], bare: Sequence[Seen]) -> dict[str, float]:
    """An arm with idle work against the one without, on the same grounds."""
    pairs = list(zip(filled, bare, strict=True))
    return {
        "foreground": statistics.median(each.pace / without.pace for each, without in pairs),
        "busy": statistics.median(each.busy + each.idle_work for each in filled),
        "wait_ms": 1e3 * statistics.median(each.wait_s - without.wait_s for each, without in pairs),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm, chunk and body: the median of all settings, and the worst."""
    keys = ("arm", "chunk_ms", "body_ms")
    found = []
    for kind in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in keys) == kind]
        figures = {
            name: [statistics.median(row[name] for row in own), worst(row[name] for row in own)]
            for name, worst in (("foreground", min), ("busy", min), ("wait_ms", max))
        }
        found.append(dict(zip(keys, kind, strict=True)) | {"settings": len(own)} | figures)
    return found


def stage() -> dict[str, float]:
    """A real stage: what is kept, what the split costs, how long chunks are."""
    import torch

    from node.model.optimizer import Accumulator
    from node.model.parts import build_block_stack
    from node.pipeline.split_backward import DeferredWeights, SplitDevice
    from node.pipeline.worker import GraphBudget
    from protocol.manifest.manifest import manifest_from_table

    torch.set_num_threads(1)
    model = {
        "vocabulary": 257, "hidden": 256, "heads": 4, "kv_heads": 4, "feed_forward": 704, "sequence": 256,
    }  # fmt: skip
    table = {"protocol": 2, "name": "stage", "seed": 1, "model": model, "stages": {"blocks": [0, 2]}}
    manifest = manifest_from_table(table | {"training": {"rows": 4, "inner_tokens": 8192}})
    part = build_block_stack(manifest, ModuleId(1))
    split, sums, queue = SplitDevice(part), Accumulator(part), ComputeQueue(limit=1)
    later = DeferredWeights(Reasoned(True, "measured"), split, sums, queue.submit)
    tokens, source, graphs = manifest.microbatch_tokens, torch.randn(manifest.hidden_shape), GraphBudget(2**40)
    graphs.forward(split, source, ())
    assert graphs._of_one is not None
    whole, halves, firsts, chunks = [], [], [], []
    for number in range(15):
        visit = split.forward(source, ())
        begun = time.thread_time()
        sums.add(MicrobatchId(stage_peer(0), 2 * number), tokens, split.backward(visit, source).parameters)
        whole.append(time.thread_time() - begun)
        visit = split.forward(source, ())
        begun = time.thread_time()
        half = later.first_half(visit, source)
        assert half.is_bounded()
        later.put_off(MicrobatchId(stage_peer(0), 2 * number + 1), tokens, half, lambda seconds: None)
        firsts.append(time.thread_time() - begun)
        del half
        while isinstance(turn := queue.take(0.0), IdleWork):
            at = time.thread_time()
            turn.compute_chunk()
            chunks.append(time.thread_time() - at)
        halves.append(time.thread_time() - begun)
    return {
        "kept": later.peak_bytes / (graphs._of_one * tokens),
        "time": statistics.median(halves) / statistics.median(whole),
        "first": statistics.median(firsts) / statistics.median(whole),
        "chunk_ms": 1e3 * sorted(chunks)[int(0.99 * (len(chunks) - 1))],
        "longest_chunk_ms": 1e3 * max(chunks),
    }


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 20, 50, 100])
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    real = stage()
    tell(f"stage: {real}")
    given = chosen.latencies, chosen.seeds, chosen.seconds
    report = {
        "stage": real,
        "put_off": put_off(*given, real["kept"]),
        "running_freely": running_freely(*given, real["kept"]),
        "filling": filling(*given),
        "seeds": chosen.seeds,
        "seconds": chosen.seconds,
    }
    text = json.dumps(report)
    if chosen.output is not None:
        chosen.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
