"""Anchors that are kept, lent and leased; the arrays they lie in; the outer step that makes the next one."""

import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from node.averaging.anchor import shared_vector
from node.averaging.anchor.anchor import STATES, Anchor, AnchorStore, hash_all, initial_anchor, restored_anchor
from node.averaging.anchor.outer_step import LocalReplica, OuterRule, Staging, anchor_of
from node.averaging.anchor.shared_vector import KEPT, STRETCH, SpareArrays, Vector
from node.averaging.exchange.reduction import SentParts, UpdateSource
from node.averaging.round_runner import InnerWork, ReplicaSync
from node.checkpoint.saver import capture_module, restore_module
from node.concurrency.compute_thread import ComputeThread
from node.model.optimizer import RAMP_STEPS, Accumulator, InnerOptimizer, StepFigures
from node.model.passes import build_block_stack
from node.solo.trainer import SoloReplica
from protocol.codecs import decode_into, encoded_bytes
from swarm.averaging.round_events import RoundRules
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.kit.waiting import ManualClock
from tests.node.averaging.small_rounds import vector
from tests.node.checkpoint.saved_states import small_layout, state, written
from tests.node.small_manifest import small_manifest

LAYOUT = small_layout(3 * 4096)


def advance(store: AnchorStore, number: int) -> Anchor:
    anchor = written(state(number, LAYOUT), *store.spare())
    store.put(anchor)
    return anchor


def intact(anchor: Anchor) -> bool:
    return hash_all(anchor.layout, anchor.parameters, anchor.momentum) == anchor.hashes


def next_of(store: AnchorStore) -> Anchor:
    """The anchor that a round makes of the current one: one fragment moves."""
    base, rule = store.current, OuterRule(0.7, 0.9)
    first, end = base.layout.fragments[base.version.fragment]
    part = base.layout.range_of(first, end)
    staging = Staging(base, rule, *store.spare(part))
    gradient = np.random.default_rng(base.version.round).standard_normal(part.stop - part.start, np.float32)
    staging.apply(first, end, gradient)
    store.put(anchor := staging.finish(base.version.round + 1, 1, 1))
    return anchor


def test_the_previous_anchor_stays_until_the_next_is_begun():
    store = AnchorStore(first := state(0, LAYOUT))
    second = advance(store, 1)
    assert store.current is second
    assert store.get(first.version.digest) is first
    store.spare()
    assert store.get(first.version.digest) is None
    assert store.get(second.version.digest) is second
    array, digest = weakref.ref(second.parameters.arrays[0]), second.version.digest
    del second
    advance(store, 2)
    assert store.get(digest) is not None
    assert array() is not None
    store.spare()
    assert array() is None, "what is kept no more is let go of"


@pytest.mark.parametrize("rounds", [1, 8, 11])
def test_versions_share_the_fragments_that_have_not_moved(rounds):
    store = AnchorStore(state(0, small_layout(16 * 4096 + 7, 8)))
    for _ in range(rounds):
        before = store.current
        after = next_of(store)
        assert intact(before)
        assert intact(after)
        vectors = (before.parameters, before.momentum, after.parameters, after.momentum)
        assert len({id(array) for vector in vectors for array in vector.arrays}) == 2 * (8 + 1)


def test_a_leased_anchor_outlives_later_rounds_until_the_lease_ends():
    clock = ManualClock()
    store = AnchorStore(first := state(0, LAYOUT), clock.monotonic)
    assert store.lease(first.version.digest, 600.0)
    for number in range(1, 8):
        advance(store, number)
        assert store.get(first.version.digest) is first
        assert intact(first)
    clock.now += 601.0
    store.spare()
    assert store.get(first.version.digest) is None


def test_rounds_come_before_leases():
    store = AnchorStore(state(0, LAYOUT))
    leased = [advance(store, number) for number in range(1, 4)]
    for anchor in leased:
        store.lease(anchor.version.digest, 600.0)
    lent = [store.spare(), store.spare()]
    assert len(lent) == 2
    assert 1 <= len([a for a in leased if store.get(a.version.digest) is a]) <= STATES - len(lent)
    assert store.current is leased[-1]


def test_no_more_than_two_pairs_are_lent_and_one_that_was_dropped_or_became_an_anchor_counts_no_more():
    store = AnchorStore(state(0, LAYOUT))
    for _ in range(5):
        store.spare()
        next_of(store)
    one, two = store.spare(), store.spare()
    with pytest.raises(ResourceExhausted):
        store.spare()
    store.give_back(*one)
    store.spare()
    assert two[0].arrays


def test_an_anchor_stays_whole_while_another_thread_makes_round_after_round():
    store = AnchorStore(first := state(0, small_layout(16 * 4096, 4)))
    stop = threading.Event()

    def rounds() -> None:
        while not stop.is_set():
            next_of(store)

    thread = threading.Thread(target=rounds)
    thread.start()
    try:
        for _ in range(200):
            assert intact(store.current)
        assert intact(first)
    finally:
        stop.set()
        thread.join()
    assert intact(store.current)


