"""From the manifest to the parts of a model, with their initial weights, on the CPU. Move them with `.to(device)`."""

from __future__ import annotations

from node.model.initial import initialise
from node.model.parts import BlockStack, EmbeddingPart, HeadPart
from protocol.manifest import Manifest, ModelSection
from swarm.vocabulary import ModuleId


def build_block_stack(manifest: Manifest, module: ModuleId) -> BlockStack:
    """The module of any stage but stage 0.

    Raises:
        ValueError: the manifest has no such module, or it is stage 0's, which has an embedding and a head instead.
    """
    if module.stage == 0 or not manifest.has(module):
        raise ValueError(f"module {module} is not a stack of blocks of this run")
    blocks = manifest.stages.blocks
    stack = BlockStack(manifest.model, sum(blocks[: module.stage]), blocks[module.stage])
    initialise([stack], seed=manifest.seed, expert=module.expert, total_blocks=sum(blocks))
    return stack


def build_embedding(manifest: Manifest) -> EmbeddingPart:
    """Stage 0's first part."""
    part = EmbeddingPart(manifest.model, manifest.stages.blocks[0])
    initialise([part], seed=manifest.seed, expert=0, total_blocks=sum(manifest.stages.blocks))
    return part


def build_head(manifest: Manifest) -> HeadPart:
    """Stage 0's second part."""
    part = HeadPart(manifest.model)
    initialise([part], seed=manifest.seed, expert=0, total_blocks=sum(manifest.stages.blocks))
    return part


def block_parameters(model: ModelSection) -> int:
    """Weights of the matrices of one transformer block; its two norms are left out."""
    kv_size = model.kv_heads * model.head_size
    return model.hidden * (2 * model.hidden + 2 * kv_size + 3 * model.feed_forward)


def training_flops_per_token(manifest: Manifest) -> float:
    """Floating point operations of one token's forward and backward pass through the whole model.

    Six for every weight that is multiplied, and for the attention of a causal row half of the full square
    (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    model, blocks = manifest.model, sum(manifest.stages.blocks)
    weights = block_parameters(model)
    attention = 6 * model.sequence * model.hidden
    return float(6 * (blocks * weights + model.hidden * model.vocabulary) + blocks * attention)
