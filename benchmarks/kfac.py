"""K-FAC in a pipeline's idle time, as PipeFisher has it (Osawa et al. 2022, arXiv:2211.14133).

`schedule`, in virtual time through the node's compute queue: equal devices without latency, by the authors' times of a
transformer block and by this machine's. At the first microbatch of a step a stage begins a refresh: each microbatch of
that step gives two curvature factors, then each factor is inverted, all as idle work. `period`: steps between two
refreshes (`work_over_bubble`: the authors' formula for it). `step`: step time over that without K-FAC, `in_step` with
the same refreshes inside the step.

`training`: a small model with K-FAC against AdamW, Muon and SOAP; an arm is "refresh period/damping". Curvature is one
period old when first used (period 0: that of the step itself). The empirical Fisher matrix of a layer is the Kronecker
product of the means of x x^T and g g^T, damped as in arXiv:1503.05671, section 6.3; steps have AdamW's length
(grafting, arXiv:2002.11803).
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks import kit
from benchmarks.filling import Durations, FillingPeer, FillingWorld, Setting, share_of_time
from benchmarks.kit import source_of, tell
from benchmarks.optimizers import ARMS, Task, Trainer, manifest_of, measure, trained, trainings
from lab.world.world import Peer
from node.model import passes
from node.model.blocks import Linear
from node.model.device import flush_denormals
from node.model.optimizers.adamw import AdamW
from node.model.passes import build_block_stack
from protocol.manifest.manifest import InnerSection, Manifest
from swarm.pipeline.custody import Work
from swarm.vocabulary.types import ModuleId, PeerId

WARM_STEPS: Final = 2
CHUNK_S: Final = 0.002
ADAMW: Final = "adamw"


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of a stage in ms: forward and backward pass, curvature of a microbatch, all inversions, preconditioning."""

    forward_ms: float
    backward_ms: float
    curvature_ms: float
    inversion_ms: float
    precondition_ms: float

    def work_over_bubble(self, stages: int, microbatches: int) -> float:
        """The paper's figure, for GPipe or 1F1B: (curvature + inversion) / bubble."""
        bubble_ms = (stages - 1) * (self.forward_ms + self.backward_ms)
        return (microbatches * self.curvature_ms + self.inversion_ms) / bubble_ms


PROFILES: Final = {
    "BERT-Base": Profile(9.75, 16.45, 25.55, 71.67, 6.81),
    "BERT-Large": Profile(16.10, 26.95, 43.50, 126.70, 14.73),
}
"""One block on a P100, 32 sequences of 128: prof/*_time_memory_p100.csv of github.com/kazukiosawa/pipe-fisher."""


class KfacPeer(FillingPeer):
    """A stage peer that preconditions its inner steps."""

    def __init__(self, world: KfacWorld, own: PeerId, module: ModuleId, incarnation: int) -> None:
        self._kfac = world
        self.begun: list[int] = []  # steps with whose microbatches a refresh began
        self._undone: deque[float] = deque()  # seconds of each factor, or half of the inversions
        self._is_queued = False
        self._passes: Counter[Work] = Counter()
        super().__init__(world, own, module, incarnation)

    def _passed(self, work: Work) -> None:
        super()._passed(work)
        step, place = divmod(self._passes[work], self.setting.per_step)
        self._passes[work] += 1
        profile = self._kfac.profile
        if profile is None:
            return
        may_begin = not self._undone and (not self.begun or step >= self.begun[-1] + self._kfac.refresh_every)
        if work is Work.FORWARD and place == 0 and may_begin:
            self.begun.append(step)
        if self.begun and self.begun[-1] == step:
            slowness = self._ground.slowness[self.id]
            self._undone.append(slowness * profile.curvature_ms / 2e3)
            if work is Work.BACKWARD and place == self.setting.per_step - 1:
                self._undone.extend([slowness * profile.inversion_ms / 2e3] * 2)
            if self._kfac.in_bubbles:
                self._queue_one()

    def _queue_one(self) -> None:
        """Queues one piece only, so that weight gradients, which have a deadline, never wait for several."""
        if self._undone and not self._is_queued:
            self._is_queued = True
            self.queue.submit(self._compute_piece(self._undone[0]), "curvature or inverse")

    def _compute_piece(self, seconds: float) -> Iterator[None]:
        for is_last in self._in_chunks(seconds):
            if is_last:
                self._undone.popleft()
                self._is_queued = False
                self._queue_one()
            yield

    def _step(self) -> None:
        super()._step()
        if self._kfac.profile is not None:
            self._spent_s += self._ground.slowness[self.id] * self._kfac.profile.precondition_ms / 1e3
            if not self._kfac.in_bubbles:
                self._spent_s += sum(self._undone)
                self._undone.clear()


