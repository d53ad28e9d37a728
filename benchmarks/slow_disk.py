"""How long an inner step waits for the disk when a checkpoint is being written.

    python benchmarks/slow_disk.py [--rates 25 50 100 200 400] [--step-s 1.0] [--parameters 24000000]

A module with AdamW and its anchor (12 bytes a parameter to be copied, 8 more to be written), the node's own classes on
a real compute thread, and a disk that takes so many MB a second: a storage in the seam of `node.checkpoint.storage`. An
inner step is due `--step-s` seconds after the copy began, and has what is left copied first. `waits_s` is wall time
that is not the thread's processor time, so other work on the machine is in it; `held_bytes_a_parameter` is what waited
to be written when the step went on. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.averaging.anchor.anchor import AnchorStore
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.checkpoint.folder import CheckpointFolder, save_state
from node.checkpoint.replica import capture_as_written
from node.checkpoint.state import Agreed, ReplicaState
from node.checkpoint.storage import DiskStorage
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.optimizer import Accumulator, InnerOptimizer
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, RunId
from tests.node.averaging.small_rounds import Blocks
from tests.node.small_manifest import small_manifest

PEER: Final = PeerId("benchmark")
RUN: Final = RunId("0" * 64)


class SlowDisk(DiskStorage):
    """A disk that takes so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        super().write(path, map(self._slowed, pieces))

    def _slowed(self, piece: memoryview) -> memoryview:
        time.sleep(len(piece) / self._bytes_per_s)
        return piece


class Module:
    """A module that has taken an inner step, with its anchor."""

    def __init__(self, elements: int) -> None:
        self.part = Blocks(elements)
        self._sums = Accumulator(self.part)
        self.optimizer = InnerOptimizer(small_manifest().training, [self._sums])
        self.step(0)
        self.store = AnchorStore(anchor_of(LocalReplica([self.part], 1, self.optimizer)))

    def step(self, number: int) -> None:
        gradients = [torch.full_like(p, 1e-3).detach() for p in self._sums.parameters]
        self._sums.add(MicrobatchId(PEER, number), 32, gradients)
        self.optimizer.step()


async def wait(module: Module, number: int, bytes_per_s: float, step_s: float) -> dict[str, float]:
    """What the inner step waited."""
    with ComputeThread() as compute, tempfile.TemporaryDirectory() as path:
        post = partial(compute.post, Priority.UPKEEP)
        agreed = Agreed(module.store.saved(), 1, 32)
        capture = partial(capture_as_written, (module.part,), module.optimizer, post)
        state = await compute.run(Priority.UPKEEP, partial(capture, visits=1, tokens=32, agreed=agreed))
        folder = CheckpointFolder(Path(path), RUN, b"", SlowDisk(bytes_per_s))
        begun = time.monotonic()
        writing = asyncio.create_task(asyncio.to_thread(save_state, folder, PEER, ModuleId(1), state))
        await asyncio.sleep(step_s)
        waited_s, held = await compute.run(Priority.UPKEEP, partial(_finish, state))
        await compute.run(Priority.UPKEEP, partial(module.step, number))
        await writing
        return {
            "waits_s": round(waited_s, 2),
            "held_bytes_a_parameter": round(held / sum(p.numel() for p in module.part.parameters()), 2),
            "written_after_s": round(time.monotonic() - begun, 2),
        }


def _finish(state: ReplicaState) -> tuple[float, int]:
    copying = state.copying
    assert copying is not None
    begun, computed = time.monotonic(), time.thread_time()
    copying.finish()
    return time.monotonic() - begun - (time.thread_time() - computed), copying.waiting_bytes


def measure(elements: int, rates: Iterable[float], step_s: float) -> dict[str, Any]:
    """By rate."""
    module, found = Module(elements), dict[str, Any]()
    for number, rate in enumerate(rates, start=1):
        print(f"{rate:g} MB/s", file=sys.stderr)
        found[f"{rate:g}"] = asyncio.run(wait(module, number, rate * 1e6, step_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 50.0, 100.0, 200.0, 400.0], help="MB a second")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--parameters", type=int, default=24_000_000)
    chosen = parser.parse_args()
    found = measure(chosen.parameters, chosen.rates, chosen.step_s)
    print(json.dumps({"mb_per_s": found, "parameters": chosen.parameters, "step_s": chosen.step_s}))


if __name__ == "__main__":
    main()
