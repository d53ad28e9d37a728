"""The model's parts: types, documents, the head's loss in pieces, initial weights. (Logits: `test_generation.py`.)"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import node.model.initialization as initial
from benchmarks.kit import loss_of
from node.data.packing import Microbatch
from node.model import passes, residual
from node.model.document_attention import document_attention, kernel_for
from node.model.initialization import digest_of_tensors, near_normal, parameters_of
from node.model.passes import (
    IGNORED,
    BlockStack,
    HeadSum,
    OneHead,
    SummedLoss,
    backward,
    build_block_stack,
    build_embedding,
    build_head,
    forward,
    loss_alone,
    loss_and_gradient,
)
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import document_cost, quadratic_share
from swarm.vocabulary.types import ModuleId
from tests.kit.hops import hidden_states
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")


def test_bfloat16_is_for_hidden_states_and_float32_for_parameters_and_loss() -> None:
    manifest = small_manifest(model__dtype="bfloat16")
    model = WholeModel(manifest, CPU)
    shape = manifest.training.rows, manifest.model.sequence + 1
    stream = torch.randint(257, shape, generator=torch.Generator().manual_seed(1))
    microbatch = Microbatch(stream[:, :-1], stream[:, 1:], 0.0)
    hidden = model.embedding(microbatch.tokens)
    assert hidden.dtype == torch.bfloat16
    assert model.stacks[0](hidden).dtype == torch.bfloat16
    assert model.head(hidden, microbatch.labels).dtype == torch.float32
    loss, gradients = model.gradients(microbatch)
    assert {gradient.dtype for part in gradients.values() for gradient in part} == {torch.float32}
    assert loss == pytest.approx(loss_of(WholeModel(small_manifest(), CPU), microbatch), abs=0.02)


@pytest.mark.parametrize("module", [ModuleId(0), ModuleId(3), ModuleId(1, 1)])
def test_a_stack_is_built_only_for_a_module_that_is_one(module: ModuleId) -> None:
    with pytest.raises(ValueError, match=str(module)):
        build_block_stack(small_manifest(), module)


def test_stage_0_without_blocks_only_embeds() -> None:
    part = build_embedding(small_manifest(stages__blocks=[0, 1]))
    assert set(parameters_of(part)) == {"model.embed_tokens.weight"}
    tokens = torch.tensor([[0, 256]])
    torch.testing.assert_close(part(tokens)[0], parameters_of(part)["model.embed_tokens.weight"][[0, 256]])


def test_a_document_costs_its_products_and_the_pairs_of_its_tokens() -> None:
    """Two operations a weight, and 2 x hidden for each of d^2 / 2 pairs, twice; in tokens without attention."""
    manifest = small_manifest()
    stack = build_block_stack(manifest, ModuleId(2))
    weights = sum(parameter.numel() for parameter in stack.parameters() if parameter.dim() == 2)
    pairs = 2 * (2 * 16) * 12**2 / 2
    assert document_cost(manifest.model, 12) == pytest.approx(12 + pairs / (2 * weights))
    assert quadratic_share(manifest.model) == 16 / weights


MANIFEST = small_manifest(model__attention="documents")
HIDDEN, LONGEST = MANIFEST.model.hidden, MANIFEST.model.sequence
lengths = st.lists(st.integers(1, LONGEST), min_size=1, max_size=6).map(tuple)


def masked(queries: Tensor, keys: Tensor, values: Tensor, documents: tuple[int, ...]) -> Tensor:
    """With the whole square, and what lies outside of documents masked."""
    of = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    sees = (of[:, None] == of[None, :]) & torch.ones(len(of), len(of)).tril().bool()
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=sees, enable_gqa=True)


def vectors(heads: int, tokens: int, seed: int) -> Tensor:
    return torch.randn(1, heads, tokens, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def with_gradients(attention: Any, documents: tuple[int, ...]) -> list[Tensor]:
    tokens = sum(documents)
    inputs = [vectors(heads, tokens, heads + seed) for seed, heads in enumerate((4, 2, 2))]
    output = attention(*inputs, documents)
    return [output, *torch.autograd.grad(output, inputs, vectors(4, tokens, 9).detach())]


@settings(deadline=None)
@given(lengths)
def test_it_is_attention_with_a_mask_between_documents(documents: tuple[int, ...]) -> None:
    ours, theirs = (with_gradients(attention, documents) for attention in (document_attention, masked))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("documents", [(), (3,), (5, 4), (9, -1), (8, 0)])
def test_documents_that_do_not_fill_the_row(documents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fill"):
        document_attention(vectors(4, 8, 1), vectors(2, 8, 2), vectors(2, 8, 3), documents)
    rows = vectors(4, 8, 1).expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="do not fill"):
        document_attention(rows, rows, rows, (8,))


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "kernel"),
    [
        ("cpu", torch.float32, 64, "each"),
        ("cpu", torch.bfloat16, 64, "each"),
        ("mps", torch.float32, 64, "each"),
        ("cuda", torch.bfloat16, 64, "variable-length"),
        ("cuda", torch.float16, 256, "variable-length"),
        ("cuda", torch.bfloat16, 12, "block-sparse"),
        ("cuda", torch.bfloat16, 512, "block-sparse"),
        ("cuda", torch.float32, 64, "block-sparse"),
    ],
)
def test_the_kernel_follows_from_device_and_type(device: str, dtype: torch.dtype, head_size: int, kernel: str) -> None:
    assert kernel_for(device, dtype, head_size).value == kernel


def visited(stack: BlockStack, hidden: Tensor, documents: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Output, gradient of the input, gradients of the parameters."""
    visit = forward(stack, hidden, documents)
    found = backward(stack, visit, torch.ones_like(visit.result))
    return visit.result, found.source, *found.parameters


