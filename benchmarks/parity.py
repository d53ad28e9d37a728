"""What rounds cost in loss, by inner optimizer: replicas that average at times against one process.

Both sides train on the same tokens. One process takes the replicas' microbatches together in each step; its best rate
is the baseline of the best rate and outer step of the rounds. Rounds are real (runner, round machine, gRPC with mutual
TLS on loopback) and in lock-step; a reference in plain torch takes each outer step, too (`reference_difference`, only
of float32). `over_one`: loss over the best of one process with the same optimizer, `over_adamw`: over the rounds of
AdamW. `--difference` holds 20 rounds of 2 inner steps only, and compares the replicas' parameters with those of a
reference that trains its own replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks import kit
from benchmarks.averaging import RoundPeer
from benchmarks.kit import READER, Learner, evaluate, loss_of, run_of, size_of, tell
from node.averaging.anchor.anchor import Anchor, version_of
from node.averaging.anchor.outer_step import LocalReplica, anchor_of, outer_rule
from node.averaging.anchor.shared_vector import Vector
from node.concurrency.compute_thread import Priority
from node.concurrency.task_groups import task_scope
from node.data.documents import Documents
from node.data.feed import START, TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Cursor, Microbatch
from node.model.initialization import parameters_of
from protocol.manifest.manifest import Manifest
from swarm.averaging.round_events import RoundRules
from swarm.compression.round_codecs import codec_levels
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained; the same for all sides. `microbatches` are those of each replica in an inner step."""

    hidden: int = 16
    heads: int = 2
    feed_forward: int = 48
    blocks: int = 1
    sequence: int = 64
    rows: int = 8
    microbatches: int = 1
    steps: int = 3000
    common_steps: int = 800  # taken by one process for all replicas
    warmup_steps: int = 50
    held_out_microbatches: int = 128
    replicas: int = 4

    @property
    def step_tokens(self) -> int:
        return self.replicas * self.microbatches * self.rows * self.sequence


@dataclass(frozen=True, slots=True)
class Rule:
    """How replicas are trained between rounds and what a round does. `inner_rate` is the peak."""

    inner: str
    inner_rate: float
    inner_steps: int = 1
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    codec: str = "none"


def manifest_of(task: Task, seed: int, rule: Rule, replicas: int) -> Manifest:
    """A run of one module whose inner step has the tokens of `replicas` replicas."""
    return run_of(
        "parity",
        [task.blocks],
        seed=seed,
        **size_of(task) | {"microbatches": replicas * task.microbatches},
        data={"held_out": 0.05},
        inner={"name": rule.inner, "learning_rate": rule.inner_rate},
        inner_steps=rule.inner_steps,
        outer={"learning_rate": rule.outer_rate, "momentum": rule.outer_momentum},
        schedule={
            "kind": "cosine",
            "warmup_tokens": task.warmup_steps * task.step_tokens,
            "total_tokens": task.steps * task.step_tokens,
            "final_ratio": 0.0,
        },
        sections={"codecs": {"pseudo_gradients": rule.codec}},
    )


class Replica(Learner):
    """One replica of the whole model, as in a node."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        ((self.module, self.parts),) = self.model.modules()
        (self.optimizer,) = self.optimizers
        self.replica = LocalReplica(self.parts, manifest.training.fragments, self.optimizer)

    def vector(self) -> Vector:
        """A copy of all parameters, [elements]."""
        return np.asarray(anchor_of(self.replica).parameters)

    def write(self, values: Vector) -> None:
        self.replica.write(slice(0, self.replica.layout.elements), values)

    def follow(self, other: Replica) -> None:
        """Becomes a copy of the other, its optimizer's state included."""
        self.write(other.vector())
        saved = other.optimizer.export_state(parameters_of(*other.parts))
        self.optimizer.import_state(parameters_of(*self.parts), saved)
        self.optimizer.tokens = other.optimizer.tokens


