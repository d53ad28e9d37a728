"""Graphs that outlive an inner step: their gradients are those of the weights that made their outputs."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from node.model.blocks import Linear
from node.model.optimizer import Accumulator, inner_optimizer
from node.model.parts import build_block_stack
from node.model.passes import OneDevice
from node.pipeline.admission import hidden_tensor
from node.pipeline.runner import Job
from node.pipeline.split_backward import BlockByBlock
from node.pipeline.worker import HopWorker, WeightStash, host_hop
from protocol.codecs import Encoded, encode
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody_events import Key, Work
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.node.network.small_swarm import CPU
from tests.node.small_manifest import small_manifest

PLENTY = 2**30
MODULE = ModuleId(1)


def manifest_with(staleness: int, **changes: object) -> Manifest:
    return small_manifest(training__staleness=staleness, training__inner={"learning_rate": 0.1}, **changes)


class Replica:
    """A replica of two blocks, and what autograd says of any version of it. `passes`: of the whole, or block by
    block as on a card."""

    def __init__(self, staleness: int = 1, budget: int = PLENTY, dtype: str = "float32", passes: str = "whole") -> None:
        self.manifest = manifest_with(staleness, model__dtype=dtype)
        if passes == "whole":
            self.worker = host_hop(self.manifest, MODULE, CPU, budget)
            return
        part = build_block_stack(self.manifest, MODULE)
        if passes == "split weights":
            part.split_weights()
        total, tensor = Accumulator(part), hidden_tensor(self.manifest)
        optimizer = inner_optimizer(self.manifest, MODULE, [total])
        blocks = BlockByBlock(part, self.dtype)
        self.worker = HopWorker(part, total, optimizer, tensor, CPU, budget, passes=blocks, stashed=staleness)

    def source(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.manifest.hidden_shape, generator=generator).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.manifest.model.dtype == "bfloat16" else torch.float32

    def forward(self, number: int) -> nn.Module:
        """Computes it; returns the module as it was then."""
        self._compute(Work.FORWARD, number, input=encode(self.source(number), Codec.NONE))
        return copy.deepcopy(self.worker.part)

    def backward(self, number: int) -> list[Tensor]:
        """The gradients that are added, and that of the input as the last."""
        before = [total.clone() for total in self.worker.unapplied.sums]
        output = self._compute(Work.BACKWARD, number, gradient=encode(self.source(number + 1000), Codec.NONE))
        tokens = self.manifest.microbatch_tokens
        added = [(total - old) / tokens for total, old in zip(self.worker.unapplied.sums, before, strict=True)]
        return [*added, output]

    def _compute(self, work: Work, number: int, **tensors: Encoded) -> Tensor:
        key = Key(MicrobatchId(PeerId("data"), number), 0)
        job = Job(number, key, work, Purpose.TRAIN, tensors.get("input"), tensors.get("gradient"))
        output = self.worker.compute(job).tensor
        assert output is not None
        return torch.frombuffer(bytearray(output.data), dtype=self.dtype).view(self.manifest.hidden_shape)

    def step(self, number: int) -> None:
        """Takes an inner step with visits of its own."""
        while not self.worker.optimizer.due:
            self.forward(number)
            self.backward(number)
            number += 1
        assert self.worker.step() is not None

    def expected(self, part: nn.Module, number: int) -> list[Tensor]:
        """By autograd alone."""
        source = self.source(number).requires_grad_()
        gradients = torch.autograd.grad(part(source), [*part.parameters(), source], self.source(number + 1000))
        return list(gradients)


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Within the rounding of bfloat16."""
    return all((f - w).abs().max() <= 0.02 * w.abs().max() for f, w in zip(found, wanted, strict=True))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(f.float(), w.float(), atol=1e-5, rtol=1e-4) for f, w in zip(found, wanted, strict=True))


KINDS = [("float32", "whole"), ("bfloat16", "whole"), ("float32", "blocks"), ("bfloat16", "blocks")]


def size_of(replica: Replica) -> int:
    return sum(tensor.nbytes for tensor in replica.worker.passes.weights())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(("dtype", "passes"), [*KINDS, ("bfloat16", "split weights")])
def test_a_visit_from_before_an_inner_step_has_the_gradient_of_the_weights_of_then(
    dtype: str, passes: str, graphs: bool
) -> None:
    budget = PLENTY if graphs else 4 * size_of(Replica(dtype=dtype, passes=passes))
    replica, same_seed = Replica(1, budget, dtype, passes), Replica(1, PLENTY, dtype, passes)
    for each in (replica, same_seed):
        each.step(10)  # the first visit measures
        each.forward(1)
    wanted = same_seed.backward(1)
    replica.step(20)
    others, weights = replica.worker.recomputed, [weight.clone() for weight in replica.worker.passes.weights()]
    assert close(replica.backward(1), wanted)
    assert replica.worker.recomputed - others == (not graphs and passes == "whole")
    now = replica.worker.passes.weights()
    assert all(torch.equal(*pair) for pair in zip(now, weights, strict=True)), "those of now are in place again"


