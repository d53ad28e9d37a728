"""What rounds and checkpoints cost training: a real swarm's pace during rounds, and how long they hold a compute
thread.

`live`: a data node and replicas of one stage on emulated devices (`tests/e2e/emulated.py`); a visit takes
`--forward-ms` forward and twice that backward; links carry 100 Mbit/s. A round lasts from the first snapshot until the
last replica has the new anchor, and a visit longer. `pace_ratio`: completed microbatches a second during rounds over
that between them, but for the first; `computed_ratio`: the same of the devices' computing time, which no border cuts.
`of_the_emulated`: the pace over that of devices that never wait; far below 1 the machine was too slow for the nodes.
`not_of_all`: rounds without a slow replica.

`jobs`: a stage of ten million parameters with AdamW, the node's own jobs on a real compute thread, in its processor
time. `snapshot` and `carry` come in a round, `alone` is a lone replica's outer step, prepared on the averaging thread.
`share_of_a_round`: snapshot and carry over the time that a device of `--tflops` computes between two rounds of the
recipe's run for four such stages with four replicas each.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks import kit
from benchmarks.kit import all_serve, notes_of, run_of, tell
from node.averaging.anchor.anchor import Anchor, AnchorStore
from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.outer_step import OuterRule, Staging
from node.averaging.module_rounds import _put_on
from node.averaging.replica_sync import ReplicaSync, Snapshot
from node.checkpoint.saver import capture_module
from node.checkpoint.state import Agreed
from node.concurrency.compute_thread import ComputeThread, Priority
from node.dial.dial import choose_recipe
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.model.optimizer import Accumulator, InnerOptimizer, StepFigures
from node.model.parts import build_block_stack
from node.observability.events import RoundCommitted
from protocol.interfaces.clock import SystemClock
from protocol.manifest.manifest import Manifest
from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.e2e.emulated import Network, Spec, read_computed
from tests.e2e.small_run import HOME, read_flights, write_text
from tests.node.small_manifest import small_manifest

# ---- live ------------------------------------------------------------------------------------------------------------

MODULE: Final = ModuleId(1)
BLOCKS: Final = (0, 3)
HEADS: Final = 8
ROW: Final = 32
PER_STEP: Final = 4
WINDOW_OF_EACH: Final = 3
"""Microbatches under way for each replica."""
BYTES_PER_S: Final = 12.5e6
DATA_FORWARD_S: Final = 0.003
BACKWARD_FACTOR: Final = 2.0


class Round(NamedTuple):
    """A round of the stage, by the monotonic clock."""

    begun: float
    ended: float
    members: int
    """Fewer than all where one was too slow."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is emulated: `peers` replicas of one stage of about so many parameters."""

    peers: int
    parameters: int
    inner_steps: int
    codec: str
    forward_s: float

    @property
    def hidden(self) -> int:
        """The width: a block has 4 matrices of hidden^2, and 3 of three times that."""
        unit = 2 * HEADS
        return max(unit, unit * round((self.parameters / (13 * BLOCKS[1])) ** 0.5 / unit))

    @property
    def visit_s(self) -> float:
        return (1 + BACKWARD_FACTOR) * self.forward_s

    def manifest(self, text: Path) -> Manifest:
        """Microbatches are so short that computing them takes little here."""
        size = {"hidden": self.hidden, "heads": HEADS, "feed_forward": 3 * self.hidden, "sequence": ROW}
        return run_of(
            "rounds",
            BLOCKS,
            seed=11,
            **size,
            rows=1,
            microbatches=PER_STEP,
            data={"source": f"path:{text}", "held_out": 0.1},
            sections={"codecs": {"pseudo_gradients": self.codec}},
            inner_steps=self.inner_steps,
            round_seconds=1e6,
            staleness=4,
            inner={"learning_rate": 1e-4},
            schedule={"kind": "constant", "warmup_steps": 5, "total_steps": 100_000},
        )


class Seen(NamedTuple):
    """What a run did, by the monotonic clock."""

    homes: list[float]
    """When microbatches came home."""
    computed: list[tuple[float, float]]
    """When each computation of a replica began, and its seconds."""
    rounds: list[Round]


