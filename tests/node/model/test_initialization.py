"""Initial weights are the same everywhere: their hash is written down here."""

from __future__ import annotations

import math

import pytest
import torch

import node.model.initialization as initial
from node.model.initialization import digest_of_tensors, near_normal, parameters_of, standard_deviation
from node.model.parts import build_block_stack, build_embedding, build_head
from swarm.vocabulary.types import ModuleId
from tests.node.small_manifest import small_manifest

# Of `small_manifest()`. If these change, every run that exists starts from other weights than it says: a new protocol
# version.
GOLDEN_STAGE_0 = "f3d5b18355d835f773f348055b6dc2ee03ec4f0110630eadac450572b7a0004d"
GOLDEN_STAGE_1 = "357cc2cdd0338ffa68de87f61adcbfe2e122fd90a876e46ad65d33ed54d37d96"


def test_initial_weights_are_the_same_on_every_machine() -> None:
    manifest = small_manifest()
    assert digest_of_tensors(parameters_of(build_embedding(manifest), build_head(manifest))).hex() == GOLDEN_STAGE_0
    assert digest_of_tensors(parameters_of(build_block_stack(manifest, ModuleId(1)))).hex() == GOLDEN_STAGE_1


def test_the_first_numbers_are_written_out() -> None:
    """One number by hand: a sum of four 16-bit integers of the Philox stream, centred and scaled."""
    values = near_normal(0, "a", (2,), 1.0)
    assert values.tolist() == [0.17511853575706482, 0.16137546300888062]


def test_torch_generators_and_threads_have_no_say() -> None:
    torch.manual_seed(1)
    before = digest_of_tensors(parameters_of(build_head(small_manifest())))
    torch.manual_seed(2)
    assert digest_of_tensors(parameters_of(build_head(small_manifest()))) == before


def test_seed_and_name_each_give_other_weights_and_experts_start_alike() -> None:
    variants = [(0, "a"), (1, "a"), (0, "b")]
    assert len({tuple(near_normal(*variant, (3,), 1.0).tolist()) for variant in variants}) == 3
    experts = small_manifest(stages__experts=2, model__attention="documents")
    stacks = [build_block_stack(experts, ModuleId(1, expert)) for expert in (0, 1)]
    assert digest_of_tensors(parameters_of(stacks[0])) == digest_of_tensors(parameters_of(stacks[1]))


def test_the_size_of_a_chunk_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = near_normal(5, "a", (10, 7), 0.3)
    monkeypatch.setattr(initial, "_CHUNK", 9)
    assert torch.equal(near_normal(5, "a", (10, 7), 0.3), whole)


def test_numbers_are_near_normal() -> None:
    values = near_normal(5, "a", (100_000,), 0.5).double()
    assert values.mean().item() == pytest.approx(0, abs=0.006)
    assert values.std().item() == pytest.approx(0.5, rel=0.01)
    assert (values.abs() < 0.5).double().mean().item() == pytest.approx(0.683, abs=0.02)


def test_what_is_added_to_the_residual_stream_shrinks_with_depth() -> None:
    assert standard_deviation("model.layers.0.self_attn.q_proj.weight", 64, 8) == 1 / 8
    assert standard_deviation("model.layers.0.self_attn.o_proj.weight", 64, 8) == 1 / 8 / 4
    assert standard_deviation("model.layers.0.mlp.down_proj.weight", 64, 32) == 1 / 8 / 8


def test_norms_begin_at_one_and_the_first_loss_near_that_of_guessing() -> None:
    head = build_head(small_manifest())
    assert torch.equal(head.model["norm"].weight, torch.ones(16))
    hidden = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 16, dtype=torch.int64)
    assert head(hidden, labels).item() == pytest.approx(math.log(257), abs=0.1)


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