class Dealer:
    """Deals the microbatches of one feed to the replicas in turn, or to one process."""

    def __init__(self, task: Task, manifest: Manifest, documents: Documents, start: Cursor = START) -> None:
        self.feed = TrainingFeed(manifest, documents, READER, start)
        self._task = task

    def a_whole_step(self) -> list[Microbatch]:
        """The next inner step of one process."""
        return [self.feed.next() for _ in range(self._task.replicas * self._task.microbatches)]

    def a_step(self) -> list[list[Microbatch]]:
        """The next inner step of each replica."""
        dealt = self.a_whole_step()
        return [dealt[replica :: self._task.replicas] for replica in range(self._task.replicas)]


class OuterReference:
    """torch.optim.SGD on the mean of (anchor - replica), weighted by tokens (Douillard et al. 2023, arXiv:2311.08105).

    Its anchor and momentum are never corrected, so a difference to the real rounds stays or grows.
    """

    def __init__(self, start: Vector, rule: Rule) -> None:
        self._anchor = torch.nn.Parameter(torch.from_numpy(start.copy()))
        nesterov = rule.outer_momentum > 0  # torch refuses it without momentum, where it would change nothing
        self._outer = torch.optim.SGD(
            [self._anchor], lr=rule.outer_rate, momentum=rule.outer_momentum, nesterov=nesterov
        )

    def step(self, replicas: Sequence[Vector], tokens: Sequence[int]) -> Vector:
        """The new anchor, from the parameters [elements] and the tokens of each replica."""
        anchor = self._anchor.detach()
        gradient = torch.zeros_like(anchor)
        for replica, share in zip(replicas, np.array(tokens, np.float64) / sum(tokens), strict=True):
            gradient += float(share) * (anchor - torch.from_numpy(replica))
        self._anchor.grad = gradient
        self._outer.step()
        values: Vector = self._anchor.detach().numpy().copy()
        return values


class Reference:
    """The whole algorithm: learners step in turn, and the reference takes an outer step after each round."""

    def __init__(self, learners: Sequence[Replica], rule: Rule) -> None:
        self._learners = learners
        self._tokens = learners[0].optimizer.tokens
        self._outer = OuterReference(learners[0].vector(), rule)

    def a_round(self, steps: Sequence[Sequence[Sequence[Microbatch]]]) -> Vector:
        """Takes inner steps (each with every replica's microbatches) and the outer step; returns the new anchor."""
        tokens = [0] * len(self._learners)
        for dealt in steps:
            for number, (learner, microbatches) in enumerate(zip(self._learners, dealt, strict=True)):
                learner.step(microbatches)
                tokens[number] += sum(microbatch.size for microbatch in microbatches)
        anchor = self._outer.step([learner.vector() for learner in self._learners], tokens)
        self._tokens += sum(tokens)
        for learner in self._learners:
            learner.write(anchor)
            learner.optimizer.tokens, learner.optimizer.replicas = self._tokens, len(self._learners)
        return anchor


PATIENCE_S: Final = 60.0  # long: no replica fails here, and a busy machine must not change the members


@dataclass(frozen=True, slots=True)
class Hall:
    """Replicas with their peers of rounds."""

    replicas: Sequence[Replica]
    peers: Sequence[RoundPeer]

    async def step(self, dealt: Sequence[Sequence[Microbatch]]) -> None:
        """Takes an inner step of every replica, one after the other."""
        for replica, peer, microbatches in zip(self.replicas, self.peers, dealt, strict=True):
            await peer.compute.run(Priority.UPKEEP, partial(_inner_step, replica, peer, microbatches))

    async def a_round(self) -> Anchor:
        """Holds a round and returns its anchor. Raises StateError when the replicas differ or one is missing."""
        for peer in self.peers:
            peer.runner.stepped()
        async with asyncio.timeout(PATIENCE_S):
            settled = [await peer.settled.get() for peer in self.peers]
        versions = {version for version, _ in settled}
        if len(versions) > 1 or any(len(event.members) != len(self.peers) for _, event in settled):
            raise StateError(f"round {settled[0][0].round} was not one of all replicas")
        return self.peers[0].runner.anchor