def test_a_saved_anchor_is_not_written_while_a_checkpoint_of_it_is():
    layout = small_layout(16 * 4096 + 7, 4)
    store = AnchorStore(first := state(0, layout))
    saved = store.saved()
    for _ in range(2 * STATES):
        next_of(store)
        assert restored_anchor(layout, saved).version == first.version, "whole, or it would be corrupt"


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_and_no_more_is_kept_than_a_round_needs() -> None:
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    place = address(first)
    first[:] = 7
    del first
    again = arrays.empty(900)
    assert address(again) == place
    assert len(again) == 900
    arrays = SpareArrays(1000)
    assert len({address(array) for array in [arrays.empty(1000) for _ in range(5)]}) == 5
    assert len(arrays._spare) == KEPT


@pytest.mark.parametrize("read", [lambda a: a[10:20], lambda a: a[5:][3:].reshape(-1, 4), torch.from_numpy, memoryview])
def test_what_is_still_read_is_not_written(read: object) -> None:
    assert callable(read)
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    first[:] = 7
    reader = read(first[8:]) if read is not memoryview else memoryview(first)
    del first
    others = [arrays.empty(1000) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert np.all(np.asarray(reader) == 7)


def test_what_is_large_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vector, "LARGEST_KEPT_BYTES", 3999)
    arrays = SpareArrays(1000)
    arrays.empty(1000)
    assert not arrays._spare


@pytest.mark.parametrize("elements", [1, STRETCH, 3 * STRETCH + 5])
def test_it_is_torchs_sgd_with_nesterov_momentum(elements: int) -> None:
    rule = OuterRule(0.7, 0.9)
    ours, momentum = vector(elements, 1), np.zeros(elements, np.float32)
    theirs = torch.from_numpy(ours.copy()).requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(20):
        gradient = vector(elements, 100 + step, 0.1)
        new = np.empty_like(ours), np.empty_like(momentum)
        rule.step(gradient, ours, momentum, *new)
        rule.step(gradient, ours, momentum, ours, momentum)
        assert np.array_equal((ours, momentum), new), "it may write over the old state"
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), rtol=1e-6, atol=1e-6)


def test_every_operation_is_rounded_by_itself() -> None:
    """As written down in float32, one operation at a time: a fused multiply-add gives other last bits."""
    rule = OuterRule(0.7, 0.9)
    gradient, parameters, momentum = vector(1000, 1), vector(1000, 2), vector(1000, 3)
    new_parameters, new_momentum = np.empty_like(parameters), np.empty_like(momentum)
    rule.step(gradient, parameters, momentum, new_parameters, new_momentum)
    rate, mu = np.float32(0.7), np.float32(0.9)
    for i in range(1000):
        buffer = np.float32(np.float32(momentum[i] * mu) + gradient[i])
        update = np.float32(np.float32(np.float32(buffer * mu) + gradient[i]) * rate)
        assert new_momentum[i] == buffer
        assert new_parameters[i] == np.float32(parameters[i] - update)


RULE = OuterRule(0.7, 0.9)
MANIFEST = small_manifest(model__hidden=64, model__feed_forward=128, stages__blocks=[0, 4])


class Trained:
    def __init__(self, fragments: int = 1) -> None:
        self.part: nn.Module = build_block_stack(MANIFEST, ModuleId(1))
        self.sums = Accumulator(self.part)
        self.optimizer = InnerOptimizer(MANIFEST, ModuleId(0), [self.sums])
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
    for place in trained.local.layout.spans:
        np.testing.assert_array_equal(values[place.start : place.stop], named[place.name].detach().numpy().ravel())
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


def lone_replica(trained: Trained, rule: OuterRule = RULE) -> SoloReplica:
    return SoloReplica(ModuleId(1), (trained.part,), trained.local, rule, every=2)


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_lone_replica_does_what_torch_does(fragments: int) -> None:
    """Outer SGD over the real parameters, fragment by fragment, by torch alone, before the inner step that follows."""
    trained, plain = Trained(fragments), Trained(fragments)
    lone = lone_replica(trained)
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
        lone.stepped(trained.step(step))
        plain.step(step)
        np.testing.assert_allclose(trained.vector(), plain.vector(), rtol=0, atol=1e-5)
    current = lone.store.current
    assert (current.version.round, current.version.steps, current.version.tokens) == (6, 12, 12 * 32)
    assert current.hashes == hash_all(current.layout, current.parameters, current.momentum)


def test_a_lone_replica_goes_on_from_a_checkpoint_before_its_outer_step() -> None:
    """The step is due and not taken: the anchor and the parameters are all that it needs."""
    one, other = Trained(), Trained()
    first, second = (lone_replica(trained) for trained in (one, other))
    for step in range(1, 5):
        first.stepped(one.step(step))
    agreed = first.agreed()
    assert (agreed.anchor.version.round, agreed.steps_since) == (1, 2)
    state = capture_module((one.part,), one.optimizer, visits=4, tokens=4 * 32, agreed=agreed)
    restore_module((other.part,), other.optimizer, state)
    second.restore(state)
    for step in range(5, 8):
        for trained, lone in ((one, first), (other, second)):
            lone.stepped(trained.step(step))
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
        assert snapshot.since_anchor == InnerWork(3, 96)
        assert snapshot.norm == pytest.approx(float(np.linalg.norm(base - trained.vector())), rel=1e-5)
        sync.after_inner_step(trained.step(9))
        sync.committed(snapshot)
        assert sync.since_anchor == InnerWork(1, 32)


