"""A replica and its anchor: copies in both directions, work carried over, the outer step of one that is alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from node.averaging.anchor.anchor import AnchorStore, hash_all
from node.averaging.anchor.local_replica import LocalReplica, anchor_of
from node.averaging.anchor.outer_step import OuterRule
from node.averaging.replica_sync import ReplicaSync, Work
from node.checkpoint.saver import capture_module, restore_module
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import RAMP_STEPS, Accumulator, InnerOptimizer, StepFigures
from node.model.parts import build_block_stack
from node.solo.trainer import SoloReplica
from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.node.averaging.small_rounds import vector
from tests.node.network.small_swarm import ManualClock
from tests.node.small_manifest import small_manifest

RULE = OuterRule(0.7, 0.9)
MANIFEST = small_manifest(model__hidden=64, model__feed_forward=128, stages__blocks=[0, 4])


class Trained:
    """A module that takes inner steps with made-up gradients."""

    def __init__(self, fragments: int = 1) -> None:
        self.part: nn.Module = build_block_stack(MANIFEST, ModuleId(1))
        self.sums = Accumulator(self.part)
        self.optimizer = InnerOptimizer(MANIFEST.training, [self.sums])
        self.changes = 0
        self.local = LocalReplica([self.part], fragments, self.optimizer, self._changed)
        self._microbatches = 0

    def _changed(self) -> None:
        self.changes += 1

    def step(self, seed: int) -> StepFigures:
        numbers = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=numbers) for p in self.part.parameters()]
        self._microbatches += 1
        self.sums.add(MicrobatchId(PeerId("data"), self._microbatches), 32, gradients)
        return self.optimizer.step()

    def vector(self) -> np.ndarray:
        out = np.empty(self.local.layout.elements, np.float32)
        self.local.read(slice(0, len(out)), out)
        return out


def test_a_vector_has_every_parameter_at_its_place() -> None:
    trained = Trained(fragments=2)
    values = trained.vector()
    named = dict(trained.part.named_parameters())
    for span in trained.local.layout.spans:
        expected = named[span.name].detach().numpy().ravel()
        np.testing.assert_array_equal(values[span.start : span.stop], expected)
    assert trained.local.layout.elements == sum(p.numel() for p in named.values())


def test_parts_are_read_and_written_by_themselves() -> None:
    trained = Trained()
    before, total = trained.vector(), trained.local.layout.elements
    part = slice(total // 3 + 1, total // 2 + 7)
    new = vector(part.stop - part.start, 5)
    trained.local.write(part, new)
    after = trained.vector()
    np.testing.assert_array_equal(after[part], new)
    np.testing.assert_array_equal(after[: part.start], before[: part.start])
    np.testing.assert_array_equal(after[part.stop :], before[part.stop :])
    out = np.empty_like(new)
    trained.local.read(part, out)
    np.testing.assert_array_equal(out, new)
    assert trained.changes == 1


def test_carrying_over_keeps_what_came_after_the_snapshot() -> None:
    trained = Trained()
    trained.step(1)
    snapshot = trained.vector()
    new = vector(len(snapshot), 6)
    trained.local.carry(slice(0, len(new)), snapshot, new)
    np.testing.assert_array_equal(trained.vector(), new)
    trained.local.write(slice(0, len(new)), snapshot)
    trained.step(2)
    local = trained.vector()
    trained.local.carry(slice(0, len(new)), snapshot, new)
    np.testing.assert_array_equal(trained.vector(), new + (local - snapshot))


def test_a_plain_mean_leaves_a_lone_replica_as_it_is() -> None:
    """An outer rate of 1 without momentum: what the demo's manifest says. Only the two subtractions round."""
    trained, untouched = Trained(), Trained()
    lone = SoloReplica(trained.local, OuterRule(1.0, 0.0), every=2)
    for step in range(1, 10):
        trained.step(step)
        untouched.step(step)
        lone.after_inner_step(32)
    assert lone.store.current.version.round == 4
    np.testing.assert_allclose(trained.vector(), untouched.vector(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_lone_replica_does_what_torch_does(fragments: int) -> None:
    """Outer SGD over the real parameters, fragment by fragment, by torch alone, before the inner step that follows."""
    trained, plain = Trained(fragments), Trained(fragments)
    lone = SoloReplica(trained.local, RULE, every=2)
    anchor = torch.from_numpy(plain.vector()).requires_grad_()
    buffer = torch.zeros(len(anchor))
    fragment = 0
    for step in range(1, 14):
        if step % 2 == 1 and step > 1:
            first, end = plain.local.layout.fragments[fragment]
            part = plain.local.layout.range_of(first, end)
            parameter = anchor.detach()[part].clone().requires_grad_()
            outer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
            outer.state[parameter]["momentum_buffer"] = buffer[part].clone()
            parameter.grad = parameter.detach() - torch.from_numpy(plain.vector()[part])
            outer.step()
            buffer[part] = outer.state[parameter]["momentum_buffer"]
            anchor.detach()[part] = parameter.detach()
            plain.local.write(part, parameter.detach().numpy())
            fragment = (fragment + 1) % len(plain.local.layout.fragments)
        trained.step(step)
        plain.step(step)
        lone.after_inner_step(32)
        np.testing.assert_allclose(trained.vector(), plain.vector(), rtol=0, atol=1e-5)
    current = lone.store.current
    assert (current.version.round, current.version.steps, current.version.tokens) == (6, 12, 12 * 32)
    assert current.hashes == hash_all(current.layout, current.parameters, current.momentum)


def test_a_lone_replica_goes_on_from_a_checkpoint_before_its_outer_step() -> None:
    """The step is due and not taken: the anchor and the parameters are all that it needs."""
    one, other = Trained(), Trained()
    first, second = (SoloReplica(trained.local, RULE, every=2) for trained in (one, other))
    for step in range(1, 5):
        one.step(step)
        first.after_inner_step(32)
    agreed = first.agreed()
    assert (agreed.anchor.version.round, agreed.steps_since) == (1, 2)
    state = capture_module((one.part,), one.optimizer, visits=4, tokens=4 * 32, agreed=agreed)
    restore_module((other.part,), other.optimizer, state)
    second.restore(state)
    for step in range(5, 8):
        for trained, lone in ((one, first), (other, second)):
            trained.step(step)
            lone.after_inner_step(32)
    assert second.store.current.version == first.store.current.version
    np.testing.assert_array_equal(other.vector(), one.vector())


def sync_of(
    trained: Trained, compute: ComputeThread, averaging: ComputeThread, clock: ManualClock | None = None
) -> ReplicaSync:
    store = AnchorStore(anchor_of(trained.local))
    fragments, chunks = len(trained.local.layout.fragments), trained.local.layout.chunks
    rules = RoundRules(4, fragments, chunks, longest_s=10.0)
    return ReplicaSync(trained.local, store, compute, averaging, rules, RULE, clock or ManualClock())


async def test_a_lone_replica_takes_its_outer_step_after_enough_work_or_time() -> None:
    trained, clock = Trained(), ManualClock()
    with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
        sync = sync_of(trained, compute, averaging, clock)
        sync.is_alone = lambda: True
        left = []
        for seconds in (1, 1, 1, 1, 1, 10, 1, 10):
            clock.now += seconds
            before = sync._store.current.version.round
            step = sync.after_inner_step(trained.step(seconds))
            assert step is None or step.anchor.version.round == before + 1
            assert (step is None) == (sync._store.current.version.round == before)
            left.append(sync.since_anchor.steps)
    assert left == [1, 2, 3, 4, 1, 1, 2, 1]


async def test_a_snapshot_knows_its_work_and_norm() -> None:
    trained = Trained()
    with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
        sync = sync_of(trained, compute, averaging)
        base = trained.vector()
        for seed in range(3):
            sync.after_inner_step(trained.step(seed))
        snapshot = await sync.snapshot()
        assert snapshot.since_anchor == Work(3, 96)
        assert snapshot.norm == pytest.approx(float(np.linalg.norm(base - trained.vector())), rel=1e-5)
        sync.after_inner_step(trained.step(9))
        sync.committed(snapshot)
        assert sync.since_anchor == Work(1, 32)


async def test_an_adopted_anchor_replaces_everything() -> None:
    trained, other = Trained(), Trained()
    other.step(77)
    anchor = anchor_of(other.local)
    with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
        sync = sync_of(trained, compute, averaging)
        sync.after_inner_step(trained.step(1))
        await sync.adopt(anchor)
        np.testing.assert_array_equal(trained.vector(), anchor.parameters)
        assert sync.since_anchor == Work()
        assert sync.lost == Work(1, 32)
        assert trained.optimizer.steps == anchor.version.steps


def test_a_fresh_optimizer_rises_to_the_schedule() -> None:
    trained, steady = Trained(), Trained()
    for seed in range(5):
        trained.step(seed)
        steady.step(seed)
    trained.optimizer.start_anew(5, 5 * 32)
    rates = [(trained.step(seed).learning_rate, steady.step(seed).learning_rate) for seed in range(RAMP_STEPS + 2)]
    for number, (fresh, usual) in enumerate(rates, start=1):
        assert fresh == pytest.approx(usual * min(1.0, number / RAMP_STEPS))


async def test_a_lone_replica_that_diverged_starts_again_from_its_anchor() -> None:
    trained = Trained()
    with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
        sync = sync_of(trained, compute, averaging)
        sync.is_alone = lambda: True
        base = trained.vector()
        for seed in range(4):
            sync.after_inner_step(trained.step(seed))
        with torch.no_grad():
            next(trained.part.parameters()).view(-1)[0] = float("nan")
        sync._before_inner_step()
        np.testing.assert_array_equal(trained.vector(), base)
        assert sync._store.current.version.round == 0
        assert sync.lost == Work(4, 128)