def test_a_copy_for_products_is_of_the_parameters_again() -> None:
    replica = Replica(dtype="bfloat16", passes="blocks")
    replica.step(10)
    replica.forward(1)
    replica.step(20)
    replica.backward(1)
    for linear in (module for module in replica.worker.part.modules() if isinstance(module, Linear)):
        assert torch.equal(linear.matrix(torch.bfloat16), linear.weight.bfloat16())


def test_no_more_versions_are_kept_than_the_staleness_and_those_the_newest() -> None:
    replica = Replica()
    replica.step(10)
    replica.forward(1)
    replica.step(20)
    second = replica.forward(2)
    replica.step(30)
    assert same(replica.backward(1), replica.expected(replica.worker.part, 1)), "held up: computed anew"
    assert same(replica.backward(2), replica.expected(second, 2))
    assert replica.worker.recomputed == 1
    third = replica.forward(3)
    replica.step(40)
    assert same(replica.backward(3), replica.expected(third, 3))
    assert replica.worker.recomputed == 1


def test_a_visit_that_is_computed_twice_holds_its_version_once() -> None:
    replica = Replica()
    replica.step(10)
    for _ in range(2):
        replica.forward(1)
    replica.backward(1)
    assert replica.worker._stash.current.visits == 0
    assert replica.worker._graphs._kept == pytest.approx(0, abs=1e-9)


def test_copies_take_a_quarter_of_the_budget_at_most_before_graphs_do() -> None:
    size = size_of(Replica())
    assert Replica(budget=4 * size - 1).worker._stash.copies == 0
    for staleness, copies in ((1, 1), (2, 2), (3, 2)):
        worker = Replica(staleness, 8 * size).worker
        assert (worker._stash.copies, worker._stash.bytes) == (copies, copies * size)
        assert worker._graphs._budget == 8 * size - copies * size


def test_a_step_without_visits_under_way_copies_nothing() -> None:
    stash = WeightStash(OneDevice(build_block_stack(manifest_with(1), MODULE)).weights, 1, PLENTY)
    stash.before_step()
    assert stash._copies == {}
    made = []
    for _ in range(2):
        version = stash.current
        version.visits += 1
        stash.before_step()
        made.append(stash._copies[version][0].data_ptr())
        stash.done(version)
        assert not version.is_there
    assert made[0] == made[1], "the copy is used again"


def test_a_graph_whose_weights_or_tensors_have_changed_is_not_used() -> None:
    part = build_block_stack(manifest_with(1), MODULE)
    stash, passes = WeightStash(OneDevice(part).weights, 1, PLENTY), OneDevice(part)
    source = torch.randn(manifest_with(1).hidden_shape)
    lost = passes.forward(source, (), stash.saving)
    stash.changed()
    with pytest.raises(StateError, match="are gone"):
        passes.backward(lost, source)
    kept = passes.forward(source, (), stash.saving)
    kept.source.detach().add_(1.0)
    with pytest.raises(StateError, match="changed in place"):
        passes.backward(kept, torch.ones_like(source))


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_is_that_of_one_version_whatever_comes_between(seed: int) -> None:
    """Visits, steps, other changes and visits that are forgotten, in any order."""
    chance = random.Random(seed)
    replica = Replica(staleness=chance.choice([1, 2]))
    replica.step(1)
    under_way: dict[int, nn.Module] = {}
    outcomes = {"then": 0, "now": 0}
    for number in range(100, 220):
        turn = chance.random()
        if turn < 0.45:
            under_way[number] = replica.forward(number)
        elif turn < 0.85 and under_way:
            oldest = chance.choice(list(under_way))
            then, recomputed = under_way.pop(oldest), replica.worker.recomputed
            found, is_new = replica.backward(oldest), replica.worker.recomputed > recomputed
            outcomes["now" if is_new else "then"] += 1
            assert same(found, replica.expected(replica.worker.part if is_new else then, oldest))
        elif turn < 0.88 and under_way:
            forgotten = chance.choice(list(under_way))
            del under_way[forgotten]
            replica.worker.forget(forgotten)
        elif turn < 0.91:
            with torch.no_grad():
                for parameter in replica.worker.part.parameters():
                    parameter.mul_(1.01)
            replica.worker.parameters_changed()
        if replica.worker.optimizer.due:
            replica.worker.step()
    assert min(outcomes.values()) > 0, outcomes
    for number in under_way:
        replica.worker.forget(number)
    assert replica.worker._stash._copies == {}