async def test_an_adopted_anchor_replaces_everything() -> None:
    trained, other = Trained(), Trained()
    other.step(77)
    anchor = anchor_of(other.local)
    with ComputeThread() as compute, ComputeThread(name="averaging") as averaging:
        sync = sync_of(trained, compute, averaging)
        sync.after_inner_step(trained.step(1))
        await sync.adopt(anchor)
        np.testing.assert_array_equal(trained.vector(), anchor.parameters)
        assert sync.since_anchor == InnerWork()
        assert sync.lost == InnerWork(1, 32)
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
        assert sync.lost == InnerWork(4, 128)


CODEC = Codec.INT4
ELEMENTS = 3 * 4096
SENT = (slice(0, 4096), slice(4096, 2 * 4096))
OWN = slice(2 * 4096, ELEMENTS)


class _Schedule:
    steps = tokens = 0
    replicas = 1
    before_step = before_change = staticmethod(lambda: None)

    def start_anew(self, steps: int, tokens: int) -> None:
        raise AssertionError("nothing starts anew here")


class Setting:
    """A replica that has moved from its anchor, its snapshot, and work that came after."""

    def __init__(self) -> None:
        self.replica = LocalReplica([nn.Linear(96, 128, bias=False)], 1, _Schedule())
        start = normal(0)
        self.source = UpdateSource(initial_anchor(self.replica.layout, start), start - normal(1))
        self.later = normal(2)
        self.replica.write(slice(0, ELEMENTS), self.source.snapshot + self.later)
        self.gradient = start - self.source.snapshot
        self.sent = SentParts(CODEC)

    def send(self, part: slice) -> Vector:
        data, room = memoryview(bytearray(encoded_bytes(CODEC, 4096))), np.empty(4096, np.float32)
        self.source.encode(part, CODEC, data, room)
        self.sent.note(part, data)
        decoded = np.empty(4096, np.float32)
        decode_into(CODEC, data, decoded)
        data[:] = bytes(len(data))  # the room is used for the next piece
        return decoded


def normal(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)


def test_the_replica_stands_on_the_new_anchor_less_its_leftover_and_with_its_later_work() -> None:
    here, new = Setting(), normal(3)
    decoded = here.gradient.copy()
    for part in SENT:
        decoded[part] = here.send(part)
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    here.replica.carry(slice(0, ELEMENTS), here.source.snapshot, new)
    result = np.empty(ELEMENTS, np.float32)
    here.replica.read(slice(0, ELEMENTS), result)
    np.testing.assert_allclose(result, new - (here.gradient - decoded) + here.later, rtol=0, atol=1e-5)
    np.testing.assert_allclose(result[OWN], (new + here.later)[OWN], rtol=0, atol=1e-5)
    assert np.linalg.norm(here.gradient - decoded) > 0.05 * np.linalg.norm(here.gradient)


def test_a_dissolved_attempt_leaves_no_trace() -> None:
    here = Setting()
    before = here.source.snapshot.copy()
    here.send(SENT[0])
    here.sent = SentParts(CODEC)
    here.send(SENT[1])
    assert np.array_equal(here.source.snapshot, before)
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    assert np.array_equal(here.source.snapshot[SENT[0]], before[SENT[0]])
    assert not np.array_equal(here.source.snapshot[SENT[1]], before[SENT[1]])
    once = here.source.snapshot.copy()
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    assert np.array_equal(here.source.snapshot, once), "it is rewritten once"


def test_all_of_it_comes_in_the_rounds_after() -> None:
    here = Setting()
    replica, anchor, goal = here.replica, here.source.anchor, here.source.snapshot.copy()
    replica.write(slice(0, ELEMENTS), goal)
    whole = slice(0, ELEMENTS)
    parameters = anchor.parameters.copy()
    away = [float(np.linalg.norm(parameters - goal))]
    for _ in range(20):
        source = UpdateSource(initial_anchor(anchor.layout, parameters.copy()), np.empty(ELEMENTS, np.float32))
        replica.read(whole, source.snapshot)
        sent, data = SentParts(CODEC), memoryview(bytearray(encoded_bytes(CODEC, ELEMENTS)))
        source.encode(whole, CODEC, data, np.empty(ELEMENTS, np.float32))
        sent.note(whole, data)
        decoded = np.empty(ELEMENTS, np.float32)
        decode_into(CODEC, data, decoded)
        parameters = parameters - decoded
        sent.rewrite(source.anchor.parameters, source.snapshot)
        replica.carry(whole, source.snapshot, parameters)
        away.append(float(np.linalg.norm(parameters - goal)))
    assert away[0] > 10 * away[1] > 100 * away[2]
    assert away[20] < 1e-6 * away[0]