class KfacWorld(FillingWorld):
    """The world of one arm: K-FAC by this profile (None: without), in bubbles or in its step, every `least` steps."""

    def __init__(self, setting: Setting, profile: Profile | None, in_bubbles: bool = True, least: int = 1) -> None:
        self.profile, self.in_bubbles, self.refresh_every = profile, in_bubbles, least
        super().__init__(setting, 1.0)

    def new_peer(self, own: PeerId, module: ModuleId, incarnation: int) -> Peer:
        return KfacPeer(self, own, module, incarnation)

    def run_steps(self, steps: int) -> None:
        ((_, in_flight),) = self.data_nodes()
        self.time.run_until(math.inf, lambda: in_flight.steps_done >= steps)


def pipeline(profile: Profile, stages: int, microbatches: int) -> Setting:
    """The paper's pipeline: equal devices, no latency, and no cost of stage 0 and of the inner step."""
    half_s = profile.backward_ms / 2e3
    durations = Durations(profile.forward_ms / 1e3, half_s, half_s, 0.0, 0.0, 0.0)
    own = {"stages": stages, "per_step": microbatches, "window": microbatches, "durations": durations}
    return Setting(0.0, 1, body_s=0.0, chunk_s=CHUNK_S, spread=0.0, jitter=0.0, **own)


def run(world: KfacWorld, steps: int) -> dict[str, float]:
    """Runs one arm for some steps after a warm-up. Utilisation is a mean over the stages, the period the longest."""
    world.run_steps(WARM_STEPS)
    begin = world.time.now
    world.run_steps(WARM_STEPS + steps)
    peers = [peer for peer in world.stage_peers if isinstance(peer, KfacPeer)]
    accounts, span = [peer.account for peer in peers], (begin, world.time.now)
    busy, idle = ([getattr(account, kind) for account in accounts] for kind in ("busy", "idle_work"))
    return {
        "step_ms": 1e3 * (world.time.now - begin) / steps,
        "utilisation": share_of_time(busy, *span) + share_of_time(idle, *span),
        "period": max(period(peer.begun) for peer in peers),
    }


def period(begun: list[int]) -> float:
    """Mean steps between refreshes, but for the first, where nothing was in the pipeline; inf without a second one."""
    between = [later - earlier for earlier, later in itertools.pairwise(begun)]
    return statistics.fmean(between[1:] or between) if between else math.inf


def row_of(setting: Setting, profile: Profile, steps: int) -> dict[str, Any]:
    """A pipeline with K-FAC's work in the bubbles, without K-FAC, and with the same refreshes in the step."""
    bare, filled = run(KfacWorld(setting, None), steps), run(KfacWorld(setting, profile), steps)
    is_refreshed = math.isfinite(filled["period"])
    every = max(1, round(filled["period"])) if is_refreshed else steps
    in_step = run(KfacWorld(setting, profile, in_bubbles=False, least=every), steps)
    return {
        **filled,
        "period": filled["period"] if is_refreshed else None,
        "bare_utilisation": bare["utilisation"],
        "step": filled["step_ms"] / bare["step_ms"],
        "in_step": in_step["step_ms"] / bare["step_ms"],
    }


