"""What SOAP, Muon and AdamW with 8-bit moments are worth as inner optimizers against AdamW.

One small model, trained to the end of a cosine schedule with the product's parts; a token is a byte. `soap` refreshes
its bases between microbatches, as in a peer's idle time, `soap in step` the same bases inside the inner step. `--late`:
steps take gradients of parameters that are so many steps old, one more each `--late-steps` (0: from the start);
`--look-ahead`: by which share of their last change parameters are ahead then, for each of these steps.
`foreground_s`: processor time without that between microbatches. `best`: for each optimizer and seed the learning rate
with the least final loss, and the shares of AdamW's steps and seconds until its best's last loss (null: never).
"""

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import kit
from benchmarks.kit import READER, Learner, curve_of, evaluate, loss_of, reached, run_of, size_of, source_of, tell
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.model.device import flush_denormals
from node.model.moments import MomentType
from node.model.optimizer import InnerOptimizer
from node.model.optimizers.inner_rule import AtDeadline
from protocol.manifest.manifest import Manifest
from swarm.pipeline.in_flight import staleness_at
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import ModuleId

POINTS: Final = 20


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained; the same for all arms."""

    steps: int
    blocks: int = 2
    hidden: int = 128
    heads: int = 4
    feed_forward: int = 352
    sequence: int = 128
    rows: int = 4
    microbatches: int = 2
    held_out_microbatches: int = 12
    source: str = "python-stdlib"
    late: int = 0
    late_steps: int = 100
    look_ahead: float = 1.0


@dataclass(frozen=True, slots=True)
class Arm:
    """An inner optimizer, and when its refreshes are computed."""

    name: str
    in_idle_time: bool = False
    moments: MomentType = MomentType.FLOAT32


ARMS: Final = {
    "adamw": Arm("adamw"),
    "adamw 8bit": Arm("adamw", moments=MomentType.EIGHT_BIT),
    "muon": Arm("muon"),
    "soap": Arm("soap", in_idle_time=True),
    "soap in step": Arm("soap"),
}


def manifest_of(task: Task, arm: Arm, seed: int, rate: float) -> Manifest:
    schedule = {"kind": "cosine", "warmup_steps": task.steps // 20, "total_steps": task.steps}
    inner = {"name": arm.name, "learning_rate": rate, "look_ahead": task.look_ahead}
    training = {"inner": inner, "schedule": schedule, "staleness": task.late, "staleness_steps": task.late_steps}
    data = {"source": task.source, "held_out": 0.1}
    return run_of("optimizers", [0, task.blocks], seed=seed, data=data, **training, **size_of(task))


class IdleTime:
    """Work that is computed when there is nothing else to do, in order of arrival."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._work: deque[Iterator[None]] = deque()

    def submit(self, work: Iterator[None], name: str) -> AtDeadline:
        self._work.append(work)
        return AtDeadline(work, name)

    def fill(self) -> None:
        begun = time.thread_time()
        while self._work:
            deque(self._work[0], maxlen=0)
            self._work.popleft()
        self.seconds += time.thread_time() - begun


class Trainer(Learner):
    """The model with its inner optimizers, as data node and stage peers have them."""

    def __init__(self, manifest: Manifest, arm: Arm) -> None:
        self.idle, self._arm = IdleTime(), arm
        self._waiting: deque[Callable[[], object]] = deque()  # additions of gradients
        self._feed = TrainingFeed(manifest, open_documents(manifest), READER)
        self._seconds = 0.0
        submit = self.idle.submit if arm.in_idle_time else AtDeadline
        super().__init__(manifest, partial(InnerOptimizer, manifest, ModuleId(0), submit=submit, moments=arm.moments))

    @property
    def foreground_s(self) -> float:
        return self._seconds - self.idle.seconds

    def next_step(self) -> None:
        """One inner step of every module, with the next microbatches or those of some steps before."""
        begun, each, training = time.thread_time(), self.manifest.microbatches_per_step, self.manifest.training
        late = staleness_at(self.optimizers[0].steps, training.staleness, training.staleness_steps)
        while len(self._waiting) < each * (1 + late):
            microbatch = self._feed.next()
            self._waiting.append(partial(self.add, microbatch, self.gradients(microbatch)))
            if self._arm.in_idle_time:
                self.idle.fill()
        for _ in range(each):
            self._waiting.popleft()()
        self.step()
        self._seconds += time.thread_time() - begun


