"""What rounds and checkpoints take of the host's memory, in bytes a parameter: `benchmarks.memory` runs it.

Replicas that average in one process, as in the tests of rounds, their fragments in turn, until every fragment has moved
twice. Counted is what numpy has allocated (by `tracemalloc`): anchors, the snapshot, anchors in the making, pieces on
their way. A replica's own parameters, gradients and moments belong to its device and are torch's: not counted. "Steady"
is between two rounds, "peak" the most at any moment of a round, with pieces that the wire in memory copies.

A checkpoint is of a module with AdamW, written to a disk while an inner step waits for its tensors to be copied;
counted is the most at any moment, beyond what was there before it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.averaging.anchor.anchor import AnchorStore
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.checkpoint.folder import CheckpointFolder, save_state
from node.checkpoint.saver import capture_module
from node.checkpoint.state import Agreed, ReplicaState
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.optimizer import Accumulator, InnerOptimizer
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, RunId
from tests.node.averaging.small_rounds import Blocks, hall
from tests.node.small_manifest import small_manifest

REPLICAS: Final = 2
FRAGMENTS: Final = 8
ELEMENTS: Final = 2**22
CHECKPOINT_ELEMENTS: Final = 48 * 10**6
"""So many that the share of them that waits for the disk is more than the least room."""
PEER: Final = PeerId("benchmark")
RUN: Final = RunId("0" * 64)


def _held(since: int, parameters: int) -> float:
    gc.collect()
    return round((tracemalloc.get_traced_memory()[0] - since) / parameters, 2)


async def rounds(fragments: int, elements: int = ELEMENTS) -> dict[str, float]:
    """Bytes a parameter and replica, after two turns of all fragments: at rest, and at most in a round."""
    gc.collect()
    since = tracemalloc.get_traced_memory()[0]
    async with hall(REPLICAS, elements=elements, inner_steps=fragments, fragments=fragments) as here:
        for number in range(1, 2 * fragments + 1):
            print(f"round {number} of {2 * fragments}", file=sys.stderr)
            tracemalloc.reset_peak()
            await here.a_round(number, 1)
        await asyncio.sleep(0)
        peak = (tracemalloc.get_traced_memory()[1] - since) / (REPLICAS * elements)
        return {"steady": _held(since, REPLICAS * elements), "peak": round(peak, 2)}


def checkpoint(elements: int = CHECKPOINT_ELEMENTS) -> dict[str, float]:
    """Bytes a parameter that the write of a checkpoint takes at most, and the bytes that it wrote."""
    part = Blocks(elements, FRAGMENTS)
    total = Accumulator(part)
    optimizer = InnerOptimizer(small_manifest().training, [total])

    def step(number: int) -> None:
        total.add(MicrobatchId(PEER, number), 32, [torch.full_like(p, 1e-3).detach() for p in total.parameters])
        optimizer.step()

    step(0)
    store = AnchorStore(anchor_of(LocalReplica([part], FRAGMENTS, optimizer)))
    with ComputeThread() as compute, tempfile.TemporaryDirectory() as path:
        post, states = partial(compute.post, Priority.UPKEEP), list[ReplicaState]()
        tracemalloc.reset_peak()
        since = tracemalloc.get_traced_memory()[0]
        agreed = Agreed(store.saved(), 1, 32)
        capture = partial(capture_module, (part,), optimizer, post, visits=1, tokens=32, agreed=agreed)
        post(lambda: states.append(capture())).result()
        stepping = post(lambda: step(1))
        header = save_state(CheckpointFolder(Path(path), RUN, b""), PEER, ModuleId(1), states.pop())
        stepping.result()
        peak = tracemalloc.get_traced_memory()[1] - since
        return {"peak": round(peak / elements, 2), "written": round(header.file.size / elements, 2)}


def main() -> None:
    tracemalloc.start(1)
    found = {f"{fragments} fragments": asyncio.run(rounds(fragments)) for fragments in (1, FRAGMENTS)}
    print(json.dumps({**found, "a checkpoint adds": checkpoint()}))


if __name__ == "__main__":
    main()
