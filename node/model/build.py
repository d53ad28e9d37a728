"""Construction of a model's parts from the manifest, with their initial weights, on the CPU. Move them with
`.to(device)`.
"""

from __future__ import annotations

from node.model.initialization import initialise
from node.model.parts import BlockStack, EmbeddingPart, HeadPart
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import ModuleId


def build_block_stack(manifest: Manifest, module: ModuleId) -> BlockStack:
    """Builds the module of any stage but stage 0.

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
    """Builds stage 0's first part."""
    part = EmbeddingPart(manifest.model, manifest.stages.blocks[0])
    initialise([part], seed=manifest.seed, expert=0, total_blocks=sum(manifest.stages.blocks))
    return part


def build_head(manifest: Manifest) -> HeadPart:
    """Builds stage 0's second part."""
    part = HeadPart(manifest.model)
    initialise([part], seed=manifest.seed, expert=0, total_blocks=sum(manifest.stages.blocks))
    return part
