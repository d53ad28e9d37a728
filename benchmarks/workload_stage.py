"""A real stage: time a token of whole documents against full rows and a mask, and the cost model on held-out visits.

A module of one block, forward and backward, on one thread, arms in turns; times are the processor's, without what
other processes take of the core. Documents are log-normal, packed as a data node packs them. `rows`: causal rows of S
(today's stream). `mask`: one row of T with a dense mask between documents, as frameworks do that know no documents (on
fewer tokens, since it needs T x T bytes). `documents`: each by itself.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.packing import Task, log_normal, ours
from node.model.parts import build_block_stack
from node.model.passes import backward, forward
from protocol.manifest.manifest import Manifest, manifest_from_table
from protocol.manifest.model import quadratic_share
from swarm.vocabulary.types import ModuleId
from swarm.workload.visit_cost import VisitCost

BAR_TIME: Final = 0.75
BAR_ERROR: Final = 0.06
WARM_UP: Final = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int = 64
    sequence: int = 8192
    rows: int = 4
    repeats: int = 5
    visits: int = 120
    """Of the cost model; a fifth of them is held out."""


def manifest_of(sizes: Sizes) -> Manifest:
    """A run of whole documents with one block a stage."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "workload",
            "model": {
                "vocabulary": 257,
                "hidden": sizes.hidden,
                "heads": 4,
                "kv_heads": 4,
                "feed_forward": 8 * sizes.hidden // 3,
                "sequence": sizes.sequence,
                "attention": "documents",
            },
            "stages": {"blocks": [0, 1]},
            "training": {"rows": sizes.rows, "inner_tokens": sizes.rows * sizes.sequence},
        }
    )


class Masked(nn.Module):
    """The same block, with a dense mask between documents in the place of what we compute."""

    def __init__(self, stack: nn.Module, documents: Sequence[int]) -> None:
        super().__init__()
        self.stack = stack
        of = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        self.register_buffer("mask", (of[:, None] == of[None, :]).tril_(), persistent=False)

    def forward(self, hidden: Tensor, documents: tuple[int, ...]) -> Tensor:
        import node.model.blocks as blocks

        def masked(queries: Tensor, keys: Tensor, values: Tensor, _: Sequence[int]) -> Tensor:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask)

        known, blocks.document_attention = blocks.document_attention, masked
        try:
            output: Tensor = self.stack(hidden, documents)
        finally:
            blocks.document_attention = known
        return output


def visit_s(part: nn.Module, hidden: Tensor, documents: tuple[int, ...]) -> float:
    begun = time.process_time()
    visit = forward(part, hidden, documents)
    found = backward(part, visit, torch.ones_like(visit.result))
    assert found.source is not None
    return time.process_time() - begun


def measure_stage(sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    manifest = manifest_of(sizes)
    stack, share = build_block_stack(manifest, ModuleId(1)), quadratic_share(manifest.model)
    task = Task(log_normal(), sizes.sequence, manifest.microbatch_tokens, share, 2 * sizes.repeats)
    packed = [one.documents for one in ours(task).packed]
    arms = _arms(stack, packed, sizes, tell)
    return {"arms": arms, "cost_model": _cost_model(stack, share, sizes, tell)}


def _arms(stack: nn.Module, packed: list[tuple[int, ...]], sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    rows = torch.randn(sizes.rows, sizes.sequence, sizes.hidden)
    samples: dict[str, list[float]] = {"rows": [], "mask": [], "documents": []}
    for repeat in range(WARM_UP + sizes.repeats):
        documents = packed[repeat]
        short = _cut(packed[sizes.repeats + repeat % sizes.repeats], sizes.sequence)
        one = torch.randn(1, sum(documents), sizes.hidden)
        less = torch.randn(1, sum(short), sizes.hidden)
        for name, part, hidden, of in (
            ("rows", stack, rows, ()),
            ("mask", Masked(stack, short), less, short),
            ("documents", stack, one, documents),
        ):
            taken_s = visit_s(part, hidden, of) / hidden[..., 0].numel()
            if repeat >= WARM_UP:
                samples[name].append(taken_s)
        shown = ", ".join(f"{name} {1e6 * of[-1]:.1f} us" for name, of in samples.items() if of)
        tell(f"stage, repeat {repeat}: {shown}")
    medians = {name: statistics.median(of) for name, of in samples.items()}
    return {
        "us_a_token": {name: round(1e6 * seconds, 2) for name, seconds in medians.items()},
        "documents_over_rows": round(medians["documents"] / medians["rows"], 3),
        "documents_over_mask": round(medians["documents"] / medians["mask"], 3),
        "bar": BAR_TIME,
    }


def _cut(documents: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """As many of them as have so many tokens; one at least."""
    kept: list[int] = []
    for length in documents:
        if kept and sum(kept) + length > tokens:
            break
        kept.append(length)
    return tuple(kept)


def _cost_model(stack: nn.Module, share: float, sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Microbatches of all shapes: of short documents, of long ones, mixed, large and small. The shorter of two times
    is what a visit takes; the model learns from the first of them, as in a node."""
    model, errors, lengths = VisitCost(share), list[float](), log_normal()
    tokens = sizes.rows * sizes.sequence
    for number in range(sizes.visits):
        most = (sizes.sequence // 16, sizes.sequence // 4, sizes.sequence)[number % 3]
        drawn = [min(most, length) for length in lengths[100 * number :]]
        documents = _cut(tuple(drawn), (tokens // 4, tokens // 2)[number % 2])
        hidden = torch.randn(1, sum(documents), sizes.hidden)
        first_s, second_s = visit_s(stack, hidden, documents), visit_s(stack, hidden, documents)
        shape = sum(documents), sum(length * length for length in documents), len(documents)
        if number % 5 == 4 and number >= sizes.visits // 2:
            errors.append(abs(model.seconds(*shape) / min(first_s, second_s) - 1))
        else:
            model.add(*shape, first_s)
    speed = model.speed()
    found = {
        "mean_error": round(statistics.fmean(errors), 4),
        "median_error": round(statistics.median(errors), 4),
        "held_out": len(errors),
        "quadratic_share": speed.quadratic_share,
        "of_the_manifest": share,
        "bar": BAR_ERROR,
    }
    tell(f"cost model: {found}")
    return found
