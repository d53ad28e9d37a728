"""What rounds and checkpoints hold the compute thread for, which trains meanwhile.

    python benchmarks/rounds_pace.py [--rounds 7] [--tflops 10]

A stage of three blocks of 512 (ten million parameters, 40 MB) with AdamW. The jobs are those of the node, by its own
classes, on a real compute thread; each is measured in that thread's processor time, so that other work on the machine
adds little. Of each kind: `ms` is all its jobs in one round together (median over the rounds), `longest_ms` the longest
of them (likewise), `jobs` how many they are. Between two jobs microbatches are computed.

* `start`: the first anchor, read from the replica and hashed; once in a node's life.
* `put_on`: a newcomer is put on the anchor that it has fetched; once, too.
* `snapshot` and `carry`: a round's, with an inner step in between. `carry_at_rest` is without one.
* `adopt`: the replica gives up its own work.
* `alone`: the outer step of a lone replica, at the beginning of an inner step.
* `checkpoint`: the copy of parameters and moments, nothing waiting for it; `checkpoint_in_haste`: an inner step is due
  at once, and what is left is copied in its job. Time in which that waits for a disk is no processor time.

`held_ms_a_round` is snapshot and carry. `share_of_a_round` is that over the time which a device of `--tflops` (what it
reaches) computes between two rounds of the run that the recipe (`node/dial/recipe.py`) chooses for four such stages
with four replicas each: 6 operations a parameter and token, `inner_steps` times `step_tokens` tokens. `share_alone` is
the same of a lone replica's outer step.

`pace_during_rounds` is what the jobs leave of a device that is always busy while the round's bytes go over an uplink of
100 Mbit/s (a ring's share: 2 * 3/4 of the module, encoded), for each codec. It knows of nothing but these jobs:
`benchmarks/rounds_live.py` runs whole nodes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.outer_step import OuterRule, Staging
from node.averaging.module_rounds import _put_on
from node.averaging.replica_sync import ReplicaSync, Snapshot
from node.checkpoint.replica import capture_as_written
from node.checkpoint.state import Agreed
from node.concurrency.compute_thread import ComputeThread, Priority
from node.dial.dial import choose_recipe
from node.model.optimizer import Accumulator, InnerOptimizer, StepFigures
from node.model.parts import build_block_stack
from protocol.codecs import encoded_bytes
from protocol.interfaces.clock import SystemClock
from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.node.small_manifest import small_manifest

Result = TypeVar("Result")

HIDDEN: Final = 512
MANIFEST: Final = small_manifest(
    model__hidden=HIDDEN, model__heads=8, model__kv_heads=8, model__feed_forward=1536, stages__blocks=[0, 3]
)
RULE: Final = OuterRule(0.7, 0.9)
TOKENS: Final = 4096
STAGES: Final = 4
REPLICAS: Final = 4
LONE_EVERY: Final = 2
UPLINK_BYTES_PER_S: Final = 12.5e6
CODECS: Final = (Codec.NONE, Codec.INT8, Codec.INT4)


class Measured(ComputeThread):
    """A compute thread that notes the processor time of each job of the kind that is being measured."""

    def __init__(self) -> None:
        super().__init__(set_up=lambda: torch.set_num_threads(1))
        self.kind: str | None = None
        self.rounds: defaultdict[str, list[list[float]]] = defaultdict(list)
        """By kind, of each round the milliseconds of its jobs."""

    def begin(self, kind: str | None) -> None:
        """Notes the jobs that come from now on as those of another round of this kind; None for none."""
        self.kind = kind
        if kind is not None:
            self.rounds[kind].append([])

    async def run(self, priority: Priority, job: Callable[[], Result]) -> Result:
        return await super().run(priority, partial(self._timed, job))

    def post(self, priority: Priority, job: Callable[[], None]) -> Future[None]:
        return super().post(priority, partial(self._timed, job))

    def _timed(self, job: Callable[[], Result]) -> Result:
        begun = time.thread_time()
        try:
            return job()
        finally:
            if self.kind is not None:
                self.rounds[self.kind][-1].append(1e3 * (time.thread_time() - begun))

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each kind, medians over its rounds."""
        return {
            kind: {
                "ms": round(statistics.median(sum(jobs) for jobs in rounds), 2),
                "longest_ms": round(statistics.median(max(jobs) for jobs in rounds), 2),
                "jobs": statistics.median_low(len(jobs) for jobs in rounds),
            }
            for kind, rounds in self.rounds.items()
        }


class Trained:
    """The replica, whose inner steps are of made-up gradients."""

    def __init__(self) -> None:
        self.part = build_block_stack(MANIFEST, ModuleId(1))
        self.sums = Accumulator(self.part)
        self.optimizer = InnerOptimizer(MANIFEST.training, [self.sums])
        self.local = LocalReplica([self.part], 1, self.optimizer)
        self._microbatches = 0

    def step(self) -> StepFigures:
        self._microbatches += 1
        numbers = torch.Generator().manual_seed(self._microbatches)
        gradients = [torch.randn(p.shape, generator=numbers) for p in self.part.parameters()]
        self.sums.add(MicrobatchId(PeerId("data"), self._microbatches), TOKENS, gradients)
        return self.optimizer.step()


