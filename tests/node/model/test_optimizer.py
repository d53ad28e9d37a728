"""Accumulation counts each microbatch once; inner steps are those of AdamW, SOAP and Muon, whatever they keep."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from node.model.blocks import Linear, packed_weights
from node.model.initialization import floats_of, parameters_of
from node.model.optimizer import REMEMBERED_STEPS, Accumulator, Addition, InnerOptimizer
from node.model.optimizer import learning_rate as learning_rate_at
from node.model.optimizers import soap
from node.model.optimizers.adamw import AdamW, EightBitAdamW
from node.model.optimizers.inner_rule import AtDeadline, ParameterState
from node.model.optimizers.muon import Muon
from node.model.optimizers.packed import BLOCK, PART, EightBit, SplitWeight, dynamic_map, eight_bit_bytes
from node.model.optimizers.soap import Eigenbasis, RefreshClock, Soap, refined
from node.model.passes import build_block_stack
from node.model.shapes import EMBEDDING, HEAD, has_eight_bits
from protocol.manifest.manifest import InnerSection, TrainingSection
from swarm.vocabulary.errors import ResourceExhausted, SkipstoneError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.node.small_manifest import small_manifest


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
        self.vector = nn.Parameter(torch.tensor([1.0, 1.0]))


def microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(PeerId("a"), number)


def gradients(value: float) -> tuple[Tensor, Tensor]:
    return torch.full((2, 2), value), torch.full((2,), -value)


def optimizer(*accumulators: Accumulator, **inner: Any) -> InnerOptimizer:
    section = {"learning_rate": 0.1, "weight_decay": 0.2, **inner}
    schedule = {"kind": "constant", "warmup_steps": 0, "total_steps": 1}
    manifest = small_manifest(training__inner=section, training__schedule=schedule)
    return InnerOptimizer(manifest, ModuleId(0), accumulators)


def mean_of(accumulator: Accumulator) -> list[Tensor | None]:
    accumulator.hand_over_mean()
    return [parameter.grad for parameter in accumulator.parameters]


@given(st.lists(st.integers(0, 5), max_size=20))
def test_each_microbatch_counts_once_whatever_is_repeated(numbers: list[int]) -> None:
    accumulator = Accumulator(TwoParameters())
    additions = [accumulator.add(microbatch(number), 32, gradients(float(number))) for number in numbers]
    distinct = set(numbers)
    assert additions.count(Addition.ADDED) == accumulator.visits == len(distinct)
    assert additions.count(Addition.DUPLICATE) == len(numbers) - len(distinct)
    assert accumulator.tokens == 32 * len(distinct)
    matrix, vector = mean_of(accumulator)
    if not distinct:
        assert matrix is None
        assert vector is None
        return
    mean = sum(distinct) / len(distinct)
    torch.testing.assert_close(matrix, torch.full((2, 2), mean))
    torch.testing.assert_close(vector, torch.full((2,), -mean))


def test_a_step_is_the_mean_over_labels_however_many_each_microbatch_has() -> None:
    """Each gradient is of a mean over 32 tokens, so 1/32 of the sum over its labels."""
    accumulator = Accumulator(TwoParameters())
    for number, (labels, each) in enumerate([(4, 2.0), (20, 5.0), (1, 7.0)]):
        accumulator.add(microbatch(number), 32, gradients(each * labels / 32), labels)
    accumulator.add(microbatch(3), 32, gradients(9.0), 8)
    assert accumulator.retract(microbatch(3), 32, gradients(9.0), 8)
    accumulator.promise(microbatch(4), 32, 16)
    accumulator.break_promise(microbatch(4), 32, 16)
    assert (accumulator.tokens, accumulator.labels) == (96, 25)
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), (4 * 2.0 + 20 * 5.0 + 7.0) / 25))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    accumulator = Accumulator(TwoParameters())
    accumulator.add(microbatch(0), 32, gradients(2.0))
    matrix, vector = gradients(1.0)
    vector[1] = bad
    assert accumulator.add(microbatch(1), 32, (matrix, vector)) is Addition.NOT_FINITE
    assert (accumulator.visits, accumulator.tokens) == (1, 32)
    assert not accumulator.has(microbatch(1))
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), 2.0))


def test_the_gradients_handed_in_are_not_kept_or_changed() -> None:
    accumulator = Accumulator(TwoParameters())
    mine = gradients(1.0)
    accumulator.add(microbatch(0), 1, mine)
    accumulator.add(microbatch(1), 1, gradients(3.0))
    assert torch.equal(mine[0], torch.ones(2, 2))


def test_microbatches_of_recent_steps_are_still_known_and_old_ones_forgotten() -> None:
    accumulator = Accumulator(TwoParameters())
    inner = optimizer(accumulator)
    for number in range(REMEMBERED_STEPS + 1):
        accumulator.add(microbatch(number), 1, gradients(1.0))
        inner.step()
    assert accumulator.add(microbatch(REMEMBERED_STEPS), 1, gradients(1.0)) is Addition.DUPLICATE
    assert accumulator.has(microbatch(1))
    assert not accumulator.has(microbatch(0))
    assert accumulator.visits == 0


def test_two_parts_have_their_own_visits_and_are_clipped_as_one() -> None:
    embedding, head = TwoParameters(), TwoParameters()
    accumulators = Accumulator(embedding), Accumulator(head)
    inner = optimizer(*accumulators, clip_norm=1e9)
    accumulators[0].add(microbatch(0), 64, gradients(4.0))
    assert not inner.due
    for number in range(2):
        accumulators[1].add(microbatch(number), 32, gradients(4.0))
    assert inner.due
    figures = inner.step()
    assert figures.visits == (1, 2)
    assert figures.gradient_norm == pytest.approx(4.0 * math.sqrt(12))
    assert not inner.due
    assert torch.equal(embedding.matrix, head.matrix)


def test_a_step_without_any_visit_is_a_mistake() -> None:
    with pytest.raises(SkipstoneError):
        optimizer(Accumulator(TwoParameters())).step()


def test_what_is_taken_back_after_the_step_makes_the_next_one_smaller() -> None:
    accumulator = Accumulator(TwoParameters())
    inner = optimizer(accumulator)
    accumulator.add(microbatch(0), 32, gradients(2.0))
    inner.step()
    assert accumulator.retract(microbatch(0), 32, gradients(2.0))
    assert (accumulator.visits, accumulator.tokens) == (-1, -32)
    assert mean_of(accumulator)[0] is None
    accumulator.add(microbatch(1), 32, gradients(3.0))
    accumulator.add(microbatch(2), 32, gradients(7.0))
    assert (accumulator.visits, accumulator.tokens) == (1, 32)
    torch.testing.assert_close(mean_of(accumulator)[0], torch.full((2, 2), 8.0))


SHAPES = ((6, 10), (10, 6), (6, 6))


def section(**keys: Any) -> InnerSection:
    return InnerSection(name="soap", **{"refresh_steps": 4, "refresh_lag": 2, **keys})


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(gradient_of(shape, -1)) for shape in SHAPES]


def gradient_of(shape: tuple[int, ...], step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * step + 31 * shape[0] + shape[1] + 10**6)
    return torch.randn(shape, generator=numbers) * torch.logspace(0, -2, shape[1])


class Lane:
    """Idle time that computes so many chunks of all that waits after each step."""

    def __init__(self, chunks: int = 0, refuses: bool = False) -> None:
        self.waiting: list[Iterator[None]] = []
        self.computed = 0
        self.cancelled = 0
        self._chunks, self._refuses = chunks, refuses

    def submit(self, work: Iterator[None], name: str) -> Handle:
        if self._refuses:
            raise ResourceExhausted("too much waits")
        self.waiting.append(work)
        return Handle(self, work, name)

    def idle(self) -> None:
        left = self._chunks
        for work in self.waiting:
            while left and next(work, self) is not self:
                left -= 1
                self.computed += 1


class Handle(AtDeadline):
    def __init__(self, lane: Lane, work: Iterator[None], name: str) -> None:
        super().__init__(work, name)
        self._lane = lane

    def cancel(self) -> None:
        self._lane.cancelled += 1
        super().cancel()


def trained(
    inner: InnerSection, steps: int, lane: Lane | None = None, own: list[nn.Parameter] | None = None
) -> tuple[list[nn.Parameter], Soap]:
    own, lane = own or parameters(), lane or Lane()
    optimizer = Soap(own, inner, lane.submit)
    for step in range(steps):
        move(optimizer, own, step)
        lane.idle()
    return own, optimizer


def move(optimizer: Soap | AdamW, own: list[nn.Parameter], step: int) -> None:
    for parameter in own:
        parameter.grad = gradient_of(tuple(parameter.shape), step)
    optimizer.step(0.01)


@pytest.mark.parametrize("lane", [Lane(chunks=1), Lane(chunks=7), Lane(chunks=1000), Lane(refuses=True)])
def test_idle_time_changes_nothing_but_when_it_is_computed(lane: Lane) -> None:
    at_deadline, _ = trained(section(), 20)
    own, _ = trained(section(), 20, lane)
    assert all(torch.equal(mine, other) for mine, other in zip(own, at_deadline, strict=True))


def test_all_of_it_can_be_computed_in_idle_time_and_is_given_up_when_starting_anew() -> None:
    full, none = Lane(chunks=1000), Lane()
    trained(section(), 20, full)
    trained(section(), 20, none)
    assert full.computed > 3 * 4 * 3
    assert (none.computed, len(none.waiting)) == (0, len(full.waiting))
    assert all(next(work, None) is None for work in full.waiting)
    lane = Lane()
    _, optimizer = trained(section(), 1, lane)
    optimizer.clear()
    assert (lane.cancelled, optimizer.states) == (len(SHAPES), {})


def test_before_the_first_basis_it_is_adamw() -> None:
    inner = section(refresh_steps=100, refresh_lag=100)
    own, _ = trained(inner, 6)
    theirs = parameters()
    reference = AdamW(theirs, inner)
    for step in range(6):
        move(reference, theirs, step)
    for mine, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_two_steps_with_a_basis_are_those_of_the_paper() -> None:
    """Against the algorithm written down again, in float64, with the eigenvectors that the optimizer found."""
    inner = section(weight_decay=0.0, refresh_steps=50, refresh_lag=1)
    own, optimizer = trained(inner, 1, own=[nn.Parameter(gradient_of((6, 10), -1))])
    mean, variance = torch.zeros(6, 10).double(), torch.zeros(6, 10).double()
    for step in (1, 2):
        before = own[0].detach().double()
        move(optimizer, own, step)
        bases = optimizer.states[own[0]].bases
        left, right = bases["left"].double(), bases["right"].double()
        gradient = gradient_of((6, 10), step).double()
        mean = inner.beta1 * mean + (1 - inner.beta1) * gradient
        variance = inner.beta2 * variance + (1 - inner.beta2) * (left.T @ gradient @ right) ** 2
        steered = (left.T @ mean @ right / (1 - inner.beta1**step)) / (variance / (1 - inner.beta2**step)).sqrt()
        torch.testing.assert_close(own[0].double(), before - 0.01 * left @ steered @ right.T, rtol=1e-4, atol=1e-5)


def test_statistics_are_means_of_the_gradients_products_and_bases_their_eigenvectors() -> None:
    inner = section(refresh_steps=4, refresh_lag=1)
    own, optimizer = trained(inner, 60, own=[nn.Parameter(gradient_of((6, 10), -1))])
    state = optimizer.states[own[0]]
    expected = torch.zeros(10, 10)
    for step in range(60):
        gradient = gradient_of((6, 10), step)
        expected = inner.beta2 * expected + (1 - inner.beta2) * gradient.T @ gradient
    torch.testing.assert_close(state.statistics["right"], expected)
    turned = state.bases["right"].T @ expected @ state.bases["right"]
    assert (turned - turned.diag().diag()).norm() < 0.2 * turned.norm()


@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("at", range(1, 14))
def test_a_restored_state_goes_on_as_if_nothing_had_been(at: int, lag: int) -> None:
    whole, _ = trained(section(refresh_lag=lag), 20)
    own, optimizer = trained(section(refresh_lag=lag), at, Lane(chunks=2))
    other = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    resumed = Soap(other, section(refresh_lag=lag))
    for mine, parameter in zip(own, other, strict=True):
        saved = optimizer.exported(optimizer.states[mine])
        shapes = {slot: tuple(tensor.shape) for slot, tensor in saved.tensors.items()}
        assert shapes == resumed.slots(parameter, saved.steps)
        copies = ParameterState(saved.steps, {slot: tensor.clone() for slot, tensor in saved.tensors.items()})
        resumed.states[parameter] = resumed.restored(parameter, copies)
    for step in range(at, 20):
        move(resumed, other, step)
    assert all(torch.equal(mine, expected) for mine, expected in zip(other, whole, strict=True))


@pytest.mark.parametrize("value", [0.0, 1e-25, 1.0, 1e25])
def test_no_gradient_breaks_a_step(value: float) -> None:
    own = parameters()
    before = [parameter.detach().clone() for parameter in own]
    optimizer = Soap(own, section())
    for _ in range(12):
        for parameter in own:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(0.01)
    for parameter, start in zip(own, before, strict=True):
        assert (parameter - start).abs().max() < 12 * 0.01 * 12


def test_a_refresh_that_fails_leaves_the_basis(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(AtDeadline):
        def finish(self) -> None:
            raise torch.OutOfMemoryError("none left")

    own = parameters()
    optimizer = Soap(own, section(), Failing)
    for step in range(8):
        move(optimizer, own, step)
    assert all(torch.equal(optimizer.states[p].bases["left"], torch.eye(len(p))) for p in own)
    assert "keeping the old SOAP basis" in caplog.text


@given(st.integers(1, 30), st.data())
def test_refreshes_come_at_their_pace_and_never_two_at_a_time(every: int, data: st.DataObject) -> None:
    lag, offset = data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1))
    clock = RefreshClock(every, lag, offset)
    begun = [step for step in range(1, 6 * every + 2) if clock.begun(step) == step]
    assert begun[0] == 1
    assert all(later - earlier >= lag for earlier, later in pairwise(begun))
    assert all(later - earlier == every for earlier, later in pairwise(begun[1:]))
    assert begun[1] <= lag + every
    assert all(clock.due(step) == clock.begun(step) + lag for step in range(1, 40))


def test_it_moves_parameters_as_pytorchs_own_class_does() -> None:
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 3))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    inner = InnerSection(weight_decay=0.1)
    decays = (inner.weight_decay, 0.0, 4 * inner.weight_decay)
    groups = [{"params": [each], "weight_decay": decay} for each, decay in zip(theirs, decays, strict=True)]
    reference = torch.optim.AdamW(groups, betas=(inner.beta1, inner.beta2), eps=inner.epsilon, fused=True)
    optimizer = AdamW(own, inner)
    optimizer.rates = {own[2]: 1 / 4}
    for step in range(1, 6):
        for mine, other in zip(own, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        if step == 2:
            own[2].grad = theirs[2].grad = None
        for group, factor in zip(reference.param_groups, (1, 1, 1 / 4), strict=True):
            group["lr"] = 0.01 / step * factor
        reference.step()
        optimizer.step(0.01 / step)
        for mine, other in zip(own, theirs, strict=True):
            assert torch.equal(mine, other)
    assert [optimizer.states[parameter].steps.item() for parameter in own] == [5, 5, 4]


def result_of(statistics: Tensor, basis: Tensor | None = None, iterations: int = 1) -> tuple[Eigenbasis | None, int]:
    work, chunks = refined(statistics, torch.eye(len(statistics)) if basis is None else basis, iterations), 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, chunks
        chunks += 1


def statistics_of(side: int, decay: float = 4.0) -> Tensor:
    turn = torch.linalg.qr(torch.randn(side, side, generator=torch.Generator().manual_seed(side))).Q
    return turn @ torch.diag(torch.logspace(0, -decay, side)) @ turn.T


@pytest.mark.parametrize("width", [8, 13, 1000])
def test_iterations_come_to_the_eigenvectors(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "_CHUNK_OPERATIONS", {"cpu": 4 * 40**2 * width})
    statistics = statistics_of(40)
    found, chunks = result_of(statistics, iterations=30)
    vectors = found.vectors
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(40), rtol=0, atol=1e-5)
    values = torch.linalg.eigvalsh(statistics).flip(0)
    torch.testing.assert_close((vectors.T @ statistics @ vectors).diag(), values, rtol=0.02, atol=1e-5)
    assert chunks >= 40 // width


def test_one_iteration_is_a_product_and_a_qr_decomposition_in_an_order_that_is_returned() -> None:
    statistics = statistics_of(20, decay=1.0)
    basis = torch.linalg.eigh(statistics + 0.01).eigenvectors
    found, _ = result_of(statistics, basis)
    expected = torch.linalg.qr(statistics.double() @ basis.double()[:, found.order]).Q
    torch.testing.assert_close(found.vectors.abs().double(), expected.abs(), rtol=0, atol=1e-3)
    found, _ = result_of(torch.diag(torch.tensor([1.0, 9.0, 4.0])))
    assert found.order.tolist() == [1, 2, 0]
    torch.testing.assert_close(found.vectors.abs(), torch.eye(3)[:, [1, 2, 0]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 3])
def test_few_directions_keep_the_others_orthonormal(rank: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "_CHUNK_OPERATIONS", {"cpu": 1})
    few = torch.randn(50, rank, generator=torch.Generator().manual_seed(5))
    found, _ = result_of(few @ few.T * scale, iterations=3)
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(50), rtol=0, atol=1e-3)
    largest = few.T @ found.vectors[:, :rank]
    torch.testing.assert_close(largest.norm(), few.norm(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_a_matrix_that_says_nothing_gives_nothing(value: float) -> None:
    assert result_of(torch.full((30, 30), value))[0] is None


INNER = InnerSection(weight_decay=0.1)


def moved(rule: AdamW | EightBitAdamW, parameter: nn.Parameter, first: int, count: int) -> None:
    for step in range(first, first + count):
        parameter.grad = gradient_of(tuple(parameter.shape), step)
        rule.step(1e-3)


@pytest.mark.parametrize(("shape", "steps"), [((64, 96), 50), ((3, PART // 2 + 11), 1)])
def test_it_moves_a_matrix_nearly_as_float32_moments_do(shape: tuple[int, int], steps: int) -> None:
    torch.manual_seed(1)
    before = torch.randn(shape)
    own, theirs = nn.Parameter(before.clone()), nn.Parameter(before.clone())
    moved(rule := EightBitAdamW([own], INNER), own, 0, steps)
    moved(AdamW([theirs], INNER), theirs, 0, steps)
    off = (own - theirs).norm() / (theirs - before).norm()
    assert torch.equal(own, theirs) if steps == 1 else 1e-4 < off < 0.05  # at first they are the gradient's alone
    assert rule.states[own].steps == steps


@pytest.mark.parametrize("kind", [AdamW, EightBitAdamW])
def test_split_weights_are_moved_as_plain_ones(kind: type[AdamW] | type[EightBitAdamW]) -> None:
    torch.manual_seed(2)
    plain = nn.Parameter(torch.randn(3, PART // 2 + 11))
    shell = nn.Parameter(torch.full((), math.nan).expand(plain.shape))
    one, other = kind([plain], INNER), kind([shell], INNER)
    other.packed = {shell: SplitWeight(plain.detach())}
    for rule, parameter in ((one, plain), (other, shell)):
        moved(rule, parameter, 0, 3)
    assert torch.equal(other.packed[shell].copied(), plain)
    assert one.exported(one.states[plain]).steps == other.exported(other.states[shell]).steps == 3


def test_the_embedding_vectors_and_small_matrices_keep_float32() -> None:
    assert has_eight_bits(HEAD, (257, 64))
    assert has_eight_bits("model.layers.0.mlp.up_proj.weight", (64, 64))
    assert not has_eight_bits(EMBEDDING, (257, 64))
    assert not has_eight_bits("model.layers.0.mlp.up_proj.weight", (63, 64))
    assert not has_eight_bits("model.norm.weight", (8192,))


@pytest.mark.parametrize("name", ["muon", "soap", "adamw"])
def test_all_that_blocks_write_moves_as_far_as_one_matrix(name: str) -> None:
    manifest = small_manifest(training__inner={"name": name, "weight_decay": 0.0})
    accumulator = Accumulator(part := build_block_stack(manifest, ModuleId(1)))
    before = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
    accumulator.add(microbatch(1), 32, [torch.ones_like(parameter) for parameter in accumulator.parameters])
    InnerOptimizer(manifest, ModuleId(1), (accumulator,)).step()
    attention = "model.layers.1.self_attn.{}_proj.weight"
    read, written = (part.get_parameter(n) - before[n] for n in (attention.format("q"), attention.format("o")))
    assert read.abs().max() > 0
    torch.testing.assert_close(2 * sum(manifest.stages.blocks) * written, read)


@pytest.mark.parametrize(("staleness", "look_ahead", "each"), [(1, 1.0, 0), (2, 0.5, 0), (3, 0.0, 0), (2, 1.0, 2)])
def test_with_late_gradients_parameters_are_ahead_by_the_last_change(
    staleness: int, look_ahead: float, each: int
) -> None:
    inner = {"name": "muon", "look_ahead": look_ahead, "learning_rate": 0.01}
    growing = {"training__inner": inner, "training__staleness_steps": each}
    runs = [small_manifest(training__staleness=late, **growing) for late in (0, staleness)]
    parts = [build_block_stack(manifest, ModuleId(1)) for manifest in runs]
    sums = [Accumulator(part) for part in parts]
    on_time, late = (InnerOptimizer(m, ModuleId(1), (total,)) for m, total in zip(runs, sums, strict=True))
    last = [parameter.detach().clone() for parameter in parts[0].parameters()]
    for number in range(4):
        for total in sums:
            total.add(microbatch(number), 32, [torch.full_like(parameter, number % 3 - 0.8) for parameter in last])
        on_time.step()
        late.step()
        by = look_ahead * (min(staleness, (number + 1) // each) if each else staleness)
        for place, ahead, before in zip(*(part.parameters() for part in parts), last, strict=True):
            torch.testing.assert_close(ahead, place + by * (place - before), rtol=1e-4, atol=1e-6)
            before.copy_(place.detach())
    late.start_anew(0, 0)
    new = [parameter.detach().fill_(1.0) for parameter in parts[1].parameters()]
    sums[1].add(microbatch(9), 32, [torch.zeros_like(parameter) for parameter in new])
    late.step()
    assert all((parameter - 1).abs().max() < 0.01 for parameter in new), "nothing old is taken back"
    assert late.state_bytes - on_time.state_bytes == 4 * sum(p.numel() for p in new) * (look_ahead > 0)


MUON_INNER = InnerSection(name="muon", weight_decay=0.1)


def test_it_moves_matrices_as_pytorchs_own_class_does_up_to_its_bfloat16() -> None:
    torch.manual_seed(1)
    own = [nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40, 24)), nn.Parameter(torch.zeros(40, 24))]
    before = [parameter.detach().clone() for parameter in own]
    theirs = [nn.Parameter(parameter.clone()) for parameter in before]
    groups = [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.01 / 4, "weight_decay": 0.4}]
    plain = {"momentum": 0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}  # orthogonalizes what it is given
    reference = torch.optim.Muon(groups, lr=0.01, weight_decay=0.1, **plain)
    optimizer, means = Muon(own, MUON_INNER), [torch.zeros_like(parameter) for parameter in own]
    optimizer.rates = {own[2]: 1 / 4}
    for step in range(5):
        own[1].grad = theirs[1].grad = None
        for mine, other, mean in list(zip(own, theirs, means, strict=True))[:: 1 + (step == 2)]:
            mine.grad = torch.randn_like(mine)
            other.grad = 0.2 * mine.grad + 0.8 * mean.lerp_(mine.grad, 0.05)
        reference.step()
        optimizer.step(0.01)
    for mine, other, start in zip(own, theirs, before, strict=True):
        assert (mine - other).norm() < 0.03 * (mine - start).norm()
    assert [optimizer.states[parameter].steps for parameter in own] == [5, 4, 5]


@pytest.mark.parametrize("matrix", [torch.zeros(3, 5), torch.full((3, 5), 1e-30), torch.full((3, 5), 1e15)])
def test_a_degenerate_gradient_moves_within_bounds(matrix: torch.Tensor) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = Muon([parameter], MUON_INNER)
    parameter.grad = matrix
    optimizer.step(0.1)
    assert (parameter - 0.99).abs().max() <= 0.1 * 0.2 * 5**0.5 * 1.25


def training(kind: str, warmup: int, total: int, final: float = 0.1, peak: float = 0.5) -> TrainingSection:
    schedule: dict[str, Any] = {"kind": kind, "warmup_steps": warmup, "total_steps": total, "final_ratio": final}
    return small_manifest(training__schedule=schedule, training__inner={"learning_rate": peak}).training


def learning_rate(section: TrainingSection, step: float) -> float:
    return learning_rate_at(section, step * section.inner_tokens)


@pytest.mark.parametrize(
    ("kind", "warmup", "rates"),
    [
        ("cosine", 10, {1: 0.05, 2: 0.1, 9: 0.45, 10: 0.5, 60: 0.275, 110: 0.05, 10_000: 0.05}),
        ("linear", 10, {10: 0.5, 60: 0.275, 110: 0.05, 10_000: 0.05}),
        ("constant", 10, {10: 0.5, 60: 0.5, 110: 0.5, 10_000: 0.5}),
        ("linear", 0, {1: 0.5 * (0.1 + 0.9 * 109 / 110)}),
        ("cosine", 0, {27.5: 0.05 + 0.225 * (1 + 2**-0.5)}),
    ],
)
def test_the_rate_rises_to_its_peak_falls_and_stays(kind: str, warmup: int, rates: dict[float, float]) -> None:
    section = training(kind, warmup, 110)
    assert [learning_rate(section, step) for step in rates] == pytest.approx([*rates.values()])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(0, 1),
    st.integers(1, 400),
)
def test_it_never_leaves_its_bounds_and_never_rises_after_the_warm_up(
    kind: str, warmup: int, length: int, final: float, step: int
) -> None:
    section = training(kind, warmup, warmup + length, final)
    rate, following = learning_rate(section, step), learning_rate(section, step + 1)
    assert 0 <= rate <= 0.5 * (1 + 1e-12)
    assert (following > rate) == (step < warmup) or following == pytest.approx(rate)


CPU = torch.device("cpu")


def packed(values: Tensor, *, is_signed: bool) -> EightBit:
    held = EightBit(tuple(values.shape), CPU, is_signed=is_signed)
    held.store(values)
    return held


def spread(shape: tuple[int, ...], seed: int, *, is_signed: bool) -> Tensor:
    """Elements of sizes over six decades within each block, as moments are, and some zeros."""
    numbers = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=numbers) * 10 ** (-6 * torch.rand(shape, generator=numbers))
    values[torch.rand(shape, generator=numbers) < 0.05] = 0
    return values if is_signed else values.square()


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_values_are_those_of_the_paper(is_signed: bool) -> None:
    values = torch.tensor(dynamic_map(is_signed=is_signed), dtype=torch.float64)
    assert len(values) == 256
    assert bool((values.diff() > 0).all())
    assert values[-1] == 1
    top = values[(values > 0.1) & (values < 1)]
    assert len(top) == (64 if is_signed else 128), "the largest decade has as many as all others together"
    assert top.diff().max() == pytest.approx(0.9 / len(top)) == top.diff().min()
    assert values[values > 0].min() == pytest.approx(5.5e-7 if is_signed else 1e-7)
    assert (0 in values) == is_signed
    assert values.min() == (pytest.approx(-0.99297, abs=1e-5) if is_signed else pytest.approx(1e-7))


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (5, 1000), (3, 7)])
def test_an_element_is_off_by_half_a_step_of_its_decade_at_most(shape: tuple[int, ...], is_signed: bool) -> None:
    values = spread(shape, 1, is_signed=is_signed)
    back = packed(values, is_signed=is_signed).copied()
    assert back.shape == values.shape
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: values.numel()]
    quotients, errors = (values.flatten() / scales).abs(), ((back - values).flatten() / scales).abs()
    for decade in range(7):
        inside = (quotients > 10.0 ** (decade - 7)) & (quotients <= 10.0 ** (decade - 6))
        steps = 2**decade if is_signed else 2 ** (decade + 1)
        half = 0.5 * 0.9 * 10.0 ** (decade - 6) / steps
        # Between the steps of two decades, and at the negative end, where there is no -1, it may be a little more.
        assert bool((errors[inside] <= 1.6 * half + 1e-9).all()), decade
    largest = quotients == 1
    assert bool(largest.any())
    assert bool((errors[largest] == 0).all()), "the largest of a block is kept exactly"


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_was_unpacked_is_packed_to_the_same(is_signed: bool) -> None:
    once = packed(spread((300, 77), 2, is_signed=is_signed), is_signed=is_signed).copied()
    assert torch.equal(packed(once, is_signed=is_signed).copied(), once)


def test_a_variance_never_becomes_nothing() -> None:
    values = torch.full((2 * BLOCK,), 1e-12)
    values[0] = 1.0
    back = packed(values, is_signed=False).copied()
    assert float(back[1:BLOCK].min()) == pytest.approx(1e-7), "rounded up: what is divided by it moves too little"
    assert bool((back[BLOCK:] == values[BLOCK:]).all())
    assert bool((packed(torch.zeros(BLOCK), is_signed=False).copied() == 0).all())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_signed", [True, False])
def test_what_is_not_finite_is_seen_and_stays_in_its_block(wrong: float, is_signed: bool) -> None:
    values = spread((4, BLOCK), 3, is_signed=is_signed)
    values[1, 5] = wrong
    back = packed(values, is_signed=is_signed).copied()
    assert not bool(back[1].isfinite().any())
    assert torch.equal(back[[0, 2, 3]], packed(values[[0, 2, 3]], is_signed=is_signed).copied())


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 3e38])
def test_sizes_at_the_ends_of_float32_come_back(size: float) -> None:
    values = torch.linspace(-1, 1, BLOCK).mul(size)
    back = packed(values, is_signed=True).copied()
    assert bool(back.isfinite().all())
    assert float((back - values).abs().max()) <= 0.02 * size + 2e-45


def test_parts_are_read_and_written_by_themselves() -> None:
    values = spread((6 * BLOCK + 100,), 4, is_signed=True)
    held, whole = EightBit((values.numel(),), CPU, is_signed=True), packed(values, is_signed=True)
    for part in held.parts(2 * BLOCK):
        held.write(part, values[part])
    for part in held.parts(3 * BLOCK):
        assert torch.equal(held.read(part), whole.copied()[part])
    with pytest.raises(AssertionError, match="where a block does"):
        held.read(slice(1, BLOCK))


@pytest.mark.parametrize("elements", [1, BLOCK, BLOCK + 1, 2**16])
def test_the_bytes_are_those_that_are_reckoned_with(elements: int) -> None:
    assert EightBit((elements,), CPU, is_signed=True).nbytes == eight_bit_bytes(elements)


SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.17549435e-38)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def numbers() -> Tensor:
    """Any bits, special ones, and those half way between two bfloat16 numbers, next to even and to odd ones."""
    generator = torch.Generator().manual_seed(1)
    any_bits = torch.randint(-(2**31), 2**31, (65_536 - len(SPECIAL) - 4,), generator=generator).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808000 - 2**31, 0x3F818000 - 2**31]).to(torch.int32)
    return torch.cat([torch.tensor(SPECIAL), ties.view(torch.float32), any_bits.view(torch.float32)]).view(256, 256)


def test_every_number_comes_back_to_the_bit() -> None:
    matrix = numbers()
    split = SplitWeight(matrix)
    assert torch.equal(bits_of(split.copied()), bits_of(matrix))
    assert torch.equal(bits_of(split.unpacked()), bits_of(matrix))
    assert torch.equal(bits_of(split.read(slice(100, 1000))), bits_of(matrix).view(-1)[100:1000])
    split.write(slice(7, 11), torch.tensor([1.5, -2.25, 1 / 3, 1e-20]))
    assert split.copied().view(-1)[7:11].tolist() == torch.tensor([1.5, -2.25, 1 / 3, 1e-20]).tolist()
    assert torch.equal(bits_of(split.read(slice(11, 65_536))), bits_of(matrix).view(-1)[11:])


def test_the_upper_half_is_the_nearest_bfloat16_number() -> None:
    matrix = numbers()
    upper, cast = SplitWeight(matrix).fresh(), matrix.bfloat16()
    known = matrix.isfinite() & (bits_of(matrix) & 0xFFFF != 0x8000)
    assert bool(known.float().mean() > 0.9)
    assert torch.equal(upper.detach()[known], cast[known])
    ties = (bits_of(matrix) & 0xFFFF == 0x8000) & matrix.isfinite() & (matrix.abs() < 1e38)
    assert bool(ties.any())
    assert bool((upper.detach()[ties].float().abs() > matrix[ties].abs()).all())
    assert bool(upper.detach()[matrix.isinf()].isinf().all())


def test_a_graph_from_before_a_change_is_refused() -> None:
    split = SplitWeight(torch.randn(4, 8))
    old = torch.nn.functional.linear(torch.randn(3, 8).bfloat16().requires_grad_(), split.fresh()).float().sum()
    split.write(slice(0, 4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_a_layer_computes_and_learns_as_with_a_copy() -> None:
    layer = Linear(8, 4)
    torch.nn.init.normal_(layer.weight)
    other, values = copy.deepcopy(layer), torch.randn(3, 8).bfloat16()
    wanted = layer(values)
    layer.split()
    assert layer.weight.shape == other.weight.shape
    assert layer.weight.untyped_storage().nbytes() == 4
    assert bool(layer.weight.isnan().all()), "whoever reads the parameter itself is not given old numbers"
    assert torch.equal(layer(values), wanted)
    (found,) = torch.autograd.grad(layer(values).float().sum(), [layer.matrix(torch.bfloat16)])
    (expected,) = torch.autograd.grad(other(values).float().sum(), [other.weight])
    assert torch.equal(found.float(), expected)
    assert list(packed_weights(layer)) == [layer.weight]
    (held,) = floats_of(layer).values()
    assert isinstance(held, SplitWeight)
    assert torch.equal(held.copied(), parameters_of(other)["weight"])
