"""Attention within documents is attention with a mask between them, and the rest of a stage knows of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.model.document_attention import document_attention, kernel_for
from node.model.parts import BlockStack, build_block_stack, build_embedding, build_head
from node.model.passes import backward, forward
from swarm.vocabulary.types import ModuleId
from tests.node.small_manifest import small_manifest

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
    for ours, theirs in zip(
        with_gradients(document_attention, documents), with_gradients(masked, documents), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("documents", [(), (3,), (5, 4), (9, -1), (8, 0)])
def test_documents_that_do_not_fill_the_row(documents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fill"):
        document_attention(vectors(4, 8, 1), vectors(2, 8, 2), vectors(2, 8, 3), documents)


def test_several_rows_have_no_documents() -> None:
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


# ---- a stage ---------------------------------------------------------------------------------------------------------


def visited(stack: BlockStack, hidden: Tensor, documents: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Output, gradient of the input, gradients of the parameters."""
    visit = forward(stack, hidden, documents)
    found = backward(stack, visit, torch.ones_like(visit.result))
    assert found.source is not None
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


def test_the_loss_of_packed_documents_is_that_of_each_by_tokens() -> None:
    documents = (5, 16, 2)
    embedding, stack, head = build_embedding(MANIFEST), build_block_stack(MANIFEST, ModuleId(1)), build_head(MANIFEST)
    drawn = torch.randint(0, 257, (1, sum(documents) + 1), generator=torch.Generator().manual_seed(2))
    tokens, labels = drawn[:, :-1], drawn[:, 1:]

    def loss(tokens: Tensor, labels: Tensor, documents: tuple[int, ...]) -> Tensor:
        found: Tensor = head(stack(embedding(tokens, documents), documents), labels)
        return found

    pieces = zip(tokens.split(documents, dim=1), labels.split(documents, dim=1), strict=True)
    apart = sum(loss(*piece, ()) * piece[0].numel() for piece in pieces) / sum(documents)
    torch.testing.assert_close(loss(tokens, labels, documents), apart, atol=1e-5, rtol=1e-5)