def _inner_step(replica: Replica, peer: RoundPeer, microbatches: Sequence[Microbatch]) -> None:
    (figures,) = replica.step(microbatches)
    peer.runner.after_inner_step(figures)


@asynccontextmanager
async def hall(replicas: Sequence[Replica], manifest: Manifest) -> AsyncIterator[Hall]:
    """Peers around these replicas, which are equal."""
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ExitStack())
        peers = [_peer(replica, manifest, threads) for replica in replicas]
        for peer in peers:
            await stack.enter_async_context(peer.transport)
        tasks = await stack.enter_async_context(task_scope())
        for peer in peers:
            peer.know([one.contact for one in peers])
            stack.enter_context(peer.receiving())
        running = [tasks.create_task(peer.runner.run()) for peer in peers]
        try:
            for peer in peers:
                await peer.connect()
            yield Hall(replicas, peers)
        finally:
            for task in running:
                task.cancel()


def _peer(replica: Replica, manifest: Manifest, stack: ExitStack) -> RoundPeer:
    training = manifest.training
    rules = RoundRules(
        training.inner_steps,
        training.fragments,
        replica.replica.layout.chunks,
        longest_s=1e9,
        answer_s=PATIENCE_S,
        prepare_s=PATIENCE_S,
        silence_s=PATIENCE_S,
        codecs=codec_levels(Codec[manifest.codecs.pseudo_gradients.upper()]),
    )
    # The anchor has the replica's steps behind it, so that the schedule goes on from there.
    first = anchor_of(replica.replica)
    version = version_of(first.layout, first.hashes, 0, replica.optimizer.steps, replica.optimizer.tokens, 0)
    return RoundPeer(
        replica.module, replica.replica, dataclasses.replace(first, version=version), rules, outer_rule(manifest), stack
    )


TASKS: Final = {
    "small": Task(),
    "larger": Task(128, 4, 352, 2, 128, 4, 1, steps=400, common_steps=0, warmup_steps=20, held_out_microbatches=24),
}
DIFFERENCE_ROUNDS: Final = 20
DIFFERENCE_RULE: Final = Rule("adamw", 1e-3, 2, 0.7, 0.9)  # few steps: float32's rounding errors grow with each


class Run:
    """The measurements of one seed."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._manifest = task, partial(manifest_of, task, seed)
        manifest = self._manifest(Rule("adamw", 1e-3), task.replicas)
        self._documents: Documents = open_documents(manifest)
        self._held_out = list(held_out_microbatches(manifest, task.held_out_microbatches, self._documents))
        self._common_start = cache(lambda inner, rate: self.alone(Rule(inner, rate), task.common_steps))

    def loss(self, learner: Replica) -> float:
        return float(evaluate(partial(loss_of, learner.model), self._held_out)["loss"])

    def alone(self, rule: Rule, steps: int) -> tuple[Replica, Cursor]:
        """One process after some steps, and its position in the text."""
        manifest = self._manifest(rule, self._task.replicas)
        learner, dealer = Replica(manifest), Dealer(self._task, manifest, self._documents)
        for _ in range(steps):
            learner.step(dealer.a_whole_step())
        return learner, dealer.feed.cursor

    async def rounds(self, rule: Rule) -> dict[str, Any]:
        """The loss of replicas that average, and the largest difference of an outer step to the reference's."""
        task, manifest = self._task, self._manifest(rule, 1)
        begun, cursor = self._common_start(rule.inner, rule.inner_rate)
        dealer = Dealer(task, manifest, self._documents, cursor)
        learners = [Replica(manifest) for _ in range(task.replicas)]
        for learner in learners:
            learner.follow(begun)
        reference = OuterReference(learners[0].vector(), rule)
        largest, rounds = 0.0, (task.steps - task.common_steps) // rule.inner_steps
        async with hall(learners, manifest) as peers:
            for _ in range(rounds):
                for _ in range(rule.inner_steps):
                    await peers.step(dealer.a_step())
                expected = reference.step([learner.vector() for learner in learners], [1] * task.replicas)
                anchor = await peers.a_round()
                largest = max(largest, _difference(expected, anchor.parameters))
        exact = {"reference_difference": largest} if rule.codec == "none" else {}
        return {**dataclasses.asdict(rule), "rounds": rounds, "loss": self.loss(learners[0]), **exact}