@settings(deadline=None, max_examples=20)
@given(lengths)
def test_packed_documents_are_computed_as_each_by_itself(documents: tuple[int, ...]) -> None:
    """Positions begin anew with each, nothing is seen of another, and gradients add up."""
    stack = build_block_stack(MANIFEST, ModuleId(1))
    hidden = torch.randn(1, sum(documents), HIDDEN, generator=torch.Generator().manual_seed(1))
    output, source, *parameters = visited(stack, hidden, documents)
    alone = [visited(stack, piece, ()) for piece in hidden.split(documents, dim=1)]
    torch.testing.assert_close(output, torch.cat([each[0] for each in alone], dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(source, torch.cat([each[1] for each in alone], dim=1), atol=1e-5, rtol=1e-5)
    for place, gradient in enumerate(parameters, start=2):
        apart = torch.stack([each[place] for each in alone]).sum(dim=0)
        torch.testing.assert_close(gradient, apart, atol=1e-5, rtol=1e-5)


POSITIONS, VOCABULARY, WIDTH = 37, 300, 48
PIECES = pytest.mark.parametrize("positions_at_once", [1, 5, 36, 37, 1000])


class Head:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(POSITIONS, WIDTH, generator=numbers).to(dtype)
        self.matrix = torch.randn(VOCABULARY, WIDTH, generator=numbers)
        self.labels = torch.randint(0, VOCABULARY, (POSITIONS,), generator=numbers)
        self.labels[3::7] = IGNORED

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, matrix = self.hidden.clone().requires_grad_(), self.matrix.clone().requires_grad_()
        loss = F.cross_entropy(F.linear(hidden, matrix.to(hidden.dtype)).float(), self.labels, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, [hidden, matrix])


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@PIECES
@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
@pytest.mark.parametrize("strip", [1, 7 * WIDTH, 2**22])
def test_the_gradients_are_those_of_all_logits_at_once(
    positions_at_once: int, sums: torch.dtype, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "STRIP", strip)
    head = Head()
    before = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(6)).to(sums)
    total = before.clone()
    at_once = positions_at_once * VOCABULARY
    loss, of_hidden = loss_and_gradient(head.hidden, head.matrix, head.labels, at_once, HeadSum(total, 3.0))
    wanted, plain_of_hidden, of_matrix = head.plain()
    assert off(loss, wanted) <= 1e-6
    assert off(of_hidden, plain_of_hidden) <= 1e-5
    assert off((total - before) / 3, of_matrix) <= 1e-5
    assert off(loss_alone(head.hidden, head.matrix, head.labels, at_once), wanted) <= 1e-6


@PIECES
def test_autograd_gets_the_same(positions_at_once: int) -> None:
    head = Head()
    hidden, matrix = head.hidden.clone().requires_grad_(), head.matrix.clone().requires_grad_()
    at_once = positions_at_once * VOCABULARY
    loss = SummedLoss.apply(hidden, matrix, head.labels, at_once) * 0.25  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(loss, [hidden, matrix])
    wanted, *gradients = head.plain()
    assert off(loss.detach(), wanted * 0.25) <= 1e-6
    assert all(off(mine, plain * 0.25) <= 1e-5 for mine, plain in zip(found, gradients, strict=True))


def test_bfloat16_products_and_a_float32_loss() -> None:
    head = Head(torch.bfloat16)
    total = torch.zeros_like(head.matrix)
    narrow = head.matrix.to(torch.bfloat16)
    loss, of_hidden = loss_and_gradient(head.hidden, narrow, head.labels, 5 * VOCABULARY, HeadSum(total, 1.0))
    wanted, plain_of_hidden, of_matrix = head.plain()
    assert loss.dtype is torch.float32
    assert of_hidden.dtype is torch.bfloat16
    assert off(loss, wanted) <= 1e-5
    assert off(of_hidden, plain_of_hidden) <= 0.01
    assert off(total, of_matrix) <= 0.01


@pytest.mark.parametrize("piece", [1, 4, 8])
def test_without_memory_nothing_counts_by_halves(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of that piece, counted from 1, finds no memory for its gradient."""
    add, calls = passes._Workspace.add, itertools.count(1)

    def failing(self: passes._Workspace, of_logits: Tensor, hidden: Tensor) -> None:
        if next(calls) == piece:
            raise MemoryError
        add(self, of_logits, hidden)

    monkeypatch.setattr(passes._Workspace, "add", failing)
    head = Head()
    before = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    total = before.clone()
    with pytest.raises(MemoryError):
        loss_and_gradient(head.hidden, head.matrix, head.labels, 5 * VOCABULARY, HeadSum(total, 3.0))
    assert (total - before).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "model",
    [{}, {"model__tied_embeddings": True}, {"model__residual": 5}, {"model__residual": 5, "model__token_rank": 3}],
)
def test_a_data_nodes_head_adds_the_mean_gradients(model: dict[str, Any]) -> None:
    manifest = small_manifest(**model)
    head = build_head(manifest, build_embedding(manifest))
    hidden = hidden_states(manifest, 4).requires_grad_()
    labels = torch.arange(hidden[..., 0].numel()).reshape(hidden.shape[:2]) % 257
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()]
    found = OneHead(head).loss_into(hidden.detach(), labels, sums, 10)
    loss = F.cross_entropy(head.logits(hidden).flatten(0, 1), labels.flatten())
    of_hidden, *of_parameters = torch.autograd.grad(loss, [hidden, *head.parameters()])
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert off(found.source, of_hidden) <= 1e-5
    assert all(off(mine / 10, plain) <= 1e-5 for mine, plain in zip(sums, of_parameters, strict=True))
    untouched = [total.clone() for total in sums]
    assert torch.equal(OneHead(head).loss_into(hidden.detach(), labels, (), 10).source, found.source)
    assert all(torch.equal(total, before) for total, before in zip(sums, untouched, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e37])
def test_a_head_that_may_overflow_adds_nothing(value: float) -> None:
    manifest = small_manifest()
    head = build_head(manifest)
    passes = OneHead(head)
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4))
    labels = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in head.parameters()]
    with torch.no_grad():
        head.lm_head.weight[256, 3] = value
    assert passes.loss_into(hidden, labels, sums, 10) is None
    assert not any(total.any() for total in sums)
    with torch.no_grad():
        head.lm_head.weight[256, 3] = 0.01
    passes.parameters_changed()
    assert passes.loss_into(hidden, labels, sums, 10) is not None
    assert all(total.any() for total in sums)


def test_a_bfloat16_head_follows_its_matrix() -> None:
    manifest = small_manifest(model__dtype="bfloat16")
    head = build_head(manifest)
    passes = OneHead(head)
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    labels = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    before = passes.loss_into(hidden, labels, (), 1)
    for parameter in head.parameters():
        parameter.data.mul_(1.5)  # which torch does not count, as a fused optimizer's writes
    passes.parameters_changed()
    after, fresh = passes.loss_into(hidden, labels, (), 1), passes.loss(hidden, labels)
    assert after.loss == pytest.approx(fresh, rel=1e-6)
    assert after.loss != pytest.approx(before.loss, rel=1e-6)


@pytest.mark.parametrize(("count", "width"), [(64, 1024), (5, 16), (99, 100), (1, 3)])
def test_directions_of_a_narrow_residual_stream_are_orthonormal(count: int, width: int) -> None:
    rows = residual.directions(7, count, width)
    assert (rows @ rows.T - torch.eye(count)).abs().max() <= 2e-6
    assert not torch.equal(rows, residual.directions(8, count, width))


def test_a_tokens_fixed_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    section, tokens = small_manifest(model__residual=5, model__vocabulary=70_000).model, torch.tensor([[3, 69_999, 3]])
    kept = residual.Residual(section, 3)
    states = kept.begin(torch.zeros(1, 3, 5), tokens)
    assert states.shape[-1] == 5 + 3
    rows = kept.stream(states).rows
    assert torch.equal(rows[0, 0], rows[0, 2])
    assert torch.equal(kept.stream(states.flip(1)).rows.flip(1), rows)
    monkeypatch.setattr(residual, "TABLE_BYTES", 0)
    assert torch.equal(kept.stream(states).rows, rows), "computed anew"
    monkeypatch.setattr(residual, "_CHUNK", 1)
    assert torch.equal(residual.fixed_rows(3, tokens.flatten(), 16), rows[0])
    many = residual.fixed_rows(3, torch.arange(10_000), 16)
    assert many.std().item() == pytest.approx(0.02, rel=0.01)
    assert (many.T @ many / len(many) / 0.02**2 - torch.eye(16)).abs().max() < 0.06
    assert not torch.equal(residual.fixed_rows(4, tokens.flatten(), 16), rows[0])
    golden = [-8_323_175, -2_332_813, 10_500_669]
    assert [round(value / 0.02 / 3**0.5 * 2**24) for value in rows[0, 0, :3].tolist()] == golden


# Of `small_manifest()`. If these change, every run that exists starts from other weights than it says: a new protocol
# version.
GOLDEN_STAGE_0 = "069f6f3de5e1dc2fc4de9e160f64ac0ddc4dd3131432eca27859d9b55ea5139c"
GOLDEN_STAGE_1 = "2f84d63e73a6f68a104b3a99d0b9b81554b76c2c961910f1f0c9fa95835894a2"


def test_initial_weights_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    manifest = small_manifest()
    assert digest_of_tensors(parameters_of(build_embedding(manifest), build_head(manifest))).hex() == GOLDEN_STAGE_0
    assert digest_of_tensors(parameters_of(build_block_stack(manifest, ModuleId(1)))).hex() == GOLDEN_STAGE_1


def test_seed_and_name_give_other_weights_and_chunk_size_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = near_normal(5, "a", (10, 7), 0.3)
    monkeypatch.setattr(initial, "_CHUNK", 9)
    assert torch.equal(near_normal(5, "a", (10, 7), 0.3), whole)
    variants = [(0, "a"), (1, "a"), (0, "b")]
    assert len({tuple(near_normal(*variant, (3,), 1.0).tolist()) for variant in variants}) == 3
    experts = small_manifest(stages__experts=2, model__attention="documents")
    stacks = [build_block_stack(experts, ModuleId(1, expert)) for expert in (0, 1)]
    assert digest_of_tensors(parameters_of(stacks[0])) == digest_of_tensors(parameters_of(stacks[1]))


def test_the_digest_covers_names_shapes_and_every_element() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    changed = torch.zeros(2, 3)
    changed[1, 2] = 1e-30
    others = [
        {"a": torch.zeros(2, 3), "c": torch.zeros(2)},
        {"a": torch.zeros(3, 2), "b": torch.zeros(2)},
        {"a": changed, "b": torch.zeros(2)},
        {"a": torch.zeros(2, 3)},
    ]
    assert len({digest_of_tensors(t) for t in [tensors, *others]}) == 5
    assert digest_of_tensors(dict(reversed(tensors.items()))) == digest_of_tensors(tensors)