def averaged(store: AnchorStore, snapshot: Snapshot) -> Anchor:
    """The anchor that a round of this replica's pseudo-gradient makes, on the store; on the averaging thread."""
    base = store.current
    first, end = base.layout.fragments[base.version.fragment]
    staging = Staging(base, RULE, *store.spare(snapshot.part))
    staging.apply(first, end, base.parameters[snapshot.part] - snapshot.source.snapshot[snapshot.part])
    anchor = staging.finish(base.version.round + 1, base.version.steps + 1, base.version.tokens + TOKENS)
    store.put(anchor)
    return anchor


async def measure(rounds: int) -> tuple[int, dict[str, dict[str, float]]]:
    """The parameters, and the figures of each kind of job."""
    trained = Trained()
    with Measured() as compute, ComputeThread(name="averaging") as averaging:

        async def job(work: Callable[[], Result]) -> Result:
            return await compute.run(Priority.UPKEEP, work)

        compute.begin("start")
        store = AnchorStore(await job(partial(_put_on, trained.local, None)))
        clock = SystemClock()
        rules = RoundRules(LONE_EVERY, 1, trained.local.layout.chunks, math.inf)
        sync = ReplicaSync(trained.local, store, compute, averaging, rules, RULE, clock)

        async def step() -> StepFigures:
            compute.begin(None)
            return await job(trained.step)

        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for kind in ("carry", "carry_at_rest"):
                sync.after_inner_step(await step())
                compute.begin("snapshot")
                snapshot = await sync.snapshot()
                anchor = await averaging.run(Priority.UPKEEP, partial(averaged, store, snapshot))
                if kind == "carry":
                    sync.after_inner_step(await step())
                sync.committed(snapshot)
                compute.begin(kind)
                await sync.carry(snapshot, anchor, None)

            await step()
            compute.begin("checkpoint")
            agreed = Agreed(store.saved(), 1, TOKENS)
            post = partial(compute.post, Priority.UPKEEP)
            capture = partial(capture_as_written, (trained.part,), trained.optimizer, post)
            state = await job(partial(capture, visits=1, tokens=TOKENS, agreed=agreed))
            assert state.copying is not None
            await asyncio.to_thread(_read, state.copying.pieces)

            await step()
            compute.begin("checkpoint_in_haste")
            state = await job(partial(capture, visits=1, tokens=TOKENS, agreed=agreed))
            assert state.copying is not None
            reading = asyncio.create_task(asyncio.to_thread(_read, state.copying.pieces))
            await job(state.copying.finish)
            await reading

            compute.begin("put_on")
            await job(partial(_put_on, trained.local, store.current))
            compute.begin("adopt")
            await sync.adopt(store.current)
            before = store.current.version.round
            for _ in range(LONE_EVERY):
                sync.after_inner_step(await step())
            compute.begin("alone")
            sync.is_alone = lambda: True
            await job(trained.optimizer.before_step)
            sync.is_alone = lambda: False
            assert store.current.version.round == before + 1
        return trained.local.layout.elements, compute.figures()


def _read(pieces: Callable[[], Any]) -> None:
    for _ in pieces():
        pass


def between_rounds_s(elements: int, flops: float) -> tuple[dict[str, int], float]:
    """The recipe's choice, and the seconds that a device computes between two rounds."""
    recipe = choose_recipe(STAGES * elements, elements, HIDDEN, STAGES, REPLICAS, None)
    chosen = {"inner_steps": recipe.inner_steps.value, "step_tokens": recipe.step_tokens.value}
    return chosen, 6.0 * elements * math.prod(chosen.values()) / flops


def pace_during_rounds(elements: int, held_s: float) -> dict[str, float]:
    """By codec: the share of the exchange's time that is left for training."""
    sent = 2 * (REPLICAS - 1) / REPLICAS
    seconds = {codec: sent * encoded_bytes(codec, elements) / UPLINK_BYTES_PER_S for codec in CODECS}
    return {codec.name.lower(): round(1 - held_s / exchange_s, 4) for codec, exchange_s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tflops", type=float, default=10.0)
    given = parser.parse_args()
    elements, jobs = asyncio.run(measure(given.rounds))
    held = jobs["snapshot"]["ms"] + jobs["carry"]["ms"]
    chosen, between_s = between_rounds_s(elements, given.tflops * 1e12)
    found = {
        "parameters": elements,
        "jobs": jobs,
        "held_ms_a_round": round(held, 2),
        "between_rounds": {**chosen, "tflops": given.tflops, "seconds": round(between_s, 2)},
        "share_of_a_round": round(held / 1e3 / between_s, 5),
        "share_alone": round(jobs["alone"]["ms"] / 1e3 / between_s, 5),
        "pace_during_rounds": pace_during_rounds(elements, held / 1e3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