def task_of(options: Any) -> Task:
    size = {"hidden": options.hidden, "feed_forward": 176, "sequence": 64, "rows": 8, "held_out_microbatches": 6}
    return Task(options.steps, source=source_of(options.text), **size)


def schedules(options: Any) -> dict[str, list[dict[str, Any]]]:
    steps, found = options.schedule_steps, list[dict[str, Any]]()
    profiles = PROFILES | {"measured": measured_profile(task_of(options))}
    for (name, profile), stages, multiple in itertools.product(profiles.items(), options.depths, options.multiples):
        count = stages * multiple
        row = {"profile": name, "stages": stages, "microbatches": count}
        row["work_over_bubble"] = profile.work_over_bubble(stages, count)
        found.append(row | row_of(pipeline(profile, stages, count), profile, steps))
        tell(found[-1])
    return {"pipelines": found}


# ---- training --------------------------------------------------------------------------------------------------------


@contextmanager
def timed(times_ms: list[float]) -> Iterator[None]:
    begun = time.thread_time()
    yield
    times_ms.append(1e3 * (time.thread_time() - begun))


def _inverse(factor: Tensor, damping: float) -> Tensor:
    """`damping` is relative to the means of the factors' eigenvalues."""
    added = max(math.sqrt(damping) * factor.trace() / len(factor), 1e-12)  # new blocks have no gradient yet
    return torch.cholesky_inverse(torch.linalg.cholesky(factor + added * torch.eye(len(factor))))


class Kfac(AdamW):
    """The rule of these layers' weights. New curvature every `every` steps is first used `lag` steps later."""

    def __init__(self, layers: Sequence[Linear], inner: InnerSection, every: int, lag: int, damping: float) -> None:
        super().__init__([layer.weight for layer in layers], inner)
        self.spent: defaultdict[str, list[float]] = defaultdict(list)  # ms; curvature is that of one factor
        self._every, self._lag, self._damping, self._steps = every, lag, damping, 0
        self._factors = {layer.weight: [torch.zeros(size, size) for size in layer.weight.shape] for layer in layers}
        self._inverses: dict[nn.Parameter, list[Tensor]] = {}
        self._waiting: dict[int, dict[nn.Parameter, list[Tensor]]] = {}  # inverses by the first step that uses them
        for layer in layers:
            layer.register_forward_hook(self._passed)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        if self._steps % self._every == 0:
            with timed(self.spent["inversion"]):
                found = {one: [_inverse(each, self._damping) for each in both] for one, both in self._factors.items()}
                self._waiting[self._steps + self._lag] = found
                for factor in chain.from_iterable(self._factors.values()):
                    factor.zero_()
        self._inverses |= self._waiting.pop(self._steps, {})
        self._steps += 1
        before = [parameter.detach().clone() for parameter in self.parameters]
        super().step(rate)
        with timed(self.spent["preconditioning"]):
            self._turn(before, rate)

    def _turn(self, before: Sequence[Tensor], rate: float) -> None:
        """Turns AdamW's steps from these parameters into preconditioned ones of their length."""
        for parameter, old in zip(self.parameters, before, strict=True):
            if parameter not in self._inverses or parameter not in self.states:
                continue
            outputs, inputs = self._inverses[parameter]
            kept = old * (1 - rate * self._inner.weight_decay)
            direction = outputs @ self.states[parameter].mean @ inputs
            length, own = (torch.linalg.vector_norm(each) for each in (parameter - kept, direction))
            parameter.copy_(kept - direction * (length / own.clamp_min(1e-30)))

    def _passed(self, layer: nn.Module, values: tuple[Tensor, ...], output: Tensor) -> None:
        """A hook: a forward pass of a layer."""
        if self._steps % self._every == 0 and output.requires_grad:
            of_outputs, of_inputs = self._factors[layer.get_parameter("weight")]
            self._add(of_inputs, values[0])
            output.register_hook(partial(self._add, of_outputs))

    def _add(self, total: Tensor, vectors: Tensor) -> None:
        flat = vectors.detach().flatten(0, -2)
        with timed(self.spent["curvature"]):
            total.addmm_(flat.T, flat)


