"""Tokens per second of a swarm against one process: same manifest, same cores, in turn.

The model is large enough that computing dominates. All sides get all cores: one process as torch's threads, so does
`whole`, one node that hosts all modules, and the swarm as one process a stage. Rates are between the first and the last
step, so that neither start-up counts. `split` is each kind of time as a share of the wall time of the peers with
blocks; sending overlaps with computing.
"""

import asyncio
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import run_of
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import Event, NodeSummary, Step
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest

TARGET = 0.8
WHOLE_TARGET = 0.97


def large_run(hidden: int) -> Manifest:
    """Eight blocks in two stages behind a data node that has only embedding and head."""
    size = {"hidden": hidden, "heads": 8, "feed_forward": 11 * hidden // 4}
    size |= {"sequence": 256, "rows": 4, "microbatches": 16}
    return run_of("throughput", [0, 4, 4], seed=5, model={"kv_heads": 4}, staleness=1, **size)


class Steps:
    """An event sink that keeps the time and the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self.times.append((time.perf_counter(), event.tokens))


def solo_process(connection: Connection, hidden: int, steps: int) -> None:
    """Trains in a process of its own, and sends the tokens per second."""
    import torch

    from node.solo.trainer import train_solo

    torch.set_num_threads(os.cpu_count() or 1)
    seen = Steps()
    train_solo(large_run(hidden), steps=steps, device=torch.device("cpu"), on_event=seen.emit)
    connection.send(kit.rate(seen.times))


def whole_process(connection: Connection, hidden: int, steps: int) -> None:
    """The same by one node that hosts all modules."""
    from node.context.options import NodeOptions
    from node.runtime.node import run_node

    seen = Steps()
    with tempfile.TemporaryDirectory() as folder:
        key, path = Path(folder) / "key", Path(folder) / "run.toml"
        manifest = large_run(hidden)
        path.write_bytes(sign_manifest(manifest, Identity.load_or_create(key)).text)
        options = NodeOptions(
            link=None,
            manifest_path=path,
            identity_path=key,
            stages=f"0-{manifest.stages.count - 1}",
            listen="127.0.0.1",
            threads=os.cpu_count(),
            steps=steps,
        )
        asyncio.run(run_node(options, seen, asyncio.Event()))
    connection.send(kit.rate(seen.times))


def split_of(events: list[Event]) -> dict[str, float]:
    busy = [event.busy_s for event in events if isinstance(event, NodeSummary) and event.module != "0.0"]
    whole = sum(b.compute + b.idle_work + b.wait for b in busy)
    kinds = ("compute", "idle_work", "codec", "wire", "wait")
    return {kind: round(sum(getattr(b, kind) for b in busy) / whole, 4) for kind in kinds}


def measure(options: Any) -> dict[str, Any]:
    manifest = large_run(options.hidden)
    swarm_options = LocalSwarmOptions(peers=manifest.stages.count, steps=options.steps, threads=1)
    alone, whole, together, splits = list[float](), list[float](), list[float](), list[dict[str, float]]()
    for number in range(options.rounds):
        for process, rates in ((solo_process, alone), (whole_process, whole)):
            with kit.process(process, options.hidden, options.steps) as running:
                rates.append(kit.hear(running, 3600))
        rate, events = asyncio.run(kit.swarm_to_its_end(manifest, swarm_options))
        together.append(rate)
        splits.append(split_of(events))
        told = f"solo {alone[-1]:.0f}, whole {whole[-1]:.0f}, swarm {rate:.0f} tokens/s"
        kit.tell(f"round {number + 1} of {options.rounds}: {told}")
    return {
        "solo_tokens_per_s": kit.median(alone),
        "swarm_tokens_per_s": kit.median(together),
        "ratio": kit.median_ratio(together, alone),
        "target": TARGET,
        "whole_tokens_per_s": kit.median(whole),
        "whole_ratio": kit.median_ratio(whole, alone),
        "whole_target": WHOLE_TARGET,
        "split": kit.medians(splits),
        "steps": options.steps,
        "rounds": options.rounds,
    }


if __name__ == "__main__":
    kit.run(__doc__, measure, {"steps": 2, "rounds": 1, "hidden": 64}, steps=8, rounds=3, hidden=512)