async def run(folder: Path, setting: Setting, seconds: float, starting_s: float) -> Seen:
    """Runs the swarm. Raises RuntimeError if nodes do not come up or end, or no round is held."""
    network, flights = folder / "network.json", folder / "flights.json"
    computed = [folder / f"computed-{index}" for index in range(1 + setting.peers)]

    def place(index: int) -> Place:
        own: dict[str, Any] = {"computed": str(computed[index])}
        if index == 0:
            own = {"flights": str(flights), "window": WINDOW_OF_EACH * setting.peers}
        spec = Spec(
            setting.forward_s if index else DATA_FORWARD_S,
            str(network),
            backward_factor=BACKWARD_FACTOR,
            bytes_per_s=BYTES_PER_S,
            **own,
        )
        return Place(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))

    manifest = setting.manifest(write_text(folder / "text"))
    options = LocalSwarmOptions(peers=1 + setting.peers, threads=1)
    async with LocalSwarm(manifest, options, places=place) as swarm:
        names = {peer.peer: "here" for peer in swarm.peers}
        Network({str(peer): name for peer, name in names.items()}, {"here": {"here": 0.0}}).write(network)
        await all_serve(swarm, starting_s)
        tell(f"{1 + setting.peers} nodes serve")
        rounds = await _rounds(swarm, setting.peers, seconds, starting_s)
    homes = sorted(mark.at for mark in read_flights(flights) if mark.kind == HOME)
    return Seen(homes, sorted(itertools.chain.from_iterable(map(read_computed, computed))), rounds)


async def _rounds(swarm: LocalSwarm, replicas: int, seconds: float, first_within_s: float) -> list[Round]:
    """The first of all replicas, and those of so many seconds after it."""
    found: dict[int, Round] = {}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(first_within_s) as limit:
            async for event in swarm.events():
                if swarm.ends:
                    raise RuntimeError(f"a node has ended: {notes_of(swarm)}")
                if not isinstance(event, RoundCommitted) or event.module != str(MODULE):
                    continue
                now, members = time.monotonic(), len(event.members)
                tell(f"round {event.round} of {members}: {event.seconds:.2f} s, {event.sent_bytes} bytes")
                if not found and members < replicas:
                    continue  # the others are not there yet
                if not found:
                    limit.reschedule(loop.time() + seconds)
                begun, _, fewest = found.get(event.round, (now, now, replicas))
                found[event.round] = Round(min(begun, now - event.seconds), now, min(fewest, members))
    except TimeoutError:
        if not found:
            raise RuntimeError(f"no round was held within {first_within_s:.0f} s: {notes_of(swarm)}") from None
    return [found[number] for number in sorted(found)]


def compare(seen: Seen, setting: Setting) -> dict[str, Any]:
    """The paces, without the first round. Raises RuntimeError if too few rounds have time after them."""
    homes, rounds, numbers = seen.homes, seen.rounds, range(1, len(seen.homes) + 1)

    def count(begin: float, end: float) -> float:
        before, after = np.interp((begin, end), homes, numbers)
        return float(after - before)

    def computed(begin: float, end: float) -> float:
        return sum(max(0.0, min(end, at + lasts) - max(begin, at)) for at, lasts in seen.computed)

    pairs = []
    for this, following in itertools.pairwise(rounds[1:]):
        late = this.ended + setting.visit_s
        if following.begun > late and count(late, following.begun):
            spans = (this.begun, late), (late, following.begun)
            pairs.append([figure for span in spans for figure in (count(*span), computed(*span), span[1] - span[0])])
    if not pairs:
        raise RuntimeError("fewer than three rounds, or no time between them: give it more --seconds or --inner-steps")
    inside, busy_inside, inside_s, between, busy_between, between_s = map(sum, zip(*pairs, strict=True))
    ratios = [round((a / a_s) / (b / b_s), 3) for a, _, a_s, b, _, b_s in pairs]
    full = setting.peers / setting.visit_s
    shares = busy_inside / inside_s / setting.peers, busy_between / between_s / setting.peers
    return {
        "pace_ratio": round((inside / inside_s) / (between / between_s), 4),
        "median_ratio": round(statistics.median(ratios), 3),
        "computed_ratio": round(shares[0] / shares[1], 4),
        "ratios": ratios,
        "rounds": len(pairs),
        "not_of_all": sum(each.members < setting.peers for each in rounds),
        "median_round_s": round(statistics.median(each.ended - each.begun for each in rounds), 2),
        "share_in_rounds": round(inside_s / (inside_s + between_s), 3),
        "of_the_emulated": [round(inside / inside_s / full, 3), round(between / between_s / full, 3)],
        "computed": [round(share, 4) for share in shares],
        "computed_of_home": round((busy_inside + busy_between) / ((inside + between) * setting.visit_s), 3),
        "microbatches": [round(inside, 1), round(between, 1)],
    }