class KfacTrainer(Trainer):
    """The trainer of `benchmarks.optimizers`, with K-FAC for the blocks' matrices."""

    def __init__(self, manifest: Manifest, every: int, lag: int, damping: float = 1e-3) -> None:
        super().__init__(manifest, ARMS[ADAMW])
        layers = [layer for stack in self.model.stacks for layer in stack.modules() if isinstance(layer, Linear)]
        inner = manifest.training.inner
        self.kfac = Kfac(layers, inner, every, lag, damping)
        own = set(self.kfac.parameters)
        for optimizer in self.optimizers[1:]:
            rest = [parameter for rule in optimizer.rules for parameter in rule.parameters if parameter not in own]
            optimizer.rules = (AdamW(rest, inner), self.kfac)


def train(task: Task, arm: str, seed: int, rate: float) -> dict[str, Any]:
    """Trains one arm to the end of its schedule: one of `ARMS`, or "period/damping", 0 for curvature at once."""
    if arm in ARMS:
        return measure(task, arm, seed, rate)
    manifest, (every, damping) = manifest_of(task, ARMS[ADAMW], seed, rate), map(float, arm.split("/"))
    trainer = KfacTrainer(manifest, max(int(every), 1), int(every), damping)
    return {"arm": arm, "seed": seed, "rate": rate, **trained(task, manifest, trainer)}


def measured_profile(task: Task, repeats: int = 20) -> Profile:
    """What the task's blocks cost as one stage, in processor time of one core: medians."""
    manifest = manifest_of(task, ARMS[ADAMW], 1, 1e-3)
    stack, source = build_block_stack(manifest, ModuleId(1)), torch.randn(manifest.hidden_shape)
    times = defaultdict[str, list[float]](list)
    for _ in range(repeats):
        with timed(times["forward"]):
            visit = passes.forward(stack, source)
        with timed(times["backward"]):
            passes.backward(stack, visit, source)
    trainer = KfacTrainer(manifest, 1, 1)
    for _ in range(repeats):
        trainer.next_step()
    medians = {name: statistics.median(of) for name, of in (times | trainer.kfac.spent).items()}
    curvature_ms = sum(trainer.kfac.spent["curvature"]) / (repeats * task.microbatches)
    return Profile(
        medians["forward"], medians["backward"], curvature_ms, medians["inversion"], medians["preconditioning"]
    )


def measure_training(options: Any) -> dict[str, Any]:
    arms = [f"{period}/{damping:g}" for period, damping in itertools.product(options.periods, options.dampings)]
    return trainings(task_of(options), options, (*options.beside, *arms), train)


if __name__ == "__main__":
    usual = {"depths": [4, 8, 16], "multiples": [1, 2], "schedule_steps": 12, "steps": 120, "hidden": 64}
    more = {"seeds": [1, 2, 3], "rates": [3e-3, 6e-3, 1.2e-2], "periods": [0, 1, 2, 3, 4, 5], "text": Path}
    more |= {"dampings": [1e-3, 1e-2], "beside": (ADAMW, "muon", "soap")}  # PipeFisher has 1e-3 for BERT
    quick = {"depths": [4], "multiples": [1], "schedule_steps": 3, "steps": 6, "hidden": 16, "seeds": [1]}
    quick |= {"periods": [2]}
    torch.set_num_threads(1)
    flush_denormals()
    kit.run(__doc__, {"schedule": schedules, "training": measure_training}, quick, **usual, **more)