def _difference(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    return float(np.abs(left - right).max())


async def difference(task: Task, seed: int, rule: Rule, rounds: int) -> float:
    """Largest difference of a parameter after some rounds, between real rounds and the algorithm in one process."""
    torch.set_num_threads(1)
    manifest = manifest_of(task, seed, rule, 1)
    dealer = Dealer(task, manifest, open_documents(manifest))
    dealt = [[dealer.a_step() for _ in range(rule.inner_steps)] for _ in range(rounds)]
    learners = [Replica(manifest) for _ in range(task.replicas)]
    async with hall(learners, manifest) as peers:
        for steps in dealt:
            for step in steps:
                await peers.step(step)
            await peers.a_round()
    reference = Reference([Replica(manifest) for _ in range(task.replicas)], rule)
    for steps in dealt:
        expected = reference.a_round(steps)
    return max(_difference(expected, learner.vector()) for learner in learners)


def measure_seed(task: Task, seed: int, options: Any) -> dict[str, Any]:
    run, alone, rows = Run(task, seed), dict[str, dict[float, float]](), list[dict[str, Any]]()
    outers = [tuple(map(float, outer.split("/"))) for outer in options.outers]
    for inner in options.inner:
        alone[inner] = {rate: run.loss(run.alone(Rule(inner, rate), task.steps)[0]) for rate in options.rates}
        tell({"seed": seed, inner: alone[inner]})
        for count, codec in itertools.product(options.inner_steps, options.codecs):
            rules = [Rule(inner, rate, count, *outer, codec) for rate in options.rates for outer in outers]
            tried = [asyncio.run(run.rounds(rule)) for rule in rules]
            best = min(tried, key=lambda row: row["loss"])
            first = next((row for row in rows if row["inner"] == "adamw" and row["inner_steps"] == count), best)
            rows.append(best | {"over_one": best["loss"] / min(alone[inner].values()), "tried": tried})
            rows[-1]["over_adamw"] = best["loss"] / first["loss"]
            tell({key: value for key, value in rows[-1].items() if key != "tried"})
    return {"seed": seed, "alone": alone, "rounds": rows}


def measure(options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = dataclasses.replace(TASKS[options.task], replicas=options.replicas)
    if options.difference:
        apart = asyncio.run(difference(task, options.seeds[0], DIFFERENCE_RULE, options.difference_rounds))
        return {"rounds": options.difference_rounds, "difference": apart}
    seeds = [measure_seed(task, seed, options) for seed in options.seeds]
    return {"task": dataclasses.asdict(task), "tokens": task.steps * task.step_tokens, "seeds": seeds}


if __name__ == "__main__":
    usual = {"task": "small", "seeds": [1, 2, 3], "replicas": 4, "inner": ("adamw", "muon", "soap")}
    usual |= {"rates": [12e-3, 24e-3, 48e-3], "inner_steps": [50], "outers": ["0.8/0.5", "1/0"]}
    quick = {"seeds": [1], "difference": True, "difference_rounds": 2}
    codecs = ("none", "int8", "int4", "int2")
    kit.run(__doc__, measure, quick, difference=False, difference_rounds=DIFFERENCE_ROUNDS, codecs=codecs, **usual)