# ---- jobs ------------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")
LARGE_STAGE: Final = {
    "model__hidden": 512,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__feed_forward": 1536,
    "stages__blocks": [0, 3],
}
SMALL_STAGE: Final = LARGE_STAGE | {"model__hidden": 64, "model__feed_forward": 128}
RULE: Final = OuterRule(0.7, 0.9)
TOKENS: Final = 4096
STAGES: Final = 4
REPLICAS: Final = 4
LONE_EVERY: Final = 2


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

    def __init__(self, manifest: Manifest) -> None:
        self.part = build_block_stack(manifest, ModuleId(1))
        self.sums = Accumulator(self.part)
        self.optimizer = InnerOptimizer(manifest.training, [self.sums])
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


async def measure_jobs(rounds: int, manifest: Manifest) -> tuple[int, dict[str, dict[str, float]]]:
    """The parameters, and the figures of each kind of job."""
    trained = Trained(manifest)
    with Measured() as compute, ComputeThread(name="averaging") as averaging:

        async def job(work: Callable[[], Result]) -> Result:
            return await compute.run(Priority.UPKEEP, work)

        store = AnchorStore(await job(partial(_put_on, trained.local, None)))
        clock = SystemClock()
        rules = RoundRules(LONE_EVERY, 1, trained.local.layout.chunks, math.inf)
        sync = ReplicaSync(trained.local, store, compute, averaging, rules, RULE, clock)

        async def step() -> StepFigures:
            compute.begin(None)
            return await job(trained.step)

        for number in range(rounds):
            tell(f"jobs: round {number + 1} of {rounds}")
            sync.after_inner_step(await step())
            compute.begin("snapshot")
            snapshot = await sync.snapshot()
            anchor = await averaging.run(Priority.UPKEEP, partial(averaged, store, snapshot))
            sync.after_inner_step(await step())
            sync.committed(snapshot)
            compute.begin("carry")
            await sync.carry(snapshot, anchor, None)

            await step()
            compute.begin("checkpoint")
            agreed = Agreed(store.saved(), 1, TOKENS)
            post = partial(compute.post, Priority.UPKEEP)
            capture = partial(capture_module, (trained.part,), trained.optimizer, post)
            state = await job(partial(capture, visits=1, tokens=TOKENS, agreed=agreed))
            assert state.copying is not None
            await asyncio.to_thread(_read, state.copying.pieces)

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


# ---- all -------------------------------------------------------------------------------------------------------------


def held_by_jobs(options: Any) -> dict[str, Any]:
    manifest = small_manifest(**(SMALL_STAGE if options.quick else LARGE_STAGE))
    elements, jobs = asyncio.run(measure_jobs(options.rounds, manifest))
    held = jobs["snapshot"]["ms"] + jobs["carry"]["ms"]
    # 6 operations a parameter and token, between two rounds of the run that the recipe chooses.
    recipe = choose_recipe(STAGES * elements, elements, manifest.model.hidden, STAGES, REPLICAS, None)
    between_s = 6.0 * elements * recipe.inner_steps.value * recipe.step_tokens.value / (options.tflops * 1e12)
    return {
        "parameters": elements,
        "jobs": jobs,
        "held_ms_a_round": round(held, 2),
        "seconds_between_rounds": round(between_s, 2),
        "share_of_a_round": round(held / 1e3 / between_s, 5),
    }


def measure(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "jobs" in options.parts:
        found["jobs"] = held_by_jobs(options)
    if "live" in options.parts:
        forward_s = options.forward_ms / 1e3
        setting = Setting(options.peers, options.parameters, options.inner_steps, options.codec, forward_s)
        with tempfile.TemporaryDirectory() as name:
            seen = asyncio.run(run(Path(name), setting, options.seconds, options.starting_s))
        found["live"] = {**asdict(setting), **compare(seen, setting)}
    return found


def main() -> None:
    live = {"seconds": 150.0, "inner_steps": 6, "codec": "int8", "forward_ms": 200.0, "peers": 4}
    quick = {"parts": ["jobs"], "rounds": 1, "seconds": 12.0, "inner_steps": 8, "forward_ms": 20.0, "peers": 2}
    quick |= {"parameters": 40_000}
    more = {"parameters": 10_000_000, "starting_s": 600.0, "rounds": 7, "tflops": 10.0}
    kit.run(__doc__, measure, quick, parts=("live", "jobs"), **live, **more)


if __name__ == "__main__":
    main()