def measure(task: Task, name: str, seed: int, rate: float) -> dict[str, Any]:
    """Trains one arm to the end of its schedule."""
    manifest = manifest_of(task, ARMS[name], seed, rate)
    trainer = Trainer(manifest, ARMS[name])
    return {"arm": name, "seed": seed, "rate": rate, **trained(task, manifest, trainer)}


def trained(task: Task, manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    texts = list(held_out_microbatches(manifest, task.held_out_microbatches, open_documents(manifest)))

    def look(step: int) -> list[float]:
        return [step, round(trainer.foreground_s, 3), evaluate(partial(loss_of, trainer.model), texts)["loss"]]

    curve = []
    with suppress(StateError):  # it has diverged
        curve = curve_of(task.steps, POINTS, trainer.next_step, look)
    return {
        "loss": curve[-1][2] if curve else None,
        "foreground_s": trainer.foreground_s,
        "idle_s": trainer.idle.seconds,
        "curve": curve,
    }


def best_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each seed and optimizer the run with the least final loss, and how soon it was at AdamW's."""
    found = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        best: dict[str, dict[str, Any]] = {}
        for run in (run for run in runs if run["seed"] == seed and run["loss"] is not None):
            if run["arm"] not in best or run["loss"] < best[run["arm"]]["loss"]:
                best[run["arm"]] = run
        adamw = best.get("adamw")
        for run in best.values():
            row = {key: run[key] for key in ("arm", "seed", "rate", "loss", "idle_s")}
            if adamw is not None:
                row["steps_share"] = reached(run["curve"], 0, adamw["loss"], adamw["curve"][-1][0])
                row["seconds_share"] = reached(run["curve"], 1, adamw["loss"], adamw["curve"][-1][1])
                row["loss_over_adamw"] = run["loss"] - adamw["loss"]
            found.append(row)
    return found


def summary(best: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Medians over the seeds, for each arm; of the shares over those that got there."""
    names = dict.fromkeys(row["arm"] for row in best)
    rows = {name: [row for row in best if row["arm"] == name] for name in names}
    return {name: kit.medians(of, [key for key in of[0] if key not in ("arm", "seed")]) for name, of in rows.items()}


def trainings(task: Task, options: Any, arms: Iterable[str], train: Callable[..., Any]) -> dict[str, Any]:
    """Trains all arms with all seeds and learning rates."""
    torch.set_num_threads(1)
    flush_denormals()
    runs: list[dict[str, Any]] = []
    for seed, arm, rate in itertools.product(options.seeds, arms, options.rates):
        runs.append(train(task, arm, seed, rate))
        tell({key: runs[-1][key] for key in ("arm", "seed", "rate", "loss")})
    best = best_of(runs)
    return {"summary": summary(best), "best": best, "runs": runs}


def measure_all(options: Any) -> dict[str, Any]:
    own = {key: getattr(options, key) for key in ("steps", "hidden", "late", "late_steps", "look_ahead")}
    task = Task(**own, source=source_of(options.text))
    return {"task": asdict(task), **trainings(task, options, options.arms, measure)}


if __name__ == "__main__":
    usual = {"seeds": [1, 2, 3], "rates": [1.5e-3, 3e-3, 6e-3], "arms": tuple(ARMS), "steps": 300}
    usual |= {"hidden": 128, "late": 0, "late_steps": 100, "look_ahead": 1.0}
    quick = {"seeds": [1], "rates": [3e-3], "steps": 6, "hidden": 16}
    kit.run(__doc__, measure_all, quick, text=Path, **usual)
