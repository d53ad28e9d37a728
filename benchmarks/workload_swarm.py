"""Tokens per second of a swarm of two hops: whole documents of equal cost, concatenation with a mask, rows of a stream.

Real processes, links and TLS on this machine, one thread each; steps wait (staleness 0), so that a microbatch that
costs more than the others holds all up. Where each stage has several replicas their devices are emulated
(`benchmarks.workload_node`). Arms in turns, between the first and the last step; medians of the ratios within a round.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.packing import log_normal
from benchmarks.workload_node import Spec
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place, everywhere_here
from node.observability.events import Step
from protocol.manifest.manifest import Manifest, manifest_from_table
from protocol.manifest.model import quadratic_share

BARS: Final = {"concat": 1.10, "rows": 1.35}
FORWARD_S: Final = 4.0
"""On an emulated device, of a microbatch of rows; far above what it really takes here."""
CONCAT: Final = Place(command=(sys.executable, "-P", "-m", "benchmarks.concat_node"))


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int = 64
    sequence: int = 8192
    rows: int = 4
    microbatches: int = 8
    """Of a step."""
    steps: int = 4
    """The first of which does not count."""
    rounds: int = 3
    staleness: int = 0
    documents: int = 6000
    replicas: int = 1
    """Of each stage after 0."""

    @property
    def peers(self) -> int:
        return 1 + 2 * self.replicas


def manifest_of(sizes: Sizes, text: Path, attention: str) -> Manifest:
    tokens = sizes.microbatches * sizes.rows * sizes.sequence
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "workload",
            "model": {
                "vocabulary": 257,
                "hidden": sizes.hidden,
                "heads": 4,
                "kv_heads": 4,
                "feed_forward": 8 * sizes.hidden // 3,
                "sequence": sizes.sequence,
                "attention": attention,
            },
            "stages": {"blocks": [0, 1, 1]},
            "data": {"source": f"path:{text}"},
            "training": {
                "rows": sizes.rows,
                "inner_tokens": tokens,
                "inner_steps": 1_000_000,
                "round_seconds": 1e6,
                "staleness": sizes.staleness,
            },
        }
    )


def write_documents(folder: Path, count: int) -> Path:
    folder.mkdir()
    rng = random.Random(3)
    for number, length in enumerate(log_normal(count)):
        (folder / f"{number:05}.txt").write_bytes(bytes(rng.choices(b"abcdefghij klm\n", k=length)))
    return folder


async def tokens_per_s(manifest: Manifest, place: Place | None, sizes: Sizes) -> float:
    times: list[tuple[float, int]] = []
    options = LocalSwarmOptions(peers=sizes.peers, steps=sizes.steps, threads=1)
    places = everywhere_here if place is None else (lambda index: place)
    async with LocalSwarm(manifest, options, places=places) as nodes:
        async for event in nodes.events():
            if isinstance(event, Step):
                times.append((time.perf_counter(), event.tokens))
            if nodes.progress.is_over:
                nodes.request_stop()
    if len(times) < 2:
        raise RuntimeError(f"the swarm ended after {len(times)} of {sizes.steps} steps: {nodes.progress}")
    (began, before), (ended, after) = times[0], times[-1]
    return (after - before) / (ended - began)


def emulated(manifest: Manifest, sizes: Sizes, *, concat: bool) -> Place:
    """Where the nodes of a swarm with several replicas a stage are."""
    share, tokens = quadratic_share(manifest.model), sizes.rows * sizes.sequence
    unit = Spec(1.0, share, tokens, sizes.sequence, sizes.microbatches, concat)
    spec = replace(unit, token_s=FORWARD_S / unit.seconds(()))
    return Place(command=(sys.executable, "-P", "-m", "benchmarks.workload_node", spec.to_json()))


def measure_swarm(sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"ours": [], "concat": [], "rows": []}
    with tempfile.TemporaryDirectory(prefix="skipstone-workload-") as folder:
        text = write_documents(Path(folder) / "text", sizes.documents)
        whole, rows = manifest_of(sizes, text, "documents"), manifest_of(sizes, text, "causal")
        arms: list[tuple[str, Manifest, Place | None]] = [
            ("ours", whole, None),
            ("concat", whole, CONCAT),
            ("rows", rows, None),
        ]
        if sizes.replicas > 1:
            arms = [(arm, run, emulated(run, sizes, concat=arm == "concat")) for arm, run, _ in arms]
        for number in range(sizes.rounds):
            for arm, manifest, place in arms:
                found[arm].append(asyncio.run(tokens_per_s(manifest, place, sizes)))
                tell(f"swarm, round {number}, {arm}: {found[arm][-1]:.0f} tokens/s")
    pairs = {arm: zip(found["ours"], found[arm], strict=True) for arm in BARS}
    ratios = {f"ours_over_{arm}": round(statistics.median(a / b for a, b in of), 3) for arm, of in pairs.items()}
    rounded = {arm: [round(one) for one in of] for arm, of in found.items()}
    return {"tokens_per_s": rounded, **ratios, "bars": BARS, "staleness": sizes.staleness, "replicas": sizes.replicas}
