"""The model against an independent reference in float64, and its parts against one whole graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from node.data.packing import Microbatch
from node.model.initialization import parameters_of
from node.model.parts import HeadPart, build_block_stack, build_embedding, build_head
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import Manifest, document_cost, quadratic_share
from swarm.vocabulary.types import ModuleId
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")


def random_microbatch(manifest: Manifest) -> Microbatch:
    rows, sequence = manifest.training.rows, manifest.model.sequence
    stream = torch.randint(257, (rows, sequence + 1), generator=torch.Generator().manual_seed(1))
    return Microbatch(stream[:, :-1], stream[:, 1:], 0.0)


def reference_logits(manifest: Manifest, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """LlamaForCausalLM written out anew: loops over rows and heads, explicit mask, repeated keys and values."""
    model = manifest.model
    size, share = model.head_size, model.heads // model.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_epsilon) * weights[name]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.empty_like(x)
        for position in range(len(x)):
            for i in range(size // 2):
                angle = position * model.rope_theta ** (-2 * i / size)
                a, b = x[position, i], x[position, i + size // 2]
                turned[position, i] = a * math.cos(angle) - b * math.sin(angle)
                turned[position, i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    def attend(x: Tensor, prefix: str) -> Tensor:
        q, k, v = (x @ weights[f"{prefix}.{letter}_proj.weight"].T for letter in "qkv")
        heads = []
        for head in range(model.heads):
            own, shared = slice(head * size, (head + 1) * size), head // share
            group = slice(shared * size, (shared + 1) * size)
            scores = rotate(q[:, own]) @ rotate(k[:, group]).T / math.sqrt(size)
            scores = scores.masked_fill(torch.triu(torch.ones_like(scores), 1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        return torch.cat(heads, -1) @ weights[f"{prefix}.o_proj.weight"].T

    def row_logits(row: Tensor) -> Tensor:
        x = weights["model.embed_tokens.weight"][row]
        for layer in range(sum(manifest.stages.blocks)):
            name = f"model.layers.{layer}"
            x = x + attend(norm(x, f"{name}.input_layernorm.weight"), f"{name}.self_attn")
            y = norm(x, f"{name}.post_attention_layernorm.weight")
            gate = y @ weights[f"{name}.mlp.gate_proj.weight"].T
            up = y @ weights[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T

    return torch.stack([row_logits(row) for row in tokens])


def logits_of(model: WholeModel, tokens: Tensor) -> Tensor:
    hidden = model.embedding(tokens)
    for stack in model.stacks:
        hidden = stack(hidden)
    return model.head.logits(hidden)


def all_parts(model: WholeModel) -> list[nn.Module]:
    return [part for _, parts in model.modules() for part in parts]


@torch.no_grad()
def unlike_ones(model: WholeModel) -> None:
    """Norm weights that are all 1 would hide where they are applied; weights this small, what attention does."""
    generator = torch.Generator().manual_seed(2)
    for parameter in parameters_of(*all_parts(model)).values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def test_logits_are_those_of_a_llama_model() -> None:
    manifest = small_manifest()
    model = WholeModel(manifest, CPU)
    unlike_ones(model)
    tokens = random_microbatch(manifest).tokens
    weights = {name: value.double() for name, value in parameters_of(*all_parts(model)).items()}
    torch.testing.assert_close(
        logits_of(model, tokens).double(), reference_logits(manifest, weights, tokens), rtol=1e-4, atol=1e-4
    )


def test_a_token_changes_nothing_before_it() -> None:
    manifest = small_manifest()
    model = WholeModel(manifest, CPU)
    unlike_ones(model)
    tokens = random_microbatch(manifest).tokens
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 257
    with torch.no_grad():
        before, after = logits_of(model, tokens), logits_of(model, changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-6


def test_parameters_are_named_as_hugging_face_names_them() -> None:
    model = WholeModel(small_manifest(), CPU)
    block = [
        "input_layernorm",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "post_attention_layernorm",
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    blocks = {f"model.layers.{index}.{name}.weight" for index in range(4) for name in block}
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set(parameters_of(*all_parts(model))) == blocks | outside
    assert set(parameters_of(*model.stacks[0:1])) == {name for name in blocks if ".1." in name or ".2." in name}


def test_the_parts_gradients_are_those_of_one_whole_graph() -> None:
    manifest = small_manifest()
    model = WholeModel(manifest, CPU)
    unlike_ones(model)
    microbatch = random_microbatch(manifest)
    loss, gradients = model.gradients(microbatch)

    hidden = model.embedding(microbatch.tokens)
    for stack in model.stacks:
        hidden = stack(hidden)
    whole = model.head(hidden, microbatch.labels)
    whole.backward()

    assert loss == pytest.approx(whole.item(), abs=1e-6)
    for part in all_parts(model):
        for parameter, gradient in zip(part.parameters(), gradients[part], strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_the_loss_is_the_same_when_logits_are_computed_in_pieces() -> None:
    manifest = small_manifest()
    whole, pieces = build_head(manifest), HeadPart(manifest.model, logits_at_once=5 * 257)
    pieces.load_state_dict(whole.state_dict())
    labels = random_microbatch(manifest).labels
    hidden = torch.randn(*manifest.hidden_shape, generator=torch.Generator().manual_seed(4), requires_grad=True)
    losses = [head(hidden, labels) for head in (whole, pieces)]
    gradients = [
        torch.autograd.grad(loss, [hidden, *head.parameters()])
        for loss, head in zip(losses, (whole, pieces), strict=True)
    ]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_bfloat16_is_for_hidden_states_and_float32_for_parameters_and_loss() -> None:
    manifest = small_manifest(model__dtype="bfloat16")
    model = WholeModel(manifest, CPU)
    microbatch = random_microbatch(manifest)
    hidden = model.embedding(microbatch.tokens)
    assert hidden.dtype == torch.bfloat16
    assert model.stacks[0](hidden).dtype == torch.bfloat16
    assert model.head(hidden, microbatch.labels).dtype == torch.float32
    loss, gradients = model.gradients(microbatch)
    assert {gradient.dtype for part in gradients.values() for gradient in part} == {torch.float32}
    exact = WholeModel(small_manifest(), CPU)
    assert loss == pytest.approx(exact.loss(microbatch), abs=0.02)


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
    """Two operations for every weight of a block, and 2 x hidden for each of the d^2 / 2 pairs in scores and again in
    the mean of values; in tokens without attention."""
    manifest = small_manifest()
    stack = build_block_stack(manifest, ModuleId(2))
    weights = sum(parameter.numel() for parameter in stack.parameters() if parameter.dim() == 2)
    pairs = 2 * (2 * 16) * 12**2 / 2
    assert document_cost(manifest.model, 12) == pytest.approx(12 + pairs / (2 * weights))
    assert quadratic_share(manifest.model) == 16 / weights
